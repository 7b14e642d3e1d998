"""Figures of the study: curves of every task, differences of the methods."""

import pathlib

import analysis
import numpy as np
import study_cells
import study_tasks
from study_cells import ONE_RATE
from study_numbers import BASE, Study, difference, score


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
  """Score of each method less GRPO's, a panel per task.

  Full: at the best rate of each; hollow: at one rate.
  """
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
    for rate, up, face in ((None, 0.15, None), (ONE_RATE, -0.15, 'white')):
      cells = s.setting(task, rate=rate)
      for i, method in enumerate(others):
        if method not in cells or BASE not in cells:
          continue
        d = difference(cells[method], cells[BASE], score)
        if d:
          low, high = d.interval.low, d.interval.high
          axis.plot([low, high], [i + up] * 2, color=f'C{i + 1}')
          axis.plot(
            d.interval.mean,
            i + up,
            'o',
            color=f'C{i + 1}',
            markerfacecolor=face or f'C{i + 1}',
          )
    axis.axvline(0, color='black', linewidth=0.8)
    axis.set_yticks(range(len(others)), others)
    axis.set_title(task, fontsize=10)
    axis.grid(alpha=0.3)
  for axis in axes[len(tasks) :]:
    axis.set_axis_off()
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=80, metadata={'Software': None})
