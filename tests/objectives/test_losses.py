"""Policy losses: hand numbers, exact accumulation, finite gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.objectives import advantages, losses

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
  grad = jax.jit(jax.grad(losses.clipped))
  whole = grad(logp, old, advantages, mask, d)
  parts = [
    grad(logp[i], old[i], advantages[i], mask[i], d[i])
    for i in (slice(0, 2), slice(2, 4), slice(4, 6))
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


# --- the other losses --------------------------------------------------------


def test_gspo_uses_one_ratio_per_sequence():
  ratios = jnp.log(jnp.array([[1.1, 0.9, 1.2]]))
  mask = ones(3)
  old = jnp.zeros((1, 3))
  s = (1.1 * 0.9 * 1.2) ** (1 / 3)
  np.testing.assert_allclose(s, 1.0591, atol=6e-5)
  d = losses.row_denominator(mask)
  up = losses.gspo(ratios, old, jnp.ones(1), mask, d)
  np.testing.assert_allclose(up, -1.0004, atol=1e-6)
  down = losses.gspo(ratios, old, -jnp.ones(1), mask, d)
  np.testing.assert_allclose(down, s, rtol=1e-6)


def test_gspo_token_form_has_value_and_gradient_of_the_sequence_form():
  rng = np.random.default_rng(0)
  logp, old = rng.normal(size=(2, 4, 5)).astype(np.float32) * 3e-4
  mask = ones(5, 2, 3, 1)
  advantages = jnp.array([1.0, -1.0, 0.5, 2.0])

  def sequence_form(logp):
    mean = jnp.sum((logp - old) * mask, 1) / jnp.sum(mask, 1)
    s = jnp.exp(mean)
    gain = jnp.minimum(
      s * advantages, jnp.clip(s, 1 - 3e-4, 1 + 4e-4) * advantages
    )
    return -jnp.mean(gain)

  d = losses.row_denominator(mask)

  def token_form(logp):
    return losses.gspo(logp, old, advantages, mask, d)

  value, grad = jax.jit(jax.value_and_grad(token_form))(logp)
  expected = jax.jit(jax.value_and_grad(sequence_form))(logp)
  np.testing.assert_allclose(value, expected[0], rtol=1e-5)
  np.testing.assert_allclose(grad, expected[1], rtol=1e-5, atol=1e-7)


def test_cispo():
  ratio = jnp.array([[0.5, 1.0, 3.0]])
  logp, mask = jnp.log(ratio), ones(3)

  def f(logp, **kwargs):
    return losses.cispo(
      logp, jnp.zeros((1, 3)), jnp.ones(1), mask, 1.0, **kwargs
    )

  # the gradient is -weight: no token is without
  np.testing.assert_allclose(jax.grad(f)(logp), [[-0.5, -1, -1.28]], rtol=1e-6)
  grad = jax.grad(lambda x: f(x, clip_low=0.2))(logp)
  np.testing.assert_allclose(grad, [[-0.8, -1, -1.28]], rtol=1e-6)
  grad = jax.grad(lambda x: f(x, mask_clipped=True))(logp)
  np.testing.assert_allclose(grad, [[-0.5, -1, 0]], rtol=1e-6)


def test_reinforce():
  logp, mask = jnp.array([[-1.0, -2.0, NAN]]), ones(2, width=3)
  value, grad = jax.value_and_grad(losses.reinforce)(
    logp, None, jnp.array([2.0]), mask, 2.0
  )
  assert value == 3
  np.testing.assert_array_equal(grad, [[-1, -1, 0]])


@pytest.mark.parametrize('name', list(losses.LOSSES))
def test_on_policy_all_losses_have_the_gradient_of_reinforce(name):
  rng = np.random.default_rng(0)
  logp = jnp.array(-rng.random((4, 5)), jnp.float32)
  mask, advantages = ones(5, 2, 3, 1), jnp.array([1.0, -1.0, 0.5, 2.0])
  d = losses.row_denominator(mask)
  got = jax.grad(losses.LOSSES[name])(logp, logp, advantages, mask, d)
  expected = jax.grad(losses.reinforce)(logp, logp, advantages, mask, d)
  np.testing.assert_allclose(got, expected, rtol=1e-5)


@pytest.mark.parametrize('name', list(losses.LOSSES))
def test_losses_are_finite_whatever_the_mask(name):
  rng = np.random.default_rng(1)
  logp = jnp.array(rng.normal(size=(4, 5)) * 200, jnp.float32)
  old = jnp.array(rng.normal(size=(4, 5)) * 200, jnp.float32)
  advantages = jnp.array([1.0, -1.0, 0.0, 2.0])
  f = jax.jit(jax.value_and_grad(losses.LOSSES[name]))
  for mask in (
    jnp.zeros((4, 5), bool),
    jnp.ones((4, 5), bool),
    ones(0, 1, 5, 3),
    jnp.array(rng.random((4, 5)) < 0.5),
  ):
    d = losses.row_denominator(mask)
    dirty = jnp.where(mask, logp, NAN)
    value, grad = f(dirty, jnp.where(mask, old, jnp.inf), advantages, mask, d)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert not np.any(np.where(mask, 0, grad))
    clean = f(logp, old, advantages, mask, d)
    np.testing.assert_array_equal(clean[0], value)
    np.testing.assert_array_equal(np.where(mask, clean[1], 0), grad)


def test_losses_make_no_nan_on_the_way():
  mask = ones(2, 0, width=3)
  logp, advantages = jnp.full((2, 3), -1.0), jnp.array([1.0, -1.0])
  with jax.debug_nans(True):
    for loss in losses.LOSSES.values():
      out = jax.jit(jax.value_and_grad(loss))(
        logp, logp - 100, advantages, mask, losses.token_denominator(mask)
      )
      jax.block_until_ready(out)


def test_entropy_scale_is_a_constant_factor_on_the_clipped_term():
  for ratio, advantage, expected in [
    (1.5, 1.0, -min(1.5, 1.2 * 1.05)),
    (1.0, 1.0, -1.0),
    (0.5, -1.0, 0.8 * 1.05),
  ]:
    loss = clipped_of_log_ratio(np.log(ratio), advantage, entropy_scale=0.5)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_adaptive_clip():
  f = losses.adaptive_clip
  np.testing.assert_allclose(f(0.0, 0.1), 0.2)
  np.testing.assert_allclose(f(0.1, 0.1), 0.2 * (1 + 0.2 * np.tanh(1)))
  np.testing.assert_allclose(f(100.0, 0.1), 0.24, rtol=1e-6)
  np.testing.assert_allclose(f(100.0, 0.1, base=0.22), 0.25)
  np.testing.assert_allclose(f(0.0, 0.1, base=0.1), 0.15)
  with pytest.raises(ValueError, match='target_kl > 0'):
    f(0.1, 0.0)
  # a measured clip goes straight into a compiled loss
  logp = jnp.log(jnp.array([[3.0]]))
  loss = jax.jit(
    lambda eps: losses.clipped(
      logp, jnp.zeros((1, 1)), jnp.ones(1), ones(1), 1.0, eps, eps
    )
  )
  np.testing.assert_allclose(loss(f(0.0, 0.1)), -1.2, rtol=1e-6)


def test_clip_fractions_per_sequence():
  logp = jnp.log(jnp.array([[1.1, 0.9, 1.2]]))
  got = losses.clip_fractions(
    logp, jnp.zeros((1, 3)), jnp.ones(1), ones(3), 3e-4, 4e-4, sequence=True
  )
  assert got['high'].value == 1 and got['low'].value == 0


def test_value_loss():
  values, old = jnp.array([[1.0, 2.0, NAN]]), jnp.array([[0.5, 2.0, NAN]])
  returns, mask = jnp.array([[0.0, 3.0, NAN]]), ones(2, width=3)
  value, grad = jax.value_and_grad(losses.value_loss)(
    values, old, returns, mask, 2.0
  )
  # (1 - 0)^2 beats the clipped (0.7 - 0)^2
  np.testing.assert_allclose(value, 0.5 * (1 + 1) / 2)
  np.testing.assert_allclose(grad, [[0.5, -0.5, 0]])
  plain = losses.value_loss(values, old, returns, mask, 2.0, clip=None)
  np.testing.assert_allclose(plain, value)
  # past the clip on the good side: no further pull
  grad = jax.grad(losses.value_loss)(
    jnp.array([[0.9]]), jnp.zeros((1, 1)), jnp.ones((1, 1)), ones(1), 1.0
  )
  assert grad == 0


def test_denominators_are_global_inside_shard_map():
  mask = jnp.array(np.random.default_rng(0).random((8, 5)) < 0.5)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))

  def all_three(mask, axis_name=None):
    return (
      losses.token_denominator(mask, axis_name=axis_name),
      losses.row_denominator(mask, axis_name=axis_name),
      losses.constant_denominator(mask, 7, axis_name=axis_name),
    )

  shared = jax.shard_map(
    lambda mask: all_three(mask, 'data'),
    mesh=mesh,
    in_specs=jax.P('data'),
    out_specs=(jax.P(), jax.P('data'), jax.P()),
  )
  for got, expected in zip(jax.jit(shared)(mask), all_three(mask)):
    np.testing.assert_array_equal(got, expected)


def test_a_row_that_nobody_scored_leaves_the_loss():
  """Advantages -1, none, 1, 0 on rows of 1, 2, 3 and 1 tokens."""
  rewards = np.array([[[1], [NAN], [3], [2]]], np.float32)
  a = advantages.grpo(rewards, None, jnp.ones(1), eps=0.0).reshape(-1)
  scored = advantages.scored(jnp.isfinite(rewards), jnp.ones(1)).reshape(-1)
  mask = ones(1, 2, 3, 1) & scored[:, None]
  logp = jnp.full(mask.shape, -1.0)
  for denominator, expected in (
    (losses.token_denominator(mask), -(3 - 1) / 5),
    (losses.row_denominator(mask), 0.0),
  ):
    value, grad = jax.value_and_grad(losses.clipped)(
      logp, logp, a, mask, denominator
    )
    np.testing.assert_allclose(value, expected, atol=1e-6)
    assert np.isfinite(grad).all() and not grad[1].any() and grad[0, 0] > 0


def test_a_mean_over_sequences_is_no_sum():
  mask = ones(1, 3)  # a loss of 1 on all four tokens
  logp = jnp.zeros((2, 3))
  loss = losses.clipped(
    logp, logp, -jnp.ones(2), mask, losses.row_denominator(mask)
  )
  np.testing.assert_allclose(loss, 1.0, rtol=1e-6)


@pytest.mark.parametrize(
  'wrong, said',
  [
    # one prompt, as many samples as tokens: it would broadcast over tokens
    ({'advantages': np.ones((1, 4))}, r'advantages have shape \(1, 4\)'),
    ({'advantages': np.ones(1)}, r'advantages have shape \(1,\)'),
    ({'old_logp': np.zeros((4, 1))}, r'old_logp has shape \(4, 1\)'),
    ({'denominator': np.ones(4)}, r'denominator has shape \(4,\)'),
  ],
)
@pytest.mark.parametrize('name', ['clipped', 'gspo', 'cispo'])
def test_what_would_broadcast_is_refused(name, wrong, said):
  arrays = {
    'logp': np.zeros((4, 4)),
    'old_logp': np.zeros((4, 4)),
    'advantages': np.ones(4),
    'mask': np.ones((4, 4), bool),
    'denominator': np.ones((4, 1)),
  }
  losses.LOSSES[name](**arrays)
  with pytest.raises(ValueError, match=said):
    losses.LOSSES[name](**arrays | wrong)
