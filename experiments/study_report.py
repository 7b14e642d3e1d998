"""Every table and figure of the study, from its raw files.

  python experiments/study_report.py --study=experiments/results/study

Reads STUDY/raw, writes STUDY/figures, and puts the tables into STUDY/study.md,
each between `<!-- table: NAME -->` and `<!-- end -->`; what stands around them
is written by hand and stays. Numbers are of two kinds:

  sampled   the answers that a run trained on in its last ten steps (temperature
            1, 128 rows a step), on prompts that it has hardly seen before
  held-out  256 problems at the end, greedy answers

`score` is the mean of all rewards, each within its declared range; conditions
are not carried out in it. Brackets behind means are 95% bootstrap intervals
over seeds. Differences are taken within a seed, which shares data and
supervised start, and have Student's intervals: a bootstrap of so few seeds is
too narrow for a verdict.
"""

import argparse
import collections
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import study_cells
import study_figures
import study_tasks
from study_numbers import (
  BASE,
  Difference,
  Study,
  after_holm,
  all_at_once,
  difference,
  heldout,
  heldout_score,
  interval,
  load,
  of_values,
  rewards_sum,
  sampled,
  score,
  whole_score,
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  lines = ['| ' + ' | '.join(head) + ' |', '|---' * len(head) + '|']
  lines += ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows]
  return '\n'.join(lines)


# The tables of study.md.


def progress_table(s: Study) -> str:
  """How much of each part has been run, and which cells have not."""
  rows, missing = [], []
  for part, cells in _parts(s).items():
    run = [s.raws[cell] for cell in cells if cell in s.raws]
    failed = sum(
      study_cells.failure_path(s.directory, c).exists() for c in cells
    )
    rows.append(
      (
        part,
        f'{len(run)} of {len(cells)}',
        failed,
        f'{sum(raw.cpu_seconds for raw in run) / 3600:.2f}',
      )
    )
    if said := '; '.join(_not_run(s, cells)):
      missing.append(f'* {part}, cells not run: {said}.')
  hours = sum(raw.cpu_seconds for raw in s.raws.values()) / 3600
  rows.append(('in all', len(s.raws), sum(r[2] for r in rows), f'{hours:.2f}'))
  text = table(('part', 'cells run', 'failed', 'core hours'), rows)
  return text + '\n\n' + '\n'.join(missing or ['Every cell has been run.'])


def _parts(s: Study) -> dict[str, list[study_cells.Cell]]:
  """Every cell that there is to run."""
  rates = s.rates or dict.fromkeys(study_cells.METHODS, study_cells.RATES[1])
  parts = {'rates': study_cells.rate_cells()}
  for part, cell in study_cells.queue(rates):
    parts.setdefault(part, []).append(cell)
  return parts


def _not_run(s: Study, cells: list[study_cells.Cell]) -> Iterator[str]:
  """'task, methods: number of each', where several have the same number."""
  open_ = collections.Counter(
    (cell.task, cell.method) for cell in cells if cell not in s.raws
  )
  by_number = collections.defaultdict(list)
  for (task, method), number in open_.items():
    by_number[task, number].append(method)
  for (task, number), methods in by_number.items():
    asked = {cell.method for cell in cells if cell.task == task}
    names = 'each method' if len(methods) == len(asked) else ', '.join(methods)
    yield f'{task}, {names}: {number}'


def rates_table(s: Study) -> str:
  rows = []
  for method in study_cells.METHODS:
    row = [method]
    for rate in study_cells.RATES:
      found = [
        f'{score(raw):.3f}'
        for cell, raw in sorted(s.raws.items(), key=lambda x: x[0].seed)
        if cell.method == method
        and cell.rate == rate
        and cell.seed in study_cells.RATE_SEEDS
        and cell.task == study_cells.RATE_TASK
      ]
      best = s.rates.get(method) == rate
      row.append(' and '.join(found) + (' ←' if best and found else ''))
    rows.append(row)
  return table(('method', *(f'{rate:g}' for rate in study_cells.RATES)), rows)


