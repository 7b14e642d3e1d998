"""Conditions, normalizers, and the formulas that make one more reward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import advantages, shaping

NAN = float('nan')
NAMES = ('safety', 'correct', 'length')


def apply(conditions, rows, mode='zero', names=NAMES):
  hierarchy = shaping.make_hierarchy(names, conditions)
  values = np.array(rows, np.float32)
  return shaping.apply_conditions(
    hierarchy, values, ~np.isnan(values), mode=mode
  )


# --- conditions --------------------------------------------------------------


@pytest.mark.parametrize(
  'condition, expected',
  [
    (None, ()),
    ('safety>0.7', (('safety', '>', 0.7),)),
    (
      'correct >= 1 and format>0',
      (('correct', '>=', 1.0), ('format', '>', 0.0)),
    ),
    (' length_tokens <= 2e2 ', (('length_tokens', '<=', 200.0),)),
    ('a==-1', (('a', '==', -1.0),)),
    ('a!=.5', (('a', '!=', 0.5),)),
    (('safety', 0.7), (('safety', '>=', 0.7),)),
    ({'a': 1, 'b': 0}, (('a', '>=', 1.0), ('b', '>=', 0.0))),
  ],
)
def test_parse_condition(condition, expected):
  assert shaping.parse_condition(condition) == expected


@pytest.mark.parametrize(
  'text', ['safety', 'safety>', '>0.7', 'a>1 or b>2', 'a>b', '', 'a>1 and']
)
def test_text_that_cannot_be_read_is_an_error(text):
  with pytest.raises(ValueError, match='cannot read'):
    shaping.parse_condition(text)


def test_unknown_names_cycles_and_counts_are_errors():
  with pytest.raises(ValueError, match="'length'.*'corect'.*safety, correct"):
    shaping.make_hierarchy(NAMES, [None, None, 'corect>=1'])
  with pytest.raises(ValueError, match='circle: length -> length'):
    shaping.make_hierarchy(NAMES, [None, None, 'length>0'])
  with pytest.raises(ValueError, match='circle') as error:
    shaping.make_hierarchy(NAMES, ['length>0', 'safety>0', 'correct>0'])
  assert 'safety -> length -> correct -> safety' in str(error.value)
  with pytest.raises(ValueError, match='2 conditions for 3 rewards'):
    shaping.make_hierarchy(NAMES, [None, None])
  with pytest.raises(ValueError, match="'nan'"):
    apply([None] * 3, [[0, 0, 0]], mode='nan')


def test_failed_condition_makes_zero_or_missing():
  rows = [[1, 1, 0.5], [1, 0, 0.5]]
  conditions = [None, None, 'correct>=1']
  zero = apply(conditions, rows)
  np.testing.assert_allclose(zero.values, [[1, 1, 0.5], [1, 0, 0]])
  assert zero.valid.all()
  missing = apply(conditions, rows, mode='missing')
  np.testing.assert_array_equal(
    missing.valid, [[True, True, True], [True, True, False]]
  )
  for got in (zero, missing):
    np.testing.assert_array_equal(got.held[:, 2], [True, False])


def test_conditions_are_judged_on_conditioned_rewards():
  # unsafe: correctness does not count, and so length does not either
  rows = [[0.9, 1, 0.5], [0.1, 1, 0.5]]
  conditions = [None, 'safety>0.7', 'correct>=1']
  zero = apply(conditions, rows)
  np.testing.assert_allclose(zero.values[1], [0.1, 0, 0])
  np.testing.assert_allclose(zero.values[0], [0.9, 1, 0.5])
  missing = apply(conditions, rows, mode='missing')
  np.testing.assert_array_equal(missing.valid[1], [True, False, False])
  # the order of declaration does not matter
  turned = apply(
    conditions[::-1], [row[::-1] for row in rows], names=NAMES[::-1]
  )
  np.testing.assert_array_equal(turned.values[:, ::-1], zero.values)


@pytest.mark.parametrize('mode', ['zero', 'missing'])
def test_condition_on_a_missing_value_makes_missing(mode):
  got = apply(
    [None, 'safety>0.7', 'correct>=1'], [[NAN, 1, 0.5], [1, NAN, 0.5]], mode
  )
  np.testing.assert_array_equal(
    got.valid, [[False, False, False], [True, False, False]]
  )
  assert np.isfinite(got.values).all()
  # safety 1 is above 0.7, whether or not there is a correctness to count
  np.testing.assert_array_equal(got.held[:, 1:], [[0, 0], [1, 0]])


def test_what_is_missing_stays_missing():
  got = apply([None, None, 'correct>=1'], [[1, 0, NAN]])
  np.testing.assert_array_equal(got.valid, [[True, True, False]])


def test_all_comparisons_of_a_condition_must_hold():
  rows = [[1, 1, 0.5], [1, 0, 0.5], [0, 1, 0.5]]
  got = apply([None, None, 'correct>=1 and safety>0'], rows)
  np.testing.assert_allclose(got.values[:, 2], [0.5, 0, 0])


def test_conditions_inside_jit_and_for_any_leading_shape():
  hierarchy = shaping.make_hierarchy(NAMES, [None, None, {'correct': 1}])
  values = np.random.default_rng(0).integers(0, 2, (3, 4, 3)).astype(np.float32)
  f = jax.jit(lambda v: shaping.apply_conditions(hierarchy, v, v >= 0))
  got = f(values)
  expected = np.where(values[..., 1] >= 1, values[..., 2], 0)
  np.testing.assert_array_equal(got.values[..., 2], expected)


def test_conditioned_length_in_gdpo():
  """Missing leaves the statistics: only correct rows compete on length."""
  rows = np.array([[1, 1.0], [1, 0.0], [0, 1.0], [0, 1.0]], np.float32)
  hierarchy = shaping.make_hierarchy(
    ('correct', 'length'), [None, 'correct>=1']
  )
  shaped = {
    mode: shaping.apply_conditions(hierarchy, rows, rows >= 0, mode)
    for mode in ('zero', 'missing')
  }
  z = {
    mode: advantages.group_normalize(c.values[None], c.valid[None], eps=0.0)
    for mode, c in shaped.items()
  }
  np.testing.assert_allclose(
    z['missing'][0, :, 1], [0.7071, -0.7071, 0, 0], atol=1e-4
  )
  np.testing.assert_allclose(
    z['zero'][0, :, 1], [1.5, -0.5, -0.5, -0.5], atol=1e-4
  )


def test_calibrate_threshold():
  values = np.append(np.arange(101.0), NAN)
  low, high = shaping.calibrate_threshold(values)
  assert (low, high) == (60, 80)
  with pytest.raises(ValueError, match='no value'):
    shaping.calibrate_threshold([NAN])


# --- normalizers -------------------------------------------------------------


def test_running_normalizer():
  normalizer = shaping.make_normalizer(['running', 'sigmoid', 'none'], eps=0.0)
  state = normalizer.init()
  first = jnp.array([[0.0, 0.0, 5.0], [2.0, 1.0, 7.0]])
  valid = jnp.ones_like(first, bool)
  state = normalizer.update(state, first, valid)
  np.testing.assert_allclose(state.mean, [1, 0.5, 6])
  got = normalizer.apply(state, first, valid)
  np.testing.assert_allclose(got[:, 0], [-1, 1], rtol=1e-6)
  np.testing.assert_allclose(got[:, 1], [0.5, jax.nn.sigmoid(1.0)])
  np.testing.assert_allclose(got[:, 2], [5, 7])
  # the past weighs 0.9
  state = normalizer.update(state, first + 10, valid)
  np.testing.assert_allclose(state.mean[0], 0.9 * 1 + 0.1 * 11, rtol=1e-6)
  np.testing.assert_allclose(state.variance[0], 1, rtol=1e-6)
  # a reward that is missing throughout keeps its averages
  after = normalizer.update(state, first * NAN, ~valid)
  jax.tree.map(np.testing.assert_array_equal, after, state)
  assert not normalizer.apply(state, first * NAN, ~valid).any()
  with pytest.raises(ValueError, match='minmax'):
    shaping.make_normalizer(['minmax'])


def test_normalizer_before_the_first_batch_is_the_identity():
  normalizer = shaping.make_normalizer(['running'], eps=0.0)
  x = jnp.array([[3.0]])
  assert normalizer.apply(normalizer.init(), x, jnp.ones((1, 1), bool)) == 3


def test_system_reward():
  values = jnp.array([[1.0, 10.0], [0.0, NAN], [NAN, NAN]])
  got = shaping.system_reward(values, ~jnp.isnan(values), jnp.array([3.0, 1.0]))
  np.testing.assert_allclose(got, [13 / 4, 0, NAN])


# --- formulas ----------------------------------------------------------------


def test_overlong_penalty():
  lengths = np.array([0, 79, 80, 81, 90, 99, 100, 101, 250])
  got = shaping.overlong_penalty(lengths, limit_tokens=100, margin_tokens=20)
  np.testing.assert_allclose(
    got, [0, 0, 0, -0.05, -0.5, -0.95, -1, -1, -1], atol=1e-7
  )
  got = shaping.overlong_penalty(
    np.array([16384, 17408, 18432, 20480, 20481]),
    limit_tokens=20480,
    margin_tokens=4096,
  )
  np.testing.assert_allclose(got, [0, -0.25, -0.5, -1, -1])


def test_overlong_penalty_edges():
  lengths = np.array([0, 99, 100, 101])
  hard = shaping.overlong_penalty(lengths, limit_tokens=100)
  np.testing.assert_array_equal(hard, [0, 0, 0, -1])
  off = shaping.overlong_penalty(lengths, limit_tokens=None)
  np.testing.assert_array_equal(off, [0, 0, 0, 0])
  for margin in (101, -1):
    with pytest.raises(ValueError, match='between 0 and limit_tokens'):
      shaping.overlong_penalty(lengths, limit_tokens=100, margin_tokens=margin)


def test_efficiency_coherence_diversity():
  np.testing.assert_allclose(
    shaping.efficiency(np.array([0, 100])),
    [1, 1 / (1 + np.log(101))],
    rtol=1e-6,
  )
  np.testing.assert_allclose(shaping.coherence(0.0), 0.5)
  np.testing.assert_allclose(shaping.coherence(2.0), 1 - 1 / (1 + np.exp(-2)))
  np.testing.assert_allclose(shaping.diversity(1.0), np.log(2), rtol=1e-6)
  np.testing.assert_allclose(
    shaping.generalized_reward(1.0, 0.0, 0.0), 0.7 + 0.2 * 0.5
  )
  got = shaping.recent_diversity(
    jnp.array([[1.0, 0.0, NAN], [NAN, NAN, NAN], [-1.0, -1.0, -1.0]])
  )
  np.testing.assert_allclose(got, [0.015, 0, 0.06], rtol=1e-6)


def test_a_reward_that_was_constant_is_not_blown_up():
  normalizer = shaping.make_normalizer(['running'])
  same, valid = jnp.full((2, 4, 1), 0.1), jnp.ones((2, 4, 1), bool)
  state = normalizer.update(normalizer.init(), same, valid)
  got = normalizer.apply(state, same + 0.5, valid)  # by 1e4, with 1 / eps
  np.testing.assert_allclose(got, np.full((2, 4, 1), 0.5), rtol=1e-6)


def test_another_number_of_rewards_is_refused():
  values, valid = jnp.zeros((2, 4, 3)), jnp.ones((2, 4, 3), bool)
  normalizer = shaping.make_normalizer(['running'])
  for function in (normalizer.update, normalizer.apply):
    with pytest.raises(ValueError, match=r'\(2, 4, 3\).*the 1 rewards'):
      function(normalizer.init(), values, valid)
  hierarchy = shaping.make_hierarchy(('a', 'b'), (None, 'a>0'))
  with pytest.raises(ValueError, match=r'\(2, 4, 3\).*the 2 rewards'):
    shaping.apply_conditions(hierarchy, values, valid)
  with pytest.raises(ValueError, match=r'\(1,\) for 3 rewards'):
    shaping.system_reward(values, valid, jnp.ones(1))
