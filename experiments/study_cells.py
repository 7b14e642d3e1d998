"""The cells of the study: which there are, in which order, what each leaves.

Cell --name--> OUT/raw/NAME.jsonl.gz --read_raw--> Raw(cell, ranges, run)
sweep --best_rates--> queue
"""

import gzip
import json
import math
import pathlib
import re
from typing import Any, NamedTuple

import analysis
import jax
import numpy as np
import study_tasks

import gdpo_jax
from gdpo_jax.tasks.base import Task
from gdpo_jax.train.metrics import read_jsonl, split_history

METHODS = (
  'grpo',
  'grpo_batch',
  'dr_grpo',
  'mo_grpo',
  'gdpo',
  'dvao',
  'sa_mrpo',
  'gd2po',
)
FEW = ('grpo', 'grpo_batch', 'gdpo')  # where all of them would cost too much
RATES = (3e-5, 1e-4, 3e-4)
RATE_TASK = 'agree_if'
ONE_RATE = 1e-4  # of the comparisons at one rate, and of the other sweeps
SWEPT = 'scale'  # the task of the other sweeps
RATE_SEEDS = (100, 101)  # not those that are compared afterwards
SEEDS = tuple(range(8))
ROWS = 128  # of a step of the tiny tasks, whatever the group size
NUM_STEPS = 60
# config and variant of the real tasks, rate, steps, held-out problems
REAL = {
  'arithmetic': ('math_len', 'smollm2', 1e-5, 10, 100),
  'gsm8k': ('gsm8k', 'gsm8k', 5e-6, 3, 32),
}


class Cell(NamedTuple):
  """One run of the study."""

  task: str
  method: str  # a row of train.settings.ALGORITHMS
  rate: float
  group_size: int
  weights: tuple[float, ...]
  seed: int

  @property
  def name(self) -> str:
    weights = '-'.join(f'{w:g}' for w in self.weights)
    return (
      f'{self.task}/{self.method}_r{self.rate:g}_g{self.group_size}'
      f'_w{weights}_s{self.seed}'
    )


_NAME = re.compile(
  r'(\w+)/(\w+)_r([\d.e-]+)_g(\d+)_w([\d.]+(?:-[\d.]+)*)_s(\d+)'
)


def parse(name: str) -> Cell:
  """The cell of a name."""
  found = _NAME.fullmatch(name)
  if not found:
    raise ValueError(
      f'{name!r} is no cell; names are TASK/METHOD_rRATE_gSIZE_wW1-W2_sSEED.'
    )
  task, method, rate, group, weights, seed = found.groups()
  cell = Cell(
    task,
    method,
    float(rate),
    int(group),
    tuple(float(w) for w in weights.split('-')),
    int(seed),
  )
  known = {*study_tasks.TINY, *REAL}
  if cell.task not in known or cell.method not in METHODS:
    raise ValueError(
      f'{name!r}: tasks are {sorted(known)}, methods {sorted(METHODS)}.'
    )
  return cell


def _ones(task: str) -> tuple[float, ...]:
  if task in study_tasks.TINY:
    return (1.0,) * len(study_tasks.TINY[task].rewards)
  return (1.0,) * (2 if task == 'arithmetic' else 3)


def rate_cells() -> list[Cell]:
  """The sweep that the other cells wait for."""
  return [
    Cell(RATE_TASK, method, rate, 8, _ones(RATE_TASK), seed)
    for seed in RATE_SEEDS
    for rate in RATES
    for method in METHODS
  ]


def queue(rates: dict[str, float]) -> list[tuple[str, Cell]]:
  """(part, cell) of all that comes after the sweep, in order.

  Args:
    rates: the best of each method.
  """

  def cells(
    part, tasks, seeds, methods=METHODS, group=8, weights=None, rate=None
  ):
    return [
      (
        part,
        Cell(task, m, rate or rates[m], group, weights or _ones(task), seed),
      )
      for seed in seeds
      for task in tasks
      for m in methods
    ]

  main = (SWEPT, 'conflict')
  others = [task for task in study_tasks.TINY if task not in main]
  # gdpo and what it is compared with, where their best rates differ
  moved = [m for m in FEW if rates[m] != ONE_RATE]
  out = cells('main', main, SEEDS)
  out += cells('one_rate', main, SEEDS, moved, rate=ONE_RATE)
  for size in (2, 4, 16):
    out += cells('groups', [SWEPT], SEEDS, FEW, group=size, rate=ONE_RATE)
  for weights in ((1.0, 3.0), (3.0, 1.0)):
    out += cells('weights', [SWEPT], SEEDS, FEW, weights=weights, rate=ONE_RATE)
  out += cells('others', others, SEEDS[:4])
  out += cells('one_rate', others, SEEDS[:4], moved, rate=ONE_RATE)
  for task, group in (('arithmetic', 4), ('gsm8k', 8)):
    rate = REAL[task][2]
    out += [
      ('real', Cell(task, method, rate, group, _ones(task), seed))
      for seed in SEEDS[:3]
      for method in FEW
    ]
  out += cells('more', others, SEEDS[4:])
  return out + cells('more', others, SEEDS[4:], moved, rate=ONE_RATE)


