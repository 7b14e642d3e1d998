"""Any list of algorithms and seeds on one task, then one page about them.

  python experiments/compare.py --out=runs/compare --seeds=0,1,2 \\
    --config=experiments/configs/gsm8k.py:tiny \\
    --algorithms=grpo,grpo_batch,dr_grpo,mo_grpo,gdpo

Each pair of algorithm and seed is a run of the launcher in a process of its own,
on the same path: same settings, data, seeds. A pair that has ended is not run
again, one that was stopped goes on, so the command can be given again at any
time. `mo_grpo` is GDPO without its batch step, `grpo_batch` GRPO with it.

An algorithm may carry settings: --algorithms="gdpo gdpo:learning_rate=1e-5"
(separated by spaces then). With --jobs=N so many runs go on at once; with
--devices=0,1,2,3 each gets one of these accelerators. On a CPU, one run uses
all cores.

Writes OUT/compare.html (curves, table, paired differences with the first
algorithm, Pareto front), its figure and numbers alone (OUT/compare.svg,
OUT/compare.json), and OUT/ALGORITHM/SEED/ for each run.
"""

import base64
import concurrent.futures
import html
import io
import json
import os
import pathlib
import queue
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import analysis
import launcher
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from gdpo_jax.train.settings import ALGORITHMS

HERE = pathlib.Path(__file__).parent
DEFAULT = 'grpo,grpo_batch,dr_grpo,mo_grpo,gdpo'


class Variant(NamedTuple):
  """An algorithm, with settings of its own.

  Or a student: with `teachers` there is no algorithm but distillation from
  their runs of the same seed, for as many steps.
  """

  algorithm: str
  settings: tuple[str, ...] = ()  # 'field=value'
  label: str = ''  # instead of a name made of the two
  teachers: tuple['Variant', ...] = ()

  @property
  def name(self) -> str:
    return self.label or ':'.join([self.algorithm, *self.settings])

  @property
  def directory(self) -> str:
    return re.sub(r'[^\w.=-]+', '_', self.name)

  @property
  def arguments(self) -> list[str]:
    return [
      f'--config.{each}'
      for each in (f'algorithm={self.algorithm}', *self.settings)
    ]


def parse_variants(text: str) -> list[Variant]:
  """'grpo,gdpo', or with settings, separated by spaces: 'gdpo:a=1,b=2 grpo'."""
  parts = text.split() if ':' in text else re.split(r'[,\s]+', text.strip())
  variants = []
  for part in parts:
    algorithm, _, settings = part.partition(':')
    if algorithm not in ALGORITHMS:
      raise ValueError(
        f'unknown algorithm {algorithm!r}; choose from '
        f'{", ".join(sorted(ALGORITHMS))}.'
      )
    fields = tuple(s for s in settings.split(',') if s)
    if any('=' not in field for field in fields):
      raise ValueError(f'settings are FIELD=VALUE, got {settings!r}.')
    variants.append(Variant(algorithm, fields))
  if not variants or len(set(variants)) < len(variants):
    raise ValueError(f'give algorithms, each once: {text!r}.')
  return variants


def run_all(
  experiment: str,
  arguments: Sequence[str],
  variants: Sequence[Variant],
  seeds: Sequence[int],
  out: pathlib.Path,
  num_steps: int,
  jobs: int = 1,
  devices: Sequence[str] = (),
) -> list[pathlib.Path]:
  """Runs what has not ended; returns the directories of runs that failed.

  The supervised start of a seed, where the config has one, is made by the first
  of its runs, and the others begin with it.

  Args:
    arguments: of the launcher, the config among them.
    num_steps: with fewer, a run has not ended.
  """
  todo = [
    (variant, seed)
    for seed in seeds
    for variant in variants
    if analysis.load(out / variant.directory / str(seed), num_steps) is None
  ]
  slots: queue.Queue = queue.Queue()
  for slot in devices or [None] * jobs:
    slots.put(slot)

  def one(variant: Variant, seed: int) -> pathlib.Path | None:
    directory = out / variant.directory / str(seed)
    directory.mkdir(parents=True, exist_ok=True)
    slot = slots.get()
    _share_start([out / v.directory / str(seed) for v in variants])
    environment = dict(os.environ)
    if slot is not None:
      environment['CUDA_VISIBLE_DEVICES'] = slot
    if variant.teachers:
      command = [
        str(HERE / 'distill.py'),
        *(str(out / v.directory / str(seed)) for v in variant.teachers),
        f'--steps={num_steps}',
        f'--seed={seed}',
        f'--out={directory}',
      ]
    else:
      command = [
        str(HERE / f'{experiment}.py'),
        *arguments,
        *variant.arguments,
        f'--config.seed={seed}',
        f'--run_dir={directory}',
      ]
    print(f'{variant.name}, seed {seed}: {directory}/log.txt', flush=True)
    with (directory / 'log.txt').open('a', encoding='utf-8') as log:
      done = subprocess.run(
        [sys.executable, *command],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
      )
    slots.put(slot)
    return None if done.returncode == 0 else directory

  with concurrent.futures.ThreadPoolExecutor(slots.qsize()) as pool:
    failed = pool.map(lambda pair: one(*pair), todo)
    return [directory for directory in failed if directory is not None]


