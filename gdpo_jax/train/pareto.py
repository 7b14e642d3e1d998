"""Which evaluations of a run no other one beats on every reward.

Points are mean held-out rewards, larger is better on every axis. The
hypervolume is the volume between the front and a reference point, here the
first evaluation: 0 until something is better than the start on every axis.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Archive(NamedTuple):
  """The evaluations of a run under K rewards."""

  names: tuple[str, ...]
  steps: tuple[int, ...]  # n evaluations
  means: np.ndarray  # f64[n, K], raw
  front: np.ndarray  # bool[n]
  hypervolume: np.ndarray  # f64[n], of the evaluations up to each


def archive(
  evaluations: Sequence[Mapping[str, Any]],
  weights: Mapping[str, float],
) -> Archive | None:
  """From rows with `eval/rewards/NAME/mean`.

  Args:
    evaluations: oldest first; those that lack a reward are left out.
    weights: by reward; a negative one turns the axis round, 0 leaves it out.
  Returns:
    None where no evaluation has every reward.
  """
  names = tuple(name for name, weight in weights.items() if weight)
  keys = [f'eval/rewards/{name}/mean' for name in names]
  rows = [r for r in evaluations if all(r.get(k) is not None for k in keys)]
  if not rows or not names:
    return None
  means = np.array([[row[k] for k in keys] for row in rows], float)
  points = means * np.sign([weights[name] for name in names])
  return Archive(
    names=names,
    steps=tuple(int(row['step']) for row in rows),
    means=means,
    front=front(points),
    hypervolume=np.array(
      [hypervolume(points[: i + 1], points[0]) for i in range(len(points))]
    ),
  )


def front(points: np.ndarray) -> np.ndarray:
  """bool[n]: no other point is at least as good on all axes, better on one."""
  points = np.asarray(points, float)
  no_worse = (points[:, None] >= points[None]).all(-1)  # [by, of]
  better = (points[:, None] > points[None]).any(-1)
  return ~(no_worse & better).any(axis=0)


def hypervolume(points: np.ndarray, reference: np.ndarray) -> float:
  """Volume dominated by `points` and not below `reference`, f[n, K], f[K].

  Sliced along the last axis: exact, and quick enough for some hundred points
  on up to five axes.
  """
  points = np.asarray(points, float)
  reference = np.asarray(reference, float)
  points = points[(points > reference).all(-1)]
  if not len(points):
    return 0.0
  if points.shape[1] == 1:
    return float(points.max() - reference[0])
  points = points[front(points)]
  levels = np.unique(points[:, -1])
  below = np.concatenate([reference[-1:], levels[:-1]])
  return float(
    sum(
      (high - low)
      * hypervolume(points[points[:, -1] >= high, :-1], reference[:-1])
      for low, high in zip(below, levels)
    )
  )