class Raw(NamedTuple):
  """What a cell leaves."""

  cell: Cell
  ranges: np.ndarray  # f[K, 2], declared lowest and highest of each reward
  run: analysis.Run
  seconds: float  # of the process's clock, on a machine that others used, too
  cpu_seconds: float


def raw_path(out: pathlib.Path, cell: Cell) -> pathlib.Path:
  return out / 'raw' / f'{cell.name}.jsonl.gz'


def read_raw(path: pathlib.Path) -> Raw:
  """A file that `write_raw` left."""
  with gzip.open(path, 'rt', encoding='utf-8') as file:
    head, *lines = map(json.loads, file)
  names = tuple(reward['name'] for reward in head['rewards'])
  before, after = (line for line in lines if 'heldout' in line)
  training, _ = split_history([x for x in lines if 'step' in x])

  def values(line):
    return np.array([line['heldout'][name] for name in names], float).T

  run = analysis.Run(
    path,
    names,
    training,
    values(before),
    values(after),
    np.array(after['tokens'], float),
  )
  ranges = np.array([reward['range'] for reward in head['rewards']], float)
  return Raw(
    parse(head['cell']), ranges, run, head['seconds'], head['cpu_seconds']
  )


def _short(value: Any) -> Any:
  """Six digits of a number: what runs differ by is far larger."""
  if isinstance(value, float):
    return float(f'{value:.6g}') if math.isfinite(value) else None
  return value


def write_raw(
  path: pathlib.Path, cell: Cell, task: Task, result, cost: dict[str, float]
) -> None:
  """One compressed file: a head, every row of metrics.jsonl, held-out values.

  Rows leave out `throughput/` and the parts of `time/`.
  """
  head = {
    'cell': cell.name,
    'rewards': [
      {'name': r.name, 'range': r.range, 'condition': r.condition}
      for r in task.rewards
    ],
    'versions': {'gdpo_jax': gdpo_jax.__version__, 'jax': jax.__version__},
    **cost,
  }
  rows = [
    {
      key: _short(value)
      for key, value in row.items()
      if key == 'time/step' or not key.startswith(('throughput/', 'time/'))
    }
    for row in result.history
  ]
  for step in (0, int(result.state.step)):
    answered = read_jsonl(result.directory / 'heldout' / f'{step}.jsonl')
    rows.append(
      {
        'heldout': {
          r.name: [_short(row['rewards'][r.name]) for row in answered]
          for r in task.rewards
        },
        'tokens': [row['tokens'] for row in answered],
      }
    )
  text = '\n'.join(json.dumps(row) for row in [head, *rows]) + '\n'
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.partial')
  # without the time, so that equal content is an equal file
  partial.write_bytes(gzip.compress(text.encode(), mtime=0))
  partial.rename(path)


def scores(
  raw: Raw, start: int | None = -10, stop: int | None = None
) -> np.ndarray:
  """f[K]: each reward within its declared range, mean of the last ten steps.

  Of answers sampled for training, on prompts that no step has seen
  before. Raw values: conditions are not carried out.

  Args:
    start, stop: which steps instead, as in a slice.
  """
  low, high = raw.ranges.T
  means = [
    [row[f'rewards/{name}/mean'] for row in raw.run.training[start:stop]]
    for name in raw.run.names
  ]
  return (np.mean(means, axis=1) - low) / (high - low)


def best_rates(out: pathlib.Path) -> dict[str, float] | None:
  """The rate with the highest mean score of each method; None: not all ended.

  A cell that failed counts for nothing.
  """
  found: dict[str, dict[float, list[float]]] = {m: {} for m in METHODS}
  for cell in rate_cells():
    if raw_path(out, cell).exists():
      score = float(scores(read_raw(raw_path(out, cell))).mean())
      found[cell.method].setdefault(cell.rate, []).append(score)
    elif not failure_path(out, cell).exists():
      return None
  return {
    method: max(rates, key=lambda rate, rates=rates: np.mean(rates[rate]))
    for method, rates in found.items()
  }


def failure_path(out: pathlib.Path, cell: Cell) -> pathlib.Path:
  return out / 'failed' / f'{cell.name}.txt'
