"""Time of the compiled advantages on one core; does anything recompile?

  python -m experiments.bench_objectives

Prints microseconds per call (best, median and 90th percentile of 200) for
rewards f32[512, 16, 5] with a tenth of them missing, for every method and
preset.
"""

import os
import time

import jax
import numpy as np

from gdpo_jax.objectives import advantages, presets

PROMPTS, GROUP, REWARDS, TOKENS = 512, 16, 5, 128
CALLS = 200


def batch(seed: int):
  rng = np.random.default_rng(seed)
  shape = (PROMPTS, GROUP, REWARDS)
  rewards = rng.integers(0, 4, shape).astype(np.float32)
  return jax.device_put((rewards, rng.random(shape) > 0.1))


def measure(name: str, method) -> str:
  weights = jax.device_put(np.ones(REWARDS, np.float32))
  lengths = np.random.default_rng(0).integers(1, TOKENS, PROMPTS * GROUP)
  settings = {'mask': jax.device_put(np.arange(TOKENS) < lengths[:, None])}
  if name in ('sa_mrpo', 'saw'):
    settings['bounds'] = np.tile(np.array([0, 3], np.float32), (REWARDS, 1))
  traces = []

  @jax.jit
  def step(rewards, valid, weights, settings):
    traces.append(name)
    return method(rewards, valid, weights, **settings)

  batches = [batch(seed) for seed in range(8)]
  jax.block_until_ready(step(*batches[0], weights, settings))
  seconds = []
  for call in range(CALLS):
    rewards, valid = batches[call % len(batches)]
    start = time.perf_counter()
    jax.block_until_ready(step(rewards, valid, weights, settings))
    seconds.append(time.perf_counter() - start)
  median, late = np.percentile(seconds, [50, 90]) * 1e6
  return (
    f'{name:22}{min(seconds) * 1e6:10.0f}{median:10.0f}{late:10.0f}'
    f'{len(traces):8}'
  )


def main():
  # one core, before the backend looks for more
  os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
  os.environ['XLA_FLAGS'] = (
    '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1'
  )
  jax.config.update('jax_platforms', 'cpu')
  shape = f'f32[{PROMPTS}, {GROUP}, {REWARDS}]'
  print(f'rewards {shape}, one core, {CALLS} calls on 8 batches')
  print(
    f'{"method":22}{"best us":>10}{"median us":>10}{"p90 us":>10}{"traces":>8}'
  )
  for name, method in (advantages.ADVANTAGES | presets.PRESETS).items():
    print(measure(name, method), flush=True)


if __name__ == '__main__':
  main()
