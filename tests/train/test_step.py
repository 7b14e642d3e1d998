"""One optimizer step: exact accumulation, exact skipping, exact sharding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gdpo_jax import sharding
from gdpo_jax.policy import packing
from gdpo_jax.train import metrics, step
from gdpo_jax.train.experience import minibatches
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.state import init_state

GROUP = 4


@optax.inject_hyperparams
def _sgd(learning_rate, factor):
  return optax.sgd(learning_rate * factor)


def plain_sgd():
  """Rate 1 without clipping: the parameters move by the gradient itself."""
  return optax.chain(optax.identity(), _sgd(learning_rate=1.0, factor=1.0))


def settings(**changes):
  base = {
    'prompts_per_step': 8,
    'group_size': GROUP,
    'max_prompt_tokens': 6,
    'max_new_tokens': 10,
  }
  return Settings(**{**base, **changes}).resolve()


def run(policy, params, batch, s, mesh=None, optimizer=None, times=1):
  traces = []

  def log_probs(*args, **kwargs):
    traces.append(1)
    return policy.log_probs(*args, **kwargs)

  mesh = mesh or sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  optimizer = optimizer or plain_sgd()
  state = init_state(params, optimizer, s, mesh)
  counted = policy._replace(log_probs=log_probs)
  fn = step.make_train_step(counted, optimizer, s, mesh)
  for i in range(times):
    state, out = fn(state, batch)
    if i == 0:
      after_first = len(traces)
  assert len(traces) == after_first  # the second step finds the first's program
  return state, metrics.to_host(out)


def gradient(params, state):
  """What SGD at rate 1 subtracted."""
  return jax.tree.map(lambda a, b: np.asarray(a - b), params, state.params)


def assert_close(a, b, rtol=2e-4, atol=2e-6):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b
  )


@pytest.mark.parametrize('denominator', ['row', 'token', 'constant'])
def test_micro_batches_add_up(policy, params, batch, denominator):
  batch = batch._replace(ref_logp=batch.old_logp - 0.05)
  coefs = {'entropy_coef': 0.1, 'kl_coef': 0.3}
  whole = settings(denominator=denominator, **coefs)
  expected, expected_row = run(policy, params, batch, whole)
  s = settings(denominator=denominator, prompts_per_micro_batch=2, **coefs)
  state, row = run(policy, params, batch, s)
  assert_close(gradient(params, state), gradient(params, expected))
  for name in ('loss', 'kl', 'entropy', 'clip_ratio/low_mean'):
    assert row[name] == pytest.approx(expected_row[name], rel=1e-4), name


def test_packed_rows_make_the_same_step(policy, params, batch):
  """Groups keep their order by signal, and rows their place in the loss."""
  lengths = np.asarray(batch.rollout.mask).sum(1).reshape(-1, GROUP)
  place = packing.pack(lengths, batch.rollout.tokens.shape[1], 16)
  assert place.shape[1] == 2
  changes = {'prompts_per_micro_batch': 2, 'denominator': 'token'}
  expected, expected_row = run(policy, params, batch, settings(**changes))
  s = settings(pack_tokens=16, **changes)
  packed = batch._replace(place=jnp.asarray(place))
  state, row = run(policy, params, packed, s, times=2)
  one, one_row = run(policy, params, packed, s)
  assert_close(
    gradient(params, one), gradient(params, expected), rtol=1e-5, atol=1e-6
  )
  assert one_row == pytest.approx(expected_row, rel=1e-5, abs=1e-6)
  assert int(state.updates) == 2


def test_gradient_is_that_of_the_written_out_loss(policy, params, batch):
  """min(ratio * A, clip(ratio) * A), mean of row means, over all 32 rows."""

  def loss(params):
    logp, _ = policy.log_probs(params, batch.rollout)
    ratio = jnp.exp(logp - batch.old_logp)
    a = batch.advantages[:, None]
    term = -jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a)
    row = jnp.sum(term * batch.rollout.mask, 1) / batch.rollout.mask.sum(1)
    return jnp.mean(row)

  state, row = run(policy, params, batch, settings(prompts_per_micro_batch=2))
  assert row['loss'] == pytest.approx(float(loss(params)), rel=1e-4)
  assert_close(gradient(params, state), jax.grad(loss)(params))


def test_groups_without_signal_are_skipped_and_change_nothing(
  policy, params, batch
):
  s = settings(prompts_per_micro_batch=1)
  state, row = run(policy, params, batch, s)
  assert row['groups_in_loss'] == pytest.approx(7 / 8)
  # A vanishing entropy term forbids skipping, and adds nothing.
  all_groups = settings(prompts_per_micro_batch=1, entropy_coef=1e-30)
  expected, expected_row = run(policy, params, batch, all_groups)
  assert expected_row['groups_in_loss'] == 1.0
  assert_close(gradient(params, state), gradient(params, expected))
  assert row['loss'] == pytest.approx(expected_row['loss'], rel=1e-5)


def test_no_signal_at_all_gives_loss_and_gradient_zero(policy, params, batch):
  batch = batch._replace(advantages=np.zeros_like(batch.advantages))
  state, row = run(policy, params, batch, settings())
  assert row['loss'] == 0 and row['grad_norm'] == 0
  assert row['groups_in_loss'] == 0
  assert_close(state.params, params, atol=0)


def test_excluded_rows_leave_numerator_and_denominator(policy, params, batch):
  """Six groups, padded with two that do not count, equal the six alone."""
  pad = 2 * GROUP
  counts = np.arange(8 * GROUP) < 8 * GROUP - pad
  padded, padded_row = run(
    policy, params, batch._replace(row_valid=counts), settings()
  )
  alone = jax.tree.map(lambda x: x[:-pad], batch)
  expected, expected_row = run(
    policy, params, alone, settings(prompts_per_step=6)
  )
  assert padded_row['loss'] == pytest.approx(expected_row['loss'], rel=1e-5)
  assert_close(gradient(params, padded), gradient(params, expected))


def test_a_step_that_is_not_finite_is_skipped_and_counted(
  policy, params, batch
):
  advantages = batch.advantages.copy()
  advantages[5] = np.nan
  state, row = run(
    policy, params, batch._replace(advantages=advantages), settings()
  )
  assert row['skipped_updates'] == 1 and 'loss' not in row
  assert int(state.updates) == 0
  jax.tree.map(np.testing.assert_array_equal, state.params, params)


def test_loss_is_zero_on_policy_but_the_gradient_is_not(policy, params, batch):
  """A printed loss of 0 at step 1 is no fault: old == new, advantages sum to 0."""
  logp, _ = policy.log_probs(params, batch.rollout)
  advantages = np.tile(np.float32([1, -1, 1, -1]), 8)
  state, row = run(
    policy,
    params,
    batch._replace(old_logp=np.asarray(logp), advantages=advantages),
    settings(),
  )
  assert row['loss'] == pytest.approx(0, abs=1e-6)
  assert row['grad_norm'] > 1e-3


def test_columns_of_pads_are_left_out_and_change_nothing(policy, params, batch):
  """Prompts of at most 6 in 20 columns, completions of at most 10 in 40."""

  def wide(x, before, after):
    return np.pad(np.asarray(x), ((0, 0), (before, after)))

  r = batch.rollout
  padded = r._replace(
    prompt=wide(r.prompt, 14, 0),
    prompt_mask=wide(r.prompt_mask, 14, 0),
    tokens=wide(r.tokens, 0, 30),
    mask=wide(r.mask, 0, 30),
    logp=wide(batch.old_logp, 0, 30),
  )
  narrow = step.trimmed(padded)
  assert narrow.prompt.shape[1] == narrow.tokens.shape[1] == 16
  assert step.trimmed(padded, 8).prompt.shape[1] == 8
  np.testing.assert_array_equal(narrow.prompt[:, -6:], r.prompt)
  np.testing.assert_array_equal(narrow.tokens[:, :10], r.tokens)
  full, cut = (
    run(
      policy,
      params,
      batch._replace(rollout=x, old_logp=x.logp),
      settings(max_prompt_tokens=20, max_new_tokens=40),
    )[0]
    for x in (padded, narrow)
  )
  assert_close(gradient(params, full), gradient(params, cut), atol=1e-6)


@pytest.mark.parametrize('epochs', [1, 2], ids=['one update', 'several'])
def test_a_sampler_that_rounds_is_corrected_up_to_a_cap(
  policy, params, batch, epochs
):
  """Sampler 1.5 and 3 times less likely, cap 2: 1.5 and 2 times the gradient."""
  logp, _ = policy.log_probs(params, batch.rollout, group_size=GROUP)

  def of(factor, **changes):
    rollout = batch.rollout._replace(logp=logp - np.log(factor))
    old = logp if epochs > 1 else rollout.logp  # what the collector hands over
    state, row = run(
      policy,
      params,
      batch._replace(rollout=rollout, old_logp=old),
      settings(epochs_per_batch=epochs, **changes),
    )
    return gradient(params, state), row

  plain, _ = of(1.0)
  for factor, weight, capped in ((1.5, 1.5, 0), (3.0, 2.0, 1)):
    corrected, row = of(factor, importance_cap=2.0)
    assert_close(corrected, jax.tree.map(lambda g: g * weight, plain))  # noqa: B023
    assert row['importance/weight_mean'] == pytest.approx(weight, rel=1e-5)
    assert row['importance/capped'] == capped
    assert row['sampler_mismatch'] == pytest.approx(np.log(factor), rel=1e-4)
    assert row['clip_ratio/region_mean'] == 0


MESHES = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)]


@pytest.mark.parametrize('shape', MESHES, ids=str)
def test_meshes_agree_with_one_device(policy, params, batch, shape):
  s = settings(prompts_per_micro_batch=4)
  expected, expected_row = run(policy, params, batch, s, times=3)
  mesh = sharding.make_mesh(*shape)
  state, row = run(policy, params, batch, s, mesh=mesh, times=3)
  assert_close(
    jax.device_get(state.params), jax.device_get(expected.params), rtol=1e-4
  )
  assert row['loss'] == pytest.approx(expected_row['loss'], rel=1e-4, abs=1e-6)
  kernel = state.params['layers']['mlp']['up']['kernel']
  assert (
    kernel.sharding.spec
    == sharding.shardings(mesh, {'mlp': {'up': {'kernel': kernel}}})['mlp'][
      'up'
    ]['kernel'].spec
  )


def test_a_group_without_signal_still_feels_the_kl(policy, params, batch):
  """Advantage 0 and a KL term: no policy gradient, but that of the KL."""
  batch = batch._replace(advantages=np.zeros_like(batch.advantages))
  s = settings(kl_coef=0.3)
  logp, _ = policy.log_probs(params, batch.rollout)
  for shift, pulls in ((0.0, False), (-0.5, True)):
    reference = np.asarray(logp) + np.float32(shift) * np.cos(logp)
    _, row = run(policy, params, batch._replace(ref_logp=reference), s)
    assert row['groups_in_loss'] == 1
    assert (row['grad_norm'] > 1e-3) == pulls


def test_each_update_is_divided_by_its_own_tokens(batch):
  """Eight groups in updates of four: the rollout's tokens are not counted."""
  s = settings(prompts_per_update=4, denominator='token')
  mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  parts = list(minibatches(batch, s, jax.random.key(0), mesh))
  assert len(parts) == 2
  tokens = [int(part.rollout.mask.sum()) for part in parts]
  assert sum(tokens) == int(batch.rollout.mask.sum())
  for part, count in zip(parts, tokens):
    got = step.loss_denominator(s, step.row_mask(part))
    np.testing.assert_array_equal(got, np.full((4 * GROUP, 1), count))
