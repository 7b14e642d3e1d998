"""A model small enough to train in a test, and batches for it."""

import jax
import numpy as np
import pytest

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Batch, Rollout

GROUP = 4


@pytest.fixture(scope='session')
def config():
  return PolicyConfig(
    family='llama',
    vocab_size=32,
    width=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_width=64,
    tied=True,
    eos_ids=(1,),
  )


@pytest.fixture(scope='session')
def policy(config):
  return make_policy(config)


@pytest.fixture(scope='session')
def params(policy):
  return policy.init(jax.random.key(0))


@pytest.fixture(scope='session')
def batch(policy, params):
  """8 groups of 4, ragged prompts and completions, group 3 without signal."""
  rng = np.random.default_rng(0)
  groups, tp, tc = 8, 6, 10
  n = groups * GROUP
  prompt_lengths = np.repeat(rng.integers(2, tp + 1, groups), GROUP)
  prompt = np.repeat(rng.integers(2, 32, (groups, tp)), GROUP, axis=0)
  prompt_mask = np.arange(tp)[None] >= tp - prompt_lengths[:, None]
  lengths = rng.integers(1, tc + 1, n)
  mask = np.arange(tc)[None] < lengths[:, None]
  rollout = Rollout(
    prompt=np.where(prompt_mask, prompt, 0).astype(np.int32),
    prompt_mask=prompt_mask,
    tokens=np.where(mask, rng.integers(2, 32, (n, tc)), 0).astype(np.int32),
    mask=mask,
    logp=np.zeros((n, tc), np.float32),
    ended=np.ones(n, bool),
  )
  advantages = rng.standard_normal(n).astype(np.float32)
  advantages[3 * GROUP : 4 * GROUP] = 0
  rollout = jax.tree.map(jax.numpy.asarray, rollout)
  logp, _ = policy.log_probs(params, rollout, group_size=GROUP)
  noise = 0.1 * rng.standard_normal((n, tc)).astype(np.float32)
  old = np.where(mask, np.asarray(logp) + noise, 0).astype(np.float32)
  return Batch(
    rollout=rollout,
    advantages=advantages,
    old_logp=old,
    ref_logp=None,
    row_valid=np.ones(n, bool),
  )