def _share_start(runs: Sequence[pathlib.Path]) -> None:
  """Copies the supervised start that one of the runs has made to the others."""
  made = [run / 'warm_start' for run in runs if (run / 'warm_start').is_dir()]
  for run in runs if made else []:
    if not (run / 'warm_start').exists():
      partial = run / 'warm_start.partial'
      shutil.copytree(made[0], partial, dirs_exist_ok=True)
      partial.rename(run / 'warm_start')


def collect(
  variants: Sequence[Variant], seeds: Sequence[int], out: pathlib.Path
) -> dict[str, list[analysis.Run]]:
  """The runs of each variant, in the order of the seeds that all have ended.

  Raises:
    ValueError: no seed has ended for every variant.
  """
  found = {
    v: [analysis.load(out / v.directory / str(seed)) for seed in seeds]
    for v in variants
  }
  whole = [
    i for i in range(len(seeds)) if all(runs[i] for runs in found.values())
  ]
  if not whole:
    raise ValueError(
      f'no seed has a finished run of every algorithm in {out}; see log.txt of '
      'each.'
    )
  return {v.name: [runs[i] for i in whole] for v, runs in found.items()}


def summary(runs: dict[str, list[analysis.Run]]) -> dict:
  """Plain JSON: intervals of every reward, differences, who is on the front."""
  first = next(iter(runs))
  names = runs[first][0].names
  table, differences, points = {}, {}, []
  for name, seeds in runs.items():
    after = np.stack([run.after for run in seeds])  # [S, n, K]
    tokens = np.stack([run.tokens for run in seeds])
    cells = {k: analysis.bootstrap(after[:, :, i]) for i, k in enumerate(names)}
    table[name] = {
      **{k: cell._asdict() for k, cell in cells.items()},
      'tokens': analysis.bootstrap(tokens)._asdict(),
      'start': {
        k: float(np.nanmean(np.stack([r.before[:, i] for r in seeds])))
        for i, k in enumerate(names)
      },
    }
    points.append([cell.mean for cell in cells.values()])
    if name != first:
      base = np.stack([run.after for run in runs[first]])
      differences[name] = {
        k: analysis.paired(after[:, :, i], base[:, :, i])._asdict()
        for i, k in enumerate(names)
      }
  front = analysis.pareto(np.array(points))
  return {
    'rewards': names,
    'seeds': len(runs[first]),
    'problems': len(runs[first][0].after),
    'heldout': table,
    'baseline': first,
    'differences': differences,
    'pareto_front': [n for n, on in zip(runs, front) if on],
  }


def page(runs: dict[str, list[analysis.Run]], found: dict, title: str) -> str:
  """One self-contained HTML page."""
  names = list(found['rewards'])
  figure = base64.b64encode(_figure(runs, found).encode()).decode()

  def cell(value: dict) -> str:
    return (
      f'{value["mean"]:.3f} <small>[{value["low"]:.3f}, {value["high"]:.3f}]'
      '</small>'
    )

  def rows(table: dict, keys: Sequence[str]) -> str:
    out = ''
    for name, values in table.items():
      cells = ''.join(f'<td>{cell(values[k])}</td>' for k in keys)
      mark = ' ★' if name in found['pareto_front'] else ''
      out += f'<tr><th>{html.escape(name)}{mark}</th>{cells}</tr>'
    return out

  def head(keys: Sequence[str]) -> str:
    return ''.join(f'<th>{html.escape(k)}</th>' for k in ('', *keys))

  keys = [*names, 'tokens']
  one = found['seeds'] == 1
  return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto;
  padding: 0 1rem; color: #222; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ padding: .3rem .8rem; border-bottom: 1px solid #ddd; text-align: left; }}
