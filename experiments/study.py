"""The study: does decoupling help, and when? Runs its cells, one after another.

  python experiments/study.py --out=runs/study
  python experiments/study.py --out=runs/again \\
    --cells=scale/gdpo_r0.0001_g8_w1-1_s0
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
  one_rate gdpo, grpo and grpo_batch at one rate, where their best ones differ
  groups   group sizes 2, 4, 16 at 128 rows a step, on `scale`, eight seeds
  weights  1:3 and 3:1, on `scale`, eight seeds, as `groups` at one rate
  others   the other tasks of study_tasks.py, four seeds
  real     SmolLM2-135M-Instruct on arithmetic, then on GSM8K, three seeds
           (GSM8K needs DATA/gsm8k_train.jsonl and DATA/gsm8k_test.jsonl)
  more     the other tasks, four more seeds

study_report.py makes tables and figures of what is there.
"""

import argparse
import importlib.util
import math
import pathlib
import shutil
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

import jax
import launcher
import ml_collections
import numpy as np
import study_cells
import study_tasks
from study_cells import Cell

from gdpo_jax.tasks.base import Task
from gdpo_jax.train import loop
from gdpo_jax.train.progress import Progress

HERE = pathlib.Path(__file__).parent


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
  if cell.task in study_cells.REAL:
    experiment, variant, _, steps, heldout = study_cells.REAL[cell.task]
    config = _load_config(experiment, variant)
    config.update(
      num_steps=steps,
      heldout=heldout,
      save_every=2,
      # half the time on a CPU; ratios are corrected for the rounded rollout
      compute_dtype='bfloat16',
      rollout_dtype='bfloat16',
    )
    for part in ('train', 'heldout'):
      if part in config.task:
        config.task[part] = str(data / pathlib.Path(config.task[part]).name)
  else:
    config = _load_config('math_len', 'tiny')
    config.update(
      num_steps=study_cells.NUM_STEPS,
      prompts_per_step=study_cells.ROWS // cell.group_size,
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
  if cell.task in study_cells.REAL:
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
  study_cells.write_raw(
    study_cells.raw_path(out, cell), cell, task, result, cost
  )
  shutil.rmtree(directory)
  return True


def todo(out: pathlib.Path) -> Iterator[tuple[str, Cell, int]]:
  """(part, cell, cells left) of what has not ended or failed.

  The rest of the queue is known once the sweep has ended.
  """

  def open_(cells):
    return [
      (part, cell)
      for part, cell in cells
      if not (
        study_cells.raw_path(out, cell).exists()
        or study_cells.failure_path(out, cell).exists()
      )
    ]

  sweep = open_([('rates', cell) for cell in study_cells.rate_cells()])
  unknown = study_cells.queue(
    dict.fromkeys(study_cells.METHODS, study_cells.RATES[0])
  )
  for i, (part, cell) in enumerate(sweep):
    yield part, cell, len(sweep) - i + len(unknown)
  rest = open_(
    study_cells.queue(
      study_cells.best_rates(out)
      or dict.fromkeys(study_cells.METHODS, study_cells.RATES[1])
    )
  )
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
      path = study_cells.failure_path(out, cell)
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
      _COUNTED[path] = study_cells.read_raw(path).cpu_seconds
  return sum(_COUNTED[path] for path in _COUNTED if out in path.parents) / 3600


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path, default='runs/study')
  parser.add_argument(
    '--cells',
    help='only these, instead of the queue; separated by commas',
  )
  parser.add_argument(
    '--data', type=pathlib.Path, default='data', help='where GSM8K lies'
  )
  parser.add_argument(
    '--core_hours', type=float, default=12.0, help='processor time, in all'
  )
  parser.add_argument(
    '--list', action='store_true', help='print what is left, run nothing'
  )
  args = parser.parse_args(argv)
  cells = todo(args.out)
  if args.cells:
    try:
      chosen = [study_cells.parse(name) for name in args.cells.split(',')]
    except ValueError as error:
      parser.error(str(error))
    chosen = [
      c for c in chosen if not study_cells.raw_path(args.out, c).exists()
    ]
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
