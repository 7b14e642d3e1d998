"""Metric rows by hand, and files that survive a kill."""

import json

import numpy as np
import pytest

from gdpo_jax.objectives.masked import Mean
from gdpo_jax.train import metrics
from gdpo_jax.train.experience import Experience, Groups
from gdpo_jax.types import Batch, Rollout


def test_reward_metrics_by_hand():
  nan = np.nan
  values = np.float32(
    [[[1, 5], [0, 5], [1, nan]], [[1, nan], [1, nan], [1, 7]]]
  )
  row = metrics.reward_metrics(('a', 'b'), values, np.float32([1, 0.5]))
  assert row['rewards/a/mean'] == pytest.approx(5 / 6)
  assert row['rewards/a/std'] == pytest.approx(np.sqrt(1 / 6))
  # Deviations: group 0 of a sqrt(1/3), group 1 of a is constant.
  assert row['rewards/a/group_std'] == pytest.approx(np.sqrt(1 / 3) / 2)
  assert row['rewards/a/zero_variance'] == 0.5
  assert row['rewards/a/missing'] == 0
  assert row['rewards/b/mean'] == pytest.approx(17 / 3)
  assert row['rewards/b/missing'] == 0.5
  assert row['rewards/b/weight'] == 0.5
  # Only group 0 of b has two values, and they are equal.
  assert row['rewards/b/group_std'] == 0
  assert row['rewards/b/zero_variance'] == 1


def test_a_reward_that_never_answered_has_no_mean():
  row = metrics.reward_metrics(('a',), np.full((2, 2, 1), np.nan), np.ones(1))
  assert row == {'rewards/a/missing': 1.0, 'rewards/a/weight': 1.0}


def test_merge_adds_sums_and_counts():
  a, b = {'x': Mean(3.0, 1.0)}, {'x': Mean(5.0, 3.0), 'y': Mean(1.0, 1.0)}
  assert metrics.to_host(metrics.merge(a, b)) == {'x': 2.0, 'y': 1.0}
  assert metrics.to_host({'nothing': Mean(0.0, 0.0)}) == {}


def test_timer_adds_up_within_a_step():
  timer = metrics.Timer()
  for _ in range(2):
    with timer('generate'):
      pass
  row = timer.summary()
  assert 0 <= row['time/generate'] <= row['time/step']


def test_writer_cuts_back_to_the_step_of_the_checkpoint(tmp_path):
  writer = metrics.Writer(tmp_path)
  for step in (1, 2, 3):
    writer.write(step, {'loss': step})
  writer.close()
  with (tmp_path / metrics.JSONL).open('a') as file:
    file.write('{"step": 4, "lo')  # killed in the middle of a line
  writer = metrics.Writer(tmp_path, resume_step=2)
  writer.write(3, {'loss': 30})
  writer.close()
  rows = metrics.read_jsonl(tmp_path / metrics.JSONL)
  assert rows == [
    {'step': 1, 'loss': 1},
    {'step': 2, 'loss': 2},
    {'step': 3, 'loss': 30},
  ]


def test_rows_are_strict_json(tmp_path):
  writer = metrics.Writer(tmp_path)
  writer.write(1, {'loss': float('nan'), 'kl': np.float32(0.5)})
  writer.close()

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  line = (tmp_path / metrics.JSONL).read_text()
  assert json.loads(line, parse_constant=refuse) == {
    'step': 1,
    'loss': None,
    'kl': 0.5,
  }


def test_equal_rewards_have_no_variance_whatever_their_float32_std():
  values = np.full((2, 8, 1), 0.1, np.float32)
  values[1, :, 0] = [0, 1e-4] * 4
  row = metrics.reward_metrics(('a',), values, np.ones(1))
  assert row['rewards/a/zero_variance'] == 0.5


def test_experience_metrics_by_hand():
  """Rewards [[1, 10], [0, 20]] with weights [2, 0.1]; rows of 2 and 6 tokens.

  The second group is scored by the reward of weight 0 alone; the row of six
  tokens was cut off and does not count, but its length does.
  """
  nan = np.nan
  values = np.float32(
    [[[1, 10, 0], [0, 20, 0]], [[nan, nan, 7], [nan, nan, 7]]]
  )
  mask = np.arange(6) < np.array([[[2], [6]], [[2], [6]]])
  zeros, prompt = np.zeros(mask.shape, np.float32), np.ones((2, 3), np.int32)
  ended = np.array([[True, False]] * 2)
  groups = Groups(
    prompt=prompt,
    prompt_mask=prompt > 0,
    examples=np.array([{}, {}]),
    tokens=mask.astype(np.int32),
    mask=mask,
    logp=zeros,
    ended=ended,
    texts=np.full((2, 2), ''),
    values=values,
    held=np.ones(values.shape, bool),
    conditioned=np.nan_to_num(values),
    rewards=np.nan_to_num(values),
    valid=np.isfinite(values),
    informative=np.array([True, False]),
  )
  rows = np.array([True, False, False, False])
  batch = Batch(
    Rollout(*[None] * 6), np.zeros(4), np.zeros((4, 6)), None, row_valid=rows
  )
  row = metrics.experience_metrics(
    Experience(
      batch=batch,
      groups=groups,
      names=('a', 'b', 'seen'),
      weights=np.float32([2, 0.1, 0]),
      advantages=np.float32([[0.5, -0.5], [0, 0]]),
      kl_nats=None,
      counted=rows.reshape(2, 2),
      scores=(),
      rounds=1,
    )
  )
  # ((2 + 1) + (0 + 2)) / 2; without weights 15.5, with zeros 1.25
  assert row['reward'] == pytest.approx(2.5)
  assert row['frac_reward_zero_std'] == 0.5
  assert row['rewards/seen/mean'] == pytest.approx(3.5)
  assert row['completions/mean_length'] == 4
  assert row['completions/mean_terminated_length'] == 2
  assert row['completions/clipped_ratio'] == 0.5
  assert row['rows/excluded'] == 3
  assert row['num_tokens'] == 16


def test_the_value_head_is_judged_on_the_tokens_that_were_kept():
  """Three tokens of five are left of rows that ended early."""
  values = np.float32([[1, 3, 0], [2, 0, 0]])
  returns = np.float32([[2, 4, 9], [3, 9, 9]])
  mask = np.array([[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]], bool)
  row = metrics.value_metrics(values, returns, mask)
  # means 3 and 2, deviation of (1, 3, 2)
  assert row['value/bias'] == pytest.approx(1 / np.sqrt(2 / 3))
  assert row['value/ratio'] == pytest.approx(1.5)
