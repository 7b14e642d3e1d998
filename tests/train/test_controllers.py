"""What moves from step to step: KL, weights, normalizers, reference, values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_runs import byte_model, digits, settings, short, task, train

from gdpo_jax.objectives.advantages import PRESETS
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train import advantage, step
from gdpo_jax.train.controllers import Controllers


@pytest.fixture(scope='module')
def model():
  return byte_model()


def rows_of(result):
  return [row for row in result.history if 'loss' in row]


def assert_equal(a, b):
  jax.tree.map(np.testing.assert_array_equal, a, b)


def test_adaptive_kl_as_a_reward_beside_a_moving_reference(model, tmp_path):
  """Ziegler's rule by hand; `kl` is a reward with the coefficient as weight."""
  s = settings(
    kl_coef=0.5,
    kl_place='reward',
    kl_controller='adaptive',
    kl_target=1e-3,
    reference_every=2,
  )
  result = train(model, tmp_path, s, heldout=[])
  rows = rows_of(result)
  coef = 0.5
  for row in rows:
    assert row['kl/coef'] == pytest.approx(coef, rel=1e-5)
    assert row['rewards/kl/weight'] == pytest.approx(coef, rel=1e-5)
    nats = row['kl/nats_per_sequence']
    assert row['rewards/kl/mean'] == pytest.approx(-nats, rel=1e-4, abs=1e-7)
    coef *= 1 + 0.1 * np.clip(nats / 1e-3 - 1, -0.2, 0.2)
  # the same policy as its reference, up to float32; then it moves away
  assert abs(rows[0]['kl/nats_per_sequence']) < 1e-4
  assert abs(rows[1]['kl/nats_per_sequence']) > 1e-3
  # after step 2 the reference is the policy again
  assert abs(rows[2]['kl/nats_per_sequence']) < 1e-4
  assert_equal(result.state.controllers['reference'], result.state.params)


def test_a_resumed_run_has_the_controllers_of_the_first(model, tmp_path):
  s = settings(
    kl_coef=0.1,
    kl_controller='moving_target',
    kl_target=0.01,
    reference_decay=0.5,
    weight_schedule='linear',
    weight_milestones=((0, (1.0, 0.0)), (4, (1.0, 1.0))),
    normalizers='running',
    clip_target_kl=0.01,
  )
  whole = train(model, tmp_path / 'whole', s, heldout=[])

  class Stop(Exception):
    pass

  def stop(done, row):
    if done == 3:
      raise Stop

  with pytest.raises(Stop):
    train(model, tmp_path / 'cut', s, heldout=[], after_step=stop)
  resumed = train(model, tmp_path / 'cut', s, heldout=[])
  assert_equal(resumed.state.controllers, whole.state.controllers)
  assert_equal(resumed.state.params, whole.state.params)
  rows = rows_of(whole)
  assert [r['rewards/short/weight'] for r in rows] == [0, 0.25, 0.5, 0.75]
  # decay 0.5 halves the distance to the policy at every step
  for reference, params in zip(
    jax.tree.leaves(whole.state.controllers['reference']),
    jax.tree.leaves(whole.state.params),
  ):
    assert float(abs(reference - params).max()) > 0
  running = whole.state.controllers['normalizer']
  assert list(running.batches) == [4, 4]
  means = [r['rewards/digits/mean'] for r in rows]
  expected = means[0]
  for mean in means[1:]:
    expected = 0.9 * expected + 0.1 * mean
  assert float(running.mean[0]) == pytest.approx(expected, rel=1e-4)


def test_gap_driven_and_lagrangian_weights():
  names, weights = ('correct', 'tokens'), (1.0, 0.5)

  def advance(s, means):
    controllers = Controllers(s.resolve(), names, weights)
    state = controllers.init({})
    raw = np.broadcast_to(np.float32(means), (2, 2, 2))
    state = controllers.advance(
      state, {}, jnp.int32(1), raw, raw, np.ones(raw.shape, bool), None
    )
    return controllers.weights(state, np.float32(weights))

  gap = settings(weight_schedule='gap_driven', weight_targets=(1.0, 10.0))
  # gaps 0.5 and 1.5: 0.1 + 0.9 / 4 and 0.1 + 0.9 * 3 / 4, times the weight
  np.testing.assert_allclose(
    advance(gap, (0.5, 11.5)), [0.325, 0.5 * 0.775], rtol=1e-6
  )
  limit = settings(
    weight_schedule='lagrangian', weight_constraints=(('tokens', '<=', 200),)
  )
  # 300 tokens are 50% too many: the multiplier 0.5 rises by 0.1 * 0.5
  np.testing.assert_allclose(advance(limit, (1, 300)), [1, -0.55], rtol=1e-6)


