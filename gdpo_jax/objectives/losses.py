"""Policy losses over token log-probabilities, and what divides them.

  loss = sum over tokens of mask * per-token loss / denominator

The denominator belongs to the batch that one optimizer step sees and comes from
its masks, before the forward pass. Micro-batches then just add up, whatever
their sizes, and rows that are skipped because their advantage is 0 change
nothing. Shapes: logp, old_logp f32[N, Tc]; advantages f32[N], or f32[N, Tc];
mask bool[N, Tc]. Values off the mask have no influence, NaN included.
"""

import jax
import jax.numpy as jnp

from gdpo_jax.objectives.masked import Mean, masked_sum
from gdpo_jax.types import Array

# exp overflows float32 at 88.7; e^20 is far outside of any trust region. The
# argument is clamped, not the result: the gradient is then 0 and not inf * 0.
MAX_LOG_RATIO = 20.0


def token_denominator(mask: Array, *, axis_name: str | None = None) -> Array:
  """f32[]: the number of tokens; a mean over tokens (DAPO, arXiv:2503.14476)."""
  return jnp.maximum(_count(mask, axis_name), 1.0)


def row_denominator(mask: Array, *, axis_name: str | None = None) -> Array:
  """f32[N, 1]: rows * tokens of the row; the mean of row means (GRPO).

  Rows without tokens are not counted: a row that is masked out leaves the
  denominator as well.
  """
  lengths = jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.int32)
  rows = _count(lengths > 0, axis_name)
  return jnp.maximum(rows, 1.0) * jnp.maximum(lengths, 1).astype(jnp.float32)


def constant_denominator(
  mask: Array, length: int, *, axis_name: str | None = None
) -> Array:
  """f32[]: rows * `length` tokens (Dr. GRPO, arXiv:2503.20783, Listing 1).

  Args:
    length: the same for every batch, usually the limit on new tokens.
  """
  if length <= 0:
    raise ValueError(f'constant_denominator needs a length > 0, got {length}.')
  rows = _count(jnp.any(mask, axis=-1), axis_name)
  return jnp.maximum(rows, 1.0) * length


def clipped(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> Array:
  """`-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)` (PPO, DAPO).

  Args:
    clip_low, clip_high: PPO 0.2 and 0.2; "clip higher" of DAPO 0.2 and 0.28.
    dual_clip: c > 1 bounds what a negative advantage can cost at `c |A|`
      (arXiv:1912.09729; 3 there).
  Returns:
    f32[].
  """
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(f'dual_clip must be above 1, got {dual_clip}.')
  advantages = _per_token(advantages, mask)
  ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
  inside = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  gain = jnp.minimum(ratio * advantages, inside * advantages)
  if dual_clip is not None:
    bounded = jnp.maximum(gain, dual_clip * advantages)
    gain = jnp.where(advantages < 0, bounded, gain)
  return masked_sum(-gain / denominator, mask)


def clip_fractions(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
) -> dict[str, Mean]:
  """Shares of tokens whose gradient the clip removes.

  Returns:
    'low' (A < 0 below the band), 'high' (A > 0 above it), 'region' (either) and,
    with a dual clip, 'dual' (A < 0 beyond c), each a `Mean` over tokens.
  """
  advantages = _per_token(advantages, mask)
  ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
  low = (advantages < 0) & (ratio < 1 - clip_low)
  high = (advantages > 0) & (ratio > 1 + clip_high)
  fractions = {'low': low, 'high': high, 'region': low | high}
  if dual_clip is not None:
    fractions['dual'] = (advantages < 0) & (ratio > dual_clip)
  return {name: Mean.of(hit, mask) for name, hit in fractions.items()}


def entropy_bonus(
  entropy: Array, mask: Array, denominator: Array, coef: float | Array
) -> Array:
  """`-coef * entropy`, f32[]; added to a loss it rewards spread-out policies.

  Args:
    entropy: f32[N, Tc], nats.
  """
  return -coef * masked_sum(entropy / denominator, mask)


def _count(mask: Array, axis_name: str | None) -> Array:
  """Number of True; as an integer first: float32 is exact up to 2^24 only."""
  count = jnp.sum(mask, dtype=jnp.int32)
  if axis_name is not None:
    count = jax.lax.psum(count, axis_name)
  return count.astype(jnp.float32)


def _per_token(advantages: Array, mask: Array) -> Array:
  """f32[N, Tc]; constants to the gradient, 0 off the mask."""
  advantages = jax.lax.stop_gradient(advantages)
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  return jnp.where(mask, advantages, 0.0)


def _log_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
  difference = jnp.where(mask, logp - jax.lax.stop_gradient(old_logp), 0.0)
  return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


LOSSES = {'clipped': clipped}
