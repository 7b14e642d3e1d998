"""The study: does decoupling help, and when? Runs its cells, one after another.

  python experiments/study.py --out=runs/study
  python experiments/study.py --out=runs/again \\
    --cells=scale/gdpo_r0.0003_g8_w1-1_s0
  python experiments/study.py --out=runs/study --list

A cell is (task, method, rate, group size, weights, seed), and its name says so.
All cells of a task have the same settings but for these: same data, supervised
start per seed, number of updates, no KL term. They run in this process, so that
imports and compiled programs are shared. A cell that has ended leaves one file,
OUT/raw/CELL.jsonl.gz, and is skipped from then on; one that fails leaves
OUT/failed/CELL.txt and does not end the study; killed at any moment, the study
goes on where it was when the same command is given again.

The queue, the most informative cells first:

  rates    three learning rates per method, `agree_if`, two seeds of their own
  main     each method at its best rate, eight seeds, `scale` and `conflict`
  others   the other tasks of study_tasks.py, four seeds
  groups   group sizes 2, 4, 16 at 128 rows a step, on `scale`, four seeds
  weights  1:3 and 3:1, on `scale`, four seeds
  more     the other tasks, four more seeds
  real     SmolLM2-135M-Instruct on arithmetic, then on GSM8K, three seeds
           (GSM8K needs DATA/gsm8k_train.jsonl and DATA/gsm8k_test.jsonl)

study_report.py makes tables and figures of what is there.
"""

import argparse
import gzip
import importlib.util
import json
import math
import pathlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import analysis
import jax
import launcher
import ml_collections
import numpy as np
import study_tasks

import gdpo_jax
from gdpo_jax.tasks.base import Task
from gdpo_jax.train import loop
from gdpo_jax.train.metrics import read_jsonl, split_history
from gdpo_jax.train.progress import Progress

