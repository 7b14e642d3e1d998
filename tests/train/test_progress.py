"""What a terminal, a log file and a program see."""

import io
import json

import rich.console

from gdpo_jax.train.monitor import Event
from gdpo_jax.train.progress import Progress, trend

ALARM = Event(2, 'kl_high', 'kl', 'alarm', 'KL is [high].', 'Halve the rate.')
ADVICE = Event(1, 'batch_small', 'batch', 'advice', 'a step has 8 rows')


def row(step):
  return {
    'rewards/right/mean': 0.25 * step,
    'rewards/right/group_std': 0.5,
    'rewards/right/missing': 0.0,
    'completions/mean_length': 12.0,
    'throughput/tokens_per_second': 100.0,
  }


def show(terminal=False, **kwargs):
  out = io.StringIO()
  console = rich.console.Console(
    file=out, force_terminal=terminal, width=100, color_system=None
  )
  progress = Progress(console, **kwargs)
  progress.start(4, 0, ('right',))
  progress.event(ADVICE)
  for step in (1, 2, 3, 4):
    progress.step(step, row(step))
    if step == 2:
      progress.event(ALARM)
  progress.note('evaluating')
  progress.stop()
  return out.getvalue()


def test_a_log_file_has_one_line_per_step_and_per_word_of_the_rules():
  lines = show().splitlines()
  assert len(lines) == 4 + 2 + 1
  assert lines[0] == 'note: step 1: a step has 8 rows'
  assert lines[1].startswith('step 1/4  right 0.250  tokens 12.0  100 tokens/s')
  # brackets are text here, not markup
  assert lines[3] == 'warning: step 2: KL is [high]. Halve the rate.'
  assert not any('\x1b' in line for line in lines)


def test_quiet_lets_alarms_through_only():
  assert show(quiet=True).splitlines() == [
    'warning: step 2: KL is [high]. Halve the rate.'
  ]


def test_json_is_one_object_per_line():
  records = [json.loads(line) for line in show(as_json=True).splitlines()]
  assert [r['event'] for r in records] == [
    'advice', 'step', 'step', 'alarm', 'step', 'step',
  ]  # fmt: skip
  assert records[1]['rewards/right/mean'] == 0.25
  assert records[3]['rule'] == 'kl_high'


def test_a_terminal_shows_bar_table_and_warning():
  text = show(terminal=True)
  for words in ('step 4/4', 'spread in group', '0:00 left', 'warning:'):
    assert words in text


def test_trend_marks_what_is_beyond_chance():
  assert trend([0.1, 0.2] * 3 + [0.8, 0.9] * 3) == '↑'
  assert trend([0.8, 0.9] * 3 + [0.1, 0.2] * 3) == '↓'
  assert trend([0.1, 0.9] * 6) == ''
  assert trend([0.1, 0.9]) == ''
  assert trend([0.5] * 12) == ''
  assert trend([0.5] * 6 + [0.6] * 6) == '↑'
