"""Every rule with its threshold, its advice, and what it may adjust."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from gdpo_jax.train.rules import (
  FIRST,
  WINDOW,
  About,
  Finding,
  Row,
  batch_small,
  condition_silent,
  early_oscillation,
  entropy_collapse,
  entropy_rise,
  fusion_collapse,
  fusion_oscillates,
  head_dead,
  kl_high,
  late_drop,
  not_finite,
  reward_missing,
  reward_muted,
  reward_still,
  value_bias,
  weight_small,
)


class Adjustment(NamedTuple):
  """What `action='adjust'` multiplies while the alarm lasts."""

  # 'learning_rate', 'entropy_coef', 'fusion_entropy_coef',
  # 'fusion_entropy_floor', or 'head_rate' of the head that was found
  what: str
  factor: float
  repeats: int  # how often at most, if the alarm goes on


class Rule(NamedTuple):
  """One thing that goes wrong in runs, and what to do about it."""

  name: str
  threshold: float
  unit: str  # what the threshold is compared with
  advice: str
  find: Callable[[Sequence[Row], About, float], list[Finding]]
  release: float | None = (
    None  # over when it no longer holds at this; None: threshold
  )
  adjustment: Adjustment | None = None
  once: bool = False  # judged on the first row only: advice, not an alarm


RULES = (
  Rule(
    'batch_small',
    32,
    'rows per reward and step (eight times as many in all)',
    'Raise prompts_per_step or group_size (prompts_per_micro_batch keeps the '
    'memory); or expect to need a lower learning rate and more steps.',
    batch_small,
    once=True,
  ),
  Rule(
    'reward_still',
    0.95,
    f'share of groups with equal values, mean of {WINDOW} steps',
    'It adds nothing to the advantage. Look at some of its rows: is the '
    'function wired to the right column? If it is always 0, the task is too '
    'hard for now: easier prompts, larger groups, a graded score in place of '
    'yes and no, or a warm start. If it is constant by design, set its weight '
    'to 0.',
    reward_still,
  ),
  Rule(
    'weight_small',
    0.1,
    f'share of the advantage over an even share, mean of {WINDOW} steps',
    'Raise its weight, or set it to 0 if it is only to be logged. With a '
    'method that sums first (grpo, dr_grpo), a reward with a small unit '
    'drowns: use gdpo or rescale it.',
    weight_small,
  ),
  Rule(
    'reward_missing',
    0.5,
    'share of rows on which the function fails, mean of 3 steps',
    'Read the failure records of that function; raise timeout_s if it is '
    'slow; give it a fallback, so that the rows keep a value.',
    reward_missing,
  ),
  Rule(
    'reward_muted',
    0.0,
    'rows that were not scored because the function rests',
    'The run goes on without this reward and tries it again later. Repair the '
    'function or its service; give it a fallback; raise mute_after if such '
    'gaps are normal.',
    reward_muted,
  ),
  Rule(
    'not_finite',
    0.0,
    'share of the updates of a step that were skipped',
    'Parameters were left as they were. If it goes on: lower the learning '
    'rate, compute in float32, and look for rewards or advantages of enormous '
    'size.',
    not_finite,
  ),
  Rule(
    'kl_high',
    2.0,
    'times the target, nats per sequence, mean of 3 steps',
    'Halve the learning rate, or raise kl_coef (kl_controller=adaptive does '
    'it for you). With several updates per batch, use fewer. If the distance '
    'is wanted, raise kl_target.',
    kl_high,
    release=1.0,
    adjustment=Adjustment('learning_rate', 0.5, 4),
  ),
  Rule(
    'entropy_collapse',
    0.3,
    f'times the entropy of the first {FIRST} steps, with half of each group '
    'copies',
    'Raise entropy_coef by half (from 0: to 1e-3) or the temperature, raise '
    'clip_high (DAPO), lower the learning rate; groups of copies teach '
    'nothing.',
    entropy_collapse,
    release=0.5,
    adjustment=Adjustment('entropy_coef', 1.5, 4),
  ),
  Rule(
    'entropy_rise',
    3.0,
    f'times the entropy of the first {FIRST} steps, mean of 3 steps',
    'Lower entropy_coef and the learning rate; check that the sampler and the '
    'trainer agree (sampler_mismatch).',
    entropy_rise,
    release=2.0,
  ),
  Rule(
    'condition_silent',
    0.02,
    f'share of rows on which it holds, mean of {WINDOW} steps',
    'The conditioned reward is 0 nearly everywhere. Lower the threshold '
    '(objectives.shaping.calibrate_threshold proposes one from a finished '
    'run), or train the reward that it waits for first (a weight schedule).',
    condition_silent,
  ),
  Rule(
    'early_oscillation',
    3.0,
    f'times the standard error of a step, mean jump of {WINDOW} steps',
    'The steps are too large: halve the learning rate, lengthen the warm-up '
    '(warmup_share), or take larger batches.',
    early_oscillation,
  ),
  Rule(
    'late_drop',
    4.0,
    f'standard errors below the best {WINDOW} steps, and a quarter of it',
    'Go back to a checkpoint before the drop. If another reward rose '
    'meanwhile, they are in conflict: condition the easy one on the hard one, '
    'or shift the weights; otherwise lower the learning rate.',
    late_drop,
  ),
  Rule(
    'value_bias',
    0.5,
    f'deviations of the values, mean of {WINDOW} steps after {2 * WINDOW}',
    'Raise value_coef or take more updates per batch; bring the rewards to a '
    'common scale (normalizers) if their sum is far from 1.',
    value_bias,
  ),
  Rule(
    'head_dead',
    1e-3,
    f'of the median gradient norm of the heads, mean of {WINDOW} steps',
    'Raise the learning rate of that head by a tenth; check that its reward '
    'still tells rows apart.',
    head_dead,
    release=1e-2,
    adjustment=Adjustment('head_rate', 1.1, 10),
  ),
  Rule(
    'fusion_oscillates',
    0.1,
    f'mean jump of a mixing weight from step to step, over {WINDOW} steps',
    'Raise fusion_entropy_coef by half (from 0: to 1e-3), lower the learning '
    'rate, or take larger batches.',
    fusion_oscillates,
    release=0.05,
    adjustment=Adjustment('fusion_entropy_coef', 1.5, 4),
  ),
  Rule(
    'fusion_collapse',
    0.05,
    f'of the entropy of equal mixing weights, mean of {WINDOW} steps',
    'Set fusion_entropy_coef to 0.01. If one head is meant to win, a plain '
    'policy does the same for less.',
    fusion_collapse,
    release=0.2,
    adjustment=Adjustment('fusion_entropy_floor', 1.0, 1),
  ),
)
