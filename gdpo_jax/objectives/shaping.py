"""What happens to rewards between the raw scores and the advantages.

  raw f32[N, K] --conditions--> --normalizer--> [P, G, K] --> advantages

Conditions and weights are declared on the rewards and carried out here and in
`schedules`; nowhere else. Raw rewards are never changed in place: what is
logged is what was scored. The formulas at the end make one more reward out of
numbers of a completion (its length, its token entropy, its likeness to others).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.objectives import masked
from gdpo_jax.types import Array

# --- conditions ------------------------------------------------------------

_COMPARE = {
  '>=': jnp.greater_equal,
  '<=': jnp.less_equal,
  '==': jnp.equal,
  '!=': jnp.not_equal,
  '>': jnp.greater,
  '<': jnp.less,
}
_CLAUSE = re.compile(
  r'\s*([A-Za-z_][\w./-]*)\s*(>=|<=|==|!=|>|<)\s*'
  r'([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*'
)


class Comparison(NamedTuple):
  """`name op threshold`, for instance `safety > 0.7`."""

  name: str
  op: str
  threshold: float


Condition = str | tuple[str, float] | Mapping[str, float] | None


def parse_condition(condition: Condition) -> tuple[Comparison, ...]:
  """The comparisons that must all hold.

  Args:
    condition: text, comparisons joined by `and` (`'correct>=1 and format>0'`);
      or thresholds to be reached, `('safety', 0.7)` or `{'safety': 0.7}`; or
      None.
  Raises:
    ValueError: text that cannot be read.
  """
  if condition is None:
    return ()
  if isinstance(condition, Mapping):
    pairs = condition.items()
  elif isinstance(condition, tuple):
    pairs = [condition]
  else:
    comparisons = []
    for clause in re.split(r'\band\b', condition):
      match = _CLAUSE.fullmatch(clause)
      if match is None:
        raise ValueError(
          f'cannot read {clause.strip()!r} in the condition {condition!r}; '
          "write comparisons with numbers, joined by 'and', as in "
          "'correct>=1 and format>0'."
        )
      name, op, threshold = match.groups()
      comparisons.append(Comparison(name, op, float(threshold)))
    return tuple(comparisons)
  return tuple(Comparison(name, '>=', float(at)) for name, at in pairs)


class Hierarchy(NamedTuple):
  """Checked conditions: who waits for whom, conditions before conditioned."""

  names: tuple[str, ...]
  comparisons: tuple[tuple[Comparison, ...], ...]  # one entry per reward
  order: tuple[int, ...]


def make_hierarchy(
  names: Sequence[str], conditions: Sequence[Condition]
) -> Hierarchy:
  """Checks that conditions name rewards that exist and do not run in a circle.

  Args:
    names: the K rewards.
    conditions: one per reward, in the same order; None for none.
  Raises:
    ValueError: unknown name, cycle, or another number of conditions.
  """
  names = tuple(names)
  if len(conditions) != len(names):
    raise ValueError(
      f'got {len(conditions)} conditions for {len(names)} rewards {names}; '
      'give each reward one, or None.'
    )
  comparisons = tuple(parse_condition(condition) for condition in conditions)
  waits = {}
  for name, needed in zip(names, comparisons, strict=True):
    for other in needed:
      if other.name not in names:
        raise ValueError(
          f'the condition of reward {name!r} names {other.name!r}, which is '
          f'not a reward; there are {", ".join(names)}.'
        )
    waits[name] = {other.name for other in needed}
  order = []
  while waits:
    ready = [name for name, on in waits.items() if not on & waits.keys()]
    if not ready:
      raise ValueError(
        'conditions run in a circle: ' + ' -> '.join(_circle(waits)) + '; '
        'rewards must form a hierarchy, such as safety -> correct -> length.'
      )
    order += [names.index(name) for name in ready]
    waits = {name: on for name, on in waits.items() if name not in ready}
  return Hierarchy(names, comparisons, tuple(order))


class Conditioned(NamedTuple):
  """Rewards after their conditions."""

  values: Array  # f32[..., K]
  valid: Array  # bool[..., K]
  held: Array  # bool[..., K], the condition could be judged and held


def apply_conditions(
  hierarchy: Hierarchy, values: Array, valid: Array, mode: str = 'zero'
) -> Conditioned:
  """A reward counts only where its condition holds.

  Conditions are judged on rewards that already went through theirs: where
  safety fails, correctness does not count, and so nor does a length that asks
  for correctness. A condition on a missing value makes the reward missing, in
  either mode; what is missing stays missing.

  Args:
    values: f32[..., K]; valid: bool[..., K].
    mode: where the condition fails, the value becomes 0 ('zero', GDPO paper
      Eq. 8), or missing ('missing'), so that it leaves the statistics.
  """
  if mode not in ('zero', 'missing'):
    raise ValueError(f"mode must be 'zero' or 'missing', got {mode!r}.")
  values = jnp.asarray(values, jnp.float32)
  if values.shape[-1:] != (len(hierarchy.names),):
    raise ValueError(
      f'values of shape {values.shape} do not end in the '
      f'{len(hierarchy.names)} rewards {hierarchy.names}.'
    )
  valid = jnp.asarray(valid) & jnp.isfinite(values)
  value = list(jnp.moveaxis(jnp.where(valid, values, 0.0), -1, 0))
  exists = list(jnp.moveaxis(valid, -1, 0))
  held = list(exists)
  for k in hierarchy.order:
    known = jnp.ones_like(exists[k])
    holds = known
    for name, op, threshold in hierarchy.comparisons[k]:
      j = hierarchy.names.index(name)
      known &= exists[j]
      holds &= _COMPARE[op](value[j], threshold)
    held[k] = known & holds
    exists[k] &= held[k] if mode == 'missing' else known
    value[k] = jnp.where(exists[k] & held[k], value[k], 0.0)
  return Conditioned(*(jnp.stack(x, axis=-1) for x in (value, exists, held)))


def calibrate_threshold(
  values, low_percentile: float = 60.0, high_percentile: float = 80.0
) -> tuple[float, float]:
  """A band for the threshold of a condition, from a finished run.

  Args:
    values: what a policy trained on that reward alone scored, any shape; NaN is
      missing.
  Returns:
    the 60th and the 80th percentile, between which a threshold is neither met
    by nearly everything nor by nearly nothing.
  """
  values = np.asarray(values, np.float64)
  values = values[np.isfinite(values)]
  if not values.size:
    raise ValueError('calibrate_threshold got no value that exists.')
  low, high = np.percentile(values, [low_percentile, high_percentile])
  return float(low), float(high)


def _circle(waits: dict[str, set[str]]) -> list[str]:
  """A circle in which each reward waits for the next one."""
  path = [next(iter(waits))]
  while True:
    path.append(min(waits[path[-1]] & waits.keys()))
    if path[-1] in path[:-1]:
      return path[path.index(path[-1]) :]


# --- normalizers -----------------------------------------------------------


class NormalizerState(NamedTuple):
  """Running statistics of the raw rewards, f32[K] each."""

  mean: Array
  variance: Array
  batches: Array  # how many batches had this reward


class Normalizer(NamedTuple):
  """Pure functions; `update` once per step, `apply` as often as needed."""

  init: Callable[[], NormalizerState]
  update: Callable[[NormalizerState, Array, Array], NormalizerState]
  apply: Callable[[NormalizerState, Array, Array], Array]


def make_normalizer(
  kinds: Sequence[str], decay: float = 0.9, eps: float = 1e-4
) -> Normalizer:
  """Brings raw rewards to a common scale before anything else.

  Args:
    kinds: one per reward. 'none'; 'sigmoid'; 'running': less the running mean,
      divided by the running std (exponential averages of the batch's mean and
      variance; the first batch starts them; a batch in which a reward is
      missing leaves its averages alone). What has been constant so far is not
      divided.
    decay: weight of the past in the averages.
  Returns:
    init() -> state; update(state, values f32[..., K], valid) -> state;
    apply(state, values, valid) -> f32[..., K], 0 where missing.
  """
  unknown = set(kinds) - {'none', 'sigmoid', 'running'}
  if unknown:
    raise ValueError(
      f'unknown normalizer {sorted(unknown)}; there are none, sigmoid, running.'
    )
  running = np.array([kind == 'running' for kind in kinds])
  squash = np.array([kind == 'sigmoid' for kind in kinds])

  def init():
    zeros = jnp.zeros(len(kinds))
    return NormalizerState(zeros, jnp.ones(len(kinds)), zeros)

  def check(values):
    if values.shape[-1:] != (len(kinds),):
      raise ValueError(
        f'values of shape {values.shape} do not end in the {len(kinds)} '
        f'rewards that have a normalizer ({", ".join(kinds)}).'
      )

  def update(state, values, valid):
    check(values)
    axes = tuple(range(values.ndim - 1))
    batch = masked.moments(values, valid, axes, ddof=0)
    count, mean, std = (
      x.reshape(-1) for x in (batch.count, batch.mean, batch.std)
    )
    keep = jnp.where(state.batches > 0, decay, 0.0)
    keep = jnp.where(count > 0, keep, 1.0)
    return NormalizerState(
      mean=keep * state.mean + (1 - keep) * mean,
      variance=keep * state.variance + (1 - keep) * jnp.square(std),
      batches=state.batches + (count > 0),
    )

  def apply(state, values, valid):
    check(values)
    values = jnp.where(valid, values, 0.0)
    std = jnp.sqrt(state.variance)
    scaled = (values - state.mean) / jnp.where(std > 0, std + eps, 1.0)
    values = jnp.where(running, scaled, values)
    values = jnp.where(squash, jax.nn.sigmoid(values), values)
    return jnp.where(valid, values, 0.0)

  return Normalizer(init, update, apply)


def system_reward(values: Array, valid: Array, weights: Array) -> Array:
  """`sum w r / sum |w|` over the rewards that exist: f32[...]; NaN where none.

  One number per row for logs and for picking samples.
  """
  if jnp.shape(weights) != values.shape[-1:]:
    raise ValueError(
      f'got weights of shape {jnp.shape(weights)} for {values.shape[-1]} '
      'rewards; give each reward exactly one weight.'
    )
  valid = valid & (weights != 0)
  share = jnp.where(valid, jnp.abs(weights), 0.0)
  total = jnp.sum(jnp.where(valid, values * weights, 0.0), axis=-1)
  mean = masked.safe_divide(total, jnp.sum(share, axis=-1))
  return jnp.where(jnp.any(valid, axis=-1), mean, jnp.nan)


# --- one more reward out of numbers of a completion --------------------------


def overlong_penalty(
  num_tokens: Array, *, limit_tokens: int | None, margin_tokens: int = 0
) -> Array:
  """Soft penalty for completions that run into the limit (DAPO, Eq. 13).

  arXiv:2503.14476. 0 up to `limit - margin`, then linear down to -1 at the
  limit, -1 beyond; with margin 0 a hard cut: 0 up to and including the limit,
  -1 beyond.

  Args:
    num_tokens: i32[...], completion lengths in tokens, EOS included; the prompt
      does not count.
    limit_tokens: None switches the penalty off.
  Returns:
    f32[...], in [-1, 0].
  """
  num_tokens = jnp.asarray(num_tokens, jnp.float32)
  if limit_tokens is None:
    return jnp.zeros_like(num_tokens)
  if not 0 <= margin_tokens <= limit_tokens:
    raise ValueError(
      f'margin_tokens must be between 0 and limit_tokens ({limit_tokens}), got '
      f'{margin_tokens}.'
    )
  if margin_tokens == 0:
    return jnp.where(num_tokens > limit_tokens, -1.0, 0.0)
  over = num_tokens - (limit_tokens - margin_tokens)
  return -jnp.clip(over / margin_tokens, 0.0, 1.0)


def efficiency(num_tokens: Array) -> Array:
  """`1 / (1 + log(1 + tokens))`, f32[...]: 1 for none, 0.18 for 100 tokens."""
  return 1.0 / (1.0 + jnp.log1p(jnp.asarray(num_tokens, jnp.float32)))


def coherence(entropy: Array) -> Array:
  """`1 - sigmoid(entropy)`: 0.5 for a certain policy, towards 0; f32[...].

  Args:
    entropy: f32[...], mean token entropy of the completion in nats.
  """
  return jax.nn.sigmoid(-jnp.asarray(entropy, jnp.float32))


def diversity(novelty: Array) -> Array:
  """`log(1 + novelty)` for a novelty of at least 0; f32[...]."""
  return jnp.log1p(jnp.asarray(novelty, jnp.float32))


def recent_diversity(cosines: Array, scale: float = 0.03) -> Array:
  """`scale (1 - mean cos)` against the last (five) responses; f32[...].

  Args:
    cosines: f32[..., M], similarity to each of them; NaN where there was none.
      With no earlier response at all: 0.
  """
  exists = jnp.isfinite(cosines)
  distance = 1.0 - jnp.where(exists, cosines, 1.0)
  return scale * masked.masked_mean(distance, exists, -1)


def generalized_reward(reward: Array, entropy: Array, novelty: Array) -> Array:
  """`0.7 r + 0.2 coherence(entropy) + 0.1 diversity(novelty)`; f32[...]."""
  return 0.7 * reward + 0.2 * coherence(entropy) + 0.1 * diversity(novelty)
