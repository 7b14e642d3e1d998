"""Histograms whose bins grow by a constant factor, for values of any size.

A tenth of a decade is told from its neighbour at 1e-6 as at 1e6; sign and zero
are kept apart. Sparse: only bins that hold something are written.
"""

from collections.abc import Mapping

import numpy as np

PER_DECADE = 5
SMALLEST = 1e-8  # below it, a value counts as zero


def log_histogram(values: np.ndarray) -> dict[str, int]:
  """Counts by bin: 'nan', '0', '+e', '-e'.

  Bin e holds absolute values in [10^(e/5), 10^((e+1)/5)).
  """
  flat = np.asarray(values, np.float64).reshape(-1)
  missing = ~np.isfinite(flat)
  out: dict[str, int] = {}
  if missing.any():
    out['nan'] = int(missing.sum())
  flat = flat[~missing]
  zero = np.abs(flat) < SMALLEST
  if zero.any():
    out['0'] = int(zero.sum())
  flat = flat[~zero]
  # a hair upwards, so that 1, 10, 100 open their bins in spite of rounding
  bins = np.floor(PER_DECADE * np.log10(np.abs(flat)) + 1e-9).astype(int)
  for sign, mark in ((1, '+'), (-1, '-')):
    found, counts = np.unique(bins[np.sign(flat) == sign], return_counts=True)
    out |= {f'{mark}{e}': int(c) for e, c in zip(found, counts)}
  return out


def edges(label: str) -> tuple[float, float]:
  """(low, high) of a bin; (0, 0) for zero."""
  if label == '0':
    return 0.0, 0.0
  sign = 1.0 if label[0] == '+' else -1.0
  e = int(label[1:])
  low, high = 10 ** (e / PER_DECADE), 10 ** ((e + 1) / PER_DECADE)
  return (low, high) if sign > 0 else (-high, -low)


def order(label: str) -> float:
  """Sorts labels from the most negative to the most positive; 'nan' first."""
  return -np.inf if label == 'nan' else sum(edges(label)) / 2


def step_histograms(experience) -> Mapping[str, dict[str, int]]:
  """Raw rewards, advantages and lengths of one batch."""
  groups = experience.groups
  out = {
    f'rewards/{name}': log_histogram(groups.values[..., k])
    for k, name in enumerate(experience.names)
  }
  out['advantages'] = log_histogram(experience.advantages)
  out['completions/length'] = log_histogram(groups.mask.sum(-1))
  return out
