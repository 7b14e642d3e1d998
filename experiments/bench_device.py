"""Where the time of a step goes on an accelerator, by the training loop itself.

  python -m experiments.bench_device                      # both models, bfloat16
  python -m experiments.bench_device --models=tiny --dtype=float32  # on a CPU

Random weights in the shapes of SmolLM2-135M and Qwen2.5-1.5B, 16 prompts x 8,
512 new tokens; rows hardly end before the limit, as random weights seldom draw
the end. Five steps of `gdpo` on two rewards; medians of the last three, the
first two compile. One table for each model: tokens/s, utilisation against the
matrix peak measured at the start, seconds by part, peak memory.
"""

import json
import pathlib
import statistics
import tempfile

import jax
import rich.console
import rich.table
from absl import app, flags, logging

from experiments import shapes
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.base import Task
from gdpo_jax.train import loop, metrics
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

MODELS = {
  'smollm2-135m': PolicyConfig(**shapes.SMOLLM2),
  'qwen2.5-1.5b': PolicyConfig(**shapes.KNOWN['qwen2p5_1p5b'][1]),
  'tiny': PolicyConfig(**shapes.TINY),
}
STEPS, COMPILING = 5, 2

_MODELS = flags.DEFINE_list(
  'models', ['smollm2-135m', 'qwen2.5-1.5b'], f'Of {", ".join(MODELS)}.'
)
_DTYPE = flags.DEFINE_enum(
  'dtype', 'bfloat16', ['bfloat16', 'float32'], 'Of products, both ways.'
)
_PROMPTS = flags.DEFINE_integer('prompts', 16, 'Of a step.')
_GROUP = flags.DEFINE_integer('group', 8, 'Rows of a prompt.')
_NEW = flags.DEFINE_integer('new_tokens', 512, 'Limit of a row.')
_MICRO = flags.DEFINE_integer('micro', 2, 'Prompts of a micro-batch.')
_OUT = flags.DEFINE_string('out', None, 'File for the rows, as JSON.')


def task(num_prompts: int) -> Task:
  """Prompts of about 60 bytes, and two rewards that cost nothing."""

  def length(completion_ids, **_):
    return [len(set(ids)) / len(ids) for ids in completion_ids]

  def even(completion_ids, **_):
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]

  prompts = [
    {'prompt': f'Problem {i}: a box holds {i} red and {i + 1} green balls. '}
    for i in range(num_prompts * STEPS)
  ]
  rewards = (Reward(length), Reward(even))
  return Task(name='device', train=prompts, heldout=[], rewards=rewards)


def measure(config: PolicyConfig, directory: str) -> dict[str, float]:
  """Medians over the steps that compile nothing."""
  policy = make_policy(config, _DTYPE.value, 'dots')
  settings = Settings(
    algorithm='gdpo',
    num_steps=STEPS,
    prompts_per_step=_PROMPTS.value,
    group_size=_GROUP.value,
    prompts_per_micro_batch=_MICRO.value,
    max_prompt_tokens=64,
    max_new_tokens=_NEW.value,
    compute_dtype=_DTYPE.value,
    rollout_dtype=_DTYPE.value,
    importance_cap=None if _DTYPE.value == 'float32' else 2.0,
    save_every=0,
    samples_every=0,
  )
  history = loop.train(
    policy,
    policy.init(jax.random.key(0)),
    byte_tokenizer(),
    task(_PROMPTS.value),
    settings,
    pathlib.Path(directory),
    heldout=[],
    progress=Progress(),
  ).history
  rows, _ = metrics.split_history(history)
  rows = rows[COMPILING:]
  names = [
    name
    for name in rows[-1]
    if name.startswith(('time/', 'throughput/', 'memory/', 'flops/'))
  ]
  return {
    name: statistics.median(row[name] for row in rows if name in row)
    for name in names
  }


def main(_):
  logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
  device = jax.devices()[0]
  found = {}
  for name in _MODELS.value:
    if name not in MODELS:
      raise app.UsageError(f'{name!r} is none of {", ".join(MODELS)}')
    with tempfile.TemporaryDirectory() as directory:
      found[name] = measure(MODELS[name], directory)
  console = rich.console.Console(width=100)
  for name, row in found.items():
    table = rich.table.Table(
      title=f'{name} on {jax.device_count()} x {device.device_kind}, '
      f'{_DTYPE.value}, {_PROMPTS.value} x {_GROUP.value} rows, '
      f'{_NEW.value} new tokens'
    )
    table.add_column('metric')
    table.add_column('median', justify='right')
    table.add_column('share of the step', justify='right')
    for metric, value in row.items():
      share = ''
      if metric.startswith('time/'):
        share = f'{value / row["time/step"]:.0%}'
      table.add_row(metric, f'{value:.4g}', share)
    console.print(table)
  if _OUT.value:
    pathlib.Path(_OUT.value).write_text(
      json.dumps({'device': device.device_kind, 'models': found}, indent=2)
    )


if __name__ == '__main__':
  app.run(main)
