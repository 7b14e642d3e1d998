"""These tests compile hundreds of small functions; a second run reads them."""

import jax

jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)
