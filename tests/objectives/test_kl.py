"""KL estimators and the controllers of their coefficient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import advantages, kl

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
  with pytest.raises(ValueError, match=r'ref_logp has shape \(1, 1\)'):
    kl.kl_loss(logp, ref[:, :1], mask, 2.0, estimator=estimator)


def test_constant_controller():
  controller = kl.constant_kl(0.1)
  state = controller.update(controller.init(), jnp.float32(50))
  np.testing.assert_allclose(state.coef, 0.1)
  assert state.step == 1
  with pytest.raises(ValueError, match='at least 0'):
    kl.constant_kl(-1.0)


# --- controllers -------------------------------------------------------------


@pytest.mark.parametrize(
  'measured, coef', [(3, 0.0980), (6, 0.1), (6.5, 0.10083), (12, 0.1020)]
)
def test_adaptive_controller(measured, coef):
  controller = kl.adaptive_kl(0.1, target_nats_per_sequence=6)
  state = jax.jit(controller.update)(controller.init(), measured)
  np.testing.assert_allclose(state.coef, coef, rtol=1e-4)


def test_moving_target():
  controller = kl.moving_target_kl(0.1, 6)
  state = controller.init()
  # the target starts at 6 * 1.1 and falls to 6 * 0.9 after 1000 pi steps
  assert controller.update(state, 6.3).coef < 0.1
  later = state._replace(step=jnp.int32(3142))
  assert controller.update(later, 6.3).coef > 0.1
  np.testing.assert_allclose(
    controller.update(state, 6.6 * 1.1).coef, 0.1 * 1.01, rtol=1e-5
  )


def test_controllers_check_and_survive():
  with pytest.raises(ValueError, match='above 0 nats'):
    kl.adaptive_kl(0.1, 0.0)
  with pytest.raises(ValueError, match='at least 0'):
    kl.adaptive_kl(-0.1, 6.0)
  controller = kl.adaptive_kl(0.1, 6.0)
  state = controller.update(controller.init(), jnp.float32(NAN))
  np.testing.assert_allclose(state.coef, 0.1)
  assert state.step == 1


# --- where the distance can enter -----------------------------------------


def test_sequence_kl():
  mask = jnp.array([[True, True, False], [False] * 3])
  logp = jnp.array([[-1.0, -2.0, NAN], [NAN] * 3])
  ref = jnp.array([[-1.5, -1.0, NAN], [NAN] * 3])
  np.testing.assert_allclose(kl.sequence_kl(logp, ref, mask), [-0.5, 0])
  np.testing.assert_allclose(
    kl.sequence_kl(logp, ref, mask, 'k2'), [0.5 * 1.25, 0]
  )


def test_kl_as_one_more_reward():
  rewards = jnp.array([[[1.0], [0.0], [0.0], [5.0]]])
  valid = jnp.array([[[True], [True], [True], [False]]])
  distance = jnp.array([3.0, 1.0, NAN, 2.0])  # [N]
  r, v, w = kl.kl_as_reward(rewards, valid, jnp.ones(1), distance, 0.1)
  np.testing.assert_array_equal(r[0, :, 1], [-3, -1, 0, 0])
  # no distance measured; and a row that nothing scored has no distance either
  np.testing.assert_array_equal(v[0, :, 1], [True, True, False, False])
  np.testing.assert_allclose(w, [1, 0.1])
  # a reward of weight 0 is looked at only
  _, none, _ = kl.kl_as_reward(rewards, valid, jnp.zeros(1), distance, 0.1)
  assert not none[..., 1].any()
  # summed first: the total less coef * kl
  got = advantages.dr_grpo(r[:, :2], v[:, :2], w)
  total = np.array([1 - 0.3, 0 - 0.1])
  np.testing.assert_allclose(got, [total - total.mean()], rtol=1e-6)
  # normalized first: a z-score of its own
  got = advantages.mo_grpo(r[:, :2], v[:, :2], w, eps=0.0)
  np.testing.assert_allclose(got, [[0.9 * 0.70711, -0.9 * 0.70711]], rtol=1e-4)


def test_token_rewards():
  # [a, b, EOS, PAD]: the score sits on the EOS, not on the padding
  mask = jnp.array([[True, True, True, False], [False] * 4])
  scores = jnp.array([2.0, 7.0])
  got = kl.token_rewards(scores, mask)
  np.testing.assert_array_equal(got, [[0, 0, 2, 0], [0, 0, 0, 0]])
  logp = jnp.array([[-1.0, -1.0, -2.0, NAN], [NAN] * 4])
  ref = jnp.array([[-1.0, -2.0, -1.0, NAN], [NAN] * 4])
  got = kl.token_rewards(jnp.array([NAN, NAN]), mask, logp, ref, 0.1)
  np.testing.assert_allclose(got, [[0, -0.1, 0.1, 0], [0] * 4])


# --- refresh of the reference ------------------------------------------------


def test_refresh_every():
  refresh = jax.jit(kl.refresh_every(3))
  reference = {'w': jnp.zeros(2, jnp.bfloat16)}
  params = {'w': jnp.ones(2)}
  for step in range(7):
    got = refresh(reference, params, step)['w']
    assert got.dtype == jnp.bfloat16
    assert np.all(got == (1 if step in (3, 6) else 0))
  with pytest.raises(ValueError, match='at least 1'):
    kl.refresh_every(0)


def test_refresh_ema():
  refresh = kl.refresh_ema(0.75)
  got = refresh({'w': jnp.zeros(2)}, {'w': jnp.ones(2)}, 0)
  np.testing.assert_allclose(got['w'], [0.25, 0.25])
  with pytest.raises(ValueError, match=r'\[0, 1\)'):
    kl.refresh_ema(1.0)
