"""Advantages: hand numbers first, then what must hold for all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import advantages as adv

NAN = float('nan')
# One batch for every worked example: P=2, G=4, K=2.
E = np.stack(
  [
    [[1, 1, 0, 0], [1, 0, 0.5, 0.5]],
    [[1, 0, 0, 0], [1, 1, 1, 0.5]],
  ]
).transpose(0, 2, 1)


def call(name, rewards, weights=None, **kwargs):
  """The named aggregator on rewards in which NaN is missing; eps 0."""
  rewards = jnp.asarray(rewards, jnp.float32)
  weights = jnp.ones(rewards.shape[-1]) if weights is None else weights
  kwargs = {'eps': 0.0} | kwargs
  return np.asarray(
    adv.ADVANTAGES[name](
      rewards, ~jnp.isnan(rewards), jnp.asarray(weights, jnp.float32), **kwargs
    )
  )


def groups(*rows):
  """[P, G, K] from one list of K-tuples per group."""
  return np.array(rows, np.float32)


def columns(*rewards):
  """[1, G, K] from one list per reward."""
  return np.array(rewards, np.float32).T[None]


GRPO_E = [
  [1.4142, 0, -0.7071, -0.7071],
  [1.3908, -0.1987, -0.1987, -0.9934],
]
GDPO_E = [
  [1.4784, -0.2537, -0.6124, -0.6124],
  [1.4142, 0, 0, -1.4142],
]


@pytest.mark.parametrize(
  'name, kwargs, expected',
  [
    ('grpo', {}, GRPO_E),
    ('gdpo', {}, GDPO_E),
    (
      'dr_grpo',
      {},
      [[1, 0, -0.5, -0.5], [0.875, -0.125, -0.125, -0.625]],
    ),
    (
      'mo_grpo',
      {'ddof': 0},
      [[2.4142, -0.4142, -1, -1], [2.3094, 0, 0, -2.3094]],
    ),
    (
      'mo_grpo',
      {'ddof': 1},
      [[2.0908, -0.3587, -0.8660, -0.8660], [2, 0, 0, -2]],
    ),
  ],
)
def test_worked_example(name, kwargs, expected):
  np.testing.assert_allclose(call(name, E, **kwargs), expected, atol=6e-5)


def test_z_scores_of_the_worked_example():
  rewards = jnp.asarray(E, jnp.float32)
  valid = jnp.ones(E.shape, bool)
  z = adv.group_normalize(rewards, valid, eps=0.0)
  np.testing.assert_allclose(
    z[..., 0],
    [[0.8660, 0.8660, -0.8660, -0.8660], [1.5, -0.5, -0.5, -0.5]],
    atol=6e-5,
  )
  np.testing.assert_allclose(
    z[..., 1], [[1.2247, -1.2247, 0, 0], [0.5, 0.5, 0.5, -1.5]], atol=6e-5
  )


def test_mo_grpo_paper_example():
  rewards = columns([0.1, 0.5, 0.9], [0.15, 0.13, 0.05])
  got = call('mo_grpo', rewards, ddof=0)
  np.testing.assert_allclose(got, [[-0.2989, 0.4629, -0.1640]], atol=6e-5)
  # the paper prints another GRPO row; recomputed
  got = call('grpo', rewards, ddof=0)
  np.testing.assert_allclose(got, [[-1.2582, 0.0699, 1.1883]], atol=6e-5)


def test_one_group_alone_hides_what_gdpo_does():
  a, b = [(0, 0), (0, 1)], [(0, 0), (1, 1)]
  both = groups(a, b)
  sums = call('gdpo', both, whiten='none')
  np.testing.assert_allclose(sums[:, 1], [0.7071, 1.4142], atol=6e-5)
  np.testing.assert_allclose(
    call('gdpo', both), [[-0.5477, 0.5477], [-1.0954, 1.0954]], atol=6e-5
  )
  for alone in (groups(a), groups(b)):
    np.testing.assert_allclose(
      call('gdpo', alone), [[-0.7071, 0.7071]], atol=6e-5
    )
  np.testing.assert_allclose(
    call('grpo', both), [[-0.7071, 0.7071]] * 2, atol=6e-5
  )


def test_batch_step_counts_completions_unless_asked_for_tokens():
  rewards = columns([1, -1])
  mask = jnp.arange(3) < jnp.array([[1], [3]])
  kwargs = {'scale': 'none', 'mask': mask}
  for ddof, expected in [(0, [1, -1]), (1, [0.7071, -0.7071])]:
    got = call('grpo', rewards, whiten='sequence', ddof=ddof, **kwargs)
    np.testing.assert_allclose(got, [expected], atol=6e-5)
  for ddof, expected in [(0, [1.7321, -0.5774]), (1, [1.5, -0.5])]:
    got = call('grpo', rewards, whiten='token', ddof=ddof, **kwargs)
    np.testing.assert_allclose(got, [expected], atol=6e-5)
  with pytest.raises(ValueError, match='mask'):
    call('grpo', rewards, whiten='token')
  with pytest.raises(ValueError, match="'sequences'"):
    call('grpo', rewards, whiten='sequences')


def test_batch_scale():
  rewards = groups([(0,), (1,)], [(0,), (10,)])
  expected = {
    ('group', 1): [[-0.7071, 0.7071]] * 2,
    ('group', 0): [[-1, 1]] * 2,
    ('batch', 1): [[-0.10296, 0.10296], [-1.0296, 1.0296]],
    ('batch', 0): [[-0.11889, 0.11889], [-1.1889, 1.1889]],
    ('none', 1): [[-0.5, 0.5], [-5, 5]],
  }
  for (scale, ddof), values in expected.items():
    got = call('grpo', rewards, scale=scale, ddof=ddof)
    np.testing.assert_allclose(got, values, rtol=1e-4)
  with pytest.raises(ValueError, match="'std'"):
    call('grpo', rewards, scale='std')


def test_row_that_nobody_scored_is_left_out():
  rewards = groups([(1, NAN), (NAN, NAN), (3, NAN), (2, NAN)])
  np.testing.assert_allclose(call('grpo', rewards), [[-1, 0, 1, 0]], atol=1e-6)
  np.testing.assert_allclose(
    call('grpo', rewards, ddof=0), [[-1.2247, 0, 1.2247, 0]], atol=6e-5
  )
  np.testing.assert_allclose(
    call('gdpo', rewards, whiten='none'), [[-1, 0, 1, 0]], atol=1e-6
  )
  # three rows in the batch step, not four: std 1, not 0.8165
  np.testing.assert_allclose(call('gdpo', rewards), [[-1, 0, 1, 0]], atol=1e-6)
  got = adv.scored(~jnp.isnan(rewards), jnp.ones(2))
  np.testing.assert_array_equal(got, [[True, False, True, True]])


def test_missing_is_not_zero():
  # the second reward has one value: it adds 0; the first has values 0, 1
  rewards = groups([(0, NAN), (1, NAN), (NAN, 5)])
  np.testing.assert_allclose(
    call('mo_grpo', rewards), [[-0.7071, 0.7071, 0]], atol=6e-5
  )


def test_renormalize_divides_by_the_weights_that_are_there():
  rewards = groups([(1, 1), (1, NAN), (0, 0)])
  sums = call('dr_grpo', rewards, weights=[1, 3])
  np.testing.assert_allclose(sums, [[4 - 5 / 3, 1 - 5 / 3, -5 / 3]], rtol=1e-6)
  means = call('dr_grpo', rewards, weights=[1, 3], renormalize=True)
  np.testing.assert_allclose(means, [[1 / 3, 1 / 3, -2 / 3]], rtol=1e-6)


def test_rewards_that_cancel_give_exactly_zero():
  for rewards in (
    columns([1, 0], [0, 1]),
    columns([1, 1, 0], [0, 0, 1]),
    columns([1, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0]),
  ):
    for name in adv.ADVANTAGES:
      assert not call(name, rewards).any(), name
      assert not call(name, rewards, eps=1e-8, whiten='sequence').any(), name
  unequal = columns([1, 0], [0, 1])
  for ddof, value in [(1, 0.7071), (0, 1)]:
    got = call('mo_grpo', unequal, weights=[2, 1], ddof=ddof)
    np.testing.assert_allclose(got, [[value, -value]], atol=6e-5)


def test_cancelling_groups_stay_zero_beside_others():
  """Random rewards with a constant sum; the residue must not reach the batch."""
  rng = np.random.default_rng(0)
  r = rng.random((200, 16, 1)).astype(np.float32)
  rewards = np.concatenate([r, 1 - r], -1)
  rewards[0] = rng.random((16, 2))
  for name in adv.ADVANTAGES:
    got = call(name, rewards, whiten='sequence', eps=1e-4)
    assert got[0].all(), name
    assert not got[1:].any(), name


@pytest.mark.parametrize('value', [0.1, 0.3, 0.35, 0.4, 0.7])
@pytest.mark.parametrize('group_size', [2, 7, 8, 16])
def test_constant_groups_are_exactly_zero(value, group_size):
  rewards = np.full((3, group_size, 2), value)
  rewards[1, :, 1] = np.arange(group_size)
  for name in adv.ADVANTAGES:
    for eps in (0.0, 1e-8):
      got = call(name, rewards, eps=eps, whiten='sequence')
      assert not got[[0, 2]].any(), name
      assert got[1].any()


def test_small_real_range_survives():
  rewards = columns([0, 1e-4, 0, 1e-4])
  sign = np.array([[-1, 1, -1, 1]])
  for eps, value in [(1e-4, 0.317), (1e-6, 0.851), (1e-8, 0.8659), (0, 0.866)]:
    for name in ('grpo', 'mo_grpo'):
      got = call(name, rewards, eps=eps)
      np.testing.assert_allclose(got, sign * value, atol=6e-4)


def test_weights():
  got = call('grpo', columns([0, 1]), weights=[-1])
  np.testing.assert_allclose(got, [[0.7071, -0.7071]], atol=6e-5)
  for weights in ([1, 2, 3], [1]):
    for name in adv.ADVANTAGES:
      with pytest.raises(
        ValueError, match=rf'{len(weights)} weights.*2 rewards'
      ):
        call(name, E, weights=weights)


@pytest.mark.parametrize('name', list(adv.ADVANTAGES))
def test_weight_zero_is_no_influence(name):
  rewards = np.concatenate([E, 100 * E[:, ::-1, :1]], -1)
  rewards[0, 1, :2] = NAN  # scored by the reward of weight 0 alone
  got = call(name, rewards, weights=[1, 2, 0])
  np.testing.assert_array_equal(got, call(name, rewards[..., :2], [1, 2]))


def test_wrong_shapes_are_errors():
  with pytest.raises(ValueError, match=r'\[N, K\] to \[P, G, K\]'):
    adv.gdpo(jnp.zeros((8, 2)), None, jnp.ones(2))
  with pytest.raises(ValueError, match='valid has shape'):
    adv.gdpo(jnp.zeros((2, 4, 2)), jnp.ones((2, 4), bool), jnp.ones(2))


@pytest.mark.parametrize('name', list(adv.ADVANTAGES))
def test_no_gradient_flows_through_an_advantage(name):
  def f(rewards, weights):
    return adv.ADVANTAGES[name](rewards, None, weights).sum() ** 2

  grads = jax.grad(f, argnums=(0, 1))(jnp.asarray(E), jnp.ones(2))
  assert not any(np.any(g) for g in grads)


def test_constant_total_is_informative_for_gdpo():
  r = columns([1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1])
  flat = np.full_like(r, 0.7)
  rewards = np.concatenate([r, flat])
  valid = np.ones(rewards.shape, bool)
  for ddof, v in [(0, 0.1547), (1, 0.1340)]:
    got = call('gdpo', r, whiten='none', ddof=ddof)
    np.testing.assert_allclose(got, [[v, -v, -v, v]], atol=6e-5)
  assert not call('grpo', r).any()
  for name, expected in [
    ('gdpo', [True, False]),
    ('mo_grpo', [True, False]),
    ('grpo', [False, False]),
    ('dr_grpo', [False, False]),
  ]:
    got = adv.informative(rewards, valid, aggregator=name)
    np.testing.assert_array_equal(got, expected)


def test_all_missing_batch_is_zero():
  for name in adv.ADVANTAGES:
    got = call(name, np.full((2, 4, 3), NAN), whiten='sequence')
    np.testing.assert_array_equal(got, np.zeros((2, 4)))


def test_no_nan_is_made_on_the_way():
  with jax.debug_nans(True):
    for rewards in (
      np.full((2, 4, 2), 0.1),
      np.full((2, 1, 2), 0.1),
      np.where(np.eye(4)[:, :, None] * np.ones(2), 1.0, 0.3),
    ):
      for name in adv.ADVANTAGES:
        out = adv.ADVANTAGES[name](
          jnp.asarray(rewards), None, jnp.ones(2), whiten='sequence'
        )
        out.block_until_ready()


def test_batch_step_takes_any_mask_layout():
  mask = np.random.default_rng(0).random((8, 5)) < 0.5
  flat = call('gdpo', E, whiten='token', mask=mask)
  shaped = call('gdpo', E, whiten='token', mask=mask.reshape(2, 4, 5))
  np.testing.assert_array_equal(flat, shaped)
  tokens = np.repeat(call('gdpo', E, whiten='none').ravel(), mask.sum(1))
  expected = (call('gdpo', E, whiten='none') - tokens.mean()) / tokens.std(
    ddof=1
  )
  live = mask.sum(1).reshape(2, 4) > 0
  np.testing.assert_allclose(flat[live], expected[live], rtol=1e-5, atol=1e-6)