def task_table(s: Study, task: str, **setting) -> str:
  """Each method: every reward, the score, held-out values."""
  cells = s.setting(task, **setting)
  if not cells:
    return 'Not run.'
  names = next(iter(next(iter(cells.values())).values())).run.names
  columns = [(f'{n}', sampled(n)) for n in names]
  columns += [('score', score), ('score, all steps', whole_score)]
  columns += [(f'held-out {n}', heldout(n)) for n in names]
  columns += [('held-out, all at once', all_at_once)]
  rows = [
    [method, len(seeds), *(interval(seeds, f) for _, f in columns)]
    for method, seeds in cells.items()
  ]
  return table(('method', 'seeds', *(name for name, _ in columns)), rows)


def differences_table(s: Study, task: str, **setting) -> str:
  """Each method less GRPO: every reward and the score, sampled."""
  cells = s.setting(task, **setting)
  if BASE not in cells or len(cells) < 2:
    return 'Not run.'
  names = next(iter(cells[BASE].values())).run.names
  columns = [(n, sampled(n)) for n in names]
  columns += [('score', score), ('score, all steps', whole_score)]
  rows = []
  for method, seeds in cells.items():
    if method != BASE:
      found = [difference(seeds, cells[BASE], f) for _, f in columns]
      rows.append([method, *(d or '' for d in found)])
  return table((f'less {BASE}', *(name for name, _ in columns)), rows)


def tasks_section(s: Study) -> str:
  """Start, means and differences of every tiny task."""
  parts = []
  for task, kind in study_tasks.TINY.items():
    cells = s.setting(task)
    parts.append(f'#### `{task}`: {kind.what}')
    if not cells:
      parts.append('Not run.')
      continue
    raw = next(iter(next(iter(cells.values())).values()))
    first = raw.run.training[0]
    start = ', '.join(
      f'{n} {first[f"rewards/{n}/mean"]:.2f} (spread within groups '
      f'{first[f"rewards/{n}/group_std"]:.2f})'
      for n in raw.run.names
    )
    parts.append(f'First step of seed 0: {start}.')
    parts.append(f'![curves of {task}](figures/{task}.png)')
    parts += [task_table(s, task), differences_table(s, task)]
  return '\n\n'.join(parts)


def _listed(names: Sequence[str]) -> str:
  return ', '.join(f'`{name}`' for name in names) or 'none'


def _counted(names: Sequence[str]) -> str:
  return f'{len(names)} ({_listed(names)})' if names else 'none'


def summary(s: Study) -> str:
  """Where GDPO is ahead, where not: the first paragraph."""
  everything = sum(len(cells) for cells in _parts(s).values())
  said = [f'{len(s.raws)} of {everything} cells have been run.', '']
  compared_with = [(other, AT_ONE) for other in ('grpo', 'grpo_batch')]
  compared_with += [
    (other, {}) for other in ('grpo', 'grpo_batch', 'dr_grpo', 'mo_grpo')
  ]
  for other, setting in compared_with:
    where = ' at one rate' if setting else ' at the best rate of each'
    tasks: dict[str, list[str]] = {
      v: [] for v in ('ahead', 'open', 'behind', 'few')
    }
    single = []
    for task in study_tasks.TINY:
      cells = s.setting(task, **setting)
      if 'gdpo' not in cells or other not in cells:
        continue
      d = difference(cells['gdpo'], cells[other], score)
      if d is None:
        continue
      tasks[d.verdict].append(task)
      for reward in study_tasks.TINY[task].rewards:
        number = sampled(reward.name)
        d = difference(cells['gdpo'], cells[other], number)
        if d.verdict == 'behind':
          single.append(f'{task}: {reward.name}')
    if not any(tasks.values()):
      said.append(f'* `gdpo` and `{other}`{where} have not been compared yet.')
      continue
    few = f', too few seeds on {_counted(tasks["few"])}' if tasks['few'] else ''
    said.append(
      f'* `gdpo` against `{other}`{where}, score at the end: ahead on '
      f'{_counted(tasks["ahead"])}, behind on {_counted(tasks["behind"])}, not '
      f'to be told apart on {_counted(tasks["open"])}{few}; of single rewards '
      f'it is behind in {_listed(single)}.'
    )
  said += [_trained_on(s, other) for other in ('grpo', 'grpo_batch')]
  return '\n'.join(said)


