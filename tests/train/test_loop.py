"""The whole loop on a real model, real problems and real files."""

import json
import random

import jax
import numpy as np
import pytest
from tiny_runs import byte_model, digits, settings, short, task, train

from gdpo_jax.objectives import shaping
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train import (
  advantage,
  completions,
  dictionary,
  metrics,
  run_files,
)
from gdpo_jax.train.page import html
from gdpo_jax.train.settings import ALGORITHMS


@pytest.fixture(scope='module')
def model():
  return byte_model()


def steps_of(history):
  """Rows without what a clock decides."""
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in history
  ]


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  directory = tmp_path_factory.mktemp('run')
  policy, params = model
  traces = []

  def log_probs(*args, **kwargs):
    traces.append(len(traces))
    return policy.log_probs(*args, **kwargs)

  after = []
  result = train(
    (policy._replace(log_probs=log_probs), params),
    directory,
    settings(),
    after_step=lambda step, row: after.append(len(traces)),
  )
  return result, directory, after


def test_nothing_is_traced_after_the_first_step(finished):
  _, _, after = finished
  assert after[0] >= 1 and after == [after[0]] * 4


def test_the_run_learns_and_moves_the_parameters(finished, model):
  result, _, _ = finished
  assert int(result.state.step) == int(result.state.updates) == 4
  moved = jax.tree.map(
    lambda a, b: float(abs(a - b).max()), result.state.params, model[1]
  )
  assert min(jax.tree.leaves(moved)) > 0


def test_files_hold_every_reward_and_every_step(finished):
  result, directory, _ = finished
  rows = metrics.read_jsonl(directory / 'metrics.jsonl')
  training = [row for row in rows if 'loss' in row]
  assert [row['step'] for row in training] == [1, 2, 3, 4]
  for name in ('digits', 'short'):
    for what in ('mean', 'std', 'group_std', 'zero_variance', 'missing'):
      assert all(f'rewards/{name}/{what}' in row for row in training)
  for name in (
    'reward', 'reward_std', 'frac_reward_zero_std', 'completions/mean_length',
    'completions/clipped_ratio', 'entropy', 'grad_norm', 'learning_rate',
    'clip_ratio/region_mean', 'num_tokens', 'epoch', 'time/generate',
  ):  # fmt: skip
    assert all(name in row for row in training), name
  held_out = [row for row in rows if 'eval/rewards/digits/mean' in row]
  assert [row['step'] for row in held_out] == [0, 4]
  assert held_out[0]['eval/hypervolume'] == 0
  assert len(result.final.texts) == 20
  for step in (0, 4):
    answers = metrics.read_jsonl(directory / 'heldout' / f'{step}.jsonl')
    assert len(answers) == 20
  assert answers[3]['completion'] == result.final.texts[3]
  samples = metrics.read_jsonl(directory / 'samples.jsonl')
  assert {row['step'] for row in samples} == {1, 3, 4}
  assert set(samples[0]['rewards']) == {'digits', 'short'}
  saved = json.loads((directory / 'settings.json').read_text())
  assert saved['advantage'] == 'gdpo' and saved['clip_high'] == 0.2


def test_every_metric_of_a_run_is_in_the_dictionary(finished):
  names = {name for row in finished[0].history for name in row} - {'step'}
  assert [n for n in sorted(names) if dictionary.describe(n) is None] == []


def test_a_run_leaves_traces_and_a_report(finished):
  _, directory, _ = finished
  sample = metrics.read_jsonl(directory / 'samples.jsonl')[0]
  for what in ('rewards', 'shaped', 'normalized', 'weighted'):
    assert set(sample[what]) == {'digits', 'short'}
  assert sample['weighted']['short'] == pytest.approx(
    0.5 * sample['normalized']['short']
  )
  if completions.can_write_table():
    assert {f.stem for f in (directory / 'completions').iterdir()} == {
      '1', '3', '4',
    }  # fmt: skip
  bins = metrics.read_jsonl(directory / 'histograms.jsonl')
  assert [sum(b['advantages'].values()) for b in bins] == [32] * 4
  (advice,) = metrics.read_jsonl(directory / 'events.jsonl')
  assert advice['rule'] == 'batch_small' and '32 rows' in advice['text']
  made = run_files.load(directory)
  assert made.about.rewards[1].weight == 0.5
  content = html.content(made)
  assert [r['name'] for r in content['rewards']] == ['digits', 'short']
  assert (directory / 'report.html').stat().st_size > 4e6


