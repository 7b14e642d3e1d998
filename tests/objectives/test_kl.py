"""KL estimators and the controllers of their coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import kl

NAN = float('nan')
LN2 = np.log(2.0)


@pytest.mark.parametrize(
  'd, expected', [(0, 0), (-LN2, 0.306853), (LN2, 0.193147)]
)
def test_k3(d, expected):
  np.testing.assert_allclose(
    kl.k3(jnp.float32(d), jnp.float32(0)), expected, atol=1e-6
  )


def test_k1_k2():
  assert kl.k1(jnp.float32(-1), jnp.float32(-3)) == 2
  assert kl.k2(jnp.float32(-1), jnp.float32(-3)) == 2
  assert jax.grad(kl.k2)(-1.0, -3.0) == 2


@pytest.mark.parametrize('d', [100.0, -100.0, 30.0, -30.0])
def test_k3_is_finite_far_away(d):
  value, grad = jax.value_and_grad(kl.k3)(d, 0.0)
  assert np.isfinite(value) and value >= 0
  assert np.isfinite(grad) and grad * d >= 0


def test_k3_keeps_the_digits_of_small_distances():
  d = 1e-4
  np.testing.assert_allclose(
    kl.k3(jnp.float32(d), jnp.float32(0)), d**2 / 2 - d**3 / 6, rtol=1e-2
  )


def test_estimators_agree_with_the_divergence():
  p, q = np.array([0.6, 0.3, 0.1]), np.array([0.5, 0.2, 0.3])
  exact = np.sum(p * np.log(p / q))
  for estimator in (kl.k1, kl.k3):
    mean = np.sum(p * np.asarray(estimator(jnp.log(p), jnp.log(q))))
    np.testing.assert_allclose(mean, exact, rtol=1e-5)


@pytest.mark.parametrize('estimator', list(kl.ESTIMATORS))
def test_kl_loss_ignores_what_is_off_the_mask(estimator):
  mask = jnp.array([[True, False]])
  logp, ref = jnp.array([[-1.0, NAN]]), jnp.array([[-1.5, jnp.inf]])
  value, grad = jax.value_and_grad(kl.kl_loss)(
    logp, ref, mask, 2.0, estimator=estimator
  )
  one = kl.ESTIMATORS[estimator](logp[0, 0], ref[0, 0])
  np.testing.assert_allclose(value, one / 2, rtol=1e-6)
  assert np.isfinite(grad).all() and grad[0, 1] == 0


def test_constant_controller():
  controller = kl.constant_kl(0.1)
  state = controller.update(controller.init(), jnp.float32(50))
  np.testing.assert_allclose(state.coef, 0.1)
  assert state.step == 1
  with pytest.raises(ValueError, match='>= 0'):
    kl.constant_kl(-1.0)
