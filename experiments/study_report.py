"""Every table and figure of the study, from its raw files.

  python experiments/study_report.py --study=experiments/results/study

Reads STUDY/raw, writes STUDY/figures, and puts the tables into STUDY/study.md,
each between `<!-- table: NAME -->` and `<!-- end -->`; what stands around them
is written by hand and stays. Numbers are of two kinds:

  sampled   the answers that a run trained on in its last ten steps (temperature
            1, 128 rows a step), on prompts that it has hardly seen before
  held-out  256 problems at the end, greedy answers

`score` is the mean of all rewards, each within its declared range; conditions
are not carried out in it. Brackets are 95% bootstrap intervals over seeds;
differences are taken within a seed, which shares data and supervised start.
"""

import argparse
import collections
import pathlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import analysis
import numpy as np
import study_cells
import study_tasks

LAST = 10  # steps that 'sampled' is taken over
BASE = 'grpo'
SETTING = dict[str, dict[int, study_cells.Raw]]  # method -> seed -> cell


class Study(NamedTuple):
  """The cells of one study, sorted."""

  directory: pathlib.Path
  rates: dict[str, float]  # the best of each method, where the sweep has ended
  raws: dict[study_cells.Cell, study_cells.Raw]

  def setting(
    self,
    task: str,
    group: int | None = None,
    weights: tuple[float, ...] | None = None,
  ) -> SETTING:
    """Method -> seed -> cell, of the compared seeds, at the best rates."""
    found: SETTING = collections.defaultdict(dict)
    real = task in study_cells.REAL
    for cell, raw in self.raws.items():
      wanted = (
        study_cells.REAL[task][2] if real else self.rates.get(cell.method)
      )
      size = 8 if group is None and not real else group
      if (
        cell.task == task
        and cell.seed in study_cells.SEEDS
        and cell.rate == wanted
        and size in (None, cell.group_size)
        and cell.weights == (weights or (1.0,) * len(cell.weights))
      ):
        found[cell.method][cell.seed] = raw
    return {m: found[m] for m in study_cells.METHODS if m in found}


def load(directory: pathlib.Path) -> Study:
  raws = [
    study_cells.read_raw(path)
    for path in sorted((directory / 'raw').rglob('*.jsonl.gz'))
  ]
  return Study(
    directory,
    study_cells.best_rates(directory) or {},
    {raw.cell: raw for raw in raws},
  )


# Numbers of a cell, f[] each.


def sampled(name: str) -> Callable[[study_cells.Raw], float]:
  """Mean of a reward over the last steps."""

  def of(raw: study_cells.Raw) -> float:
    rows = raw.run.training[-LAST:]
    return float(np.mean([row[f'rewards/{name}/mean'] for row in rows]))

  return of


def score(raw: study_cells.Raw) -> float:
  return float(study_cells.scores(raw, LAST).mean())


def whole_score(raw: study_cells.Raw) -> float:
  """The mean over all steps: who is early is ahead."""
  return float(study_cells.scores(raw, len(raw.run.training)).mean())


def heldout(name: str) -> Callable[[study_cells.Raw], float]:
  def of(raw: study_cells.Raw) -> float:
    return float(np.nanmean(raw.run.after[:, raw.run.names.index(name)]))

  return of


def all_at_once(raw: study_cells.Raw) -> float:
  """Share of held-out answers that have every reward at its highest."""
  return float((raw.run.after >= raw.ranges[:, 1]).all(axis=1).mean())


def interval(
  cells: dict[int, study_cells.Raw], number: Callable[[study_cells.Raw], float]
) -> analysis.Interval:
  return analysis.over_seeds(np.array([number(raw) for raw in cells.values()]))


class Difference(NamedTuple):
  """One method less another, within seeds."""

  interval: analysis.Interval
  ahead: int  # seeds in which it is above 0
  seeds: int

  @property
  def verdict(self) -> str:
    """What the interval says: 'ahead', 'behind' or 'open'."""
    if self.seeds < 3:
      return 'open'
    if self.interval.low > 0:
      return 'ahead'
    return 'behind' if self.interval.high < 0 else 'open'

  def __str__(self) -> str:
    i = self.interval
    mark = '' if self.verdict == 'open' else '**'
    return (
      f'{mark}{i.mean:+.3f}{mark} [{i.low:+.3f}, {i.high:+.3f}] '
      f'{self.ahead}/{self.seeds}'
    )


def difference(
  a: dict[int, study_cells.Raw],
  b: dict[int, study_cells.Raw],
  number: Callable[[study_cells.Raw], float],
) -> Difference | None:
  """Over the seeds that both have; None where there is none."""
  seeds = sorted(set(a) & set(b))
  if not seeds:
    return None
  values = np.array([number(a[s]) - number(b[s]) for s in seeds])
  return Difference(
    analysis.over_seeds(values), int((values > 0).sum()), len(seeds)
  )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
  lines = ['| ' + ' | '.join(head) + ' |', '|---' * len(head) + '|']
  lines += ['| ' + ' | '.join(map(str, row)) + ' |' for row in rows]
  return '\n'.join(lines)


# The tables of study.md.


