"""The story of real runs, told and compared."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))

import inspect_run  # noqa: E402

RESULTS = ROOT / 'experiments' / 'results' / 'demo'


@pytest.fixture
def runs(tmp_path):
  """Two of the committed runs, as far as they are kept."""
  for seed in (0, 1):
    directory = tmp_path / f'demo{seed}'
    directory.mkdir()
    shutil.copy(
      RESULTS / f'metrics_seed{seed}.jsonl', directory / 'metrics.jsonl'
    )
  (tmp_path / 'demo1' / 'settings.json').write_text('{"seed": 1}')
  return tmp_path / 'demo0', tmp_path / 'demo1'


def said(capsys, *argv):
  inspect_run.main([str(a) for a in argv])
  return ' '.join(capsys.readouterr().out.split())


def test_the_story_of_the_demo(runs, capsys):
  text = said(capsys, runs[0])
  assert 'length rose in training (0.594 → 0.990)' in text
  assert 'rose held-out (0.570 → 0.755)' in text
  assert 'What to change - Nothing' in text


def test_two_runs_are_compared(runs, capsys):
  text = said(capsys, *runs)
  assert 'seed: None → 1' in text
  assert 'correct, held-out │ 0.755 │ 0.740 │ -0.015 ± 0.044 –' in text


def test_the_report_is_written_again(runs, capsys):
  assert 'report.html' in said(capsys, runs[0], '--report')
  assert (runs[0] / 'report.html').stat().st_size > 4e6


def test_a_directory_that_is_no_run(tmp_path, capsys):
  with pytest.raises(SystemExit) as exit_:
    inspect_run.main([str(tmp_path)])
  assert exit_.value.code == 2
  assert 'has no metrics.jsonl' in capsys.readouterr().err


@pytest.mark.slow
def test_contributions_on_held_out_problems(tmp_path):
  """Through the doors that a user takes: launcher, then inspect_run."""

  def python(*arguments):
    return subprocess.run(
      [sys.executable, *map(str, arguments)],
      cwd=ROOT,
      env={'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin', 'HOME': tmp_path},
      check=True,
      capture_output=True,
      text=True,
    ).stdout

  run = tmp_path / 'run'
  out = python(
    'experiments/math_len.py',
    '--config=experiments/configs/math_len.py:tiny',
    '--config.num_steps=2',
    '--config.warm_start_updates=50',
    '--config.heldout=16',
    '--json',
    f'--run_dir={run}',
  )
  events = [json.loads(line)['event'] for line in out.splitlines()]
  assert events == ['step', 'advice', 'step', 'end']
  out = python('experiments/inspect_run.py', run, '--contribution')
  assert 'without one reward: 32 held-out problems x 8, step 2' in out
  made = json.loads((run / 'contributions.json').read_text())
  assert set(made['rewards']) == {'correct', 'length', 'format'}
  for row in made['rewards'].values():
    assert -1 <= row['cosine'] <= 1 and 0 <= row['rank_changes'] <= 1
  assert 'Contribution on held-out problems' in (
    (run / 'report.html').read_text(encoding='utf-8')
  )
