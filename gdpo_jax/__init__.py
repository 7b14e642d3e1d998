"""GDPO and its relatives: reinforcement learning on several rewards, in JAX.

The names below are loaded on first use (PEP 562), so that a reward worker that
imports `gdpo_jax.rewards` never pays for, nor initializes, JAX.
"""

import importlib

__version__ = '0.1.0'

# public name -> module that defines it
_HOME = {
  'Batch': 'gdpo_jax.types',
  'Prompts': 'gdpo_jax.types',
  'Rollout': 'gdpo_jax.types',
  'TrainState': 'gdpo_jax.types',
  'Reward': 'gdpo_jax.rewards.pipeline',
  'Scores': 'gdpo_jax.rewards.pipeline',
  'score': 'gdpo_jax.rewards.pipeline',
  'GDPOConfig': 'gdpo_jax.trainer',
  'GDPOTrainer': 'gdpo_jax.trainer',
  'JaxJudge': 'gdpo_jax.judge',
  'Sampling': 'gdpo_jax.sampler',
  'generate': 'gdpo_jax.sampler',
  'Policy': 'gdpo_jax.policy.policy',
  'PolicyConfig': 'gdpo_jax.policy.config',
  'make_policy': 'gdpo_jax.policy.policy',
}
_MODULES = ('objectives', 'policy', 'rewards', 'tasks', 'train')

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str):
  if name in _HOME:
    return getattr(importlib.import_module(_HOME[name]), name)
  if name in _MODULES:
    return importlib.import_module(f'{__name__}.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__():
  return __all__
