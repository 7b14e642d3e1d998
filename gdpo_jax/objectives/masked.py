"""Statistics over what exists: masked, two-pass, in float32, never NaN.

Everything that normalizes goes through `moments`, so that three rules hold
everywhere: what is off the mask has no influence (NaN and inf included), a set
of equal values has a spread of exactly 0 (decided by max == min: eight 0.1s
have a float32 std of 8e-9, which a small eps would blow up to a signal), and a
sum over the batch is a sum over every device when `axis_name` is given.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.types import Array

# What is left of a sum whose terms cancel, in units of float32 rounding of the
# largest sum of absolute terms. Measured on a million cancelling groups of up
# to 256 rows and 8 rewards: at most 2.6.
_RESIDUE = 8 * float(jnp.finfo(jnp.float32).eps)


def safe_divide(numerator: Array, denominator: Array) -> Array:
  """`numerator / denominator`, and 0 (with gradient 0) where that is x / 0."""
  nonzero = denominator != 0
  return jnp.where(nonzero, numerator / jnp.where(nonzero, denominator, 1), 0.0)


def masked_sum(x, mask, axis=None, *, keepdims=False, axis_name=None) -> Array:
  """Sum of `x` where `mask`; f32, 0 for nothing. NaN off the mask is inert."""
  x = jnp.where(mask, jnp.asarray(x, jnp.float32), 0.0)
  total = jnp.sum(x, axis=axis, keepdims=keepdims)
  return total if axis_name is None else jax.lax.psum(total, axis_name)


def count(mask, axis=None, *, keepdims=False, axis_name=None) -> Array:
  """How many are True; f32, but counted as integers: float32 ends at 2^24."""
  total = jnp.sum(mask, axis=axis, keepdims=keepdims, dtype=jnp.int32)
  if axis_name is not None:
    total = jax.lax.psum(total, axis_name)
  return total.astype(jnp.float32)


def masked_mean(x, mask, axis=None, *, keepdims=False, axis_name=None) -> Array:
  """Mean of `x` where `mask`; f32. Nothing there: 0."""
  over = {'axis': axis, 'keepdims': keepdims, 'axis_name': axis_name}
  mask = jnp.broadcast_to(mask, jnp.shape(x))
  return safe_divide(masked_sum(x, mask, **over), count(mask, **over))


def masked_std(
  x, mask, axis=None, *, ddof=1, keepdims=False, axis_name=None
) -> Array:
  """Standard deviation of `x` where `mask`, two-pass; f32.

  Exactly 0 where all values are equal or there are no more than `ddof` of them.
  """
  std = moments(x, mask, axis, ddof=ddof, axis_name=axis_name).std
  return std if keepdims else jnp.squeeze(std, axis)


class Moments(NamedTuple):
  """First two moments over some axes; all but `centred` keep dims of size 1."""

  centred: Array  # x minus its mean; 0 off the mask and where x is constant
  mean: Array
  std: Array  # 0 where x is constant
  count: Array  # f32, how many values (or how much `repeats`) the mask leaves
  varies: Array  # bool, not all values are equal


def moments(
  x: Array,
  mask: Array,
  axis=None,
  *,
  ddof: int = 1,
  repeats: Array | None = None,
  terms: Array | None = None,
  axis_name: str | None = None,
) -> Moments:
  """Mean, deviations and std of `x` over `axis` where `mask`.

  The mean is refined by the mean of the deviations from it, whose error is
  relative to them: a reward of 1e4 + {0, 1} has the deviations of {0, 1}.

  Args:
    x: [...], any float or integer type; computed in float32.
    mask: bool[...], broadcastable to x.
    axis: int, tuple or None (all axes).
    ddof: std divides by count - ddof.
    repeats: f32[...], how often each value counts (token statistics of row
      values); once by default.
    terms: f32[...], where x is a sum whose terms may cancel, the sum of their
      absolute values: a spread within a few float32 roundings of it is rounding
      residue and counts as constant.
    axis_name: mapped axis whose devices hold the other shares of `axis`.
  """
  x = jnp.asarray(x, jnp.float32)
  mask = jnp.broadcast_to(mask, x.shape)

  def over(reduce, collective, values):
    values = reduce(values, axis=axis, keepdims=True)
    return values if axis_name is None else collective(values, axis_name)

  low = over(jnp.min, jax.lax.pmin, jnp.where(mask, x, jnp.inf))
  high = over(jnp.max, jax.lax.pmax, jnp.where(mask, x, -jnp.inf))
  varies = high > low  # nothing there: -inf > inf
  if terms is not None:
    terms = jnp.where(mask, jnp.asarray(terms, jnp.float32), 0.0)
    residue = _RESIDUE * over(jnp.max, jax.lax.pmax, terms)
    varies &= jnp.where(varies, high - low, 0.0) > residue
  if repeats is None:
    repeats, size = mask, count(mask, axis, keepdims=True, axis_name=axis_name)
  else:
    repeats = jnp.where(mask, repeats, 0.0)
    size = over(jnp.sum, jax.lax.psum, repeats)

  def mean_of(values):
    return safe_divide(over(jnp.sum, jax.lax.psum, repeats * values), size)

  x = jnp.where(mask, x, 0.0)
  rough = mean_of(x)
  centred = jnp.where(mask, x - rough, 0.0)
  correction = mean_of(centred)
  centred = jnp.where(mask & varies, centred - correction, 0.0)
  squares = over(jnp.sum, jax.lax.psum, repeats * jnp.square(centred))
  variance = squares / jnp.maximum(size - ddof, 1.0)
  # sqrt has no derivative at 0, so 0 does not go through it
  positive = variance > 0
  std = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1.0)), 0.0)
  return Moments(centred, rough + correction, std, size, varies)


def negligible(x: Array, terms: Array) -> Array:
  """bool[...]: `x` is what rounding leaves of `terms` that cancel."""
  return jnp.abs(x) <= _RESIDUE * terms


class Mean(NamedTuple):
  """A mean in the making: both fields add over micro-batches and devices.

  `jax.tree.map(jnp.add, a, b)` merges two, `.value` reads one.
  """

  total: Array
  count: Array

  @classmethod
  def of(cls, x: Array, mask: Array | None = None) -> 'Mean':
    """The sum and the number of the entries of `x` where `mask`."""
    mask = jnp.ones(jnp.shape(x), bool) if mask is None else mask
    mask = jnp.broadcast_to(mask, jnp.shape(x))
    return cls(masked_sum(x, mask), count(mask))

  @property
  def value(self) -> Array:
    """total / count; 0 where nothing was counted."""
    return safe_divide(self.total, self.count)