def test_sampler_and_trainer_agree(finished):
  rows = [row for row in finished[0].history if 'loss' in row]
  assert all(row['sampler_mismatch'] < 1e-4 for row in rows)


def test_resumed_equals_uninterrupted(finished, model, tmp_path):
  result, _, _ = finished
  half = train(model, tmp_path, settings(num_steps=2), heldout=[])
  assert int(half.state.step) == 2
  resumed = train(model, tmp_path, settings(), heldout=[])
  jax.tree.map(
    np.testing.assert_array_equal, resumed.state.params, result.state.params
  )
  expected = [row for row in steps_of(result.history) if 'loss' in row]
  assert steps_of(resumed.history) == expected


def test_sampling_in_parts_changes_nothing(finished, model, tmp_path):
  parts = train(model, tmp_path, settings(prompts_per_rollout=2), heldout=[])
  expected = [row for row in finished[0].history if 'loss' in row]
  rows = [row for row in parts.history if 'loss' in row]
  for row, other in zip(rows, expected, strict=True):
    for name in ('rewards/digits/mean', 'completions/mean_length', 'loss'):
      assert row[name] == pytest.approx(other[name], abs=1e-5), name


def test_a_finished_run_is_not_run_again(finished, model):
  result, directory, _ = finished
  again = train(model, directory, settings())
  assert again.history == result.history


def test_other_settings_in_the_same_directory_are_refused(finished, model):
  with pytest.raises(ValueError, match='group_size: 4 -> 8'):
    train(model, finished[1], settings(group_size=8))


def test_a_reward_that_fails_at_random_does_not_stop_the_run(model, tmp_path):
  rng = random.Random(0)
  calls = []

  def flaky(completions, **_):
    calls.append(rng.random() < 0.3)
    if calls[-1]:
      raise RuntimeError('no answer')
    return digits(completions)

  result = train(
    model,
    tmp_path,
    settings(num_steps=12, save_every=0),
    the_task=task(Reward(flaky), Reward(short)),
    heldout=[],
  )
  rows = [row for row in result.history if 'loss' in row]
  assert len(rows) == 12 and 0 < sum(calls) < 12
  counts = [row.get('rewards/flaky/missing/exception', 0) for row in rows]
  assert counts == [32.0 * failed for failed in calls]
  assert [row['rewards/flaky/missing'] for row in rows] == calls
  assert all(np.isfinite(row['loss']) for row in rows)


@pytest.mark.parametrize('algorithm', sorted(set(ALGORITHMS) - {'ppo'}))
def test_every_algorithm_has_what_it_asks_for(algorithm):
  """Bounds and masks reach the aggregator."""
  shaped = np.random.default_rng(0).random((4, 4, 2)).astype(np.float32)
  s = settings(algorithm=algorithm).resolve()
  mask = np.ones((4, 4, 8), bool)
  bounds = np.float32([[0, 1], [0, 1]])
  hierarchy = shaping.make_hierarchy(('a', 'b'), (None, 'a>0.5'))

  @jax.jit
  def run(values, weights):
    got = advantage.shape_rewards(s, hierarchy, values, weights, mask, bounds)
    return got.informative, advantage.combine(
      s, got.rewards, got.valid, weights, mask, bounds
    )

  informative, values = run(shaped, np.ones(2, np.float32))
  assert bool(informative.all())
  assert values.shape == (4, 4) and np.isfinite(values).all()
  assert float(abs(values).max()) > 0


def test_kl_several_updates_and_dynamic_sampling(model, tmp_path):
  result = train(
    model,
    tmp_path,
    settings(
      num_steps=2,
      algorithm='dapo',
      kl_coef=0.1,
      prompts_per_update=4,
      epochs_per_batch=2,
    ),
    heldout=[],
  )
  rows = [row for row in result.history if 'loss' in row]
  assert int(result.state.updates) == 2 * 2 * 2
  assert all(row['kl'] > 0 for row in rows)
  assert all(1 <= row['groups/rounds'] <= 4 for row in rows)


def test_rewards_that_never_answer_leave_the_model_alone(model, tmp_path):
  def silent(completions, **_):
    return [None] * len(completions)

  result = train(
    model,
    tmp_path,
    settings(num_steps=2),
    the_task=task(Reward(silent)),
    heldout=[],
  )
  rows = [row for row in result.history if 'loss' in row]
  assert all(row['rows/excluded'] == 32 and row['loss'] == 0 for row in rows)
  jax.tree.map(np.testing.assert_array_equal, result.state.params, model[1])