def progress_table(s: Study) -> str:
  """How much of each part has been run, and which cells have not."""
  rates = s.rates or dict.fromkeys(study_cells.METHODS, study_cells.RATES[1])
  parts: dict[str, list[study_cells.Cell]] = {'rates': study_cells.rate_cells()}
  for part, cell in study_cells.queue(rates):
    parts.setdefault(part, []).append(cell)
  rows, missing = [], []
  for part, cells in parts.items():
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
    by_task = collections.Counter(
      f'{cell.task}, {cell.method}' for cell in cells if cell not in s.raws
    )
    if by_task:
      said = '; '.join(f'{name}: {n}' for name, n in sorted(by_task.items()))
      missing.append(f'* {part}, cells not run: {said}.')
  text = table(('part', 'cells run', 'failed', 'core hours'), rows)
  return text + '\n\n' + '\n'.join(missing or ['Every cell has been run.'])


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
    parts.append(f'First step of a seed: {start}.')
    parts.append(f'![curves of {task}](figures/{task}.png)')
    parts += [task_table(s, task), differences_table(s, task)]
  return '\n\n'.join(parts)


PAIRS = (
  ('gdpo', 'grpo'),
  ('gdpo', 'grpo_batch'),
  ('gdpo', 'mo_grpo'),
  ('mo_grpo', 'grpo'),
  ('grpo_batch', 'grpo'),
)


def verdicts_table(s: Study) -> str:
  """Differences of the score, a row per task, a column per pair."""
  rows = []
  totals = [collections.Counter() for _ in PAIRS]
  for task in study_tasks.TINY:
    cells = s.setting(task)
    row = [task]
    for (a, b), total in zip(PAIRS, totals):
      d = None
      if a in cells and b in cells:
        d = difference(cells[a], cells[b], score)
      if d:
        total[d.verdict] += 1
      row.append(d or '')
    rows.append(row)
  counted = [
    ', '.join(f'{t[v]} {v}' for v in ('ahead', 'behind', 'open'))
    for t in totals
  ]
  rows.append(['in all', *counted])
  return table(('task', *(f'{a} less {b}' for a, b in PAIRS)), rows)


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
    parts.append(differences_table(s, study_cells.SWEPT, group=size))
  return '\n\n'.join(parts)


def weights_table(s: Study) -> str:
  parts = []
  for weights in ((1.0, 3.0), (1.0, 1.0), (3.0, 1.0)):
    said = ' : '.join(f'{w:g}' for w in weights)
    names = ' : '.join(
      r.name for r in study_tasks.TINY[study_cells.SWEPT].rewards
    )
    parts.append(f'Weights {names} = {said}:')
    parts.append(task_table(s, study_cells.SWEPT, weights=weights))
  return '\n\n'.join(parts)


def real_tables(s: Study) -> str:
  return '\n\n'.join(
    f'#### `{task}`\n\n{task_table(s, task)}\n\n{differences_table(s, task)}'
    for task in study_cells.REAL
  )


TABLES = {
  'progress': progress_table,
  'rates': rates_table,
  'verdicts': verdicts_table,
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


# Figures.


def curves(s: Study, task: str, path: pathlib.Path) -> None:
  """Every reward over the steps, a line per method with its interval."""
  import matplotlib.figure  # needs no display, keeps no global state

  cells = s.setting(task)
  names = next(iter(next(iter(cells.values())).values())).run.names
  figure = matplotlib.figure.Figure(
    figsize=(4.4 * len(names), 3.2), layout='constrained'
  )
  axes = np.atleast_1d(figure.subplots(1, len(names)))
  for axis, name in zip(axes, names):
    for i, method in enumerate(study_cells.METHODS):
      if method in cells:
        runs = [raw.run for raw in cells[method].values()]
        steps, mean, low, high = analysis.curve(runs, f'rewards/{name}/mean')
        axis.plot(steps, mean, color=f'C{i}', label=method, linewidth=1)
        axis.fill_between(steps, low, high, color=f'C{i}', alpha=0.12)
    axis.set_title(f'{task}: {name}', fontsize=10)
    axis.set_xlabel('step')
    axis.grid(alpha=0.3)
  axes[0].legend(fontsize=7)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=80, metadata={'Software': None})


def forest(s: Study, path: pathlib.Path) -> None:
  """Score of each method less GRPO's, a panel per task."""
  import matplotlib.figure

  tasks = [t for t in study_tasks.TINY if BASE in s.setting(t)]
  if not tasks:
    return
  columns = min(4, len(tasks))
  lines = -(-len(tasks) // columns)
  figure = matplotlib.figure.Figure(
    figsize=(3.4 * columns, 2.4 * lines), layout='constrained'
  )
  axes = np.atleast_1d(figure.subplots(lines, columns, sharey=True)).ravel()
  others = [m for m in study_cells.METHODS if m != BASE]
  for axis, task in zip(axes, tasks):
    cells = s.setting(task)
    for y, method in enumerate(others):
      d = method in cells and difference(cells[method], cells[BASE], score)
      if d:
        i = d.interval
        axis.plot([i.low, i.high], [y, y], color=f'C{y + 1}')
        axis.plot(i.mean, y, 'o', color=f'C{y + 1}')
    axis.axvline(0, color='black', linewidth=0.8)
    axis.set_yticks(range(len(others)), others)
    axis.set_title(task, fontsize=10)
    axis.grid(alpha=0.3)
  for axis in axes[len(tasks) :]:
    axis.set_axis_off()
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=80, metadata={'Software': None})


def write(directory: pathlib.Path) -> Study:
  """All of it."""
  s = load(directory)
  for task in (*study_tasks.TINY, *study_cells.REAL):
    if s.setting(task):
      curves(s, task, directory / 'figures' / f'{task}.png')
  forest(s, directory / 'figures' / 'differences.png')
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
