"""The study: names, rewards, raw files, tables with numbers by hand."""

import os
import pathlib
import re
import subprocess
import sys
import time
import types

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))

import analysis  # noqa: E402
import study  # noqa: E402
import study_cells  # noqa: E402
import study_numbers  # noqa: E402
import study_report  # noqa: E402
import study_tasks  # noqa: E402


def test_names_say_what_the_cell_is():
  rates = dict.fromkeys(study_cells.METHODS, 3e-5)
  queue = [cell for _, cell in study_cells.queue(rates)]
  cells = study_cells.rate_cells() + queue
  assert [study_cells.parse(cell.name) for cell in cells] == cells
  assert len(set(cells)) == len(cells)
  main = [cell for part, cell in study_cells.queue(rates) if part == 'main']
  assert len(main) == 2 * 8 * 8 and {cell.rate for cell in main} == {3e-5}
  # once more at one rate: those of three methods whose best rate is another
  one = [cell for part, cell in study_cells.queue(rates) if part == 'one_rate']
  more = [cell for part, cell in study_cells.queue(rates) if part == 'more']
  # eight seeds of every task, at the best rates and at one
  assert {cell.seed for cell in more} == {4, 5, 6, 7}
  assert len(more) == 11 * 4 * (8 + 3)
  assert {cell.rate for cell in one} == {study_cells.ONE_RATE}
  assert {cell.method for cell in one} == {'grpo', 'grpo_batch', 'gdpo'}
  rates = dict.fromkeys(study_cells.METHODS, study_cells.ONE_RATE)
  assert 'one_rate' not in {part for part, _ in study_cells.queue(rates)}
  for wrong in ('scale', 'scale/gdpoo_r1_g8_w1-1_s0', 'x/gdpo_r1_g8_w1_s0'):
    with pytest.raises(ValueError, match='no cell|tasks are'):
      study_cells.parse(wrong)


def test_all_cells_of_a_task_differ_in_what_their_names_say_alone():
  a, b = (
    study.config_of(
      study_cells.Cell('scale', method, rate, group, (1.0, 1.0), seed),
      pathlib.Path('data'),
    ).to_dict()
    for method, rate, group, seed in (('grpo', 1e-4, 8, 0), ('gdpo', 1, 2, 5))
  )
  assert {key for key in a if a[key] != b[key]} == {
    'algorithm',
    'learning_rate',
    'group_size',
    'prompts_per_step',
    'seed',
  }
  for config in (a, b):
    assert config['prompts_per_step'] * config['group_size'] == 128
    assert config['kl_coef'] == 0


def test_rewards_by_hand():
  ids = {'=46': 4, '06;04;=46': 10, '=146': 5, '06;04;': 7, '=056': 5}
  given = {
    'completions': list(ids),
    'completion_ids': [[0] * n for n in ids.values()],
    'answer': ['46'] * 5,
  }

  def values(task, name):
    [reward] = [r for r in study_tasks.TINY[task].rewards if r.name == name]
    return reward.fn(**given)

  assert values('scale', 'graded') == pytest.approx([3, 3, 1, -3, -1])
  assert values('unit', 'graded') == pytest.approx([1, 1, 2 / 3, 0, 1 / 3])
  assert values('scale', 'form') == [0, 1, 0, 0, 0]
  assert values('correlated', 'last_digit') == [1, 1, 1, 0, 1]
  assert values('rare', 'rare') == [1, 0, 0, 0, 0]
  assert values('sparse', 'sparse') == [0] * 5  # 8 does not divide 46
  assert values('sparse', 'brevity')[1] == pytest.approx(16 / 26)
  assert values('conflict', 'length') == [1, 0, 1, 0, 1]
  assert values('three', 'length') == [1] * 5
  given['answer'] = ['56', '46', '146', '46', '56']
  assert values('scale', 'graded')[4] == pytest.approx(1)
  assert values('scale', 'graded')[2] == 3


def write_raw(out, cell, graded, form):
  """What a cell of `scale` or `agree_if` leaves, made by hand.

  Sampled values are `graded` and `form` at every step.
  """
  task = study_tasks.tiny_task(cell.task, 8, 4, cell.weights)
  directory = out / 'made'
  (directory / 'heldout').mkdir(parents=True, exist_ok=True)
  names = [r.name for r in task.rewards]
  for step, values in ((0, (0, 0)), (12, (graded, form))):
    row = '{"tokens": 5, "rewards": {"%s": %s, "%s": %s}}\n'
    line = row % (names[0], values[0], names[1], values[1])
    (directory / 'heldout' / f'{step}.jsonl').write_text(line * 4)
  history = [{'step': 0, 'eval/completions/mean_length': 5.0}]
  history += [
    {
      'step': step,
      # a sum with conditions is its own number, not the sum of these two
      'reward': 2 * form,
      f'rewards/{names[0]}/mean': graded,
      f'rewards/{names[1]}/mean': form,
      f'rewards/{names[0]}/group_std': 0.5,
      f'rewards/{names[1]}/group_std': 0.25,
      'completions/mean_length': 5.0,
      'kl': float('nan'),
      'throughput/mfu': 0.1,
      'time/step': 0.123456789,
      'time/update': 0.1,
    }
    for step in range(1, 13)
  ]
  result = types.SimpleNamespace(
    history=history,
    directory=directory,
    state=types.SimpleNamespace(step=np.int32(12)),
  )
  path = study_cells.raw_path(out, cell)
  cost = {'seconds': 9.0, 'cpu_seconds': 36.0}
  study_cells.write_raw(path, cell, task, result, cost)
  return path


