"""Shapes of models that compile fast."""

from gdpo_jax.policy.config import PolicyConfig


def small_config(**changes) -> PolicyConfig:
  """Two layers of 32, 48 tokens; twice as many heads as key heads."""
  base = {
    'family': 'llama',
    'vocab_size': 48,
    'width': 32,
    'num_layers': 2,
    'num_heads': 4,
    'num_kv_heads': 2,
    'head_dim': 8,
    'mlp_width': 40,
    'tied': True,
    'eos_ids': (1,),
  }
  return PolicyConfig(**{**base, **changes})
