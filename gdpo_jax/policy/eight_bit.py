"""Parameters in 8 bits: what a past policy is kept in.

Matrices are scaled per channel, the last axis, and per layer where layers are
stacked; vectors (norms, biases) stay float32. Of a value x in a channel whose
largest absolute value is m, the error is at most

  int8  m / 254                                   (even steps of m / 127)
  fp8   |x| / 16, or m / 458752 close to zero     (e4m3: three bits of mantissa)

so int8 is closer on average for weights that fill their range, fp8 for channels
with a few large values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.types import Array

# largest number of each format
_TOP = {'fp8': 448.0, 'int8': 127.0}
FORMATS = tuple(_TOP)


class EightBit(NamedTuple):
  """A matrix, or a stack of them: values * scale."""

  values: Array  # int8 or float8_e4m3fn, [..., in, out]
  scale: Array  # f32[..., 1, out]


def quantize(params: Any, kind: str = 'int8') -> Any:
  """The same tree with an `EightBit` in the place of every matrix.

  Raises:
    ValueError: an unknown format.
  """
  if kind not in _TOP:
    raise ValueError(f'the format is {kind!r}; choose from {", ".join(_TOP)}.')

  def one(x):
    if x.ndim < 2:
      return x
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    scale = jnp.where(largest > 0, largest / _TOP[kind], 1.0)
    if kind == 'int8':
      return EightBit(jnp.round(x / scale).astype(jnp.int8), scale)
    return EightBit((x / scale).astype(jnp.float8_e4m3fn), scale)

  return jax.tree.map(one, params)


def by_row(x: Array) -> tuple[Array, Array]:
  """int8[out, in] and f32[out] of f32[out, in]: values times the row's scale."""
  largest = jnp.max(jnp.abs(x), axis=1)
  scale = jnp.where(largest > 0, largest / _TOP['int8'], 1.0)
  return jnp.round(x / scale[:, None]).astype(jnp.int8), scale


def restore(kept: Any) -> Any:
  """The tree in float32."""

  def one(x):
    if isinstance(x, EightBit):
      return x.values.astype(jnp.float32) * x.scale
    return x

  return jax.tree.map(one, kept, is_leaf=lambda x: isinstance(x, EightBit))


def relative_error(params: Any, kept: Any) -> Array:
  """f32[], the norm of the difference over the norm of the parameters."""
  squares = [
    (jnp.sum(jnp.square(a - b)), jnp.sum(jnp.square(a)))
    for a, b in zip(
      jax.tree.leaves(params), jax.tree.leaves(restore(kept)), strict=True
    )
  ]
  lost, total = (sum(x) for x in zip(*squares, strict=True))
  return jnp.sqrt(lost / jnp.maximum(total, 1e-30))
