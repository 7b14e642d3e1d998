"""One optimizer step on one mini-batch, compiled once.

  Batch [N] --order--> groups with signal first
            --scan over micro-batches--> sum of gradients, sums of metrics
            --optimizer--> TrainState, unless a gradient is not finite

Every loss term is a sum divided by a denominator that comes from the masks of
the whole mini-batch, so micro-batches add up to it exactly, and a group whose
advantages are all zero can be left out of the forward pass without changing
loss or gradient.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdpo_jax import sharding
from gdpo_jax.objectives import kl, losses
from gdpo_jax.objectives.masked import Mean
from gdpo_jax.policy import lora
from gdpo_jax.train import state as state_lib
from gdpo_jax.train import subpolicies
from gdpo_jax.train.settings import Settings, asked_for
from gdpo_jax.types import Array, Batch, Rollout, TrainState

Metrics = dict[str, Mean]


def trimmed(rollout: Rollout, least: int = 16) -> Rollout:
  """Host arrays without the columns that are pads in every row.

  The update costs what its shape says: where all rows have ended early, most of
  it would be pads. Widths are powers of two from `least` on, or the full one,
  so that a run compiles few programs; loss and gradient stay what they are.
  """

  def width(mask):
    longest = int(np.asarray(mask).sum(axis=1).max())
    return min(mask.shape[1], max(least, 1 << (longest - 1).bit_length()))

  prompt, completion = width(rollout.prompt_mask), width(rollout.mask)
  return rollout._replace(
    prompt=rollout.prompt[:, -prompt:],
    prompt_mask=rollout.prompt_mask[:, -prompt:],
    tokens=rollout.tokens[:, :completion],
    mask=rollout.mask[:, :completion],
    logp=rollout.logp[:, :completion],
  )


def row_mask(batch: Batch) -> Array:
  """bool[N, Tc]: tokens that count, of rows that count."""
  return batch.rollout.mask & batch.row_valid[:, None]


def loss_denominator(settings: Settings, mask: Array) -> Array:
  """f32[N, 1]: what each token's loss is divided by, from the whole batch."""
  by_name = {
    'row': losses.row_denominator,
    'token': losses.token_denominator,
    'constant': lambda m: losses.constant_denominator(
      m, settings.max_new_tokens
    ),
  }
  denominator = by_name[settings.denominator](mask)
  return jnp.broadcast_to(denominator, (mask.shape[0], 1))