def _trained_on(s: Study, other: str) -> str:
  """The same at one rate by the sum with conditions, which is trained on."""
  tasks = collections.defaultdict(list)
  for task in study_tasks.TINY:
    cells = s.setting(task, **AT_ONE)
    if {'gdpo', other} <= set(cells):
      d = difference(cells['gdpo'], cells[other], rewards_sum)
      tasks[d.verdict if d else 'few'].append(task)
  return (
    f'* `gdpo` against `{other}` at one rate, weighted sum with conditions '
    f'(what is trained on) at the end: ahead on {_counted(tasks["ahead"])}, '
    f'behind on {_counted(tasks["behind"])}, not to be told apart on '
    f'{_counted(tasks["open"])}.'
  )


def _difference_of(
  s: Study, a: tuple[str, str], b: tuple[str, str], number
) -> str:
  """Two (task, method) on the same seeds, at one rate."""
  cells = [s.setting(task, **AT_ONE).get(method, {}) for task, method in (a, b)]
  return str(difference(*cells, number) or 'not run')


def claims_table(s: Study) -> str:
  """Claims of the paper, each with the numbers that were to test it."""

  def versus(task, number, method='gdpo'):
    return _difference_of(s, (task, method), (task, BASE), number)

  def conditioned(method, number):
    a, b = ('conflict_if', method), ('conflict', method)
    return _difference_of(s, a, b, number)

  def conditioned_more(number):
    cells = [
      s.setting(task, **AT_ONE).get(method, {})
      for task in ('conflict_if', 'conflict')
      for method in ('gdpo', BASE)
    ]
    seeds = sorted(set.intersection(*map(set, cells)))
    values = np.array([[number(c[seed]) for c in cells] for seed in seeds])
    signs = np.array((1, -1, -1, 1))
    return of_values(values @ signs) if seeds else 'not run'

  def with_weights(method, number):
    cells = [
      s.setting(study_cells.SWEPT, weights=w, **AT_ONE).get(method)
      for w in ((3.0, 1.0), (1.0, 1.0), (1.0, 3.0))
    ]
    return ', '.join(
      f'{interval(c, number).mean:.3f}' if c else 'not run' for c in cells
    )

  form, graded = sampled('form'), sampled('graded')
  correct, length = sampled('correct'), sampled('length')
  rows = [
    (
      'Graded correctness in [-3, 3] beside a 0/1 format: GDPO ends higher in '
      'both',
      f'`scale`, less grpo: form {versus("scale", form)}, graded '
      f'{versus("scale", graded)}; in equal units, `unit`: form '
      f'{versus("unit", form)}, graded {versus("unit", graded)}',
    ),
    (
      'Without the deviation (Dr.GRPO) the format is not learned at all',
      f'`scale`, `dr_grpo` less grpo: form {versus("scale", form, "dr_grpo")}',
    ),
    (
      'Right and short: GDPO ends higher in both',
      f'`agree`: correct {versus("agree", correct)}, length '
      f'{versus("agree", length)}; `conflict`: correct '
      f'{versus("conflict", correct)}, length {versus("conflict", length)}',
    ),
    (
      'Conditioning the easy reward protects the hard one, in GDPO more than '
      'in GRPO',
      'correct on `conflict_if` less `conflict`: gdpo '
      f'{conditioned("gdpo", correct)}, grpo {conditioned("grpo", correct)}; '
      f'the one less the other {conditioned_more(correct)}',
    ),
    (
      'Weights do not change which reward is served first',
      'form on `scale` with weights graded : form of 3:1, 1:1, 1:3: grpo '
      f'{with_weights("grpo", form)}; gdpo {with_weights("gdpo", form)}',
    ),
    (
      'The gain holds with three rewards',
      f'score on `three` {versus("three", score)}, `three_if` '
      f'{versus("three_if", score)} (the sum that is trained on '
      f'{versus("three_if", rewards_sum)}), `three_conflict` '
      f'{versus("three_conflict", score)}',
    ),
    (
      'Without the batch step GDPO now and then fails to converge',
      'runs of all tiny tasks whose last ten steps are below their first five '
      'in score: '
      + ', '.join(f'{m} {_fallen(s, m)}' for m in ('mo_grpo', 'gdpo', 'grpo')),
    ),
  ]
  return table(('the paper', 'seen'), rows)


