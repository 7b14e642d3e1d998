"""Pure functions over arrays: advantages, losses, KL, shaping; no model."""
