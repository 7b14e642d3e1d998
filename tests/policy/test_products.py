"""Products with rounded inputs: values, gradients, and transposes around them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from gdpo_jax.policy import products

BF16 = jnp.bfloat16


def matrices(*shapes):
  keys = jax.random.split(jax.random.key(0), len(shapes))
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


def rounded(x):
  """To bfloat16 and back, so that a float64 product is the exact answer."""
  return np.asarray(x.astype(BF16), np.float64)


def check(got, expected):
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('contract', [(1, 0), (1, 1), (0, 0), (0, 1)])
def test_multiply_rounds_inputs_and_sums_in_float32(contract):
  shape = (300, 64), (64, 130)
  a, b = matrices(shape[0], shape[1])
  expected = rounded(a) @ rounded(b)
  if contract[0] == 0:
    a = a.T
  if contract[1] == 1:
    b = b.T
  check(products.multiply(a, b, BF16, contract), expected)
  exact = np.asarray(a, np.float64), np.asarray(b, np.float64)
  expected = np.tensordot(*exact, axes=contract)
  check(products.multiply(a, b, jnp.float32, contract), expected)


def test_transposes_and_layouts_around_a_product():
  """What simplification may fold into a product must not change its kernel.

  XLA:CPU refuses at run time a bfloat16 product that became one over the first
  axis of its left side after it had been promised a fast kernel.
  """
  x, w = matrices((96, 64), (64, 130))
  expected = rounded(x) @ rounded(w)

  @jax.jit
  def forms(x, w):
    return (
      products.multiply(jnp.maximum(x.T, -9.0), w, BF16, (0, 0)),
      products.multiply(x, w, BF16).T,
      jnp.maximum(products.multiply(x.T, w, BF16, (0, 0)).T, -1e9),
      products.multiply(x, w.T.astype(BF16), BF16, (1, 1)),
      jax.lax.scan(  # of one iteration, which is inlined
        lambda c, rows: (c, products.multiply(rows, w.T, BF16, (1, 1))),
        None,
        x[None],
      )[1][0],
    )

  a, b, c, d, e = forms(x, w)
  for got in (a, b.T, c.T, d, e):
    check(got, expected)


@pytest.mark.parametrize('dtype', [jnp.float32, BF16])
def test_dense_rounds_both_gradients(dtype):
  x, w, g = matrices((2, 48, 64), (64, 130), (2, 48, 130))
  y, pull = jax.vjp(lambda x, w: products.dense(x, w, dtype), x, w)
  dx, dw = jax.jit(pull)(g)
  exact = [np.asarray(m.astype(dtype), np.float64) for m in (x, w, g)]
  x64, w64, g64 = exact
  check(y, x64 @ w64)
  check(dx, g64 @ w64.T)
  check(dw, np.einsum('abi,abj->ij', x64, g64))


@pytest.mark.parametrize('dtype', [jnp.float32, BF16])
@pytest.mark.parametrize('num_rows', [1, 32, products.MANY_ROWS + 8])
@pytest.mark.parametrize('outputs', [32, 96, 130])
def test_project_reads_the_weight_transposed(num_rows, outputs, dtype):
  """Narrower than its input, a little wider, and more than twice as wide."""
  x, w = matrices((num_rows, 64), (outputs, 64))
  got = jax.jit(lambda x, w: products.by_rows(products.project(x, w)))(
    x[:, None], w.astype(dtype)
  )
  exact = [np.asarray(m.astype(dtype), np.float64) for m in (x, w)]
  check(got[:, 0], exact[0] @ exact[1].T)


def test_sharded_rows_or_weights():
  """Over four devices, split either way, in values and gradients."""
  mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
  x, w = matrices((64, 32), (32, 128))

  @jax.jit
  def loss(x, w):
    y = products.dense(x, w, BF16)
    return jnp.sum(jnp.sin(y)) + jnp.sum(products.project(y, w.astype(BF16)))

  gradient = jax.jit(jax.grad(loss, (0, 1)))
  expected = gradient(x, w)
  for spec_x, spec_w in (
    (Spec('data'), Spec()),
    (Spec(), Spec(None, 'data')),
    (Spec('data'), Spec('data')),
  ):
    placed = [
      jax.device_put(m, NamedSharding(mesh, spec))
      for m, spec in ((x, spec_x), (w, spec_w))
    ]
    for got, want in zip(gradient(*placed), expected, strict=True):
      np.testing.assert_allclose(got, want, atol=2e-2, rtol=1e-2)
