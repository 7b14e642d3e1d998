"""What holds for every method: edges, invariances, families, devices."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec
from objective_batches import (
  METHODS,
  NAN,
  PADDED,
  E,
  call,
  call_every,
  columns,
  every,
  every_jitted,
  extras,
  pad,
)

SUM_FIRST = ['grpo', 'dr_grpo', 'rloo', 'reinforce_pp_baseline', 'dvao']
SUM_FIRST += ['corr_grpo']
AFFINE = ['mo_grpo', 'gdpo', 'gd2po', 'dara', 'rvpo', 'paper']
# weights of their own, or no sum: a constant total need not cancel
UNEQUAL = ['sa_mrpo', 'saw', 'dara', 'rvpo']
# where rows that nothing scored count before they are set to 0
ZERO_FILLED = ['verl', 'nemo_rl']


def with_missing(seed, shape, share=0.2):
  rng = np.random.default_rng(seed)
  rewards = rng.integers(-2, 3, shape).astype(np.float32)
  return np.where(rng.random(shape) < share, NAN, rewards)


# --- edges -----------------------------------------------------------------


@pytest.mark.parametrize('value', [0.1, 0.3, 0.35, 0.4, 0.7])
@pytest.mark.parametrize('eps', [0.0, 1e-8])
def test_constant_groups_are_exactly_zero(value, eps):
  rewards = np.full((3, 8, 2), value)
  rewards[1, :, 1] = np.arange(8)
  for name, got in call_every(rewards, eps=eps).items():
    assert got[1].any(), name
    if name == 'reinforce_pp':  # no group: away from the mean of the batch
      assert np.ptp(got[0]) == 0, name
    elif name in ('verl', 'rvpo'):
      # over tokens, and of a soft minimum, the mean of the batch is not 0
      assert np.ptp(got[[0, 2]]) == 0, name
    else:
      assert not got[[0, 2]].any(), name


def test_constant_batch_is_exactly_zero():
  for value in (0.1, 0.3, 0.7):
    for name, got in call_every(np.full((3, 8, 2), value), eps=1e-8).items():
      assert not got.any(), name


def ragged(*rewards):
  """[P, 8, 2]; rows of NaN fill up smaller groups."""
  return np.stack(
    [pad(np.array(r, np.float32).T, (8, 2), NAN) for r in rewards]
  )


def test_rewards_that_cancel_give_exactly_zero():
  r = np.random.default_rng(0).random((3, 8)).astype(np.float32)
  for rewards in (
    ragged(
      ([1, 0], [0, 1]),
      ([1, 1, 0], [0, 0, 1]),
      ([1, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 1, 0]),
    ),
    np.stack([r, 1 - r], -1),
  ):
    for name, got in call_every(rewards, eps=1e-8).items():
      # totals of 1 and of 0, where padding is read as 0, are no constant
      varies = name in ZERO_FILLED and np.isnan(rewards).any()
      if name not in UNEQUAL and not varies:
        assert not got.any(), name


def test_residue_of_cancelling_groups_does_not_reach_the_batch():
  rng = np.random.default_rng(0)
  r = rng.random((3, 8, 1)).astype(np.float32)
  rewards = np.concatenate([r, 1 - r], -1)
  rewards[0] = rng.random((8, 2))
  for name, got in call_every(rewards, eps=1e-8).items():
    if name in (*UNEQUAL, 'verl', 'reinforce_pp'):
      continue  # the batch step moves these away from 0 for good reason
    assert got[0].any(), name
    assert not got[1:].any(), name


def test_one_live_group_among_hundreds_of_cancelling_ones():
  rng = np.random.default_rng(0)
  r = rng.random((200, 16, 1)).astype(np.float32)
  rewards = np.concatenate([r, 1 - r], -1)
  rewards[0] = rng.random((16, 2))
  for name in ('grpo', 'dr_grpo', 'gdpo'):
    got = call(name, rewards, whiten='sequence', eps=np.float32(1e-4))
    assert got[0].all(), name
    assert not got[1:].any(), name


def test_random_sums_that_cancel_in_floating_point():
  """Up to 8 rewards and 64 rows, z-scores that add up to 0 by construction."""
  rng = np.random.default_rng(1)
  for size, half in [(16, 1), (64, 4)]:
    r = rng.normal(size=(200, size, half)).astype(np.float32)
    rewards = np.concatenate([r, 0.3 - 3 * r[..., ::-1]], -1)
    assert not call('mo_grpo', rewards).any()


def test_everything_missing_is_zero():
  for name, got in call_every(np.full((2, 4, 2), NAN)).items():
    assert not got.any(), name


def test_one_valid_value_adds_nothing():
  rewards = np.full((2, 4, 2), NAN, np.float32)
  rewards[0, :, 0] = [0, 1, 1, 0]
  rewards[1, 2] = 5  # alone in its group, for both rewards
  out = call_every(rewards)
  for name, got in out.items():
    if name in ZERO_FILLED or name in ('reinforce_pp', 'rvpo'):
      continue
    assert not got[1].any(), name
    assert got[0].any() or name == 'gd2po', name


@pytest.mark.parametrize('seed', range(3))
def test_rows_that_nothing_scored_have_no_advantage_and_no_influence(seed):
  rewards = with_missing(seed, (3, 5, 3))
  rewards[0, 1] = rewards[2, 4] = NAN
  out = call_every(rewards)
  for name, got in out.items():
    assert np.isfinite(got).all(), name
    assert not got[0, 1] and not got[2, 4], name
  # the same without the row: group by group, so without the batch step
  without = np.delete(rewards[:1], 1, axis=1)
  for name in ('grpo', 'mo_grpo'):
    whole = call(name, rewards[:1], whiten='none')
    np.testing.assert_allclose(
      np.delete(whole, 1, axis=1),
      call(name, without, whiten='none'),
      atol=1e-6,
      err_msg=name,
    )


def test_weight_zero_is_no_influence():
  rewards = np.concatenate([E, 100 * E[:, ::-1, :1]], -1)
  rewards[0, 1, :2] = NAN  # scored by the reward of weight 0 alone
  out = call_every(rewards, [1, 2, 0])
  fewer = call_every(rewards[..., :2], [1, 2])
  for name, got in out.items():
    if name == 'trl':  # there such a row counts as a 0
      assert not got[0, 1] and np.abs(got - fewer[name]).max() > 1e-3
      continue
    np.testing.assert_allclose(got, fewer[name], atol=1e-6, err_msg=name)


def test_number_of_weights_must_be_the_number_of_rewards():
  for weights in ([1, 2, 3], [1]):
    for name in METHODS:
      with pytest.raises(
        ValueError, match=rf'{len(weights)} weights.*2 rewards'
      ):
        kwargs = extras(E.shape) if name in ('sa_mrpo', 'saw') else {}
        kwargs.pop('mask', None)
        METHODS[name](E, None, np.array(weights, np.float32), **kwargs)


def test_groups_of_one():
  rewards = np.array([[[1.0, 2.0]], [[3.0, 5.0]]], np.float32)
  for name in ('grpo', 'rloo', 'dvao', 'gdpo', 'rvpo', 'nemo_rl'):
    assert not call(name, rewards).any(), name
  assert call('reinforce_pp', rewards).all()  # its baseline is the batch
  assert not call('reinforce_pp', rewards[:1]).any()  # and a batch of one


def test_no_nan_is_made_on_the_way():
  with jax.debug_nans(True):
    for rewards in (
      np.full((2, 4, 2), 0.1),
      np.full((2, 4, 2), NAN),
      np.where(np.eye(4)[:, :2] > 0, 1.0, np.full((2, 4, 2), 0.3)),
    ):
      for eps in (0.0, 1e-4):
        call_every(rewards, eps=eps)


def test_no_gradient_flows_through_an_advantage():
  kwargs = extras(E.shape)

  @jax.jit
  def grads(rewards, weights):
    def loss(rewards, weights):
      out = every(rewards, None, weights, eps=0.0, **kwargs)
      return sum(jnp.sum(jnp.square(values)) for values in out.values())

    return jax.grad(loss, argnums=(0, 1))(rewards, weights)

  for grad in grads(E, np.ones(2, np.float32)):
    np.testing.assert_array_equal(grad, np.zeros_like(grad))


# --- families and counts ---------------------------------------------------


def test_sum_first_methods_share_signs_order_and_ties():
  rng = np.random.default_rng(0)
  for _ in range(20):
    rewards = rng.integers(0, 3, PADDED).astype(np.float32)
    out = call_every(rewards, rng.random(3))
    ranks = np.round(out['dr_grpo'], 5)
    order = np.sign(ranks[:, :, None] - ranks[:, None])
    for name in SUM_FIRST:
      got = np.round(out[name], 5)
      np.testing.assert_array_equal(np.sign(got), np.sign(ranks), err_msg=name)
      got_order = np.sign(got[:, :, None] - got[:, None])
      np.testing.assert_array_equal(got_order * (order != 0), order)


def test_groups_with_tied_sums_stay_zero_in_the_sum_first_family():
  out = call_every(columns([1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1]))
  for name in SUM_FIRST:
    assert not out[name].any(), name
  assert out['gdpo'].all()


def test_normalizing_first_changes_the_order():
  # the second reward is rare, so the row that has it comes first
  rewards = columns([1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0.9])
  first = {name: np.argmax(v[0]) for name, v in call_every(rewards).items()}
  for name in SUM_FIRST:
    assert first[name] == 0, name
  for name in ('mo_grpo', 'gdpo', 'dara', 'paper', 'trl'):
    assert first[name] == 5, name


def distinct_vectors(name, size, num_rewards, shape):
  """Distinct unordered advantage vectors over all groups of binary rewards.

  The groups are padded to [P, G, K] with what is missing, so that one
  compilation serves all sizes.
  """
  tuples = np.array(list(itertools.product((0, 1), repeat=num_rewards)))
  multisets = np.array(
    list(itertools.combinations_with_replacement(range(len(tuples)), size))
  )
  rewards = np.full(shape, NAN, np.float32)
  rewards[: len(multisets), :size, :num_rewards] = tuples[multisets]
  got = call(name, rewards, whiten='none')[: len(multisets), :size]
  # off the grid of round numbers, so that none lies on the edge of a bin
  return len(np.unique(np.round(np.sort(got, axis=1) * 1e4 + 0.31), axis=0))


COUNTS_OF_TWO_REWARDS = {
  'grpo': [2, 4, 7, 11, 16, 22, 29, 37, 46, 56],
  'dr_grpo': [3, 6, 10, 15, 21, 28, 36, 45, 55, 66],
  'gdpo': [3, 6, 14, 26, 38, 59, 81, 109, 145, 186],
}
COUNTS_OF_FOUR_SAMPLES = {
  'grpo': [7, 14, 23, 41],
  'dr_grpo': [10, 20, 35, 56],
  'gdpo': [14, 45, 127, 318],
}


@pytest.mark.parametrize('name', list(COUNTS_OF_TWO_REWARDS))
def test_number_of_distinct_advantage_vectors(name):
  shape = (364, 11, 2)  # as many multisets of eleven out of four tuples
  got = [distinct_vectors(name, size, 2, shape) for size in range(2, 12)]
  assert got == COUNTS_OF_TWO_REWARDS[name]
  shape = (52360, 4, 5)
  got = [distinct_vectors(name, 4, count, shape) for count in range(2, 6)]
  assert got == COUNTS_OF_FOUR_SAMPLES[name]


# --- devices ---------------------------------------------------------------


@pytest.fixture(scope='module')
def sharded_batch():
  rewards = with_missing(7, PADDED)
  rewards[2] = 0.3
  rewards[1, :, 1] = 0.5  # batch statistics that no device has alone
  valid = ~np.isnan(rewards)
  arrays = (rewards, valid, np.array([1, 2, 0.5], np.float32))
  kwargs = extras(PADDED)
  expected = call_every(rewards, arrays[2], eps=1e-4)
  mesh = Mesh(np.array(jax.devices()[:4]), ('data',))
  return arrays, kwargs, expected, mesh


def assert_all_close(got, expected):
  for name, values in expected.items():
    np.testing.assert_allclose(got[name], values, atol=2e-6, err_msg=name)


def test_sharded_inputs_give_the_same(sharded_batch):
  (rewards, valid, weights), kwargs, expected, mesh = sharded_batch
  rows = NamedSharding(mesh, Spec('data'))
  got = every_jitted(
    jax.device_put(rewards, rows),
    jax.device_put(valid, rows),
    weights,
    eps=np.float32(1e-4),
    bounds=kwargs['bounds'],
    mask=jax.device_put(kwargs['mask'], rows),
  )
  assert_all_close(got, expected)


def test_inside_shard_map_the_batch_is_global(sharded_batch):
  (rewards, valid, weights), kwargs, expected, mesh = sharded_batch
  rows = Spec('data')
  shared = jax.shard_map(
    lambda r, v, w, b, m: every(r, v, w, b, m, 1e-4, axis_name='data'),
    mesh=mesh,
    in_specs=(rows, rows, Spec(), Spec(), rows),
    out_specs=rows,
  )
  got = jax.jit(shared)(
    rewards, valid, weights, kwargs['bounds'], kwargs['mask']
  )
  assert_all_close(got, expected)


def test_one_trace_serves_all_batches_of_a_shape():
  traces = []

  @jax.jit
  def step(rewards, valid, weights):
    traces.append(1)
    return METHODS['gdpo'](rewards, valid, weights)

  for seed in range(3):
    rewards = with_missing(seed, (2, 4, 2))
    step(np.nan_to_num(rewards), ~np.isnan(rewards), np.ones(2) * seed)
  assert len(traces) == 1


# --- fuzz ------------------------------------------------------------------

FUZZ = settings(max_examples=40, deadline=None, derandomize=True)
SHAPES = st.sampled_from([(2, 4, 2), (1, 2, 1), (4, 8, 3), (3, 5, 3)])


@st.composite
def batches(draw, missing=True):
  """Small integer rewards, some missing, some groups constant."""
  shape = draw(SHAPES)
  rewards = draw(
    hnp.arrays(np.float32, shape, elements=st.integers(-2, 2).map(float))
  )
  if missing:
    gone = draw(hnp.arrays(bool, shape, elements=st.booleans()))
    rewards = np.where(gone & draw(st.booleans()), np.float32(NAN), rewards)
  if draw(st.booleans()):
    rewards[0] = draw(st.sampled_from([0.1, 0.3, 0.7]))
  return rewards


@FUZZ
@given(
  batches(),
  st.sampled_from([1e-6, 1e-3, 1.0, 1e3, 1e6]),
  st.sampled_from([0.0, 0.7, -1e4]),
  st.sampled_from([0.0, 1e-4]),
  st.sampled_from([np.float32, jnp.bfloat16]),
)
def test_never_nan(rewards, scale, offset, eps, dtype):
  rewards = (rewards * scale + offset).astype(dtype).astype(np.float32)
  limit = (
    np.sqrt(rewards[..., 0].size)
    * 10
    * max(1, np.nanmax(np.abs(rewards), initial=0))
  )
  for name, got in call_every(rewards, eps=eps).items():
    assert np.isfinite(got).all(), name
    assert np.abs(got).max() <= limit, name
    assert not got[np.isnan(rewards).all(-1)].any(), name


def test_bfloat16_inputs_are_computed_in_float32():
  rewards, weights = jnp.asarray(E, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
  for name in ('grpo', 'gdpo'):
    got = jax.jit(METHODS[name])(rewards, None, weights)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(
      got, call(name, E, eps=np.float32(1e-4)), atol=2e-3
    )


@FUZZ
@given(
  batches(),
  st.lists(
    st.sampled_from([0.25, 0.5, 2.0, 3.0, 10.0]), min_size=3, max_size=3
  ),
  st.lists(
    st.sampled_from([-20.0, -1.0, 0.0, 0.5, 7.0]), min_size=3, max_size=3
  ),
)
def test_affine_change_of_one_reward_changes_nothing(rewards, a, b):
  size = rewards.shape[-1]
  a, b = np.array(a[:size], np.float32), np.array(b[:size], np.float32)
  bounds = extras(rewards.shape)['bounds']
  before = call_every(rewards)
  after = call_every(a * rewards + b, bounds=a[:, None] * bounds + b[:, None])
  for name in (*AFFINE, 'sa_mrpo', 'saw'):
    np.testing.assert_allclose(
      after[name], before[name], atol=1e-3, err_msg=name
    )


def test_summing_first_is_not_affine_invariant():
  scaled = E * np.array([1, 10], np.float32)
  before, after = call_every(E), call_every(scaled)
  for name in ('grpo', 'dr_grpo', 'rloo', 'dvao'):
    assert np.abs(after[name] - before[name]).max() > 1e-2, name


@FUZZ
@given(batches(), st.randoms(use_true_random=False))
def test_permuting_rows_and_prompts_permutes_the_advantages(rewards, random):
  prompts = list(range(rewards.shape[0]))
  rows = list(range(rewards.shape[1]))
  random.shuffle(prompts)
  random.shuffle(rows)
  mask = extras(rewards.shape)['mask'].reshape(*rewards.shape[:2], -1)
  before = call_every(rewards, mask=mask)
  after = call_every(rewards[prompts][:, rows], mask=mask[prompts][:, rows])
  for name, values in before.items():
    np.testing.assert_allclose(
      after[name], values[prompts][:, rows], atol=1e-4, err_msg=name
    )
