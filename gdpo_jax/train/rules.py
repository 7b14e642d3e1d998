"""Rules that watch a run: small pure functions over its history.

Each `find(history, about, threshold)` looks at the rows of the training steps
so far, the newest last, and returns what is wrong now, in a sentence with the
numbers that say so. A metric that is not in the rows is not judged. Which rule
may do more than warn, and when an alarm is over, is decided in `monitor`.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]

# Steps that a rule averages over. A batch of 32 rows has a standard error of
# 0.09 on a binary reward; ten of them have 0.03.
WINDOW = 10
# Steps that make "the first steps" of a ratio.
FIRST = 5


class RewardInfo(NamedTuple):
  """What a reward was declared with."""

  name: str
  weight: float = 1.0
  range: tuple[float, float] | None = None
  condition: str | None = None
  fallback: str | None = None
  declared: bool = True  # False: made by a setting (kl, overlong)


class About(NamedTuple):
  """What stays the same during a run."""

  rewards: tuple[RewardInfo, ...]
  prompts_per_step: int
  group_size: int
  kl_target: float | None = None  # nats per sequence; None: no reference


class Finding(NamedTuple):
  """Something is wrong now, with this subject (a reward, a head, the run)."""

  subject: str
  sentence: str


def values(history: Sequence[Row], key: str, last: int | None = None) -> list:
  """The finite values of `key`, in the last rows, oldest first."""
  rows = history[-last:] if last else history
  found = [row.get(key) for row in rows]
  return [v for v in found if v is not None and math.isfinite(v)]


def full_window(history, key, last=WINDOW) -> float | None:
  """Mean over the last rows; None unless each of them has the metric."""
  found = values(history, key, last)
  return statistics.fmean(found) if len(found) == last else None


def entropy_key(row: Row) -> str:
  """The sampler's estimate, which every row has, before the trainer's.

  The trainer skips groups without signal, which are the ones that collapsed.
  """
  return 'entropy/sampled' if 'entropy/sampled' in row else 'entropy'


def entropy_ratio(history: Sequence[Row], last: int = 1) -> float | None:
  """Mean token entropy of the last rows over that of the first rows."""
  key = entropy_key(history[-1])
  first = values(history[:FIRST], key)
  now = values(history, key, last)
  if len(first) < FIRST or len(now) < last or not statistics.fmean(first) > 0:
    return None
  return statistics.fmean(now) / statistics.fmean(first)


def _weight(history: Sequence[Row], reward: RewardInfo) -> float:
  """In the newest row: schedules move it, and muting makes it 0."""
  return history[-1].get(f'rewards/{reward.name}/weight', reward.weight)


def _pull(history: Sequence[Row], reward: RewardInfo) -> float:
  """+1 where more is better, -1 where the weight is negative."""
  return -1.0 if _weight(history, reward) < 0 else 1.0


def _trained(history: Sequence[Row], about: About) -> list[RewardInfo]:
  """Declared rewards that have a weight now."""
  return [r for r in about.rewards if r.declared and _weight(history, r)]


def _noise(row: Row, name: str, about: About) -> float:
  """Standard error of a batch mean, groups taken as one draw each."""
  deviation = row.get(f'rewards/{name}/std') or 0.0
  return deviation / math.sqrt(about.prompts_per_step)


def reward_still(history, about, threshold):
  """No group tells its rows apart, and it is not because all is well."""
  out = []
  for reward in _trained(history, about):
    key = f'rewards/{reward.name}/'
    silent = full_window(history, key + 'zero_variance')
    mean = full_window(history, key + 'mean')
    if silent is None or mean is None or silent < threshold:
      continue
    best = reward.range and reward.range[_pull(history, reward) > 0]
    if best is not None and abs(mean - best) < 1e-6:
      continue  # nothing is left to learn
    spoke = min(values(history, key + 'zero_variance')) < threshold
    start = statistics.fmean(values(history, key + 'mean')[:WINDOW])
    if spoke and _pull(history, reward) * (mean - start) > 0:
      continue  # it rose until all rows agreed
    what = 'no longer tells' if spoke else 'never tells'
    out.append(
      Finding(
        reward.name,
        f'reward {reward.name} {what} the rows of a group apart: in the last '
        f'{WINDOW} steps {silent:.0%} of the groups gave all rows the same '
        f'value, about {mean:.3g}.',
      )
    )
  return out


def weight_small(history, about, threshold):
  """A reward that has something to say is not heard."""
  rewards = _trained(history, about)
  out = []
  for reward in rewards:
    share = full_window(history, f'advantage_share/{reward.name}')
    silent = full_window(history, f'rewards/{reward.name}/zero_variance')
    held = full_window(history, f'condition/{reward.name}/held')
    if share is None or silent is None or silent > 0.5:
      continue
    if held is not None and held < 0.25:
      continue  # its condition keeps it small, not its weight
    if share < threshold / len(rewards):
      out.append(
        Finding(
          reward.name,
          f'reward {reward.name} makes {share:.1%} of the advantage (an even '
          f'share would be {1 / len(rewards):.0%}) although it tells rows '
          f'apart in {1 - silent:.0%} of the groups; its weight is '
          f'{_weight(history, reward):g}.',
        )
      )
  return out


def reasons(row: Row, name: str) -> dict[str, float]:
  """Rows without a value, by reason."""
  prefix = f'rewards/{name}/missing/'
  return {k[len(prefix) :]: v for k, v in row.items() if k.startswith(prefix)}


def failed_share(row: Row, name: str, about: About) -> float | None:
  """Share of the rows on which the function itself gave no value.

  Its fallback may have given one. None where the row does not tell.
  """
  missing = row.get(f'rewards/{name}/missing')
  if missing is None:
    return None
  rows = about.prompts_per_step * about.group_size * row.get('groups/rounds', 1)
  return max(missing, min(1.0, sum(reasons(row, name).values()) / rows))


def reward_missing(history, about, threshold):
  """A function that fails on most rows.

  One that has no opinion (None) on some rows is as it was made; on all rows it
  is not.
  """
  out = []
  for reward in about.rewards:
    shares = []
    for row in history[-3:]:
      share = failed_share(row, reward.name, about)
      if share is not None and share < 1:
        rows = about.prompts_per_step * about.group_size
        silent = reasons(row, reward.name).get('none', 0.0) / rows
        share -= silent / row.get('groups/rounds', 1)
      shares.append(share)
    counts = reasons(history[-1], reward.name)
    if len(shares) < 3 or None in shares or 'muted' in counts:
      continue
    rate = statistics.fmean(shares)
    if rate < threshold:
      continue
    why = 'no reason was recorded'
    if counts:
      worst = max(counts, key=counts.get)
      why = f'mostly {worst!r} ({counts[worst]:.0f} rows in the last step)'
    if reward.fallback:
      why += f'; {reward.fallback} stands in'
    out.append(
      Finding(
        reward.name,
        f'reward {reward.name} gave no value for {rate:.0%} of the rows of the '
        f'last 3 steps: {why}.',
      )
    )
  return out


def reward_muted(history, about, threshold):
  """The pipeline gave up on a function for a while."""
  return [
    Finding(
      reward.name,
      f'reward {reward.name} is muted (weight 0): its calls failed several '
      'times in a row.',
    )
    for reward in about.rewards
    if reasons(history[-1], reward.name).get('muted', 0) > threshold
  ]


def not_finite(history, about, threshold):
  """Updates were skipped because loss or gradient were not finite."""
  row = history[-1]
  share = row.get('skipped_updates') or 0.0
  if share <= threshold:
    return []
  suspects = [
    reward.name
    for reward in about.rewards
    if {'nan', 'inf'} & reasons(row, reward.name).keys()
  ]
  cause = 'the loss or its gradient was NaN or infinite'
  if suspects:
    cause += f'; in the same step {", ".join(suspects)} returned NaN or inf'
  return [
    Finding('update', f'{share:.0%} of the updates were skipped: {cause}.')
  ]


def kl_high(history, about, threshold):
  """The policy runs away from the reference."""
  target = about.kl_target
  now = full_window(history, 'kl/nats_per_sequence', 3)
  if now is None or target is None or now <= threshold * target:
    return []
  return [
    Finding(
      'kl',
      f'KL to the reference is {now:.1f} nats per sequence over the last 3 '
      f'steps, {now / target:.1f} times the target of {target:g}.',
    )
  ]


def entropy_collapse(history, about, threshold):
  """The sampler gives the same answer again and again.

  Entropy alone does not tell: a run that learns to be brief and right may end
  at a fifth of its first entropy (SmolLM2 on arithmetic does). So the rows of
  a group must have become copies as well.
  """
  ratio = entropy_ratio(history, FIRST)
  distinct = full_window(history, 'completions/distinct', FIRST)
  if ratio is None or distinct is None or ratio >= threshold or distinct > 0.5:
    return []
  return [
    Finding(
      'entropy',
      f'entropy is {ratio:.2f} times that of the first steps, and only '
      f'{distinct:.0%} of the completions of a group are distinct.',
    )
  ]


def entropy_rise(history, about, threshold):
  """The policy dissolves into noise."""
  ratio = entropy_ratio(history, 3)
  if ratio is None or ratio <= threshold:
    return []
  return [
    Finding('entropy', f'entropy is {ratio:.1f} times that of the first steps.')
  ]


def condition_silent(history, about, threshold):
  """A reward waits for a condition that hardly ever holds."""
  out = []
  for reward in about.rewards:
    held = full_window(history, f'condition/{reward.name}/held')
    if reward.condition is None or held is None or held >= threshold:
      continue
    out.append(
      Finding(
        reward.name,
        f'the condition of reward {reward.name} ({reward.condition}) held on '
        f'{held:.1%} of the rows of the last {WINDOW} steps.',
      )
    )
  return out


def early_oscillation(history, about, threshold):
  """In the first steps a reward jumps up and down by more than noise."""
  if not WINDOW <= len(history) <= 5 * WINDOW:
    return []
  out = []
  for reward in about.rewards:
    means = values(history, f'rewards/{reward.name}/mean', WINDOW)
    noise = _noise(history[-1], reward.name, about)
    steps = [b - a for a, b in zip(means, means[1:])]
    turns = sum(a * b < 0 for a, b in zip(steps, steps[1:]))
    if len(means) < WINDOW or not noise or turns < WINDOW - 4:
      continue
    jump = statistics.fmean(map(abs, steps))
    if jump > threshold * noise:
      out.append(
        Finding(
          reward.name,
          f'reward {reward.name} turns around in {turns} of the last '
          f'{WINDOW - 2} steps, by {jump:.2g} on average; chance alone would '
          f'move it by about {noise:.2g}.',
        )
      )
  return out


def late_drop(history, about, threshold):
  """A reward that had risen has fallen well below its best."""
  out = []
  for reward in _trained(history, about):
    key = f'rewards/{reward.name}/mean'
    pull = _pull(history, reward)
    means = [pull * v for v in values(history, key)]
    if len(means) < 2 * WINDOW:
      continue
    windows = [
      statistics.fmean(means[i : i + WINDOW])
      for i in range(len(means) - WINDOW + 1)
    ]
    best = max(windows)
    now = statistics.fmean(means[-FIRST:])
    # both ends are means of several steps; the shorter one rules the noise
    deviation = max(
      values(history, f'rewards/{reward.name}/std') or [0.0]
    ) / math.sqrt(about.prompts_per_step * FIRST)
    if best - now > threshold * deviation and best - now > 0.25 * abs(best):
      at = windows.index(best)
      out.append(
        Finding(
          reward.name,
          f'reward {reward.name} fell from {pull * best:.3g} '
          f'(around step {history[at].get("step", at + 1)}) to '
          f'{pull * now:.3g}.',
        )
      )
  return out


def _keys(row: Row, start: str, end: str) -> list[str]:
  return [k for k in row if k.startswith(start) and k.endswith(end)]


def fusion_oscillates(history, about, threshold):
  """The mixing weights of a decoupled policy jump from step to step."""
  jumps = {}
  for key in _keys(history[-1], 'fusion/', '/weight'):
    seen = values(history, key, WINDOW + 1)
    if len(seen) == WINDOW + 1:
      pairs = zip(seen, seen[1:], strict=False)
      jumps[key] = statistics.fmean(abs(b - a) for a, b in pairs)
  if not jumps or max(jumps.values()) <= threshold:
    return []
  key = max(jumps, key=jumps.get)
  return [
    Finding(
      'fusion',
      f'the weight of head {key.split("/")[1]} jumps by {jumps[key]:.2g} a step.',
    )
  ]


def fusion_collapse(history, about, threshold):
  """One head of a decoupled policy has all the weight."""
  heads = len(_keys(history[-1], 'fusion/', '/weight'))
  entropy = full_window(history, 'fusion/entropy')
  if heads < 2 or entropy is None or entropy >= threshold * math.log(heads):
    return []
  return [
    Finding(
      'fusion',
      f'the fusion weights have an entropy of {entropy:.2g} nats, of '
      f'{math.log(heads):.2g} for {heads} heads.',
    )
  ]


def head_dead(history, about, threshold):
  """A head of a decoupled policy gets hardly any gradient."""
  # heads have a gradient in their turn only
  turns = [row for row in history if _keys(row, 'heads/', '/grad_norm')]
  keys = _keys(turns[-1], 'heads/', '/grad_norm') if turns else []
  norms = {key: full_window(turns, key) for key in keys}
  if len(keys) < 2 or None in norms.values():
    return []
  middle = statistics.median(norms.values())
  return [
    Finding(
      key.split('/')[1],
      f'head {key.split("/")[1]} has a gradient norm of {norm:.2g}, the middle '
      f'one of the heads {middle:.2g}.',
    )
    for key, norm in norms.items()
    if norm < threshold * middle
  ]


def value_bias(history, about, threshold):
  """The value head is systematically off, after time to learn."""
  bias = full_window(history[2 * WINDOW :], 'value/bias')
  if bias is None or abs(bias) <= threshold:
    return []
  side = 'below' if bias > 0 else 'above'
  return [
    Finding(
      'value',
      f'the values lie {side} the returns by {abs(bias):.2g} of their own '
      f'deviations, mean of the last {WINDOW} steps.',
    )
  ]


def batch_small(history, about, threshold):
  """Statistics over too few rows; said once."""
  rows = about.prompts_per_step * about.group_size
  seen = {
    reward.name: rows
    * (1 - (history[0].get(f'rewards/{reward.name}/missing') or 0.0))
    for reward in _trained(history, about)
  }
  few = [f'{name} {n:.0f}' for name, n in seen.items() if n < threshold]
  if rows >= 8 * threshold and not few:
    return []
  sentence = (
    f'a step has {rows} rows ({about.prompts_per_step} prompts x '
    f'{about.group_size}); below {8 * threshold:g} the batch statistics and '
    'the gradient are noisy.'
  )
  if few:
    sentence += (
      f' Rewards with a value on fewer than {threshold:g} rows: '
      f'{", ".join(few)}.'
    )
  return [Finding('batch', sentence)]
