"""Weight schedules, step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import schedules

NAN = float('nan')


def weights_over(schedule, means_per_step):
  state = schedule.init()
  update = jax.jit(schedule.update)
  out = [state.weights]
  for means in means_per_step:
    state = update(state, jnp.array(means))
    out.append(state.weights)
  assert state.step == len(means_per_step)
  return np.array(out)


def test_constant():
  got = weights_over(schedules.constant([1.0, 0.5]), [[0.0, 0.0]] * 3)
  np.testing.assert_array_equal(got, [[1, 0.5]] * 4)


@pytest.mark.parametrize(
  'kind, halfway, quarter',
  [('piecewise', 0, 0), ('linear', 0.5, 0.25), ('cosine', 0.5, 0.1464)],
)
def test_progressive(kind, halfway, quarter):
  schedule = schedules.progressive(
    [(0, [1.0, 0.0]), (2, [1.0, 0.0]), (6, [1.0, 1.0]), (8, [0.5, 1.0])], kind
  )
  got = weights_over(schedule, [[NAN, NAN]] * 10)
  np.testing.assert_allclose(got[:3], [[1, 0]] * 3)
  np.testing.assert_allclose(got[3, 1], quarter, atol=1e-4)
  np.testing.assert_allclose(got[4, 1], halfway, atol=1e-4)
  np.testing.assert_allclose(got[6], [1, 1])
  np.testing.assert_allclose(got[8:], [[0.5, 1]] * 3)


def test_progressive_checks_its_milestones():
  for milestones, message in [
    ([(1, [1.0])], 'rise from step 0'),
    ([(0, [1.0]), (0, [2.0])], 'rise from step 0'),
    ([(0, [1.0]), (5, [1.0, 2.0])], 'disagree'),
    ([], 'rise from step 0'),
  ]:
    with pytest.raises(ValueError, match=message):
      schedules.progressive(milestones)
  with pytest.raises(ValueError, match="'quadratic'"):
    schedules.progressive([(0, [1.0])], 'quadratic')


def test_gap_driven():
  schedule = schedules.gap_driven([1.0, 1.0])
  got = weights_over(schedule, [[0.4, 0.8], [NAN, 0.4], [1.0, 1.0]])
  np.testing.assert_allclose(got[0], [0.55, 0.55])
  np.testing.assert_allclose(got[1], [0.1 + 0.9 * 0.75, 0.1 + 0.9 * 0.25])
  np.testing.assert_allclose(got[2], [0.55, 0.55], rtol=1e-6)  # 0.4 is kept
  np.testing.assert_allclose(got[3], [0.1, 0.1])


def test_gap_driven_priorities():
  schedule = schedules.gap_driven([1.0, 1.0, 100.0], [1.0, 2.0, 0.0])
  got = weights_over(schedule, [[0.5, 0.5, 0.0]])
  np.testing.assert_allclose(got[1], [0.55, 1.1, 0], rtol=1e-6)
  with pytest.raises(ValueError, match='2 priorities for 1 targets'):
    schedules.gap_driven([1.0], [1.0, 2.0])


def test_lagrangian_holds_a_length_limit():
  """Length reacts to its weight; the multiplier finds what 200 tokens need."""
  schedule = schedules.lagrangian(
    [1.0, 0.0], [schedules.Constraint(index=1, limit=200.0)], rate=0.2
  )
  state, update = schedule.init(), jax.jit(schedule.update)
  np.testing.assert_array_equal(state.weights, [1, 0])
  length, seen = 400.0, []
  for _ in range(300):
    state = update(state, jnp.array([0.5, length]))
    # correctness pulls length up, its own weight pulls it down
    length += 5 * (1.0 - float(-state.weights[1]))
    seen.append(length)
  assert seen[0] > 300
  np.testing.assert_allclose(np.mean(seen[-100:]), 200, atol=20)
  np.testing.assert_allclose(state.weights[0], 1)


def test_lagrangian_at_least_and_bounds():
  at_least = schedules.Constraint(index=0, limit=0.5, at_most=False)
  schedule = schedules.lagrangian([0.0, 1.0], [at_least], 1.0, 2.0)
  got = weights_over(schedule, [[0.25, NAN], [NAN, NAN], [-9.0, 0.0], [9.0, 0]])
  np.testing.assert_allclose(got[:, 0], [0, 0.5, 0.5, 2, 0])
  with pytest.raises(ValueError, match='reward 3, but there are 1'):
    schedules.lagrangian([1.0], [schedules.Constraint(3, 1.0)])
  with pytest.raises(ValueError, match='at least 0'):
    schedules.lagrangian([-1.0], [schedules.Constraint(0, 1.0)])


def test_sampled_weights_are_uniform_on_the_simplex_of_the_declared_sum():
  schedule = schedules.sampled([2.0, -1.0, 0.0], seed=3)
  got = weights_over(schedule, [[NAN] * 3] * 400)
  np.testing.assert_allclose(np.abs(got).sum(1), 3, rtol=1e-5)
  assert (got[:, 0] >= 0).all() and (got[:, 1] <= 0).all()
  assert (got[:, 2] == 0).all()
  # uniform: mean 1/2 and variance 1/12 of a share of two
  share = got[:, 0] / 3
  assert share.mean() == pytest.approx(1 / 2, abs=0.06)
  assert share.var() == pytest.approx(1 / 12, rel=0.15)
  # a step does not depend on the ones before it, nor two seeds on each other
  state = schedule.init()._replace(step=jnp.int32(6))
  np.testing.assert_array_equal(schedule.update(state, None).weights, got[7])
  other = weights_over(schedules.sampled([2.0, -1.0, 0.0], 4), [[NAN] * 3])
  assert abs(other[0] - got[0]).max() > 0.01