def make_loss(policy, settings: Settings) -> Callable:
  """The loss of one optimizer step as a sum over rows.

  `(params, controllers, batch, denominator) -> (f32[], Metrics)`
  """
  policy_loss = losses.LOSSES.get(settings.policy_loss, settings.policy_loss)

  def loss_fn(params, controllers, batch: Batch, denominator):
    mask = row_mask(batch)
    turn, options = None, {}
    if batch.head_advantages is not None:
      turn = subpolicies.heads_turn(settings, controllers['updates'])
      options = {'turn': turn}
    if batch.place is not None:
      options = {'place': batch.place, 'line_tokens': settings.pack_tokens}
    logp, entropy, *more = policy.log_probs(
      params,
      batch.rollout,
      group_size=settings.group_size,
      temperature=settings.temperature,
      with_values=settings.has_value_head,
      **options,
    )
    clip = clip_of(settings, controllers['update_kl'])
    old_logp, advantages = batch.old_logp, batch.advantages
    sampler_logp, metrics = batch.rollout.logp, {}
    weight = jnp.ones((1, 1))
    if settings.importance_cap is not None:
      if settings.updates_per_step == 1:
        old_logp = jax.lax.stop_gradient(logp)  # the same, without a pass
      weight = losses.importance_weight(
        old_logp, sampler_logp, mask, settings.importance_cap
      )
      advantages = weight * advantages.reshape(len(advantages), -1)
      metrics = {
        'importance/weight_mean': Mean.of(weight, mask),
        'importance/capped': Mean.of(
          (weight >= settings.importance_cap).astype(jnp.float32), mask
        ),
      }
    surrogate = (logp, old_logp, advantages, mask)
    surrogate_loss = functools.partial(
      policy_loss,
      **asked_for(
        policy_loss,
        **clip,
        entropy_scale=settings.entropy_scaled_clip * settings.entropy_coef,
      ),
    )
    loss = surrogate_loss(*surrogate, denominator)
    metrics |= {
      'entropy': Mean.of(entropy, mask),
      'sampler_mismatch': Mean.of(jnp.abs(logp - sampler_logp), mask),
      'kl/to_sampler': Mean.of(kl.k3(logp, sampler_logp), mask),
    }
    by_sequence = policy_loss is losses.gspo
    fractions = losses.clip_fractions(*surrogate, **clip, sequence=by_sequence)
    for name, share in fractions.items():
      metrics[f'clip_ratio/{name}_mean'] = share
    if batch.ref_logp is not None:
      metrics['kl'] = Mean.of(kl.k3(logp, batch.ref_logp), mask)
    if settings.kl_in_loss:
      loss += controllers['kl'].coef * kl.kl_loss(
        logp, batch.ref_logp, mask, denominator, settings.kl_estimator
      )
    if settings.entropy_coef:
      loss += losses.entropy_bonus(
        entropy, mask, denominator, controllers['entropy_coef']
      )
    if turn is not None:
      own, own_metrics = subpolicies.loss(
        settings,
        surrogate_loss,
        policy.heads,
        logp,
        more[0],
        old_logp,
        weight[..., None] * batch.head_advantages[:, None],
        mask,
        denominator,
        turn,
        controllers['fusion_entropy_coef'],
      )
      loss += own
      metrics |= own_metrics
    if settings.has_value_head:
      value_loss = losses.value_loss(
        more[0],
        batch.old_values,
        batch.returns,
        mask,
        denominator,
        settings.value_clip,
      )
      loss += settings.value_coef * value_loss
      error = jnp.square(batch.returns - more[0])
      metrics |= {
        'value/mean': Mean.of(more[0], mask),
        'value/squared_error': Mean.of(error, mask),
      }
    return loss, jax.lax.stop_gradient(metrics)

  return loss_fn


def clip_of(settings: Settings, update_kl: Array) -> dict[str, Any]:
  """The band of the importance ratio, which may follow the measured KL."""
  clip = {
    'clip_low': settings.clip_low,
    'clip_high': settings.clip_high,
    'dual_clip': settings.dual_clip,
  }
  if settings.clip_target_kl is not None:
    for name in ('clip_low', 'clip_high'):
      clip[name] = losses.adaptive_clip(
        update_kl, settings.clip_target_kl, clip[name]
      )
  return clip