HERE = pathlib.Path(__file__).parent
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
SWEPT = 'scale'  # the task of the other sweeps
RATE_SEEDS = (100, 101)  # not those that are compared afterwards
SEEDS = tuple(range(8))
ROWS = 128  # of a step of the tiny tasks, whatever the group size
NUM_STEPS = 60
# config and variant of the real tasks, rate, steps, held-out problems
REAL = {
  'arithmetic': ('math_len', 'smollm2', 1e-5, 16, 200),
  'gsm8k': ('gsm8k', 'gsm8k', 5e-6, 8, 64),
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

  def cells(part, tasks, seeds, methods=METHODS, group=8, weights=None):
    return [
      (part, Cell(task, m, rates[m], group, weights or _ones(task), seed))
      for seed in seeds
      for task in tasks
      for m in methods
    ]

  main = (SWEPT, 'conflict')
  others = [task for task in study_tasks.TINY if task not in main]
  out = cells('main', main, SEEDS) + cells('others', others, SEEDS[:4])
  for size in (2, 4, 16):
    out += cells('groups', [SWEPT], SEEDS[:4], FEW, group=size)
  for weights in ((1.0, 3.0), (3.0, 1.0)):
    out += cells('weights', [SWEPT], SEEDS[:4], FEW, weights=weights)
  out += cells('more', others, SEEDS[4:])
  for task, group in (('arithmetic', 4), ('gsm8k', 8)):
    rate = REAL[task][2]
    out += [
      ('real', Cell(task, method, rate, group, _ones(task), seed))
      for seed in SEEDS[:3]
      for method in FEW
    ]
  return out


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


def scores(raw: Raw, last: int = 10) -> np.ndarray:
  """f[K]: each reward within its declared range, mean of the last steps.

  Of answers sampled for training, on prompts that hardly any step has seen
  before. Raw values: conditions are not carried out.
  """
  low, high = raw.ranges.T
  means = [
    [row[f'rewards/{name}/mean'] for row in raw.run.training[-last:]]
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


def _load_config(experiment: str, variant: str) -> ml_collections.ConfigDict:
  path = HERE / 'configs' / f'{experiment}.py'
  spec = importlib.util.spec_from_file_location(f'{experiment}_config', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config(variant)


def config_of(
  cell: Cell, data: pathlib.Path, num_steps: int | None = None
) -> ml_collections.ConfigDict:
  """Everything that is set for a cell, as a config of the launchers."""
  if cell.task in REAL:
    experiment, variant, _, steps, heldout = REAL[cell.task]
    config = _load_config(experiment, variant)
    config.update(num_steps=steps, heldout=heldout, save_every=2)
    for part in ('train', 'heldout'):
      if part in config.task:
        config.task[part] = str(data / pathlib.Path(config.task[part]).name)
  else:
    config = _load_config('math_len', 'tiny')
    config.update(
      num_steps=NUM_STEPS,
      prompts_per_step=ROWS // cell.group_size,
      heldout=256,
      eval_batch_size=256,
      save_every=0,
      warmup_share=0.1,
    )
  config.update(
    algorithm=cell.method,
    learning_rate=cell.rate,
    group_size=cell.group_size,
    seed=cell.seed,
    samples_every=0,
    monitor_actions='all=off',
  )
  if num_steps:
    config.num_steps = num_steps
  return config


def task_of(cell: Cell, config: ml_collections.ConfigDict) -> Task:
  """The cell's task, with its weights."""
  if cell.task in REAL:
    return launcher.task_function(config.experiment)(config)
  return study_tasks.tiny_task(
    cell.task, config.task.num_train, config.heldout, cell.weights
  )


def run_cell(
  cell: Cell,
  out: pathlib.Path,
  data: pathlib.Path = pathlib.Path('data'),
  num_steps: int | None = None,
) -> bool:
  """Runs a cell, or goes on with it; False where SIGTERM ended it early."""
  began = time.time(), time.process_time()
  config = config_of(cell, data, num_steps)
  settings, task = launcher.settings_of(config), task_of(cell, config)
  model = launcher.load_model(config)
  policy = launcher.policy_of(model.config, settings)
  params = model.params
  if config.warm_start_updates:
    shared = out / 'start' / str(cell.seed)
    shared.mkdir(parents=True, exist_ok=True)
    params = launcher.warm_started(
      policy, model, task, settings, config, shared, Progress(quiet=True)
    )
  directory = out / 'going' / cell.name
  result = loop.train(
    policy,
    params,
    model.tokenizer,
    task,
    settings,
    directory,
    heldout=task.heldout[: config.heldout],
    eval_batch_size=config.eval_batch_size,
    progress=Progress(quiet=True),
  )
  if int(result.state.step) < settings.num_steps or result.final is None:
    return False
  cost = {
    'seconds': round(time.time() - began[0], 2),
    'cpu_seconds': round(time.process_time() - began[1], 2),
  }
  write_raw(raw_path(out, cell), cell, task, result, cost)
  shutil.rmtree(directory)
  return True


def todo(out: pathlib.Path) -> Iterator[tuple[str, Cell, int]]:
  """(part, cell, cells left in the queue) of what has not ended or failed.

  The rest of the queue is known once the sweep has ended.
  """

  def open_(cells):
    return [
      (part, cell)
      for part, cell in cells
      if not (raw_path(out, cell).exists() or failure_path(out, cell).exists())
    ]

  sweep = open_([('rates', cell) for cell in rate_cells()])
  unknown = queue(dict.fromkeys(METHODS, RATES[0]))
  for i, (part, cell) in enumerate(sweep):
    yield part, cell, len(sweep) - i + len(unknown)
  rest = open_(queue(best_rates(out) or dict.fromkeys(METHODS, RATES[1])))
  for i, (part, cell) in enumerate(rest):
    yield part, cell, len(rest) - i


def run_all(
  cells: Iterator[tuple[str, Cell, int]],
  out: pathlib.Path,
  data: pathlib.Path,
  core_hours: float = math.inf,
) -> int:
  """Runs cells until they end, the budget or SIGTERM; the number that failed."""
  failed, seconds = 0, []
  for part, cell, left in cells:
    spent = _core_hours(out)
    if spent >= core_hours:
      print(f'{spent:.2f} core hours are spent', flush=True)
      break
    began = time.time()
    try:
      if not run_cell(cell, out, data):
        print(f'stopped in {cell.name}; it goes on from there', flush=True)
        break
      outcome = 'done'
    except Exception as error:
      path = failure_path(out, cell)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_text(traceback.format_exc(), encoding='utf-8')
      shutil.rmtree(out / 'going' / cell.name, ignore_errors=True)
      failed, outcome = failed + 1, f'FAILED, {error}'
    seconds = [*seconds[-19:], time.time() - began]
    eta = np.mean(seconds) * (left - 1) / 3600
    print(
      f'{part}: {cell.name}: {outcome}, {seconds[-1]:.0f} s; {left - 1} left, '
      f'about {eta:.1f} h; {_core_hours(out):.2f} core hours spent',
      flush=True,
    )
  return failed


_COUNTED: dict[pathlib.Path, float] = {}  # a file that is there never changes


def _core_hours(out: pathlib.Path) -> float:
  """Processor time of all cells that have ended."""
  for path in (out / 'raw').rglob('*.gz'):
    if path not in _COUNTED:
      with gzip.open(path, 'rt', encoding='utf-8') as file:
        _COUNTED[path] = json.loads(next(file))['cpu_seconds']
  return sum(_COUNTED.values()) / 3600


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path, default='runs/study')
  parser.add_argument(
    '--cells', help='only these, instead of the queue; separated by commas'
  )
  parser.add_argument(
    '--data', type=pathlib.Path, default='data', help='where GSM8K lies'
  )
  parser.add_argument(
    '--core_hours', type=float, default=12.0, help='of processor time, in all'
  )
  parser.add_argument(
    '--list', action='store_true', help='print what is left, run nothing'
  )
  args = parser.parse_args(argv)
  cells = todo(args.out)
  if args.cells:
    try:
      chosen = [parse(name) for name in args.cells.split(',')]
    except ValueError as error:
      parser.error(str(error))
    chosen = [c for c in chosen if not raw_path(args.out, c).exists()]
    cells = (('asked for', c, len(chosen) - i) for i, c in enumerate(chosen))
  if args.list:
    for part, cell, _ in cells:
      print(part, cell.name)
    return
  launcher.use_compilation_cache()
  # many small programs, again and again
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)
  if run_all(cells, args.out, args.data, args.core_hours):
    sys.exit(1)


if __name__ == '__main__':
  main()
