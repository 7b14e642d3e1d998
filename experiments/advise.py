"""From data, compute and objectives to an algorithm and settings, with reasons.

  python experiments/advise.py --examples=7473 --rewards=3 --model_params=1.5e9 \\
    --devices=8 --memory_gib=80 --tflops=400 --hours=12

Prints a table of settings, each with why, and the command line that sets them.
The rules are the published recipes, counts that can be checked, and what was
measured with this code; each reason says which.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import rich.console
import rich.table


class Advice(NamedTuple):
  setting: str  # of train.settings.Settings, or '' for a hint alone
  value: object
  reason: str


class Situation(NamedTuple):
  """What is known before a run."""

  examples: int  # training prompts
  rewards: int  # objectives with a weight
  model_params: float = 135e6
  group_size: int | None = None  # as wanted; None: chosen here
  prompt_tokens: int = 128
  completion_tokens: int = 128
  devices: int = 1
  memory_gib: float = 24.0  # of a device
  tflops: float = 0.12  # of a device, dense, as measured or published
  hours: float | None = None  # None: no limit
  success: float | None = None  # share of samples that are right now
  length_reward: bool = False
  units_differ: bool = False  # rewards of different ranges or scales


_MFU = 0.3  # share of the peak that training and sampling reach together
_BYTES_PER_PARAM = 16  # float32: weights, gradient, two moments of Adam
# Distinct advantage vectors of groups of binary rewards, GRPO and GDPO: counted.
_DISTINCT = {2: (2, 3), 4: (7, 14), 8: (29, 81), 11: (56, 186)}


def advise(s: Situation) -> list[Advice]:
  """Settings with reasons, the most important first.

  Raises:
    ValueError: a number that no situation has.
  """
  for name in ('examples', 'rewards', 'model_params', 'devices', 'tflops'):
    if not getattr(s, name) > 0:
      raise ValueError(f'{name} must be positive, got {getattr(s, name)}.')
  out = [_algorithm(s)]
  group = s.group_size or (8 if s.rewards < 3 else 16)
  seen = max(g for g in _DISTINCT if g <= max(2, group))
  grpo, gdpo = _DISTINCT[seen]
  why = (
    f'with two binary rewards and G={seen}, GDPO tells {gdpo} groups apart, '
    f'GRPO {grpo}; the published recipes use 4 (tools) and 16 (math)'
  )
  if group < 4:
    why += '; below 4 a group says little, raise it'
  out.append(Advice('group_size', group, why))

  rows = max(256, 32 * s.rewards)
  prompts = max(1, math.ceil(rows / group))
  reason = (
    f'at least {rows} rows: 256 in all and 32 for each reward, or the batch '
    'step is noise'
  )
  cap = max(1, s.examples // 4)
  if prompts > cap:
    prompts, reason = cap, f'a quarter of the {s.examples} examples'
  step_s = _step_seconds(s, prompts * group)
  if s.hours and s.hours * 3600 / step_s < 50:
    fewer = max(1, int(prompts * s.hours * 3600 / step_s / 50))
    reason = (
      f'{rows} rows would be better; so many leave 50 steps in {s.hours:g} h'
    )
    prompts, step_s = fewer, _step_seconds(s, fewer * group)
  out.append(Advice('prompts_per_step', prompts, reason))
  out.append(_steps(s, prompts, step_s))
  if prompts * group >= 1024 and prompts % 4 == 0:
    out.append(
      Advice(
        'prompts_per_update',
        prompts // 4,
        'four updates to a rollout of this size, as the tool-call recipe; the '
        'importance ratio corrects for it',
      )
    )
  out += _memory(s, group)
  out.append(_rate(s))
  if s.examples < 1000:
    out.append(
      Advice(
        'kl_coef',
        1e-3,
        f'{s.examples} examples come back often; a KL term of the tool-call '
        'recipe keeps the model from learning them by heart',
      )
    )
  if s.length_reward:
    out.append(
      Advice(
        '',
        "condition='correct>=1' on the length reward",
        'unconditioned, short and wrong earns as much as long and right; the '
        'tiny task collapses within 20 steps at a rate of 3e-4',
      )
    )
  if s.success is not None and s.success < 0.05:
    out.append(
      Advice(
        '',
        'a warm start (config.warm_start_updates), or easier data first',
        f'{s.success:.0%} right means that most groups of {group} hold no right '
        'answer, and nothing is learned from them',
      )
    )
  elif s.success is not None and s.success > 0.9:
    out.append(
      Advice(
        'max_rounds',
        4,
        f'{s.success:.0%} right leaves many groups without signal; dynamic '
        'sampling draws others (DAPO)',
      )
    )
  if s.rewards > 5:
    out.append(
      Advice(
        '',
        'merge rewards that rise and fall together',
        f'{s.rewards} rewards: those that are correlated count several times in '
        'the sum; look at the correlations in the first report',
      )
    )
  return out


def _algorithm(s: Situation) -> Advice:
  if s.rewards == 1:
    return Advice(
      'algorithm',
      'grpo',
      'one reward: GDPO is GRPO with a batch step, there is nothing to decouple',
    )
  reason = (
    f'{s.rewards} rewards: rows with different rewards and the same sum keep '
    'different advantages'
  )
  if s.units_differ:
    reason += ', and a reward of a large unit does not drown the others'
  return Advice('algorithm', 'gdpo', reason)


def _step_seconds(s: Situation, rows: int) -> float:
  """Sampling 2, log-probs and update 6 FLOPs per parameter and token."""
  tokens = rows * (s.prompt_tokens + s.completion_tokens)
  return 8 * s.model_params * tokens / (s.devices * s.tflops * 1e12 * _MFU)


def _steps(s: Situation, prompts: int, step_s: float) -> Advice:
  epochs = 15 if s.examples < 5000 else 3
  steps = max(50, math.ceil(epochs * s.examples / prompts))
  why = f'{epochs} passes over the data'
  if s.hours and steps * step_s > s.hours * 3600:
    steps = max(1, int(s.hours * 3600 / step_s))
    why = f'what {s.hours:g} h hold, {steps * prompts / s.examples:.2g} passes'
  why += (
    f'; about {step_s:.3g} s a step at {_MFU:.0%} of the peak, a guess to be '
    'replaced by the first steps'
  )
  return Advice('num_steps', steps, why)


def _memory(s: Situation, group: int) -> list[Advice]:
  need = s.model_params * _BYTES_PER_PARAM / 2**30
  usable = 0.6 * s.memory_gib  # the rest for activations and the cache
  shards = 1
  while need / shards > usable and shards < s.devices:
    shards *= 2
  out = []
  if shards > 1:
    out.append(
      Advice(
        'mesh_fsdp',
        shards,
        f'{need:.0f} GiB of weights, gradient and moments in float32 on devices '
        f'of {s.memory_gib:g} GiB',
      )
    )
  if need / shards > usable:
    out.append(
      Advice(
        '',
        'more devices, or LoRA',
        f'{need / shards:.0f} GiB a device exceed the {usable:.0f} GiB that '
        f'activations leave of {s.memory_gib:g}',
      )
    )
  if s.model_params >= 1e9:
    out.append(
      Advice(
        'compute_dtype', 'bfloat16', 'matrix units; masters stay in float32'
      )
    )
    out.append(
      Advice('remat', 'block', 'activations of one block instead of all')
    )
  tokens = group * (s.prompt_tokens + s.completion_tokens)
  if tokens > 2048:
    out.append(
      Advice(
        'prompts_per_micro_batch',
        1,
        f'a group alone has {tokens} tokens; the sum over micro-batches is exact',
      )
    )
  return out


def _rate(s: Situation) -> Advice:
  if s.model_params >= 1e9:
    return Advice('learning_rate', 1e-6, 'the published recipes from 1.5B on')
  if s.model_params >= 1e7:
    return Advice('learning_rate', 1e-5, 'measured with SmolLM2-135M')
  return Advice(
    'learning_rate', 1e-4, 'measured with 10^5 parameters; 3e-4 collapsed'
  )


def command_line(advice: Sequence[Advice]) -> str:
  return ' '.join(
    f'--config.{a.setting}={a.value}' for a in advice if a.setting
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  defaults = Situation._field_defaults
  for name, kind in (
    ('examples', int),
    ('rewards', int),
    ('model_params', float),
    ('group_size', int),
    ('prompt_tokens', int),
    ('completion_tokens', int),
    ('devices', int),
    ('memory_gib', float),
    ('tflops', float),
    ('hours', float),
    ('success', float),
  ):
    parser.add_argument(
      f'--{name}',
      type=kind,
      default=defaults.get(name),
      required=name not in defaults,
    )
  parser.add_argument('--length_reward', action='store_true')
  parser.add_argument('--units_differ', action='store_true')
  args = parser.parse_args(argv)
  try:
    advice = advise(Situation(**vars(args)))
  except ValueError as error:
    parser.error(str(error))
  table = rich.table.Table(show_lines=True)
  for title in ('setting', 'value', 'why'):
    table.add_column(title)
  for each in advice:
    table.add_row(each.setting or '(hint)', str(each.value), each.reason)
  console = rich.console.Console()
  console.print(table)
  console.print(command_line(advice), soft_wrap=True, markup=False)


if __name__ == '__main__':
  main()
