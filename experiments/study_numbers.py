"""Numbers of the study's cells, and how they differ.

raw/ --load--> Study --setting--> {method: {seed: Raw}}
                     --interval, difference--> mean [low, high]
"""

import collections
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import analysis
import numpy as np
import study_cells
from scipy import stats

LAST = 10  # steps that 'sampled' is taken over
BASE = 'grpo'
FEWEST_SEEDS = 3  # of a difference that is said to be one
TIE = 1e-9  # raw files have six digits: less is rounding of sums
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
    rate: float | None = None,
  ) -> SETTING:
    """Method -> seed -> cell, of the compared seeds.

    Args:
      rate: of all methods; None: the best of each.
    """
    found: SETTING = collections.defaultdict(dict)
    real = task in study_cells.REAL
    for cell, raw in self.raws.items():
      wanted = rate or (
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
  return float(study_cells.scores(raw, -LAST).mean())


def rewards_sum(raw: study_cells.Raw) -> float:
  """Their weighted sum with conditions, sampled: what GRPO maximizes."""
  return float(np.mean([row['reward'] for row in raw.run.training[-LAST:]]))


def whole_score(raw: study_cells.Raw) -> float:
  """The mean over all steps: who is early is ahead."""
  return float(study_cells.scores(raw, None).mean())


def heldout(name: str) -> Callable[[study_cells.Raw], float]:
  def of(raw: study_cells.Raw) -> float:
    return float(np.nanmean(raw.run.after[:, raw.run.names.index(name)]))

  return of


def heldout_score(raw: study_cells.Raw) -> float:
  low, high = raw.ranges.T
  return float(
    ((np.nanmean(raw.run.after, axis=0) - low) / (high - low)).mean()
  )


def all_at_once(raw: study_cells.Raw) -> float:
  """Share of held-out answers that have every reward at its highest."""
  return float((raw.run.after >= raw.ranges[:, 1]).all(axis=1).mean())


def interval(
  cells: dict[int, study_cells.Raw], number: Callable[[study_cells.Raw], float]
) -> analysis.Interval:
  return analysis.over_seeds(np.array([number(raw) for raw in cells.values()]))


class Difference(NamedTuple):
  """One method less another, within seeds."""

  interval: analysis.Interval  # Student's
  ahead: int  # seeds in which it is above 0
  seeds: int
  p: float  # two-sided, of Student's test; 1 where nothing can be said

  @property
  def verdict(self) -> str:
    """What the interval says: 'ahead', 'behind' or 'open'; 'few' seeds."""
    if self.seeds < FEWEST_SEEDS:
      return 'few'
    if self.interval.low > 0:
      return 'ahead'
    return 'behind' if self.interval.high < 0 else 'open'

  def __str__(self) -> str:
    i = self.interval
    mark = '**' if self.verdict in ('ahead', 'behind') else ''
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
  return of_values(np.array([number(a[s]) - number(b[s]) for s in seeds]))


def of_values(values: np.ndarray) -> Difference:
  """Of differences f[S], one per seed."""
  varies = len(values) > 1 and np.ptp(values) > TIE
  p = float(stats.ttest_1samp(values, 0).pvalue) if varies else 1.0
  ahead = int((values > TIE).sum())
  return Difference(analysis.student(values), ahead, len(values), p)


def after_holm(differences: dict[str, Difference]) -> list[str]:
  """The names whose difference outlasts the number of comparisons.

  Holm's step-down correction (Scand. J. Statist. 6, 1979, section 3): in the
  order of their p, the k-th of n (from 0) is held to level / (n - k), and the
  first that fails ends it.
  """
  left = len(differences)
  names = []
  for name, d in sorted(differences.items(), key=lambda item: item[1].p):
    if d.verdict not in ('ahead', 'behind') or (
      d.p > (1 - analysis.LEVEL) / left
    ):
      break
    names.append(name)
    left -= 1
  return names