def test_a_raw_file_holds_the_run(tmp_path):
  cell = study_cells.parse('scale/gdpo_r0.0001_g8_w1-3_s2')
  path = write_raw(tmp_path, cell, 1.5, 0.25)
  first = path.read_bytes()
  assert write_raw(tmp_path, cell, 1.5, 0.25).read_bytes() == first
  raw = study_cells.read_raw(path)
  assert raw.cell == cell and raw.cpu_seconds == 36.0
  assert raw.run.names == ('graded', 'form')
  assert raw.ranges.tolist() == [[-3, 3], [0, 1]]
  assert len(raw.run.training) == 12
  row = raw.run.training[0]
  assert row['time/step'] == 0.123457 and row['kl'] is None
  assert not {'time/update', 'throughput/mfu'} & set(row)
  assert raw.run.after.tolist() == [[1.5, 0.25]] * 4
  # (1.5 + 3) / 6 and 0.25
  assert study_cells.scores(raw).tolist() == [0.75, 0.25]


def sweep(out, best):
  """A finished sweep in which each method is best at `best[method]`."""
  for cell in study_cells.rate_cells():
    wanted = best.get(cell.method, 1e-4)
    write_raw(out, cell, 0.5, 0.75 if cell.rate == wanted else 0.5)


def test_the_queue_goes_on_with_the_best_rates(tmp_path):
  first = list(study.todo(tmp_path))
  assert [part for part, _, _ in first[:48]] == ['rates'] * 48
  assert study_cells.best_rates(tmp_path) is None
  sweep(tmp_path, {'gdpo': 3e-4, 'dr_grpo': 3e-5})
  rates = study_cells.best_rates(tmp_path)
  assert rates['gdpo'] == 3e-4 and rates['dr_grpo'] == 3e-5
  assert rates['grpo'] == 1e-4
  part, cell, left = next(study.todo(tmp_path))
  assert (part, cell.name) == ('main', 'scale/grpo_r0.0001_g8_w1-1_s0')
  assert left == len(study_cells.queue(rates))
  write_raw(tmp_path, cell, 0.0, 0.0)
  assert next(study.todo(tmp_path))[1].method == 'grpo_batch'


def test_a_cell_that_fails_does_not_end_the_study(tmp_path, capsys):
  """There are no files of GSM8K where it looks for them."""
  cells = [
    study_cells.parse(f'gsm8k/{method}_r5e-06_g8_w1-1-1_s0')
    for method in ('grpo', 'gdpo')
  ]
  done = study.run_all(
    iter([('real', cell, 2) for cell in cells]), tmp_path, tmp_path / 'none'
  )
  assert done == 2
  for cell in cells:
    told = study_cells.failure_path(tmp_path, cell).read_text()
    assert 'Traceback' in told and 'gsm8k_train.jsonl' in told
  assert capsys.readouterr().out.count('FAILED') == 2


MARKS = """above
<!-- table: verdicts --> old <!-- end -->
between
<!-- table: tasks --> old <!-- end -->
<!-- table: progress --><!-- end -->
<!-- table: rates --><!-- end -->
<!-- table: ranks --><!-- end -->
<!-- table: one_rate --><!-- end -->
<!-- table: groups --><!-- end -->
<!-- table: weights --><!-- end -->
<!-- table: real --><!-- end -->
<!-- table: summary --><!-- end -->
<!-- table: claims --><!-- end -->
below
"""


