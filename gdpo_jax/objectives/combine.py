"""What every aggregator shares: checks, group statistics, the batch step.

  rewards f32[P, G, K] --group_normalize--> z-scores f32[P, G, K]
  either, weighted --weighted_sum--> Combined [P, G] --batch_step--> f32[P, G]

Groups are an axis of the array and never split. Statistics over the batch are
over all P; inside `shard_map`, `axis_name` names the axis that shards P.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.objectives import masked
from gdpo_jax.types import Array

# Beyond this, squares and sums over a batch leave float32 behind; the rewards
# pipeline has the same bound.
_LARGEST = 1e12


def prepare(
  rewards: Array, valid: Array | None, weights: Array | None = None
) -> tuple[Array, Array, Array]:
  """Checked float32 arrays through which no gradient flows; 0 where missing.

  NaN, inf and values beyond 1e12 count as missing whatever `valid` says, and so
  does a reward of weight 0, which is there to be looked at only. `valid=None`
  says nothing; `weights=None` weighs every reward 1.
  """
  rewards = jax.lax.stop_gradient(jnp.asarray(rewards, jnp.float32))
  if rewards.ndim != 3:
    raise ValueError(
      'rewards must be [prompts, samples per prompt, rewards], got shape '
      f'{rewards.shape}; reshape [N, K] to [P, G, K] with N = P * G.'
    )
  if weights is None:
    weights = jnp.ones(rewards.shape[-1])
  weights = jax.lax.stop_gradient(jnp.asarray(weights, jnp.float32))
  if weights.shape != rewards.shape[-1:]:
    raise ValueError(
      f'got {weights.size} weights (shape {weights.shape}) for '
      f'{rewards.shape[-1]} rewards; give each reward exactly one weight.'
    )
  exists = (jnp.abs(rewards) <= _LARGEST) & (weights != 0)
  if valid is not None:
    valid = jnp.asarray(valid, bool)
    if valid.shape != rewards.shape:
      raise ValueError(
        f'valid has shape {valid.shape}, rewards {rewards.shape}; they must '
        'be equal.'
      )
    exists &= valid
  return jnp.where(exists, rewards, 0.0), exists, weights


def group_normalize(
  rewards: Array, valid: Array | None, *, eps: float = 1e-4, ddof: int = 1
) -> Array:
  """Z-score of every reward inside its group: f32[P, G, K].

  0 where missing, where the group is constant, and where it has one value.
  Values a few float32 roundings apart are constant: the rounding of a judge is
  no signal, and the batch step would make one of it.
  """
  rewards, valid, _ = prepare(rewards, valid)
  terms = jnp.abs(rewards)
  group = masked.moments(rewards, valid, axis=1, ddof=ddof, terms=terms)
  return masked.safe_divide(group.centred, group.std + eps)


class Combined(NamedTuple):
  """One value per row, made of several rewards."""

  values: Array  # f32[P, G], 0 where not valid
  terms: Array  # f32[P, G], sum of the absolute terms: the scale of rounding
  valid: Array  # bool[P, G]


def scored(valid: Array, weights: Array) -> Array:
  """bool[P, G]: rows that at least one reward of weight other than 0 scored.

  The others have advantage 0 and do not belong in the loss mask either.
  """
  return jnp.any(valid & (weights != 0), axis=-1)


def weighted_sum(
  x: Array, valid: Array, weights: Array, renormalize: bool = False
) -> Combined:
  """`sum_k w_k x_k` over what exists; `renormalize` divides by `sum_k |w_k|`.

  Not an einsum: accelerators round the inputs of a matrix product to bfloat16.
  """
  parts = jnp.where(valid, x * weights, 0.0)
  values, terms = jnp.sum(parts, axis=-1), jnp.sum(jnp.abs(parts), axis=-1)
  if renormalize:
    present = jnp.sum(jnp.where(valid, jnp.abs(weights), 0.0), axis=-1)
    values = masked.safe_divide(values, present)
    terms = masked.safe_divide(terms, present)
  return Combined(values, terms, jnp.any(valid, axis=-1))


def single(values: Array, valid: Array) -> Combined:
  """Values that are not the sum of anything any more."""
  return Combined(values, jnp.abs(values), valid)


def within_group(combined: Combined, ddof: int = 1) -> masked.Moments:
  """Moments over the group; a group that cancels is exactly constant."""
  values, terms, valid = combined
  return masked.moments(values, valid, axis=1, ddof=ddof, terms=terms)


def settle(combined: Combined) -> Combined:
  """Groups whose rows differ by no more than rounding become exactly 0.

  Z-scores that cancel leave 1e-7, which the batch step would blow up.
  """
  varies = within_group(combined).varies
  return combined._replace(values=jnp.where(varies, combined.values, 0.0))


def over_batch(
  combined: Combined, ddof=1, mask=None, axis_name=None
) -> masked.Moments:
  """Moments over all rows, or over all tokens where a `mask` is given."""
  values, terms, valid = combined
  tokens = None
  if mask is not None:
    if mask.shape[:-1] not in (values.shape, (values.size,)):
      raise ValueError(
        f'the mask has shape {mask.shape}; for {values.shape[0]} groups of '
        f'{values.shape[1]} rows it must be [{values.size}, tokens] or '
        f'[{values.shape[0]}, {values.shape[1]}, tokens].'
      )
    tokens = jnp.sum(mask.reshape(*values.shape, -1), axis=-1)
    valid = valid & (tokens > 0)
  return masked.moments(
    values,
    valid,
    axis=(0, 1),
    ddof=ddof,
    repeats=tokens,
    terms=terms,
    axis_name=axis_name,
  )


def batch_step(
  combined: Combined,
  whiten: str,
  eps: float,
  ddof: int,
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`(a - mean a) / (std a + eps)` over the batch: f32[P, G].

  Rows that do not count have 0 and no part in it. Where groups are centred, the
  mean over sequences is 0 but for rounding; it is then taken as 0, so that a
  group without signal stays at exactly 0.
  """
  if whiten == 'none':
    return jnp.where(combined.valid, combined.values, 0.0)
  if whiten == 'sequence':
    mask = None
  elif whiten != 'token':
    raise ValueError(
      f"whiten must be 'none', 'sequence' or 'token', got {whiten!r}."
    )
  elif mask is None:
    raise ValueError("whiten='token' needs the completion mask: pass mask=...")
  batch = over_batch(combined, ddof, mask, axis_name)
  scale = jnp.max(jnp.where(combined.valid, combined.terms, 0.0))
  if axis_name is not None:
    scale = jax.lax.pmax(scale, axis_name)
  centred = jnp.where(
    masked.negligible(batch.mean, scale) & (batch.centred != 0),
    combined.values,
    batch.centred,
  )
  return masked.safe_divide(centred, batch.std + eps)


def correlations(
  x: Array, valid: Array, axis, axis_name: str | None = None
) -> Array:
  """Pearson correlations of the K columns of `x` over `axis`: f32[..., K, K].

  Each pair is judged on the rows that have both. Where one of the two does not
  vary, the correlation is 0, its own included. `axis` keeps size-1 dims.
  """
  both = valid[..., :, None] & valid[..., None, :]
  own = jnp.broadcast_to(x[..., :, None], both.shape)
  centred = masked.moments(own, both, axis, axis_name=axis_name).centred
  other = jnp.swapaxes(centred, -1, -2)

  def total(y):
    return masked.masked_sum(y, True, axis, keepdims=True, axis_name=axis_name)

  norm = jnp.sqrt(total(jnp.square(centred)))
  return masked.safe_divide(
    total(centred * other), norm * jnp.swapaxes(norm, -1, -2)
  )
