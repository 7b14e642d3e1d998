"""Alarms, adjustments that are taken back, and runs that are continued."""

import jax
import jax.numpy as jnp
import pytest
import run_histories

from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train import monitor, rules
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import TrainState

ABOUT = run_histories.ABOUT


def kl(step):
  """Too high in steps 5 to 20."""
  return 20.0 if 5 <= step <= 20 else 3.0


def watch(rows, actions='', about=ABOUT):
  watching = monitor.Monitor(about, actions)
  return watching, [e for r in rows for e in watching.check(r['step'], r)]


def test_an_alarm_is_raised_once_and_is_over_once():
  rows = run_histories.run(40, **{'kl/nats_per_sequence': kl})
  watching, events = watch(rows)
  assert [(e.step, e.rule, e.kind) for e in events] == [
    (6, 'kl_high', 'alarm'),  # the mean of 3, 14.3, is above 12
    (23, 'kl_high', 'over'),  # and again below the target itself
  ]
  assert 'Halve the learning rate' in events[0].advice
  assert watching.factors == {} and watching.alarms == []


def test_adjustments_are_repeated_logged_and_taken_back():
  rows = run_histories.run(40, **{'kl/nats_per_sequence': kl})
  watching = monitor.Monitor(ABOUT, 'kl_high=adjust')
  factors = []
  events = []
  for row in rows:
    events += watching.check(row['step'], row)
    factors.append(watching.factors.get('learning_rate', 1.0))
  # every 5 steps, at most four times
  assert (
    factors[4:24]
    == [1.0] + [0.5] * 5 + [0.25] * 5 + [0.125] * 5 + [0.0625] * 2 + [1.0] * 2
  )
  kinds = [e.kind for e in events]
  assert kinds == ['alarm', *['adjusted'] * 4, 'over']
  assert 'learning_rate is now 0.5 times' in events[1].text
  assert 'learning_rate is back' in events[-1].text


def test_entropy_coefficient_goes_up_by_half_and_returns():
  def falls(step):
    return 0.1 if 6 <= step <= 14 else 1.0

  rows = run_histories.run(
    30, **{'entropy/sampled': falls, 'completions/distinct': 0.25}
  )
  watching = monitor.Monitor(ABOUT, 'entropy_collapse=adjust')
  seen = []
  for row in rows:
    watching.check(row['step'], row)
    seen.append(watching.factors.get('entropy_coef'))
  assert seen[7] is None and seen[8] == 1.5 and seen[-1] is None


def test_stop_ends_the_run():
  rows = run_histories.run(3, skipped_updates=lambda s: float(s == 2))
  watching, events = watch(rows, 'not_finite=stop')
  assert watching.should_stop
  assert events[0].kind == 'stop' and events[0].step == 2


def test_off_says_nothing():
  rows = run_histories.run(20, **{'kl/nats_per_sequence': kl})
  assert watch(rows, 'kl_high=off')[1] == []
  small = ABOUT._replace(prompts_per_step=2)
  assert watch(rows, 'all=off', small)[1] == []
  events = watch(rows, 'all=off, kl_high=warn', small)[1]
  assert {e.rule for e in events} == {'kl_high'}


def test_a_continued_run_stands_where_it_was():
  rows = run_histories.run(40, **{'kl/nats_per_sequence': kl})
  whole = monitor.Monitor(ABOUT, 'kl_high=adjust')
  events = []
  for row in rows[:12]:
    whole.check(row['step'], row)
  events = [e for r in rows[12:] for e in whole.check(r['step'], r)]
  again = monitor.Monitor(ABOUT, 'kl_high=adjust')
  again.replay(rows[:12])
  assert again.factors == {'learning_rate': 0.25}
  assert [e for r in rows[12:] for e in again.check(r['step'], r)] == events


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('kl_hihg=warn', 'kl_hihg.*there are batch_small'),
    ('kl_high=adapt', 'off, warn, adjust, stop'),
    ('kl_high', 'RULE=ACTION'),
    ('reward_still=adjust', 'nothing to adjust.*kl_high'),
  ],
)
def test_wrong_actions_are_refused(text, words):
  with pytest.raises(ValueError, match=words):
    Settings(monitor_actions=text).resolve()


def test_a_coefficient_of_0_cannot_be_raised():
  with pytest.raises(ValueError, match='set entropy_coef above 0'):
    Settings(monitor_actions='entropy_collapse=adjust').resolve()
  Settings(
    monitor_actions='entropy_collapse=adjust', entropy_coef=1e-3
  ).resolve()


def test_what_is_known_about_rewards_survives_the_file(tmp_path):
  def f(completions, **_):
    return [0.0] * len(completions)

  about = rules.About(
    monitor.describe_rewards(
      (
        Reward(f, name='a', range=(0, 1)),
        Reward(f, name='b', weight=0.5, condition={'a': 0.5}, fallback='a'),
        Reward(f, name='c', condition=('a', 1)),
      )
    ),
    prompts_per_step=8,
    group_size=4,
  )
  assert [r.condition for r in about.rewards] == [None, 'a>=0.5', 'a>=1']
  monitor.write_about(tmp_path, about)
  assert monitor.read_about(tmp_path) == about
  assert monitor.read_about(tmp_path / 'elsewhere') is None


def test_factors_reach_the_optimizer_and_are_taken_back():
  optimizer = state_lib.make_optimizer(Settings(learning_rate=1e-2).resolve())
  params = {'w': jnp.ones(2)}
  state = TrainState(
    jnp.int32(0),
    jnp.int32(0),
    params,
    optimizer.init(params),
    {'entropy_coef': jnp.float32(0.01)},
    jax.random.key(0),
  )

  def rate(state):
    _, opt = optimizer.update({'w': jnp.full(2, 0.1)}, state.opt, params)
    return float(state_lib.learning_rate(opt))

  halved = state_lib.with_rate_factor(state, 0.5)
  assert rate(halved) == pytest.approx(5e-3)
  assert rate(state_lib.with_rate_factor(halved, 1.0)) == pytest.approx(1e-2)
  raised = state_lib.with_entropy_coef(state, 0.015)
  assert float(raised.controllers['entropy_coef']) == pytest.approx(0.015)
  # nothing is moved where nothing changes
  same = state_lib.with_entropy_coef(state, 0.01)
  assert same.controllers['entropy_coef'] is state.controllers['entropy_coef']


def test_a_dead_head_gets_a_tenth_more_until_it_lives():
  """Only its own rate; logged; back to what was set."""
  watching = monitor.Monitor(ABOUT, 'head_dead=adjust')
  events, factors = [], []
  for step, row in enumerate(run_histories.run(60), 1):
    dead = step <= 24
    row |= {
      'heads/a/grad_norm': 1.0,
      'heads/b/grad_norm': 1e-6 if dead else 1.0,
    }
    events += watching.check(step, row)
    factors.append(watching.factors.get('head_rate/b', 1.0))
  assert [e.kind for e in events if e.rule == 'head_dead'] == [
    'alarm',
    *['adjusted'] * 3,
    'over',
  ]
  assert max(factors) == pytest.approx(1.1**3) and factors[-1] == 1.0
  assert 'head_rate/a' not in watching.factors
