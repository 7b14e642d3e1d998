"""Quantized parameters stay within the errors that the module states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import small_config

from gdpo_jax.policy import eight_bit
from gdpo_jax.policy.policy import make_policy


def test_int8_by_hand():
  x = jnp.array([[1.27, 0.0], [-0.5, 0.0], [0.004, 0.0]])
  kept = eight_bit.quantize({'w': x, 'b': x[0]}, 'int8')
  np.testing.assert_array_equal(kept['w'].values, [[127, 0], [-50, 0], [0, 0]])
  np.testing.assert_allclose(kept['w'].scale, [[0.01, 1.0]])
  back = eight_bit.restore(kept)
  np.testing.assert_allclose(back['w'][:, 0], [1.27, -0.5, 0], atol=1e-6)
  np.testing.assert_array_equal(back['b'], x[0])  # vectors stay as they are


@pytest.mark.parametrize('kind', eight_bit.FORMATS)
def test_errors_are_those_that_are_stated(kind):
  rng = np.random.default_rng(0)
  size = 10.0 ** rng.uniform(-4, 2, (3, 64, 16))  # six decades in a channel
  x = jnp.asarray(size * rng.standard_normal(size.shape), jnp.float32)
  back = eight_bit.restore(eight_bit.quantize(x, kind))
  largest = np.abs(x).max(axis=1, keepdims=True)
  bound = {
    'int8': largest / 254,
    'fp8': np.maximum(np.abs(x) / 16, largest / (448 * 2**10)),
  }[kind]
  error = np.abs(back - x)
  assert (error <= bound * (1 + 1e-5)).all()
  assert (error > 0.9 * bound).any()  # and the bound is not idle


@pytest.mark.parametrize(
  ('kind', 'error'),
  [('int8', 0.01), ('fp8', 0.04)],
  ids=eight_bit.FORMATS[::-1],
)
def test_a_kept_policy_speaks_almost_the_same(kind, error):
  policy = make_policy(small_config())
  params = policy.init(jax.random.key(0))
  kept = eight_bit.quantize(params, kind)
  assert 0 < float(eight_bit.relative_error(params, kept)) < error
  tokens = jnp.arange(24).reshape(2, 12)
  a, b = (
    policy.logits(p, tokens, jnp.ones((2, 12), bool))
    for p in (params, eight_bit.restore(kept))
  )
  assert float(jnp.abs(a - b).max()) < error * float(jnp.abs(a).max()) * 3
  nbytes = sum(x.nbytes for x in jax.tree.leaves(kept))
  assert nbytes < 0.35 * sum(x.nbytes for x in jax.tree.leaves(params))


def test_unknown_formats_are_refused():
  with pytest.raises(ValueError, match="'int4'; choose from fp8, int8"):
    eight_bit.quantize({}, 'int4')