def test_tables_by_hand(tmp_path):
  """GDPO's form is 0.1, 0.2, 0.3, 0.2 above GRPO's, the other reward equal."""
  sweep(tmp_path, {})
  for seed, more in enumerate((0.1, 0.2, 0.3, 0.2)):
    for method, form in (('grpo', 0.5), ('gdpo', 0.5 + more)):
      name = f'scale/{method}_r0.0001_g8_w1-1_s{seed}'
      write_raw(tmp_path, study_cells.parse(name), 0.0, form)
    for method in ('mo_grpo', 'grpo_batch'):
      name = f'scale/{method}_r0.0001_g8_w1-1_s{seed}'
      write_raw(tmp_path, study_cells.parse(name), 0.0, 0.5)
  # of another rate: not among what is compared
  write_raw(
    tmp_path, study_cells.parse('scale/gdpo_r0.0003_g8_w1-1_s7'), 3.0, 1.0
  )
  (tmp_path / 'study.md').write_text(MARKS)
  s = study_report.write(tmp_path)
  cells = s.setting('scale')
  assert list(cells) == ['grpo', 'grpo_batch', 'mo_grpo', 'gdpo']
  assert list(s.setting('scale', rate=3e-4)['gdpo']) == [7]
  d = study_numbers.difference(
    cells['gdpo'], cells['grpo'], study_numbers.sampled('form')
  )
  assert d.interval.mean == pytest.approx(0.2) and (d.ahead, d.seeds) == (4, 4)
  # deviation sqrt(0.02 / 3), and t = 3.1824 with three degrees of freedom
  assert d.verdict == 'ahead'
  assert d.interval.low == pytest.approx(
    0.2 - 3.1824 * np.sqrt(0.02 / 12), 1e-3
  )
  text = (tmp_path / 'study.md').read_text()
  assert text.startswith('above\n') and text.endswith('below\n')
  assert ' old ' not in text and '\nbetween\n' in text
  # half of the difference of one of two rewards
  row = re.search(r'\| scale \| (.*)', text)[1].split(' | ')
  assert row[0].startswith('**+0.100** [+0.035') and row[0].endswith('4/4')
  assert row[4].startswith('+0.000 [+0.000, +0.000] 0/4')
  assert '| gdpo | 4 | 0.000 [0.000, 0.000] | 0.700 [0.6' in text
  assert (
    '`gdpo` against `grpo` at one rate, score at the end: ahead on 1 (`scale`), '
    'behind on none, not to be told apart on none; of single rewards it is '
    'behind in none.'
  ) in text
  # sum with conditions, held-out score, all at once, score of all steps
  assert (
    '| scale | **+0.400** [+0.140, +0.660] 4/4 | **+0.100** [+0.035, +0.165] '
    '4/4 | +0.000 [+0.000, +0.000] 0/4 | **+0.100** [+0.035, +0.165] 4/4 | '
    '+0.000 [+0.000, +0.000] 0/4 |'
  ) in text
  assert 'less grpo: form **+0.200** [+0.070, +0.330] 4/4' in text
  assert 'mo_grpo 0 of 4, gdpo 0 of 4, grpo 0 of 4' in text
  assert '| main | 16 of 128 | 0 | 0.16 |' in text
  assert (
    'main, cells not run: scale, dr_grpo, dvao, sa_mrpo, gd2po: 8; conflict, '
    'each method: 8; scale, grpo, grpo_batch, mo_grpo, gdpo: 4.'
  ) in text
  assert (tmp_path / 'figures' / 'scale.png').stat().st_size > 5000
  # nothing new: nothing changes
  study_report.write(tmp_path)
  assert (tmp_path / 'study.md').read_text() == text
  with pytest.raises(ValueError, match='no table'):
    study_report.fill('<!-- table: x --><!-- end -->', s)


def test_intervals_over_seeds():
  found = analysis.over_seeds(np.array([1.0, 1.0, 1.0]))
  assert found == (1.0, 1.0, 1.0)
  found = analysis.over_seeds(np.array([0.0, 1.0]))
  assert (found.mean, found.low, found.high) == (0.5, 0.0, 1.0)
  found = analysis.student(np.array([0.0, 1.0]))
  assert found.high == pytest.approx(0.5 + 12.706 * 0.5, 1e-4)
  assert analysis.student(np.zeros(1)).low == -np.inf


def test_what_outlasts_many_comparisons():
  above = analysis.Interval(0.1, 0.01, 0.19)
  found = {
    name: study_numbers.Difference(above, 8, 8, p)
    for name, p in {'a': 0.01, 'b': 0.04, 'c': 0.03, 'd': 0.005}.items()
  }
  # 0.005 <= 0.05 / 4, 0.01 <= 0.05 / 3, but 0.03 > 0.05 / 2
  assert study_numbers.after_holm(found) == ['d', 'a']
  assert study_numbers.after_holm({}) == []
  found['d'] = found['d']._replace(p=0.02)
  assert study_numbers.after_holm(found) == ['a']


@pytest.mark.slow
def test_a_real_cell_is_killed_and_goes_on(tmp_path):
  name = 'scale/gdpo_r0.0001_g8_w1-1_s0'
  command = [
    sys.executable,
    str(ROOT / 'experiments' / 'study.py'),
    f'--out={tmp_path}',
    f'--cells={name}',
  ]
  environment = dict(os.environ, PYTHONPATH=str(ROOT), XLA_FLAGS='')
  killed = subprocess.Popen(command, env=environment)
  going = tmp_path / 'going' / name / 'metrics.jsonl'
  # a minute or two of a quiet machine: the supervised start comes first
  deadline = time.monotonic() + 3600
  try:
    while not (going.exists() and going.read_text().count('\n') > 5):
      assert killed.poll() is None and time.monotonic() < deadline
      time.sleep(0.2)
  finally:
    killed.kill()
    killed.wait()
  done = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=True
  )
  assert f'{name}: done' in done.stdout
  assert not going.exists()
  raw = study_cells.read_raw(
    study_cells.raw_path(tmp_path, study_cells.parse(name))
  )
  assert len(raw.run.training) == study_cells.NUM_STEPS
  # something is learned
  first = raw.run.training[0]['rewards/form/mean']
  assert study_numbers.sampled('form')(raw) > first + 0.2
  again = subprocess.run(
    command, env=environment, capture_output=True, text=True, check=True
  )
  assert not again.stdout
