"""The host side: strings in, floats out. Nothing here imports jax, not even indirectly."""
