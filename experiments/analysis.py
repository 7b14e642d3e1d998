"""Numbers out of finished runs: intervals, paired differences, Pareto fronts.

  runs --load--> Run(curves, held-out values f[n, K]) --> intervals

Every interval is a percentile bootstrap of 95%. What was drawn at random is
drawn again: seeds first, then the held-out problems, the same for all that are
compared. With one seed it is about the problems alone.
"""

import json
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from gdpo_jax.train.metrics import JSONL, read_jsonl, split_history

RESAMPLES = 2000
LEVEL = 0.95


class Run(NamedTuple):
  """One finished run."""

  directory: pathlib.Path
  names: tuple[str, ...]  # K rewards
  training: list[dict[str, Any]]  # rows of metrics.jsonl, one per step
  before: np.ndarray  # f[n, K] held-out values at the start, NaN where missing
  after: np.ndarray  # ... and at the end
  tokens: np.ndarray  # f[n], lengths of the held-out answers at the end


class Interval(NamedTuple):
  """A mean with its bootstrap interval."""

  mean: float
  low: float
  high: float

  def __str__(self) -> str:
    return f'{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]'


def load(directory: pathlib.Path, num_steps: int | None = None) -> Run | None:
  """A run that has ended and was evaluated twice, or None.

  Args:
    num_steps: that it should have had; as many as it was asked for by default.
  """
  settings = directory / 'settings.json'
  if not settings.is_file() or not (directory / JSONL).is_file():
    return None
  asked = json.loads(settings.read_text(encoding='utf-8'))['num_steps']
  num_steps = asked if num_steps is None else num_steps
  training, _ = split_history(read_jsonl(directory / JSONL))
  last = directory / 'heldout' / f'{num_steps}.jsonl'
  first = directory / 'heldout' / '0.jsonl'
  if not (last.is_file() and first.is_file()):
    return None
  answered = read_jsonl(last)
  names = tuple(answered[0]['rewards'])

  def values(rows):
    table = [[row['rewards'][name] for name in names] for row in rows]
    return np.array(table, float)  # None becomes NaN

  return Run(
    directory,
    names,
    training,
    values(read_jsonl(first)),
    values(answered),
    np.array([row['tokens'] for row in answered], float),
  )


def bootstrap(
  values: np.ndarray,
  statistic: Callable[[np.ndarray], np.ndarray] | None = None,
  seed: int = 0,
  resamples: int = RESAMPLES,
) -> Interval:
  """Interval of the mean over seeds and problems.

  Args:
    values: f[S, n], NaN where missing.
    statistic: of f[S, n] -> f[]; the mean over what exists by default.
    seed: of the draws; equal shapes and seeds draw the same rows.
  """
  statistic = statistic or _mean
  rng = np.random.default_rng(seed)
  seeds, problems = values.shape
  draws = np.empty(resamples)
  for i in range(resamples):
    rows = rng.integers(seeds, size=seeds)
    columns = rng.integers(problems, size=problems)
    draws[i] = statistic(values[rows][:, columns])
  edge = 50 * (1 - LEVEL)
  if not np.isfinite(draws).any():
    return Interval(math.nan, math.nan, math.nan)
  low, high = np.nanpercentile(draws, [edge, 100 - edge])
  return Interval(float(statistic(values)), float(low), float(high))


def _mean(values: np.ndarray) -> float:
  seen = np.isfinite(values)
  return float(values[seen].mean()) if seen.any() else math.nan


def over_seeds(values: np.ndarray, seed: int = 0) -> Interval:
  """Interval of the mean of f[S], one number per seed.

  With few seeds such intervals are too narrow: of normal numbers 75% of them
  hold the truth with three seeds, 89% with eight; with one they have no width.
  """
  rows = np.random.default_rng(seed).integers(
    len(values), size=(RESAMPLES, len(values))
  )
  edge = 50 * (1 - LEVEL)
  low, high = np.percentile(values[rows].mean(axis=1), [edge, 100 - edge])
  return Interval(float(values.mean()), float(low), float(high))


def student(values: np.ndarray) -> Interval:
  """Student's interval of the mean of f[S]; infinite with one value.

  Of normal numbers 95% of them hold the truth, however few there are.
  """
  mean = float(values.mean())
  if len(values) < 2:
    return Interval(mean, -math.inf, math.inf)
  error = float(values.std(ddof=1)) / math.sqrt(len(values))
  width = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * error
  return Interval(mean, mean - width, mean + width)


def paired(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Interval:
  """Interval of the mean of `a - b`, both f[S, n] of the same seeds, problems.

  A pair counts where both values exist.
  """
  if a.shape != b.shape:
    raise ValueError(
      f'paired values need equal shapes, got {a.shape} and {b.shape}.'
    )
  return bootstrap(a - b, seed=seed)


def curve(
  runs: Sequence[Run], key: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """(steps, mean, low, high) over seeds of a training metric, step by step.

  The interval is over seeds; with one of them it has no width. All are empty
  where a run does not know the metric.
  """
  series = [_series(run, key) for run in runs]
  steps = sorted(set.intersection(*map(set, series)))
  if not steps:
    return (np.zeros(0),) * 4
  table = np.array([[values[s] for s in steps] for values in series])
  rng = np.random.default_rng(0)
  rows = rng.integers(len(runs), size=(RESAMPLES, len(runs)))
  means = table[rows].mean(axis=1)
  edge = 50 * (1 - LEVEL)
  low, high = np.percentile(means, [edge, 100 - edge], axis=0)
  return np.array(steps), table.mean(axis=0), low, high


def _series(run: Run, key: str) -> dict[int, float]:
  return {
    row['step']: row[key] for row in run.training if row.get(key) is not None
  }


def pareto(points: np.ndarray) -> np.ndarray:
  """bool[n]: no other point is at least as good everywhere and better somewhere.

  Args:
    points: f[n, K], larger is better; a point with NaN is on no front.
  """
  points = np.asarray(points, float)
  known = np.isfinite(points).all(axis=1)
  on = known.copy()
  for i in np.flatnonzero(known):
    others = points[known]
    better = (others >= points[i]).all(axis=1) & (others > points[i]).any(
      axis=1
    )
    on[i] = not better.any()
  return on
