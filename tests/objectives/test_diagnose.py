"""The collapse meter, the conflict matrix, the shares, the counterfactuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from objective_batches import NAN, E, call, columns, groups, pad

from gdpo_jax.objectives import diagnose


@functools.cache
def jitted(**kwargs):
  return jax.jit(functools.partial(diagnose.diagnose, **kwargs))


def run(rewards, weights=None, **kwargs):
  rewards = np.asarray(rewards, np.float32)
  prompts, _, count = rewards.shape
  weights = np.ones(count) if weights is None else np.asarray(weights)
  # one shape for all tests: what is missing is left out
  rewards = pad(rewards, (6, 4, 3), NAN)
  weights = pad(weights.astype(np.float32), (3,), 1)
  got = jitted(**kwargs)(rewards, ~np.isnan(rewards), weights)
  return got._replace(
    distinct_rewards=got.distinct_rewards[:prompts],
    distinct_advantages={
      name: x[:prompts] for name, x in got.distinct_advantages.items()
    },
    conflict=got.conflict[:count, :count],
    shares={name: x[:count] for name, x in got.shares.items()},
  )


def test_collapse_meter():
  # (0,1) and (1,0) have one total: three tuples, two values under GRPO
  rewards = groups([(0, 0), (0, 1), (1, 0), (0, 1)])
  got = run(rewards)
  np.testing.assert_array_equal(got.distinct_rewards, [3])
  assert got.distinct_advantages['grpo'] == 2
  assert got.distinct_advantages['gdpo'] == 3
  dead = run(np.full((2, 4, 2), 0.1))
  np.testing.assert_array_equal(dead.distinct_rewards, [1, 1])
  np.testing.assert_array_equal(dead.distinct_advantages['gdpo'], [1, 1])


def test_rows_that_nothing_scored_are_no_tuple():
  rewards = groups([(0, 0), (NAN, NAN), (0, NAN), (NAN, NAN)])
  got = run(rewards)
  np.testing.assert_array_equal(got.distinct_rewards, [2])  # 0 is not missing
  # the 0 of such a row does not stand for the 0 of a row in the middle
  got = run(groups([(NAN,), (1,), (0,), (2,)]))
  assert got.distinct_advantages['grpo'] == 3
  np.testing.assert_array_equal(
    diagnose.distinct_per_group(jnp.array([[1.0, 1.0 + 1e-7, 2.0]])), [2]
  )


def test_conflict_matrix():
  a = np.random.default_rng(0).random((6, 4))
  got = run(np.stack([a, 3 * a + 1, -a], -1)).conflict
  expected = [[1, 1, -1], [1, 1, -1], [-1, -1, 1]]
  np.testing.assert_allclose(got, expected, atol=1e-5)
  turned = run(np.stack([a, 3 * a + 1, -a], -1), [1, 1, -1]).conflict
  np.testing.assert_allclose(turned, np.ones((3, 3)), atol=1e-5)
  constant = run(np.stack([a, np.ones_like(a)], -1)).conflict
  np.testing.assert_allclose(constant, [[1, 0], [0, 0]], atol=1e-5)


def test_shares_show_the_loud_reward_that_gdpo_levels():
  rewards = E * np.array([10, 1])
  got = run(rewards)
  assert got.shares['grpo'][0] > 0.9
  np.testing.assert_allclose(
    got.shares['gdpo'], run(E).shares['gdpo'], atol=1e-3
  )
  for share in got.shares.values():
    np.testing.assert_allclose(share.sum(), 1, rtol=1e-6)


def test_counterfactuals():
  got = run(E)
  grpo, gdpo = (call(name, E, eps=1e-4) for name in ('grpo', 'gdpo'))
  cosine = np.sum(grpo * gdpo) / np.sqrt(np.sum(grpo**2) * np.sum(gdpo**2))
  np.testing.assert_allclose(got.cosine['grpo/gdpo'], cosine, rtol=1e-5)
  # p0[1] is 0 under GRPO and negative under GDPO: no flip
  assert got.sign_flips['grpo/gdpo'] == 0
  # a row that the loud reward puts down and the other one lifts
  loud = columns([8, 8, 0, 0], [0, 0, 1, 0])
  got = run(loud)
  np.testing.assert_allclose(got.sign_flips['grpo/gdpo'], 0.25)
  np.testing.assert_allclose(got.sign_flips['grpo/dr_grpo'], 0)
  assert set(got.cosine) == {'grpo/dr_grpo', 'grpo/gdpo', 'dr_grpo/gdpo'}


def test_any_method_can_be_counted():
  got = run(E, aggregators=('mo_grpo', 'rvpo'))
  assert set(got.distinct_advantages) == {'mo_grpo', 'rvpo'}
  np.testing.assert_array_equal(got.distinct_advantages['rvpo'], [3, 3])
