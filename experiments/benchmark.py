"""Rollouts, updates and whole steps beside other projects, in one run.

  python -m experiments.benchmark --out=experiments/results  # half an hour
  python -m experiments.benchmark --what=rollout --repeats=5
  python -m experiments.benchmark --what=memory,scaling

The same weights, prompts and lengths on all sides: SmolLM2-135M (random weights
of its shape where the real ones are not fetched), 8 prompts x 4, 64 prompt and
128 new tokens where nothing else is said. Sides are warmed up, then take turns;
the page has medians and spread, and keeps the parts that an earlier run has left
in --out. Needs the [bench] extra; Tunix and llama.cpp get
environments of their own (bench_peers). Times mean little on busy cores, so the
load at the start of each part stands on the page.

  rollout  all rows to the length limit
  ragged   rows of 16 to 128 new tokens, uniform
  refill   64 ragged rows of which 32 are in flight, refilled and part by part
  weights  a rollout with weights of float32, bfloat16 and int8, and their size
  shapes   rollouts of 32 rows with other groups, and with longer prompts
  update   gradients, clip by global norm, AdamW
  packing  the same on ragged rows in groups of 8, in a line each and packed
  step     one whole GRPO step, each side in a process of its own (bench_step)
  memory   of the log-prob step, by size of the vocabulary (compiled, not run)
  scaling  ours, by rows, length and width: what a FLOP costs
"""

import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import jax
import numpy as np
from absl import app, flags

from experiments import bench_report, bench_sides
from experiments.bench_sides import Shape
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.train import accounting

PARTS = (
  'rollout',
  'ragged',
  'refill',
  'weights',
  'shapes',
  'update',
  'packing',
  'step',
  'memory',
  'scaling',
)
_WHAT = flags.DEFINE_list('what', list(PARTS), 'Parts to measure.')
_DTYPES = flags.DEFINE_list(
  'compute_dtypes',
  ['float32', 'bfloat16'],
  'Inputs of products: ours in rollouts, updates and steps; peers in rollouts.',
)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed turns of each side.')
_PEERS = flags.DEFINE_bool('peers', True, 'Tunix and llama.cpp as well.')
_OUT = flags.DEFINE_string(
  'out', None, 'Directory for benchmark.json, benchmark.md and the curves.'
)

SHAPE = Shape()
MANY = Shape(prompts=16)
OTHER_SHAPES = (Shape(4, 8), Shape(2, 16), Shape(8, 4, prompt_tokens=512))
# Few layers of half the width: hours would tell no more.
SMALL = dataclasses.replace(
  bench_sides.SMOLLM2,
  vocab_size=8192,
  width=288,
  num_layers=4,
  num_heads=6,
  num_kv_heads=3,
  head_dim=48,
  mlp_width=768,
)
WIDTHS = (144, 288, 576)
CURVE = [(rows, new) for rows in (8, 32, 64) for new in (128, 384, 1024)]


