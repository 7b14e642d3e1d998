"""One visible loop, and what it is made of."""