@pytest.mark.parametrize(
  'changes, words',
  [
    ({'weight_schedule': 'gap_driven'}, 'needs weight_targets'),
    ({'weight_targets': (1.0,)}, 'does not look at it'),
    ({'kl_controller': 'adaptive'}, 'set kl_coef'),
    ({'reference_every': 3}, 'set kl_coef'),
    (
      {'kl_coef': 1.0, 'reference_every': 3, 'reference_decay': 0.9},
      'exclude each other',
    ),
    ({'overlong_share': 2.0}, r'in \[0, 1\]'),
    ({'clip_target_kl': 0.1, 'policy_loss': 'cispo'}, 'not of'),
  ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    settings(**changes).resolve()


def test_controllers_know_the_rewards():
  def make(**changes):
    Controllers(settings(**changes).resolve(), ('a', 'b'), (1.0, 1.0))

  with pytest.raises(ValueError, match='1 entries.*2 rewards: a, b'):
    make(weight_schedule='gap_driven', weight_targets=(1.0,))
  with pytest.raises(ValueError, match='one of a, b'):
    make(weight_schedule='lagrangian', weight_constraints=(('c', '<=', 1),))
  with pytest.raises(ValueError, match='one for all or one for each'):
    make(normalizers='running, none, none')
  make(normalizers='running, none')


def test_soft_overlong_is_one_more_reward(model, tmp_path):
  """DAPO; an untrained model runs into the limit: -1 where it does."""
  s = settings(num_steps=1, algorithm='dapo', overlong_share=0.5, max_rounds=1)
  result = train(model, tmp_path, s, heldout=[])
  (row,) = rows_of(result)
  assert row['rewards/overlong/weight'] == 1
  # 0 up to 4 of 8 tokens, then a quarter per token
  longest = row['completions/max_length']
  assert longest == 8
  assert -1 <= row['rewards/overlong/mean'] < 0
  with pytest.raises(ValueError, match='rename it'):
    train(
      model,
      tmp_path / 'taken',
      s,
      the_task=task(Reward(short, name='overlong')),
    )


def test_clip_follows_the_kl_of_the_last_update():
  s = settings(clip_target_kl=0.1).resolve()
  clip = step.clip_of(s, jnp.float32(0.1))
  assert float(clip['clip_low']) == pytest.approx(0.2 * (1 + 0.2 * np.tanh(1)))
  assert step.clip_of(s, jnp.float32(0))['clip_high'] == pytest.approx(0.2)


def test_another_loss_has_another_band():
  s = settings(policy_loss='gspo').resolve()
  assert (s.clip_low, s.clip_high) == (3e-4, 4e-4)
  assert settings(policy_loss='gspo', clip_low=0.1).resolve().clip_low == 0.1
  assert settings(advantage='verl').resolve().advantage_eps == 1e-6


@pytest.mark.parametrize('preset', sorted(PRESETS))
def test_a_preset_has_its_own_constants_through_the_settings(preset):
  s = settings(advantage=preset).resolve()
  rewards = np.random.default_rng(1).random((4, 4, 2)).astype(np.float32)
  rewards[0, 0] = np.nan
  valid, mask = np.isfinite(rewards), np.ones((4, 4, 8), bool)
  mask[1, :, 3:] = False
  weights = np.float32([1, 2])
  expected = PRESETS[preset](rewards, valid, weights, mask=mask)
  bounds = np.full((2, 2), np.nan, np.float32)
  got = advantage.combine(s, rewards, valid, weights, mask, bounds)
  np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_ppo_trains_a_value_head_that_learns_the_return(model, tmp_path):
  """A reward of 1 for every row: the value goes from 0 towards 1."""

  def always(completions, **_):
    return [1.0] * len(completions)

  result = train(
    model,
    tmp_path,
    settings(
      num_steps=12,
      algorithm='ppo',
      kl_coef=1e-3,
      kl_place='reward',
      gae_dynamic=True,
      epochs_per_batch=2,
      learning_rate=3e-3,
      value_clip=10.0,
    ),
    the_task=task(Reward(always)),
    heldout=[],
  )
  rows = rows_of(result)
  assert rows[0]['value/mean'] < 0.2
  assert rows[-1]['value/mean'] > 0.6
  assert rows[-1]['value/squared_error'] < 0.3 * rows[0]['value/squared_error']
  assert all(row['groups_in_loss'] == 1 for row in rows)
  assert result.state.params['value']['kernel'].shape == (32,)


def test_gradient_cosines_tell_friends_from_foes(model, tmp_path):
  """A reward against itself: 1. Against its negative: -1."""

  def fewer(completions, **_):
    return [-value for value in digits(completions)]

  result = train(
    model,
    tmp_path,
    settings(num_steps=2, gradient_cosine_every=2, prompts_per_micro_batch=4),
    the_task=task(
      Reward(digits), Reward(digits, name='same'), Reward(fewer, weight=0.5)
    ),
    heldout=[],
  )
  first, second = rows_of(result)
  assert first['gradient_cosine/digits/same'] == pytest.approx(1, abs=1e-4)
  assert first['gradient_cosine/digits/fewer'] == pytest.approx(-1, abs=1e-4)
  assert 'gradient_cosine/digits/same' not in second
  assert first['conflict/digits/same'] == pytest.approx(1, abs=1e-4)
  assert first['conflict/digits/fewer'] == pytest.approx(-1, abs=1e-4)
  shares = [second[f'advantage_share/{n}'] for n in ('digits', 'same', 'fewer')]
  assert shares == pytest.approx([0.4, 0.4, 0.2], abs=1e-4)
  # both read the same numbers, so both see as many values as there are
  assert (
    second['collapse/distinct_advantages/gdpo']
    == second['collapse/distinct_rewards']
  )


def test_diagnosis_shows_the_collapse_of_the_paper():
  """Rows (0,1) and (1,0) are one for the sum, two for unequal weights."""
  s = settings().resolve()
  rewards = np.float32([[[0, 1], [1, 0], [0, 0], [1, 1]]])
  valid, held = np.ones((2, 1, 4, 2), bool)
  row = advantage.diagnosis(
    s, ('a', 'b'), rewards, valid, np.float32([1, 1]), held
  )
  assert row['collapse/distinct_rewards'] == 4
  assert row['collapse/distinct_advantages/grpo'] == 3
  assert row['advantage_share/a'] == row['advantage_share/b'] == 0.5
  assert row['condition/a/held'] == 1
