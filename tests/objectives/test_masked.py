"""Statistics over what exists, by hand numbers and against numpy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import masked

NAN = float('nan')


def test_mean_and_std_ignore_what_is_off_the_mask():
  x = jnp.array([[1.0, NAN, 3.0, 2.0], [NAN, 5.0, jnp.inf, 7.0]])
  mask = jnp.isfinite(x)
  np.testing.assert_allclose(masked.masked_sum(x, mask, -1), [6, 12])
  np.testing.assert_allclose(masked.masked_mean(x, mask, -1), [2, 6])
  np.testing.assert_allclose(
    masked.masked_std(x, mask, -1), [1, 2**0.5], rtol=1e-6
  )
  np.testing.assert_allclose(
    masked.masked_std(x, mask, -1, ddof=0), [(2 / 3) ** 0.5, 1], rtol=1e-6
  )


def test_nothing_there_is_zero():
  x, mask = jnp.full((2, 3), NAN), jnp.zeros((2, 3), bool)
  for f in (masked.masked_sum, masked.masked_mean, masked.masked_std):
    np.testing.assert_array_equal(f(x, mask, 1), [0, 0])
    np.testing.assert_array_equal(f(x, mask), 0)


@pytest.mark.parametrize(
  'value, n', [(0.1, 8), (0.3, 8), (0.35, 8), (0.7, 16), (0.35, 7), (0.4, 7)]
)
def test_equal_values_have_std_exactly_zero(value, n):
  x = jnp.full(n, value, jnp.float32)
  m = masked.moments(x, jnp.ones(n, bool))
  assert m.std == 0 and not m.varies
  np.testing.assert_array_equal(m.centred, np.zeros(n))
  assert m.mean == jnp.float32(value)


@pytest.mark.parametrize('ddof', [0, 1])
@pytest.mark.parametrize(
  'offset, scale', [(0, 1), (1e4, 1), (-3, 1e-6), (0, 1e6)]
)
def test_std_agrees_with_float64_at_any_offset_and_scale(offset, scale, ddof):
  rng = np.random.default_rng(0)
  x = (offset + scale * rng.normal(size=(5, 40))).astype(np.float32)
  expected = x.astype(np.float64).std(axis=1, ddof=ddof)
  got = masked.masked_std(x, np.ones_like(x, bool), 1, ddof=ddof)
  np.testing.assert_allclose(got, expected, rtol=2e-6)


def test_repeats_count_a_value_several_times():
  m = masked.moments(
    jnp.array([1.0, -1.0]), True, ddof=1, repeats=jnp.array([1.0, 3.0])
  )
  tokens = np.array([1.0, -1, -1, -1])
  np.testing.assert_allclose(m.mean, [tokens.mean()])
  np.testing.assert_allclose(m.std, [tokens.std(ddof=1)], rtol=1e-6)
  assert m.count == 4


def test_gradients_are_finite_where_the_std_is_zero():
  x = jnp.array([0.5, 0.5, NAN])
  mask = jnp.array([True, True, False])
  for f in (masked.masked_sum, masked.masked_mean, masked.masked_std):
    assert jnp.all(jnp.isfinite(jax.grad(f)(x, mask)))


def test_safe_divide():
  f = masked.safe_divide
  assert f(jnp.array(1.0), jnp.array(0.0)) == 0
  assert f(jnp.array(1.0), jnp.array(4.0)) == 0.25
  assert jax.grad(f, argnums=(0, 1))(1.0, 0.0) == (0, 0)


def test_means_of_micro_batches_add_up():
  first = masked.Mean.of(jnp.array([1.0]))
  second = masked.Mean.of(
    jnp.array([0.0, 0, 0, NAN]), jnp.array([True] * 3 + [False])
  )
  both = jax.tree.map(jnp.add, first, second)
  assert both.value == 0.25  # the mean of the two means would say 0.5
  assert masked.Mean.of(jnp.zeros(2), jnp.zeros(2, bool)).value == 0
