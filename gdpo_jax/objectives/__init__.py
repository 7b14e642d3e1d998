"""Pure functions over arrays: advantages, losses, KL, shaping. No model, no config."""