class Bench:
  """One run: the model on all sides, and what has been measured."""

  def __init__(self, directory: str):
    self.directory = directory
    self.config, self.params, self.model, source = bench_sides.models(directory)
    self.dtypes, self.repeats = _DTYPES.value, _REPEATS.value
    self.results = {
      'weights': source,
      'cores': os.cpu_count(),
      'processor': platform.processor() or platform.machine(),
      'load': {},
      'seconds': {},
    }
    earlier = _OUT.value and pathlib.Path(_OUT.value, 'benchmark.json')
    if earlier and earlier.exists():
      found = json.loads(earlier.read_text())
      if found.get('weights') == source and 'load' in found:
        self.results = found

  def sampling(
    self, shape: Shape, lengths=None, all_peers=True
  ) -> dict[str, bench_sides.Side]:
    """Ours in every dtype, then the others, or transformers alone."""
    sides = {
      f'gdpo_jax {dtype}': bench_sides.ours(
        self.config, self.params, shape, dtype, lengths
      )
      for dtype in self.dtypes
    }
    models = {'transformers float32': self.model}
    if 'bfloat16' in self.dtypes and all_peers:
      models['transformers bfloat16'] = bench_sides.rounded(self.model)
    for name, model in models.items():
      sides[name] = bench_sides.with_transformers(
        self.config, model, shape, lengths
      )
    if _PEERS.value and all_peers:
      sides |= bench_sides.peers(self.config, self.directory, shape, lengths)
    return sides

  def rollout(self):
    self._time('rollout', self.sampling(SHAPE))

  def ragged(self):
    self._time('ragged', self.sampling(SHAPE, SHAPE.ragged()))

  def refill(self):
    sides = {
      f'gdpo_jax {dtype}, {name}': bench_sides.waves(
        self.config, self.params, MANY, dtype, SHAPE.prompts, refilled
      )
      for dtype in self.dtypes
      for name, refilled in (('refilled', True), ('in parts', False))
    }
    self._time('refill', sides)

  def weights(self):
    sides = {
      f'gdpo_jax {dtype}': bench_sides.ours(
        self.config, self.params, SHAPE, dtype
      )
      for dtype in ('float32', 'bfloat16', 'int8')
    }
    self._time('weights', sides)
    self.results['rollout_megabytes'] = bench_sides.rollout_megabytes(
      self.config, self.params
    )

  def shapes(self):
    for shape in OTHER_SHAPES:
      name = (
        f'{shape.prompts} prompts x {shape.group}, {shape.prompt_tokens} + '
        f'{shape.new_tokens} tokens'
      )
      self._time(name, self.sampling(shape, all_peers=False), repeats=1)

  def update(self):
    rollout, losses = bench_sides.random_rollout(self.config, SHAPE), {}
    sides = {
      f'gdpo_jax {dtype}': bench_sides.our_update(
        self.config, self.params, SHAPE, rollout, dtype, losses
      )
      for dtype in self.dtypes
    }
    sides['torch float32'] = bench_sides.torch_update(
      self.model, SHAPE, rollout, losses
    )
    self._time('update', sides)
    self.results['loss_of_first_update'] = losses
    print('  loss of the first update', losses, flush=True)

  def packing(self):
    shape = Shape(4, 8)
    rollout = bench_sides.random_rollout(self.config, shape, shape.ragged())
    sides = {
      f'gdpo_jax {dtype}{name}': bench_sides.our_update(
        self.config, self.params, shape, rollout, dtype, {}, tokens
      )
      for dtype in self.dtypes
      for name, tokens in ((', packed', 128), ('', 0))
    }
    self._time('packing', sides)

  def step(self):
    if self.results['weights'] == 'random weights':
      print('  left out: TRL needs a tokenizer; fetch the weights first')
      return
    seconds, peaks = {}, {}
    for side, dtype in [
      *(('gdpo_jax', dtype) for dtype in self.dtypes),
      ('trl', 'float32'),
    ]:
      name = f'{side} {dtype}'
      command = [sys.executable, '-m', 'experiments.bench_step', side]
      command += [self.directory, dtype, str(self.repeats)]
      done = subprocess.run(command, capture_output=True, text=True)
      if done.returncode:
        print(f'  {name} failed: {done.stderr.strip().splitlines()[-1]}')
        continue
      out = json.loads(done.stdout.splitlines()[-1])
      print(f'  {name:28}', out, flush=True)
      seconds[name], peaks[name] = out['seconds'], out['peak_gib']
    self.results['seconds']['step'] = seconds
    self.results['peak_gib_of_step'] = peaks

  def memory(self):
    self.results['memory'] = bench_sides.log_prob_memory()

  def scaling(self):
    """Seconds and FLOPs of a rollout and of an update, by size."""
    rows = []
    small = make_policy(SMALL).init(jax.random.key(0))
    for count, new_tokens in CURVE:
      shape = Shape(count // 4, 4, 64, new_tokens)
      rows.append(self._cost('rows x tokens', SMALL, small, shape))
    for width in WIDTHS:
      config = dataclasses.replace(
        SMALL, width=width, mlp_width=width * 8 // 3, head_dim=width // 6
      )
      params = make_policy(config).init(jax.random.key(0))
      rows.append(self._cost('width', config, params, SHAPE))
    self.results['scaling'] = rows

  def _cost(self, curve, config, params, shape) -> dict:
    dtype = self.dtypes[0]
    settings = bench_sides.update_settings(shape, dtype)
    work = accounting.step_work(
      config,
      settings,
      np.full(shape.prompts, shape.prompt_tokens),
      np.full((shape.prompts, shape.group), shape.new_tokens),
    )
    rollout = bench_sides.random_rollout(config, shape)
    sides = {
      'rollout': bench_sides.ours(config, params, shape, dtype),
      'update': bench_sides.our_update(
        config, params, shape, rollout, dtype, {}
      ),
    }
    row = {
      'curve': curve,
      'rows': shape.rows,
      'new_tokens': shape.new_tokens,
      'width': config.width,
      'peak': accounting.matrix_peak(config.width, config.mlp_width, dtype),
    }
    for name, run in sides.items():
      row[name] = {
        'seconds': bench_sides.median_of(run, 1),
        'flops': getattr(work, name),
      }
    print(
      f'  {shape.rows:3} rows x {shape.new_tokens:4}, width {config.width}: '
      + ', '.join(f'{name} {row[name]["seconds"]:.2f} s' for name in sides),
      flush=True,
    )
    return row

  def _time(self, name, sides, repeats=None):
    self.results['seconds'][name] = bench_sides.take_turns(
      sides, repeats or self.repeats
    )
    for side in sides.values():
      if close := getattr(side, 'close', None):
        close()

  def shares_of_peak(self, what):
    """{side: (TFLOP/s of a large product now, share that the side reached)}."""
    if what not in ('rollout', 'update'):
      return
    settings = bench_sides.update_settings(SHAPE, 'float32')
    work = accounting.step_work(
      self.config,
      settings,
      np.full(SHAPE.prompts, SHAPE.prompt_tokens),
      np.full((SHAPE.prompts, SHAPE.group), SHAPE.new_tokens),
    )
    for name, values in self.results['seconds'][what].items():
      if name.startswith('gdpo_jax'):
        peak = accounting.matrix_peak(
          self.config.width, self.config.mlp_width, name.split()[1]
        )
        share = getattr(work, what) / float(np.median(values)) / peak
        shares = self.results.setdefault('share_of_peak', {})
        shares[f'{what}, {name}'] = peak / 1e12, share


def main(_):
  if unknown := sorted(set(_WHAT.value) - set(PARTS)):
    raise app.UsageError(f'--what={unknown}: choose from {", ".join(PARTS)}')
  # Compilation is not measured: programs are kept between runs.
  cache = os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
  jax.config.update(
    'jax_compilation_cache_dir', str(pathlib.Path(cache) / 'gdpo_jax' / 'xla')
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  with tempfile.TemporaryDirectory() as directory:
    bench = Bench(directory)
    for what in _WHAT.value:
      print(what, flush=True)
      bench.results['load'][what] = round(os.getloadavg()[0], 1)
      getattr(bench, what)()
      bench.shares_of_peak(what)
      if _OUT.value:  # after each part: a stopped run keeps what it has
        bench_report.write(pathlib.Path(_OUT.value), bench.results)
  print('\n' + bench_report.page(bench.results))


if __name__ == '__main__':
  app.run(main)
