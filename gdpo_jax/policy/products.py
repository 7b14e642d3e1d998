"""Matrix products whose inputs are rounded, and whose sums are not.

multiply  two matrices: inputs in `dtype`, sums and result in float32
dense     a layer of it, whose backward products are rounded in the same way
          (plain autodiff would multiply float32 cotangents)
project   the same for a few rows, with the weight stored the other way round
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from gdpo_jax import sharding
from gdpo_jax.types import Array

# From here on the work on the rows outweighs the copy of the weight.
MANY_ROWS = 256


def multiply(
  a: Array, b: Array, dtype=None, contract: tuple[int, int] = (1, 0)
) -> Array:
  """f32 product of two matrices over one axis of each.

  Args:
    a: [A, C], or [C, A] with contract[0] == 0.
    b: [C, B], or [B, C] with contract[1] == 1.
    dtype: of the inputs; None: that of b.
    contract: the axis of a and that of b to sum over.
  """
  dtype = jnp.dtype(b.dtype if dtype is None else dtype)
  a, b = a.astype(dtype), b.astype(dtype)
  if dtype == jnp.float32:
    return _dot(a, b, contract)
  return _by_platform(
    a,
    b,
    cpu=functools.partial(_dot_cpu, contract=contract),
    default=functools.partial(_dot, contract=contract),
  )


def _dot(a, b, contract):
  dimensions = (((contract[0],), (contract[1],)), ((), ()))
  return jax.lax.dot_general(
    a, b, dimensions, preferred_element_type=jnp.float32
  )


def _dot_cpu(a, b, contract):
  """The same with operands and result laid out in memory as they are indexed.

  XLA:CPU has fast bfloat16 kernels (AMX) for operands in row-major layout that
  are not summed over the first axis of `a`; every other case runs in float32,
  20 times slower, or not at all. So transposes are made in memory, and none is
  folded into the product.
  """
  if contract[0] == 0:
    # Laid out before and after: a transpose with nothing else fused into it is
    # tiled, and 5 to 20 times faster.
    a, contract = _row_major(a).T, (1, contract[1])
  return _row_major(_dot(_row_major(a), _row_major(b), contract))


def _by_platform(*arrays, cpu, default):
  """What `cpu` makes of the arrays on a single CPU, else what `default` does.

  On a mesh as well: the partitioner does not split what has a layout, every
  device would get all rows and compute the whole product.
  """
  if sharding.num_devices() > 1:
    return default(*arrays)
  return jax.lax.platform_dependent(*arrays, cpu=cpu, default=default)


def _row_major(x):
  return with_layout_constraint(x, Layout(major_to_minor=(0, 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dense(x: Array, w: Array, dtype=None) -> Array:
  """f32[..., B] = x f32[..., A] times w [A, B], inputs rounded to `dtype`.

  None: to the dtype of w. Differentiable where w is float32.
  """
  y = multiply(x.reshape(-1, x.shape[-1]), w, dtype)
  return y.reshape(*x.shape[:-1], w.shape[-1])


def _dense_fwd(x, w, dtype):
  # x is kept rounded; w is rounded again, its master is alive anyway. The bits
  # of a bfloat16 are kept as integers: a loop of XLA:CPU that stacks bfloat16
  # values converts the whole stack to float32 and back in every iteration.
  kept = x
  if jnp.dtype(dtype or w.dtype) == jnp.bfloat16:
    kept = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
  return dense(x, w, dtype), (kept, w)


def _dense_bwd(dtype, residual, g):
  x, w = residual
  if x.dtype == jnp.uint16:
    x = jax.lax.bitcast_convert_type(x, jnp.bfloat16)
  g = g.reshape(-1, g.shape[-1])
  dx = multiply(g, w, dtype, (1, 1)).reshape(x.shape)
  dw = multiply(x.reshape(-1, x.shape[-1]), g, dtype or w.dtype, (0, 0))
  return dx, dw


dense.defvjp(_dense_fwd, _dense_bwd)


def project(x: Array, w: Array, scale: Array | None = None) -> Array:
  """f32[..., B] = x f32[..., A] times w [B, A] transposed, in the dtype of w.

  An int8 w has a `scale` f32[B], of each row: it is read as it is and multiplied
  in bfloat16, which holds all of its values, and the result is scaled.

  For a rollout, where x has few rows and the cost is reading w: XLA:CPU copies
  the right side of a product into another layout first, but not the left one
  (32 rows x 576 x 3072: 0.7 ms against 1.1 on one core).
  """
  if scale is not None:
    w = w.astype(jnp.bfloat16)
  rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
  y = _by_platform(
    rows, w, cpu=_project_cpu, default=functools.partial(_dot, contract=(1, 1))
  )
  if scale is not None:
    y *= scale
  return y.reshape(*x.shape[:-1], w.shape[0])


def _project_cpu(x, w):
  """Measured with 32 rows, weights that do not fit a cache, two cores."""
  outputs, inputs = w.shape
  # 0.76 ms against 0.97 with w on the left (3072 x 576), 0.25 against 0.30
  # (960 x 576); bfloat16 is faster with w on the left.
  by_row = outputs >= inputs and w.dtype == jnp.float32
  if x.shape[0] > MANY_ROWS or by_row:
    return _row_major(_dot(_row_major(x), w, (1, 1)))
  if inputs > outputs:
    # What comes from a product lies by columns: no need to turn it around.
    return _row_major(_dot(w, _row_major(x.T), (1, 0))).T
  return _row_major(_dot(w, _row_major(x), (1, 1))).T


def by_rows(x: Array) -> Array:
  """The same, laid out by rows on a CPU, where `project` leaves columns.

  For what is then cut into heads: a tiled transpose first, and everything after
  it reads in order (rotation and cache of a layer: 0.27 ms to 0.15).
  """
  rows = x.reshape(-1, x.shape[-1])
  rows = _by_platform(rows, cpu=_row_major, default=lambda x: x)
  return rows.reshape(x.shape)


def turned(x: Array) -> Array:
  """A matrix transposed in memory, once; a vector as it is."""
  if x.ndim < 2:
    return x
  return _by_platform(
    x, cpu=lambda x: _row_major(_row_major(x).T), default=lambda x: x.T
  )
