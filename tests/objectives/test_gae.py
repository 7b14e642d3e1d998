"""Generalized advantage estimation against sums written out by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.objectives import gae

NAN = float('nan')


def by_definition(rewards, values, gamma, lam, last=0.0):
  """A_t as the sum over all later deltas; one row, everything counts."""
  steps = len(rewards)
  after = np.append(values[1:], last)
  delta = rewards + gamma * after - values
  out = np.zeros(steps)
  for t in range(steps):
    factor = 1.0
    for s in range(t, steps):
      out[t] += factor * delta[s]
      factor *= gamma[s] * lam[s]
  return out


def test_two_tokens_by_hand():
  # delta_1 = 1 - 0.5 = 0.5; delta_0 = 0 + 0.9 * 0.5 - 0.2 = 0.25
  advantages, returns = gae.gae(
    jnp.array([[0.0, 1.0, NAN]]),
    jnp.array([[0.2, 0.5, NAN]]),
    jnp.array([[True, True, False]]),
    gamma=0.9,
    lam=0.8,
  )
  np.testing.assert_allclose(
    advantages, [[0.25 + 0.9 * 0.8 * 0.5, 0.5, 0]], rtol=1e-6
  )
  np.testing.assert_allclose(returns, [[0.81, 1.0, 0]], rtol=1e-6)


def test_agrees_with_the_definition_for_changing_gamma_and_lambda():
  rng = np.random.default_rng(0)
  rewards, values, gamma, lam = rng.random((4, 1, 6))
  got, _ = gae.gae(
    rewards, values, np.ones((1, 6), bool), gamma, lam, jnp.array([0.7])
  )
  expected = by_definition(rewards[0], values[0], gamma[0], lam[0], 0.7)
  np.testing.assert_allclose(got[0], expected, rtol=1e-5)


def test_limits():
  rng = np.random.default_rng(1)
  rewards, values = rng.random((2, 2, 5)).astype(np.float32)
  mask = np.ones((2, 5), bool)
  # lambda 1: what is still to come, less the value
  got, returns = gae.gae(rewards, values, mask, 1.0, 1.0)
  to_come = np.cumsum(rewards[:, ::-1], 1)[:, ::-1]
  np.testing.assert_allclose(got, to_come - values, rtol=1e-5)
  np.testing.assert_allclose(returns, to_come, rtol=1e-5)
  # lambda 0: one step ahead
  got, _ = gae.gae(rewards, values, mask, 1.0, 0.0)
  after = np.pad(values[:, 1:], [(0, 0), (0, 1)])
  np.testing.assert_allclose(got, rewards + after - values, rtol=1e-5)


def test_masked_tokens_are_skipped():
  mask = np.array([[True, False, True, True, False]])
  rewards = np.array([[0.1, 9, 0.2, 1, 9]], np.float32)
  values = np.array([[0.3, 9, 0.4, 0.5, 9]], np.float32)
  got, returns = gae.gae(rewards, values, mask, 0.9, 0.8)
  dense = [0, 2, 3]
  expected, _ = gae.gae(
    rewards[:, dense], values[:, dense], np.ones((1, 3), bool), 0.9, 0.8
  )
  np.testing.assert_allclose(got[:, dense], expected, rtol=1e-6)
  assert not got[~mask].any() and not returns[~mask].any()


def test_no_gradient_flows_through_the_targets():
  mask = jnp.ones((1, 3), bool)
  grad = jax.grad(lambda v: gae.gae(v, v, mask)[1].sum())(jnp.ones((1, 3)))
  assert not grad.any()


def test_one_lambda_per_head():
  rng = np.random.default_rng(2)
  rewards, values = rng.random((2, 3, 2, 4)).astype(np.float32)
  mask, lambdas = np.ones((2, 4), bool), np.array([0.9, 0.95, 1.0])
  got, returns = gae.layered_gae(rewards, values, mask, 0.99, lambdas)
  assert got.shape == returns.shape == (3, 2, 4)
  for head, lam in enumerate(lambdas):
    expected, _ = gae.gae(rewards[head], values[head], mask, 0.99, lam)
    np.testing.assert_allclose(got[head], expected, rtol=1e-6)


def test_dynamic_lambda():
  got = gae.dynamic_lambda(0.9, jnp.array([0.0, 0.1, 50.0]))
  np.testing.assert_allclose(
    got, [0.9, 0.9 * (1 + 0.5 * np.tanh(0.1)), 1.0], rtol=1e-6
  )


def test_segmented_gamma():
  mask = jnp.arange(4) < jnp.array([[3], [1], [4], [0]])
  got = gae.segmented_gamma(0.9, mask)
  np.testing.assert_allclose(got[0, :3], np.linspace(0.9, 0.81, 3), rtol=1e-6)
  np.testing.assert_allclose(got[1, 0], 0.9)
  np.testing.assert_allclose(got[2], np.linspace(0.9, 0.81, 4), rtol=1e-6)
  assert np.isfinite(got).all()


def test_whiten_tokens():
  mask = jnp.array([[True, True, False], [True, False, False]])
  x = jnp.array([[1.0, 2.0, NAN], [3.0, NAN, NAN]])
  got = gae.whiten_tokens(x, mask, eps=0.0)
  np.testing.assert_allclose(got, [[-1, 0, 0], [1, 0, 0]], atol=1e-6)
  assert not gae.whiten_tokens(jnp.full((2, 3), 0.1), mask).any()
