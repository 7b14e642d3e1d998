"""Hand numbers of every method, and the choices each one has."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from objective_batches import METHODS, NAN, UNIT, E, call, columns, groups, pad

from gdpo_jax.objectives import advantages, combine

R = 0.5**0.5


def close(got, expected, atol=6e-5):
  np.testing.assert_allclose(got, expected, atol=atol)


# (method, settings, advantages of E), all with eps 0
WORKED = [
  (
    'grpo',
    {},
    [[1.4142, 0, -0.7071, -0.7071], [1.3908, -0.1987, -0.1987, -0.9934]],
  ),
  (
    'gdpo',
    {},
    [[1.4784, -0.2537, -0.6124, -0.6124], [1.4142, 0, 0, -1.4142]],
  ),
  ('dr_grpo', {}, [[1, 0, -0.5, -0.5], [0.875, -0.125, -0.125, -0.625]]),
  (
    'rloo',
    {},
    [[1.3333, 0, -0.6667, -0.6667], [1.1667, -0.1667, -0.1667, -0.8333]],
  ),
  (
    'reinforce_pp',
    {},
    [[1.5043, -0.1003, -0.9026, -0.9026], [1.5043, -0.1003, -0.1003, -0.9026]],
  ),
  (
    'reinforce_pp_baseline',
    {},
    [[1.6139, 0, -0.8069, -0.8069], [1.4122, -0.2017, -0.2017, -1.0087]],
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
  (
    'dvao',
    {'ddof': 0},
    [[1.1716, 0, -0.5858, -0.5858], [1.3472, -0.1925, -0.1925, -0.9623]],
  ),
  (
    'saw',
    {'bounds': UNIT, 'whiten': 'none'},
    [[1.9341, 0.5543, -1.2442, -1.2442], [2.4367, -0.4367, -0.4367, -1.5633]],
  ),
  (
    'saw',
    {'bounds': UNIT},
    [[1.2830, 0.3677, -0.8254, -0.8254], [1.6164, -0.2897, -0.2897, -1.0370]],
  ),
  (
    'saw',
    {'bounds': UNIT, 'on': 'grpo', 'whiten': 'none'},
    [[1.1617, 0.5073, -0.8345, -0.8345], [1.4779, -0.3718, -0.3718, -0.7344]],
  ),
  (
    'gd2po',
    {},
    [[1.3170, 0, -0.6117, -0.6117], [0.8229, 0, 0, -0.9165]],
  ),
  (
    'gd2po',
    {'mode': 'snr', 'tau': 0.2},
    [[1.3170, 0, -0.6117, -0.6117], [0.8229, 0, 0, -0.9165]],
  ),
  (
    'gd2po',
    {'mode': 'snr', 'tau': 0.8},
    [[1.3170, 0, -0.6117, -0.6117], [0.8229, 0, 0, -0.9165]],
  ),
  (
    'gd2po',
    {'query_weight': 'after'},
    [[0.8139, 0, -0.3780, -0.3780], [0.5182, 0, 0, -0.5568]],
  ),
  (
    'sa_mrpo',
    {'bounds': UNIT, 'ddof': 0, 'gamma': 0.5},
    [[1.5181, 0, -0.7590, -0.7590], [1.6246, -0.1284, -0.1284, -1.3679]],
  ),
  (
    'sa_mrpo',
    {'bounds': UNIT, 'ddof': 0, 'gamma': 0.5, 'whiten': 'none'},
    [[1.5811, 0, -0.7906, -0.7906], [1.6921, -0.1337, -0.1337, -1.4247]],
  ),
  (
    'sa_mrpo',
    {'bounds': UNIT, 'ddof': 0, 'gamma': 1.0},
    [[1.4343, 0.2461, -0.8402, -0.8402], [1.6977, -0.2425, -0.2425, -1.2127]],
  ),
  (
    'corr_grpo',
    {},
    [[0.7071, 0, -0.3536, -0.3536], [0.5358, -0.0765, -0.0765, -0.3827]],
  ),
  (
    'corr_grpo',
    {'on': 'gdpo'},
    [[1.3687, -0.2348, -0.5669, -0.5669], [1.3093, 0, 0, -1.3093]],
  ),
  (
    'rvpo',
    {'whiten': 'none'},
    [
      [1.0294, -0.6481, -0.5240, -0.5240],
      [0.8799, -0.1201, -0.1201, -1.1201],
    ],
  ),
]


@pytest.fixture(scope='module')
def worked_example():
  """What the methods make of E, compiled together."""

  @jax.jit
  def run(rewards):
    return [
      METHODS[name](rewards, None, jnp.ones(2), eps=0.0, **settings)
      for name, settings, _ in WORKED
    ]

  return run(E)


@pytest.mark.parametrize('case', range(len(WORKED)))
def test_worked_example(worked_example, case):
  close(worked_example[case], WORKED[case][-1])


@pytest.mark.parametrize(
  'ddof, first, second',
  [
    (
      1,
      [[0.8660, 0.8660, -0.8660, -0.8660], [1.5, -0.5, -0.5, -0.5]],
      [[1.2247, -1.2247, 0, 0], [0.5, 0.5, 0.5, -1.5]],
    ),
    (
      0,
      [[1, 1, -1, -1], [1.7321, -0.5774, -0.5774, -0.5774]],
      [[1.4142, -1.4142, 0, 0], [0.5774, 0.5774, 0.5774, -1.7321]],
    ),
  ],
)
def test_z_scores_of_the_worked_example(ddof, first, second):
  z = jax.jit(
    lambda r: advantages.group_normalize(r, None, eps=0.0, ddof=ddof)
  )(E)
  close(z[..., 0], first)
  close(z[..., 1], second)


def test_mo_grpo_paper_example():
  rewards = columns([0.1, 0.5, 0.9], [0.15, 0.13, 0.05])
  close(call('mo_grpo', rewards, ddof=0), [[-0.2989, 0.4629, -0.1640]])
  # the paper prints another row for GRPO; recomputed
  close(call('grpo', rewards, ddof=0), [[-1.2582, 0.0699, 1.1883]])


def test_one_group_alone_hides_what_gdpo_does():
  a, b = [(0, 0), (0, 1)], [(0, 0), (1, 1)]
  both = groups(a, b)
  sums = call('gdpo', both, whiten='none')
  close(sums[:, 1], [0.7071, 1.4142])
  close(call('gdpo', both), [[-0.5477, 0.5477], [-1.0954, 1.0954]])
  close(call('gdpo', both, ddof=0), [[-0.6325, 0.6325], [-1.2649, 1.2649]])
  for alone in (groups(a), groups(b)):
    close(call('gdpo', alone), [[-0.7071, 0.7071]])
  close(call('grpo', both), [[-0.7071, 0.7071]] * 2)


def test_grpo_with_the_batch_step_is_one_setting_away():
  got = call('grpo', E, whiten='sequence')
  plain = call('grpo', E)
  close(got, (plain - plain.mean()) / plain.std(ddof=1))


def test_batch_step_counts_completions_unless_asked_for_tokens():
  rewards = columns([1, -1])
  mask = np.arange(3) < np.array([[1], [3]])
  kwargs = {'scale': 'none', 'mask': mask}
  for ddof, expected in [(0, [1, -1]), (1, [0.7071, -0.7071])]:
    got = call('grpo', rewards, whiten='sequence', ddof=ddof, **kwargs)
    close(got, [expected])
  for ddof, expected in [(0, [1.7321, -0.5774]), (1, [1.5, -0.5])]:
    got = call('grpo', rewards, whiten='token', ddof=ddof, **kwargs)
    close(got, [expected])
  with pytest.raises(ValueError, match='mask'):
    call('grpo', rewards, whiten='token')
  with pytest.raises(ValueError, match="'sequences'"):
    call('grpo', rewards, whiten='sequences')
  # three tokens of two rows, turned around
  with pytest.raises(ValueError, match=r'\(3, 2\).*must be \[2, tokens\]'):
    call('grpo', rewards, whiten='token', mask=mask.T)


def test_token_step_takes_any_mask_layout_and_skips_empty_rows():
  mask = np.arange(5) < np.array([3, 1, 5, 0, 2, 2, 4, 1])[:, None]
  flat = call('gdpo', E, whiten='token', mask=mask)
  shaped = call('gdpo', E, whiten='token', mask=mask.reshape(2, 4, 5))
  np.testing.assert_array_equal(flat, shaped)
  sums = call('gdpo', E, whiten='none')
  tokens = np.repeat(sums.ravel(), mask.sum(1))
  expected = (sums - tokens.mean()) / tokens.std(ddof=1)
  expected[0, 3] = 0
  close(flat, expected, atol=1e-5)


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


def test_renormalize_divides_by_the_weights_that_are_there():
  rewards = groups([(1, 1), (1, NAN), (0, 0)])
  sums = call('dr_grpo', rewards, weights=[1, 3])
  close(sums, [[4 - 5 / 3, 1 - 5 / 3, -5 / 3]])
  means = call('dr_grpo', rewards, weights=[1, 3], renormalize=True)
  close(means, [[1 / 3, 1 / 3, -2 / 3]])


def test_weighted_sum_is_the_reward_to_log():
  rewards, valid, weights = combine.prepare(
    np.array([[[1, 10], [0, 20]]]), None, np.array([2, 0.1])
  )
  total = combine.weighted_sum(rewards, valid, weights)
  close(total.values.mean(), 2.5)  # without weights it would say 15.5


def test_negative_weight_turns_the_sign():
  close(call('grpo', columns([0, 1]), weights=[-1]), [[0.7071, -0.7071]])


def test_dvao_weights_rewards_by_their_spread():
  # the weighted form: w_k std_k / sum, times the z-scores
  std = E.std(axis=1, keepdims=True)
  share = std / std.sum(-1, keepdims=True)
  close(share[:, 0], [[0.5858, 0.4142], [0.6667, 0.3333]])
  z = (E - E.mean(axis=1, keepdims=True)) / std
  close(call('dvao', E, ddof=0), (share * z).sum(-1))
  # the scale of the weights cancels, a constant reward does no harm
  close(call('dvao', E, [5, 5], ddof=0), call('dvao', E, ddof=0))
  flat = np.concatenate([E, np.full((2, 4, 1), 0.1)], -1)
  close(call('dvao', flat, ddof=0), call('dvao', E, ddof=0))


def test_dvao_is_never_larger_than_grpo():
  rewards = np.random.default_rng(0).random((20, 4, 2))
  dvao, grpo = call('dvao', rewards, ddof=0), call('grpo', rewards, ddof=0)
  assert np.all(np.abs(dvao) <= np.abs(grpo) + 1e-6)
  alike = np.concatenate([rewards[..., :1]] * 2, -1)
  close(call('dvao', alike, ddof=0), call('grpo', alike, ddof=0), atol=1e-5)


def test_saw_gives_equal_weights_where_nothing_varies():
  flat = np.ones((2, 4, 2), np.float32)
  assert not call('saw', flat, bounds=UNIT).any()
  # in the weights the two rewards count the same: both CVs are 0
  np.testing.assert_array_equal(
    call('saw', flat, bounds=UNIT, on='grpo'), np.zeros((2, 4))
  )


def test_saw_depends_on_the_lower_bound():
  shifted = E - 1
  bounds = UNIT - 1
  close(call('saw', shifted, bounds=bounds), call('saw', E, bounds=UNIT))
  undeclared = call('saw', shifted)
  assert np.abs(undeclared - call('saw', E)).max() > 0.01
  with pytest.raises(ValueError, match="'rloo'"):
    call('saw', E, on='rloo')


def test_gd2po_by_ratio_keeps_mild_conflicts():
  # one row with z-scores 1.5 and -0.5: agreement 1 / 2
  rewards = columns([1, 0, 0, 0], [0, 1, 0, 0])
  for tau, kept in [(0.5, True), (0.8, False)]:
    got = call('gd2po', rewards, mode='snr', tau=tau, whiten='none')
    assert (got[0, 0] != 0) == kept
  assert call('gd2po', rewards, whiten='none')[0, 0] == 0
  for wrong in ({'mode': 'soft'}, {'query_weight': 'during'}):
    with pytest.raises(ValueError, match='must be'):
      call('gd2po', rewards, **wrong)


def test_gd2po_with_nothing_kept_is_zero():
  rewards = columns([1, 0], [0, 1])
  assert not call('gd2po', rewards, weights=[2, 1]).any()


def test_sa_mrpo():
  close(call('sa_mrpo', E, bounds=UNIT, gamma=0.0), call('gdpo', E), atol=1e-6)
  # damping turns the sign of a row: -0.2712 without, +0.2461 at gamma 1
  close(call('gdpo', E, ddof=0)[0, 1], -0.2712)
  # undeclared ranges damp nothing
  undeclared = np.full((2, 2), NAN, np.float32)
  close(call('sa_mrpo', E, bounds=undeclared), call('gdpo', E), atol=1e-6)
  # all rewards at their best: 0 / 0 is 0
  assert not call('sa_mrpo', np.ones((2, 4, 2)), bounds=UNIT).any()
  with pytest.raises(ValueError, match='range of each reward'):
    call('sa_mrpo', E)
  with pytest.raises(ValueError, match=r'\[2, 2\].*\(3, 2\)'):
    call('sa_mrpo', E, bounds=np.zeros((3, 2)))


def test_correlations_of_the_worked_example():
  everywhere = np.ones(E.shape, bool)
  rho = combine.correlations(E, everywhere, axis=1)[:, 0]
  close(rho[:, 0, 1], [0, 0.3333])
  close(rho[:, [0, 1], [0, 1]], np.ones((2, 2)))
  z = advantages.group_normalize(E, None, eps=0.0)
  close(combine.correlations(z, everywhere, (0, 1))[0, 0, 0, 1], 0.1667)


def test_corr_grpo_multiplier():
  """Rewards with correlations .9756, .1098, .1098, and the covariance sum."""
  got = call('corr_grpo', E, on='grpo')
  close(got * np.array([[2**0.5], [1.6330]]), call('dr_grpo', E))
  # the published example, rebuilt: unit-norm columns with those correlations
  rho = np.array(
    [[1, 0.9756, 0.1098], [0.9756, 1, 0.1098], [0.1098, 0.1098, 1]]
  )
  scores = np.random.default_rng(0).normal(size=(64, 3))
  scores -= scores.mean(0)
  scores = scores @ np.linalg.inv(np.linalg.cholesky(np.cov(scores.T))).T
  rewards = (scores @ np.linalg.cholesky(rho).T)[None].astype(np.float32)
  ratio = call('corr_grpo', rewards) / call('dr_grpo', rewards)
  close(ratio, np.full((1, 64), 0.4307), atol=2e-4)


def test_corr_grpo_floor_bounds_opposed_rewards():
  rewards = columns([1, 1, 0, 0], [0, 0, 0.5, 0.5])
  published = call('corr_grpo', rewards, eps=1e-6, floor=0.0)
  close(np.abs(published), np.full((1, 4), 250), atol=5)
  close(call('corr_grpo', rewards), [[2.5, 2.5, -2.5, -2.5]])
  # it is not free of scale
  close(call('corr_grpo', 10 * E), 10 * call('corr_grpo', E), atol=1e-4)
  with pytest.raises(ValueError, match="'rloo'"):
    call('corr_grpo', E, on='rloo')


def test_ddca():
  correct = columns([1, 1, 0, 1])
  lengths = np.array([[50, 100, 150, 200]], np.float32)
  settings = {'lengths': lengths, 'ddof': 0}
  accuracy = call('ddca', correct, beta=0.0, **settings)
  close(accuracy, [[0.5774, 0.5774, -1.7321, 0.5774]])
  both = call('ddca', correct, **settings)
  close((both - accuracy) / 0.2, [[0.1786, 0.0451, 0, -0.2236]], atol=2e-4)
  close(both, [[0.6131, 0.5864, -1.7321, 0.5326]], atol=2e-4)
  dca = call('ddca', correct, difficulty=False, **settings)
  close(dca - accuracy, (both - accuracy) * 4 / 3)
  close(
    call('ddca', correct, leave_one_out=True, **settings),
    [[0.3869, 0.3469, -1, 0.2662]],
  )


def test_ddca_edges():
  lengths = np.array([[1, 2, 3, 4]], np.float32)
  # all correct: length alone remains; one correct, none correct: no length
  alone = call('ddca', columns([1, 1, 1, 1]), lengths=lengths)
  assert np.all(np.diff(alone) < 0)
  for right in ([1, 0, 0, 0], [0, 0, 0, 0]):
    rewards = columns(right)
    got = call('ddca', rewards, lengths=lengths)
    np.testing.assert_array_equal(got, call('grpo', rewards))
  mask = np.arange(4) < np.arange(1, 5)[:, None]
  close(call('ddca', columns([1, 1, 1, 1]), mask=mask), alone)
  with pytest.raises(ValueError, match='lengths'):
    call('ddca', columns([1, 0]))


def test_dara():
  rewards = E.copy()
  rewards[1, :, 1] = 1
  plain = {'whiten': 'none'}
  got = call('dara', rewards, **plain)
  close(got, [[2.5981, -0.3587, -0.8660, -0.8660], [1.5, -0.5, -0.5, -0.5]])
  symmetric = call('dara', rewards, mode='symmetric', **plain)
  close(symmetric[0, 1], -0.8660)
  # activity 1 and 1/2: the second reward is sqrt(2) louder
  z = call('mo_grpo', rewards[..., 1:], **plain)
  close(symmetric - call('mo_grpo', rewards), (2**0.5 - 1) * z)
  capped = call('dara', rewards, cap=1.0, **plain)
  close(capped, call('mo_grpo', rewards))
  # a reward that is never active is no division by zero
  rewards[..., 1] = 1
  close(call('dara', rewards, **plain), call('mo_grpo', rewards))
  with pytest.raises(ValueError, match="'sym'"):
    call('dara', rewards, mode='sym')


def test_rvpo_lies_between_the_mean_and_the_worst():
  z = np.asarray(advantages.group_normalize(E, None, eps=0.0))
  close(call('rvpo', E, sharpness=1e-3, whiten='none'), z.mean(-1), atol=2e-3)
  close(call('rvpo', E, sharpness=1e3, whiten='none'), z.min(-1), atol=2e-3)
  missing = E.copy()
  missing[0, 0, 1] = NAN
  got = call('rvpo', missing, sharpness=1e3, whiten='none')
  close(got[0, 0], 0.8660, atol=2e-3)  # the z-score that exists, not 0
  with pytest.raises(ValueError, match='above 0'):
    call('rvpo', E, sharpness=0.0)


def test_gdpo_clustered_counts_copies_once():
  rng = np.random.default_rng(0)
  shape = (30, 8, 7)

  def gdpo(rewards):
    return call('gdpo', pad(rewards, shape, NAN))

  a, b = rng.random((2, 30, 8)).astype(np.float32)
  # up to five rewards: gdpo itself
  few = np.stack([a, a, a, b], -1)
  close(call('gdpo_clustered', few), gdpo(few), atol=1e-5)
  many = np.stack([a, a, a, 2 * a + 1, a, a, b], -1)
  pair = gdpo(np.stack([a, b], -1))
  close(call('gdpo_clustered', many), pair, atol=1e-4)
  # a reward that is turned around by its weight belongs to the cluster as well
  many[..., 1] *= -1
  weights = [1, -1, 1, 1, 1, 1, 1]
  close(call('gdpo_clustered', many, weights), pair, atol=1e-4)
  # nothing in common: every reward is its own cluster
  loose = rng.random(shape).astype(np.float32)
  close(call('gdpo_clustered', loose), gdpo(loose), atol=1e-4)


def test_gdpo_clustered_follows_chains():
  linked = np.zeros((6, 6), bool)
  for i, j in [(0, 5), (5, 2), (2, 4), (1, 3)]:
    linked[i, j] = True
  from gdpo_jax.objectives.normalize_first import _components

  member = np.asarray(_components(jnp.asarray(linked)))
  assert [np.flatnonzero(row).tolist() for row in member] == [
    [0, 2, 4, 5],
    [1, 3],
    [],
    [],
    [],
    [],
  ]


def test_row_that_nobody_scored_is_left_out():
  rewards = groups([(1, NAN), (NAN, NAN), (3, NAN), (2, NAN)])
  close(call('grpo', rewards), [[-1, 0, 1, 0]])
  close(call('grpo', rewards, ddof=0), [[-1.2247, 0, 1.2247, 0]])
  close(call('gdpo', rewards, whiten='none'), [[-1, 0, 1, 0]])
  # three rows in the batch step, not four: std 1, not 0.8165
  close(call('gdpo', rewards), [[-1, 0, 1, 0]])
  got = advantages.scored(~np.isnan(rewards), np.ones(2))
  np.testing.assert_array_equal(got, [[True, False, True, True]])


def test_missing_is_not_zero():
  # the second reward has one value: it adds 0; the first has values 0, 1
  rewards = groups([(0, NAN), (1, NAN), (NAN, 5)])
  close(call('mo_grpo', rewards), [[-0.7071, 0.7071, 0]])
  # inf is no reward either
  rewards[0, 2, 0] = np.inf
  close(call('mo_grpo', rewards), [[-0.7071, 0.7071, 0]])
  # nor is what float32 cannot square: a std of inf would make every row 0
  rewards = groups([(0,), (1,), (1e20,)])
  for name, value in [('grpo', R), ('mo_grpo', R), ('corr_grpo', 0.5)]:
    close(call(name, rewards), [[-value, value, 0]])


def test_cancelling_rewards_with_unequal_weights_do_not_cancel():
  rewards = columns([1, 0], [0, 1])
  for ddof, value in [(1, 0.7071), (0, 1)]:
    got = call('mo_grpo', rewards, weights=[2, 1], ddof=ddof)
    close(got, [[value, -value]])


def test_small_real_range_survives():
  rewards = columns([0, 1e-4, 0, 1e-4])
  sign = np.array([[-1, 1, -1, 1]])
  for eps, value in [(1e-4, 0.317), (1e-6, 0.851), (1e-8, 0.8659), (0, 0.866)]:
    for name in ('grpo', 'mo_grpo'):
      got = call(name, rewards, eps=np.float32(eps))
      close(got, sign * value, atol=6e-4)


def test_wrong_arguments_are_errors():
  with pytest.raises(ValueError, match=r'\[N, K\] to \[P, G, K\]'):
    advantages.gdpo(np.zeros((8, 2)), None, np.ones(2))
  with pytest.raises(ValueError, match='valid has shape'):
    advantages.gdpo(np.zeros((2, 4, 2)), np.ones((2, 4), bool), np.ones(2))


# --- which groups carry signal ------------------------------------------------


@functools.cache
def _informative(aggregator):
  return jax.jit(
    functools.partial(advantages.informative, aggregator=aggregator)
  )


def informative(aggregator, rewards, weights=None, **settings):
  """bool[P] on a batch padded to one shape."""
  rewards = np.asarray(rewards, np.float32)
  weights = np.ones(rewards.shape[-1]) if weights is None else np.array(weights)
  padded = pad(rewards, (3, 8, 3), NAN)
  weights = pad(weights.astype(np.float32), (3,), 1)
  got = _informative(aggregator)(padded, ~np.isnan(padded), weights, **settings)
  return np.asarray(got)[: len(rewards)].tolist()


def test_constant_total_is_informative_for_gdpo():
  r = columns([1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 1])
  rewards = np.concatenate([r, np.full_like(r, 0.7)])
  for ddof, v in [(0, 0.1547), (1, 0.1340)]:
    got = call('gdpo', r, whiten='none', ddof=ddof)
    close(got, [[v, -v, -v, v]])
  assert not call('grpo', r).any()
  assert informative('gdpo', rewards) == [True, False]
  assert informative(advantages.dara, rewards) == [True, False]
  assert informative('grpo', rewards) == [False, False]
  # its baseline is the batch
  assert informative('reinforce_pp', rewards) == [True, True]
  unit = np.tile(np.array([0, 1], np.float32), (3, 1))
  assert informative('sa_mrpo', rewards, bounds=unit) == [True, False]


def test_equal_rewards_are_no_signal_whatever_their_float32_std():
  rewards = np.full((3, 8, 2), 0.1)
  rewards[1, :, 0] = 0.7
  rewards[2, 0, 0] = 0.3
  for name in ('grpo', 'gdpo'):
    assert informative(name, rewards) == [False, False, True]
  small = columns([0, 1e-4, 0, 1e-4])
  for name in ('grpo', 'gdpo'):
    assert informative(name, small) == [True]


def test_rounding_of_a_judge_is_no_signal():
  """One float32 apart in every group: the batch step made +-0.67 of it."""
  rewards = np.full((3, 8, 2), 0.1, np.float32)
  rewards[:, 1] = np.nextafter(np.float32(0.1), np.float32(1))
  for name in ('grpo', 'gdpo'):
    assert not call(name, rewards, whiten='sequence').any()
    assert informative(name, rewards) == [False] * 3


def test_informative_asks_for_two_rows_that_differ():
  rewards = groups([(1,), (NAN,)], [(1,), (0,)], [(NAN,), (NAN,)])
  assert informative('gdpo', rewards) == [False, True, False]
  # a reward of weight 0 is no signal
  rewards = columns([1, 0], [0.5, 0.5])
  assert informative('gdpo', rewards, [0, 1]) == [False]