small {{ color: #666; }} img {{ max-width: 100%; }}
</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{len(runs)} algorithms, {found['seeds']} seed{'' if one else 's'},
{found['problems']} held-out problems answered greedily. Brackets are 95%
bootstrap intervals over {
    'problems (one seed)' if one else 'seeds and problems'
  }; bands in the curves are over seeds
{'and have no width with one seed' if one else ''}.</p>
<img alt="curves" src="data:image/svg+xml;base64,{figure}">
<h2>Held-out, at the end</h2>
<table><tr>{head(keys)}</tr>{rows(found['heldout'], keys)}</table>
<p>★ on the Pareto front of the {len(names)} rewards: no other algorithm is at
least as good in all of them and better in one (means, not intervals).</p>
<h2>Difference to {html.escape(found['baseline'])}</h2>
<p>Paired: the same seed and problem on both sides.</p>
<table><tr>{head(names)}</tr>{rows(found['differences'], names)}</table>
</body></html>
"""


def _figure(runs, found) -> str:
  """Curves of every reward and the length, and the front, as SVG."""
  import matplotlib.figure  # needs no display, keeps no global state

  names = list(found['rewards'])
  keys = [(k, f'rewards/{k}/mean') for k in names]
  keys.append(('length, tokens', 'completions/mean_length'))
  panels = len(keys) + (len(names) > 1)
  columns = min(3, panels)
  lines = -(-panels // columns)
  figure = matplotlib.figure.Figure(
    figsize=(4.2 * columns, 3.2 * lines), layout='constrained'
  )
  axes = np.atleast_1d(figure.subplots(lines, columns)).ravel()
  for axis, (label, key) in zip(axes, keys):
    for i, (name, seeds) in enumerate(runs.items()):
      steps, mean, low, high = analysis.curve(seeds, key)
      if not len(steps):  # students are taught without rewards
        continue
      axis.plot(steps, mean, color=f'C{i}', label=name)
      axis.fill_between(steps, low, high, color=f'C{i}', alpha=0.2)
    axis.set_title(label, fontsize=10)
    axis.set_xlabel('step')
    axis.grid(alpha=0.3)
  if len(names) > 1:
    axis = axes[len(keys)]
    x, y = names[:2]
    for i, name in enumerate(runs):
      cells = found['heldout'][name]
      on = name in found['pareto_front']
      axis.errorbar(
        cells[x]['mean'],
        cells[y]['mean'],
        xerr=_error(cells[x]),
        yerr=_error(cells[y]),
        color=f'C{i}',
        marker='*' if on else 'o',
        markersize=12 if on else 6,
        capsize=2,
      )
    axis.set_title('held-out; ★ Pareto front', fontsize=10)
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    axis.grid(alpha=0.3)
  for axis in axes[panels:]:
    axis.set_axis_off()
  axes[0].legend(fontsize=8)
  text = io.StringIO()
  # the same runs make the same file: no date, no random names
  with matplotlib.rc_context({'svg.hashsalt': 'gdpo_jax'}):
    figure.savefig(text, format='svg', metadata={'Date': None})
  return text.getvalue()


def _error(cell: dict) -> list[list[float]]:
  return [
    [max(0.0, cell['mean'] - cell['low'])],
    [max(0.0, cell['high'] - cell['mean'])],
  ]


def write(
  variants: Sequence[Variant],
  seeds: Sequence[int],
  out: pathlib.Path,
  title: str,
) -> dict:
  """Reads the finished runs; writes compare.json, compare.html, compare.svg."""
  runs = collect(variants, seeds, out)
  found = summary(runs)
  (out / 'compare.json').write_text(
    json.dumps(found, indent=2), encoding='utf-8'
  )
  (out / 'compare.html').write_text(page(runs, found, title), encoding='utf-8')
  (out / 'compare.svg').write_text(_figure(runs, found), encoding='utf-8')
  return found


def main(
  variants_of: Callable[[str], list[Variant]] = parse_variants,
  algorithms: str = DEFAULT,
  config_file: str | None = None,
  title: str = '{experiment}: comparison',
  out: str = 'runs/compare',
) -> None:
  """The launcher; its flags have these defaults."""
  config = config_flags.DEFINE_config_file(
    'config', config_file, 'FILE[:VARIANT] of any experiment.'
  )
  algorithms = flags.DEFINE_string('algorithms', algorithms, 'See above.')
  seeds = flags.DEFINE_list('seeds', ['0', '1', '2'], 'Of data and sampling.')
  out = flags.DEFINE_string('out', out, 'Where all is written.')
  jobs = flags.DEFINE_integer('jobs', 1, 'Runs at once.', lower_bound=1)
  devices = flags.DEFINE_list('devices', [], 'Accelerators, one for each run.')
  if not config_file:
    flags.mark_flag_as_required('config')

  def start(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unexpected arguments {argv[1:]}.')
    variants = variants_of(algorithms.value)
    numbers = [int(seed) for seed in seeds.value]
    # mistakes show here, not in as many logs as there are runs
    settings = launcher.settings_of(config.value)
    where = pathlib.Path(out.value)
    arguments = [arg for arg in sys.argv[1:] if arg.startswith('--config')]
    if not any(arg.startswith('--config=') for arg in arguments):
      if not config_file:
        raise ValueError('write the config with an equals sign: --config=FILE.')
      arguments = [f'--config={config_file}', *arguments]
    failed = run_all(
      config.value.experiment,
      arguments,
      variants,
      numbers,
      where,
      settings.num_steps,
      jobs.value,
      devices.value,
    )
    for directory in failed:
      print(f'failed: {directory}/log.txt', file=sys.stderr)
    write(
      variants, numbers, where, title.format(experiment=config.value.experiment)
    )
    print(f'{where}/compare.html')
    if failed:
      sys.exit(1)

  launcher.start(start)


if __name__ == '__main__':
  main()
