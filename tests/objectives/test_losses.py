"""Policy losses: hand numbers, exact accumulation, finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import losses

NAN = float('nan')


def ones(*lengths, width=None):
  """bool[N, Tc] with the first lengths[i] tokens of row i."""
  width = width or max(lengths)
  return jnp.arange(width) < jnp.array(lengths)[:, None]


def clipped_of_log_ratio(log_ratio, advantage, **kwargs):
  logp = jnp.array([[log_ratio]], jnp.float32)
  return losses.clipped(
    logp, jnp.zeros_like(logp), jnp.array([advantage]), ones(1), 1.0, **kwargs
  )


def test_denominators():
  mask = ones(1, 3, 0)
  assert losses.token_denominator(mask) == 4
  np.testing.assert_array_equal(
    losses.row_denominator(mask), [[2], [6], [2]]
  )  # the empty row is not a row
  assert losses.constant_denominator(mask, 10) == 20
  with pytest.raises(ValueError, match='length > 0'):
    losses.constant_denominator(mask, 0)


def test_denominators_count_exactly_beyond_2_to_the_24():
  mask = jnp.ones((2**12 + 1, 2**12 + 1), bool)
  assert losses.token_denominator(mask) == np.float32((2**12 + 1) ** 2)


def test_tokens_that_are_masked_out_leave_the_denominator():
  # two tokens of loss 1, and a truncated row of six that does not count
  mask = ones(2, 0, width=6)
  logp = jnp.zeros((2, 6))
  loss = losses.clipped(
    logp, logp, -jnp.ones(2), mask, losses.token_denominator(mask)
  )
  assert loss == 1.0  # 2/8 with the masked tokens


@pytest.mark.parametrize(
  'denominator, expected',
  [
    (losses.token_denominator, 0.25),
    (losses.row_denominator, 0.5),
    (lambda mask: losses.constant_denominator(mask, 2), 0.25),
  ],
)
def test_micro_batches_add_up(denominator, expected):
  # one token of loss 1 and three of loss 0; as one batch and as two
  mask, advantages = ones(1, 3), jnp.array([-1.0, 0.0])
  d = jnp.broadcast_to(denominator(mask), (2, 1))
  logp = jnp.zeros((2, 3))
  whole = losses.clipped(logp, logp, advantages, mask, d)
  parts = [
    losses.clipped(logp[i], logp[i], advantages[i], mask[i], d[i])
    for i in (slice(0, 1), slice(1, 2))
  ]
  assert whole == expected
  assert sum(parts) == expected


def test_clipped_gradient_adds_up_over_micro_batches():
  rng = np.random.default_rng(0)
  logp, old = rng.normal(size=(2, 6, 5)).astype(np.float32) * 0.3
  mask = jnp.array(rng.random((6, 5)) < 0.7)
  advantages = jnp.array(rng.normal(size=6), jnp.float32)
  d = losses.row_denominator(mask)
  grad = jax.grad(losses.clipped)
  whole = grad(logp, old, advantages, mask, d)
  parts = [
    grad(logp[i], old[i], advantages[i], mask[i], d[i])
    for i in (slice(0, 1), slice(1, 4), slice(4, 6))
  ]
  np.testing.assert_allclose(whole, np.concatenate(parts), rtol=1e-6)


@pytest.mark.parametrize(
  'advantage, ratio, expected',
  [
    (1, 0.5, -0.5),
    (1, 1.1, -1.1),
    (1, 1.5, -1.2),
    (-1, 0.5, 0.8),
    (-1, 1.1, 1.1),
    (-1, 4.0, 4.0),
  ],
)
def test_clipped(advantage, ratio, expected):
  loss = clipped_of_log_ratio(np.log(ratio), advantage)
  np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_clip_higher():
  loss = clipped_of_log_ratio(np.log(1.5), 1.0, clip_high=0.28)
  np.testing.assert_allclose(loss, -1.28, rtol=1e-6)


def test_dual_clip():
  # arXiv:1912.09729 with c = 3 and A = -1; the plain loss ends at 10
  for ratio, gain in [(0.5, -0.8), (1.5, -1.5), (4, -3), (10, -3)]:
    loss = clipped_of_log_ratio(np.log(ratio), -1.0, dual_clip=3.0)
    np.testing.assert_allclose(-loss, gain, rtol=1e-6)
    plain = clipped_of_log_ratio(np.log(ratio), 1.0)
    dual = clipped_of_log_ratio(np.log(ratio), 1.0, dual_clip=3.0)
    assert plain == dual
  with pytest.raises(ValueError, match='above 1'):
    clipped_of_log_ratio(0.0, 1.0, dual_clip=0.5)


@pytest.mark.parametrize('log_ratio', [100.0, -100.0])
@pytest.mark.parametrize('advantage', [0.0, 1.0, -1.0])
def test_huge_log_ratios_stay_finite(log_ratio, advantage):
  value, grad = jax.value_and_grad(clipped_of_log_ratio)(log_ratio, advantage)
  assert np.isfinite(value) and np.isfinite(grad)
  assert grad * -advantage >= 0  # the right sign, or 0
  if advantage == 0:
    assert value == 0 and grad == 0
  if advantage == 1 and log_ratio > 0:
    np.testing.assert_allclose(value, -1.2, rtol=1e-6)
    assert grad == 0


def test_loss_zero_on_policy_is_not_gradient_zero():
  def loss(logits, lengths):
    mask = ones(*lengths)
    logp = jax.nn.log_softmax(logits)[jnp.array([0, 1])]
    logp = jnp.broadcast_to(logp[:, None], mask.shape)
    return losses.clipped(
      logp,
      jax.lax.stop_gradient(logp),
      jnp.array([1.0, -1.0]),
      mask,
      losses.token_denominator(mask),
    )

  value, grad = jax.value_and_grad(loss)(jnp.zeros(2), (1, 1))
  assert value == 0
  np.testing.assert_allclose(grad, [-0.5, 0.5])
  # a mean over tokens of rows of lengths 1 and 3 is not 0 either
  np.testing.assert_allclose(loss(jnp.zeros(2), (1, 3)), 0.5)


def test_empty_mask_gives_loss_and_gradient_zero():
  mask = jnp.zeros((2, 3), bool)
  nan = jnp.full((2, 3), NAN)
  for d in (
    losses.token_denominator(mask),
    losses.row_denominator(mask),
    losses.constant_denominator(mask, 3),
  ):
    value, grad = jax.value_and_grad(losses.clipped)(nan, nan, nan, mask, d)
    assert value == 0
    np.testing.assert_array_equal(grad, np.zeros((2, 3)))


def test_garbage_off_the_mask_is_inert():
  mask = ones(1, 2)
  logp = jnp.array([[-1.0, NAN], [-2.0, -3.0]])
  old = jnp.array([[-1.1, 7.0], [-2.0, -2.9]])
  advantages, d = jnp.array([1.0, -1.0]), losses.token_denominator(mask)
  clean = jnp.nan_to_num(logp)
  for f in (losses.clipped, jax.grad(losses.clipped)):
    got = f(logp, old, advantages, mask, d)
    np.testing.assert_array_equal(got, f(clean, old, advantages, mask, d))


def test_no_gradient_through_advantages_or_old_logp():
  logp, d = jnp.full((1, 1), -1.0), 1.0
  grads = jax.grad(losses.clipped, argnums=(1, 2))(
    logp, logp, jnp.ones(1), ones(1), d
  )
  assert grads[0] == 0 and grads[1] == 0


def test_advantages_per_token():
  logp = jnp.zeros((1, 3))
  advantages = jnp.array([[1.0, 2.0, NAN]])
  assert losses.clipped(logp, logp, advantages, ones(2, width=3), 1.0) == -3


def test_clip_fractions():
  ratio = jnp.array([[0.5, 1.0, 1.5, 9.0], [0.5, 1.0, 1.5, 4.0]])
  advantages, mask = jnp.array([1.0, -1.0]), ones(3, 4)
  got = losses.clip_fractions(
    jnp.log(ratio), jnp.zeros_like(ratio), advantages, mask, dual_clip=3.0
  )
  counts = {name: float(m.total) for name, m in got.items()}
  assert counts == {'low': 1, 'high': 1, 'region': 2, 'dual': 1}
  assert all(m.count == 7 for m in got.values())


def test_entropy_bonus():
  entropy, mask = jnp.array([[1.0, 3.0, NAN]]), ones(2, width=3)
  value, grad = jax.value_and_grad(losses.entropy_bonus)(
    entropy, mask, losses.token_denominator(mask), 0.1
  )
  np.testing.assert_allclose(value, -0.2, rtol=1e-6)
  np.testing.assert_allclose(grad, [[-0.05, -0.05, 0]], rtol=1e-6)