def _fallen(s: Study, method: str) -> str:
  runs = [
    raw
    for task in study_tasks.TINY
    for raw in s.setting(task).get(method, {}).values()
  ]
  fallen = [
    raw
    for raw in runs
    if score(raw) + 1e-9 < study_cells.scores(raw, None, 5).mean()
  ]
  return f'{len(fallen)} of {len(runs)}'


AT_ONE = {'rate': study_cells.ONE_RATE}
PAIRS = (
  ('gdpo', 'grpo'),
  ('gdpo', 'grpo_batch'),
  ('gdpo', 'dr_grpo'),
  ('gdpo', 'mo_grpo'),
  ('mo_grpo', 'grpo'),
  ('grpo_batch', 'grpo'),
)


def verdicts_table(s: Study, pairs=PAIRS, **setting) -> str:
  """Differences of the score, a row per task, a column per pair."""
  rows = []
  found: list[dict[str, Difference]] = [{} for _ in pairs]
  for task in study_tasks.TINY:
    cells = s.setting(task, **setting)
    row = [task]
    for (a, b), of_pair in zip(pairs, found):
      d = None
      if a in cells and b in cells:
        d = difference(cells[a], cells[b], score)
      if d:
        of_pair[task] = d
      row.append(d or '')
    rows.append(row)
  totals = [collections.Counter(d.verdict for d in f.values()) for f in found]
  counted = [
    ', '.join(f'{t[v]} {v}' for v in ('ahead', 'behind', 'open', 'few'))
    for t in totals
  ]
  rows.append(['in all', *counted])
  rows.append(['after Holm', *(_listed(after_holm(f)) for f in found)])
  return table(('task', *(f'{a} less {b}' for a, b in pairs)), rows)


def one_rate_section(s: Study) -> str:
  """gdpo, grpo and grpo_batch at one rate."""
  pairs = [(a, b) for a, b in PAIRS if {a, b} <= set(study_cells.FEW)]
  parts = [verdicts_table(s, pairs, **AT_ONE)]
  parts += ['`gdpo` less `grpo` in other numbers:', other_numbers_table(s)]
  for task in study_tasks.TINY:
    parts += [f'`{task}`:', differences_table(s, task, **AT_ONE)]
  return '\n\n'.join(parts)


def other_numbers_table(s: Study) -> str:
  """gdpo less grpo at one rate, by what else one could go by.

  The last column says whether that rate is a worse one for grpo.
  """
  columns = {
    'sum that is trained on, with conditions': rewards_sum,
    'held-out score': heldout_score,
    'held-out, all at once': all_at_once,
    'score, all steps': whole_score,
  }
  rows = []
  for task in study_tasks.TINY:
    cells = s.setting(task, **AT_ONE)
    if {'gdpo', BASE} <= set(cells):
      found = [
        difference(cells['gdpo'], cells[BASE], f) for f in columns.values()
      ]
      at_best = s.setting(task).get(BASE, {})
      found.append(difference(cells[BASE], at_best, score))
      rows.append([task, *(d or '' for d in found)])
  last = 'score of grpo here less at the best rate of the sweep'
  return table(('task', *columns, last), rows)


