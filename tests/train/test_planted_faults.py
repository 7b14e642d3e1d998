"""Real runs with one fault each: the right rule fires, and names the cause.

A healthy run of the same model, batch and length fires none.
"""

import math

import pytest
import tiny_runs

from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train import metrics, run_files
from gdpo_jax.train.page import html

WITHIN = 20  # steps

model = pytest.fixture(scope='module')(tiny_runs.byte_model)
pytestmark = pytest.mark.slow


def even(completion_ids, **_):
  """A graded reward on which any two answers are likely to differ."""
  return [sum(i % 2 == 0 for i in ids) / len(ids) for ids in completion_ids]


def letters(completions, **_):
  return [float(sum(c.isascii() for c in text)) for text in completions]


def run(model, directory, *rewards, num_steps=WITHIN, **changes):
  """Returns the events; 256 rows a step, which is enough for no advice."""
  base = {
    'num_steps': num_steps,
    'prompts_per_step': 64,
    'learning_rate': 3e-3,
    'save_every': 0,
    'samples_every': 5,
  }
  tiny_runs.train(
    model,
    directory,
    tiny_runs.settings(**{**base, **changes}),
    the_task=tiny_runs.task(*rewards),
    heldout=[],
  )
  return run_files.load(directory).events


def alarms(events):
  return [(e['rule'], e['subject']) for e in events if e['kind'] == 'alarm']


HEALTHY = (Reward(letters), Reward(even, range=(0.0, 1.0)))


@pytest.mark.parametrize('seed', range(3))
def test_a_healthy_run_fires_none(model, tmp_path, seed):
  events = run(model, tmp_path, *HEALTHY, seed=seed, num_steps=60)
  assert events == []
  rows = run_files.load(tmp_path).training
  start, end = rows[0], rows[-1]
  assert end['rewards/letters/mean'] > start['rewards/letters/mean']


def test_a_reward_that_never_moves(model, tmp_path):
  def constant(completions, **_):
    return [0.5] * len(completions)

  events = run(model, tmp_path, *HEALTHY, Reward(constant))
  assert alarms(events) == [('reward_still', 'constant')]
  assert 'never tells the rows of a group apart' in events[0]['text']


def test_a_weight_too_small(model, tmp_path):
  events = run(model, tmp_path, Reward(letters), Reward(even, weight=1e-3))
  assert alarms(events) == [('weight_small', 'even')]
  assert 'its weight is 0.001' in events[0]['text']


def test_nan_from_step_20(model, tmp_path):
  def breaks(completions, step, **_):
    values = letters(completions)
    return [math.nan] * len(values) if step >= 20 else values

  events = run(
    model, tmp_path, Reward(breaks), Reward(even), num_steps=20 + WITHIN
  )
  assert alarms(events) == [('reward_missing', 'breaks')]
  assert 20 < events[0]['step'] <= 25 and "'nan'" in events[0]['text']


def test_an_update_that_is_not_finite_from_step_20(model, tmp_path):
  # A value beyond 1e12 would be missing; the weight takes a smaller one there.
  def explodes(completions, step, **_):
    return [v * (1e-2 if step >= 20 else 1e-25) for v in letters(completions)]

  events = run(
    model,
    tmp_path,
    Reward(explodes, weight=1e25),
    Reward(even),
    num_steps=25,
    algorithm='dr_grpo',
  )
  assert ('not_finite', 'update') in alarms(events)
  event = next(e for e in events if e['rule'] == 'not_finite')
  assert event['step'] == 21
  rows = run_files.load(tmp_path).training
  assert [r['step'] for r in rows if r['skipped_updates']][0] == 21


def test_kl_that_runs_away(model, tmp_path):
  events = run(
    model,
    tmp_path,
    *HEALTHY,
    kl_coef=1e-5,
    learning_rate=3e-2,
    monitor_actions='kl_high=adjust',
  )
  event = next(e for e in events if e['rule'] == 'kl_high')
  assert event['kind'] == 'alarm' and event['subject'] == 'kl'
  assert 'times the target of 6' in event['text']
  # the rate is halved in the step after
  rows = run_files.load(tmp_path).training
  rates = {r['step']: r['learning_rate'] for r in rows}
  assert rates[event['step']] == pytest.approx(3e-2)
  assert rates[event['step'] + 1] == pytest.approx(1.5e-2)


def test_entropy_that_collapses(model, tmp_path):
  def low(completion_ids, **_):
    return [-float(sum(ids)) for ids in completion_ids]

  events = run(model, tmp_path, Reward(low), learning_rate=3e-2)
  assert ('entropy_collapse', 'entropy') in alarms(events)
  event = next(e for e in events if e['rule'] == 'entropy_collapse')
  assert 'are distinct' in event['text']
  assert 'entropy_coef' in event['advice']


def test_a_condition_that_never_fires(model, tmp_path):
  events = run(
    model,
    tmp_path,
    Reward(letters),
    Reward(even, condition='letters>=100'),
  )
  assert ('condition_silent', 'even') in alarms(events)
  event = next(e for e in events if e['rule'] == 'condition_silent')
  assert 'letters>=100' in event['text'] and '0.0%' in event['text']


def test_a_muted_function(model, tmp_path):
  def fails(completions, **_):
    raise RuntimeError('no connection')

  events = run(
    model, tmp_path, *HEALTHY, Reward(fails, mute_after=5, retry_after=100)
  )
  # missing first, and from then on muted
  assert alarms(events) == [
    ('reward_missing', 'fails'),
    ('reward_muted', 'fails'),
  ]
  event = next(e for e in events if e['rule'] == 'reward_missing')
  assert "'exception'" in event['text']


def test_a_batch_too_small(model, tmp_path):
  events = run(
    model, tmp_path, *HEALTHY, num_steps=1, prompts_per_step=4, group_size=4
  )
  assert [(e['rule'], e['kind']) for e in events] == [('batch_small', 'advice')]
  assert '16 rows' in events[0]['text']


def test_stop_ends_the_run(model, tmp_path):
  def fails(completions, **_):
    raise RuntimeError('no connection')

  events = run(
    model,
    tmp_path,
    *HEALTHY,
    Reward(fails),
    monitor_actions='reward_missing=stop',
  )
  (event,) = [e for e in events if e['kind'] != 'advice']
  assert (event['rule'], event['kind']) == ('reward_missing', 'stop')
  rows = metrics.read_jsonl(tmp_path / 'metrics.jsonl')
  assert rows[-1]['step'] == 3
  assert 'The run ends here' in html.build(run_files.load(tmp_path))