def make_train_step(
  policy, optimizer: optax.GradientTransformation, settings: Settings, mesh
) -> Callable[..., tuple[TrainState, Metrics]]:
  """The jitted step `(state, batch) -> (state, metrics)`; `state` is donated.

  Under LoRA it is `(state, batch, frozen)`, with the base that `state.params`
  is beside; it is neither differentiated nor donated. The batch holds `prompts_per_update * group_size` rows. Metrics are sums and
  counts, so that those of several updates can be added.
  """
  loss_fn = make_loss(policy, settings)
  group, micro = settings.group_size, settings.prompts_per_micro_batch
  num_micro = settings.prompts_per_update // micro
  # With another term a group without advantages still has a gradient.
  may_skip = not (
    settings.kl_in_loss
    or settings.entropy_coef
    or settings.has_value_head
    or policy.heads
  )

  def by_micro_batch(x, order):
    """[N, ...] -> [micro-batches, rows, ...], whole groups.

    In `order`, or, where there is none, every micro-batch takes some groups of
    every device, so that no row has to move.
    """
    groups = x.reshape(-1, group, *x.shape[1:])
    if order is None:
      groups = groups.reshape(micro, num_micro, *groups.shape[1:])
      groups = groups.swapaxes(0, 1)
    else:
      groups = groups[order]
    return groups.reshape(num_micro, micro * group, *x.shape[1:])

  def train_step(state: TrainState, batch: Batch, frozen: Any = None):
    with sharding.use(mesh):
      return step(state, batch, frozen)

  def step(state, batch, frozen):
    def trained_loss(trained, *args):
      return loss_fn({**(frozen or {}), **trained}, *args)

    grad_fn = jax.value_and_grad(trained_loss, has_aux=True)
    denominator = loss_denominator(settings, row_mask(batch))
    # The loss asks whose turn it is; that is known from the state alone.
    controllers = dict(state.controllers, updates=state.updates)
    pushed = (batch.advantages != 0).reshape(batch.row_valid.shape[0], -1)
    alive = jnp.any(
      (jnp.any(pushed, axis=1) & batch.row_valid).reshape(-1, group), axis=1
    )
    if may_skip:
      order = jnp.argsort(~alive, stable=True)
      trips = -(-jnp.sum(alive) // micro)
    else:
      order, trips = None, num_micro
    stacked = jax.tree.map(
      lambda x: by_micro_batch(x, order), (batch, denominator)
    )

    def piece(i):
      rows, denominator = jax.tree.map(lambda x: x[i], stacked)
      if micro * group % sharding.num_row_shards(mesh) == 0:
        rows, denominator = jax.lax.with_sharding_constraint(
          (rows, denominator), sharding.rows(mesh)
        )
      (loss, metrics), grads = grad_fn(
        state.params, controllers, rows, denominator
      )
      # A sum over micro-batches that is whole on every device would not fit.
      grads = jax.lax.with_sharding_constraint(grads, placed.params)
      return loss, metrics, grads

    def add(i, total):
      return jax.tree.map(jnp.add, total, piece(i))

    zeros = jax.tree.map(
      lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(piece, 0)
    )
    loss, metrics, grads = jax.lax.fori_loop(0, trips, add, zeros)

    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, opt = optimizer.update(grads, state.opt, state.params)
    params = optax.apply_updates(state.params, updates)

    def keep(new, old):
      return jnp.where(finite, new, old)

    one = jnp.float32(1)
    metrics = {
      **metrics,
      'loss': Mean(jnp.where(finite, loss, 0.0), finite * one),
      'grad_norm': Mean(jnp.where(finite, norm, 0.0), finite * one),
      'skipped_updates': Mean((~finite) * one, one),
      'groups_in_loss': Mean(
        jnp.sum(alive, dtype=jnp.float32) if may_skip else one * alive.size,
        one * alive.size,
      ),
      'learning_rate': Mean(state_lib.learning_rate(opt), one),
    }
    if policy.heads:
      metrics |= subpolicies.gradient_norms(
        grads, policy.heads, subpolicies.heads_turn(settings, state.updates)
      )
    # A batch without a single token says nothing about the KL.
    update_kl = metrics['kl/to_sampler']
    measured = finite & (update_kl.count > 0)
    controllers = dict(
      state.controllers,
      update_kl=jnp.where(
        measured,
        update_kl.total / jnp.maximum(update_kl.count, 1),
        state.controllers['update_kl'],
      ),
    )
    new = state._replace(
      controllers=controllers,
      updates=state.updates + finite.astype(jnp.int32),
      params=jax.tree.map(keep, params, state.params),
      opt=jax.tree.map(keep, opt, state.opt),
    )
    return new, metrics

  # Pinned at the boundary, so that the state comes out as it went in and the
  # second step finds the program of the first.
  placed = state_lib.state_shardings(
    mesh, state_lib.abstract_state(policy, optimizer, settings)
  )
  inputs = (placed, sharding.rows(mesh))
  _, frozen = lora.split(jax.eval_shape(policy.init, jax.random.key(0)))
  if frozen:
    inputs += (sharding.shardings(mesh, frozen),)
  return jax.jit(
    train_step,
    in_shardings=inputs,
    out_shardings=(placed, sharding.replicated(mesh)),
    donate_argnums=0,
  )