def ranks_table(s: Study) -> str:
  """Mean score of each method less the mean over methods, task by task."""
  rows = []
  tasks = [
    t for t in study_tasks.TINY if len(s.setting(t)) == len(study_cells.METHODS)
  ]
  if not tasks:
    return 'No task has been run with every method.'
  for method in study_cells.METHODS:
    row = [method]
    for task in tasks:
      cells = s.setting(task)
      shared = set.intersection(*(set(seeds) for seeds in cells.values()))
      means = {
        m: np.mean([score(seeds[i]) for i in shared])
        for m, seeds in cells.items()
      }
      row.append(f'{means[method] - np.mean(list(means.values())):+.3f}')
    rows.append(row)
  return table(('method', *tasks), rows)


def groups_table(s: Study) -> str:
  parts = []
  for size in (2, 4, 8, 16):
    parts.append(
      f'Group size {size}, {study_cells.ROWS // size} prompts a step:'
    )
    parts.append(differences_table(s, study_cells.SWEPT, group=size, **AT_ONE))
  return '\n\n'.join(parts)


def weights_table(s: Study) -> str:
  parts = []
  for weights in ((1.0, 3.0), (1.0, 1.0), (3.0, 1.0)):
    said = ' : '.join(f'{w:g}' for w in weights)
    names = ' : '.join(
      r.name for r in study_tasks.TINY[study_cells.SWEPT].rewards
    )
    parts.append(f'Weights {names} = {said}:')
    parts.append(task_table(s, study_cells.SWEPT, weights=weights, **AT_ONE))
  return '\n\n'.join(parts)


def real_tables(s: Study) -> str:
  return '\n\n'.join(
    f'#### `{task}`\n\n{task_table(s, task)}\n\n{differences_table(s, task)}'
    for task in study_cells.REAL
  )


TABLES = {
  'summary': summary,
  'claims': claims_table,
  'progress': progress_table,
  'rates': rates_table,
  'verdicts': verdicts_table,
  'one_rate': one_rate_section,
  'ranks': ranks_table,
  'tasks': tasks_section,
  'groups': groups_table,
  'weights': weights_table,
  'real': real_tables,
}


def fill(text: str, s: Study) -> str:
  """The text with every marked table made again.

  Raises:
    ValueError: a mark that names no table.
  """

  def one(found: re.Match) -> str:
    name = found[1]
    if name not in TABLES:
      raise ValueError(
        f'there is no table {name!r}; choose from {", ".join(TABLES)}.'
      )
    return f'<!-- table: {name} -->\n\n{TABLES[name](s)}\n\n<!-- end -->'

  pattern = r'<!-- table: (\w+) -->.*?<!-- end -->'
  return re.sub(pattern, one, text, flags=re.DOTALL)


def write(directory: pathlib.Path) -> Study:
  """All of it."""
  s = load(directory)
  for task in (*study_tasks.TINY, *study_cells.REAL):
    if s.setting(task):
      study_figures.curves(s, task, directory / 'figures' / f'{task}.png')
  study_figures.forest(s, directory / 'figures' / 'differences.png')
  text = directory / 'study.md'
  if text.exists():
    text.write_text(fill(text.read_text(encoding='utf-8'), s), encoding='utf-8')
  return s


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument(
    '--study',
    type=pathlib.Path,
    default=pathlib.Path(__file__).parent / 'results' / 'study',
    help='directory with raw/ and study.md',
  )
  args = parser.parse_args(argv)
  found = write(args.study)
  print(f'{len(found.raws)} cells; {args.study}/study.md')


if __name__ == '__main__':
  main()
