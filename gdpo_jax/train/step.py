"""One optimizer step on one mini-batch, compiled once.

  Batch [N] --order--> groups with signal first
            --scan over micro-batches--> sum of gradients, sums of metrics
            --optimizer--> TrainState, unless a gradient is not finite

Every loss term is a sum divided by a denominator that comes from the masks of
the whole mini-batch, so micro-batches add up to it exactly, and a group whose
advantages are all zero can be left out of the forward pass without changing
loss or gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from gdpo_jax import sharding
from gdpo_jax.objectives import kl, losses
from gdpo_jax.objectives.masked import Mean
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings, asked_for
from gdpo_jax.types import Array, Batch, TrainState

Metrics = dict[str, Mean]


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
  """`(params, batch, denominator) -> (f32[], Metrics)`, a sum over the rows."""
  policy_loss = losses.LOSSES.get(settings.policy_loss, settings.policy_loss)
  clip = {
    'clip_low': settings.clip_low,
    'clip_high': settings.clip_high,
    'dual_clip': settings.dual_clip,
  }
  loss_clip = asked_for(policy_loss, **clip)

  def loss_fn(params, batch: Batch, denominator):
    mask = row_mask(batch)
    logp, entropy = policy.log_probs(
      params,
      batch.rollout,
      group_size=settings.group_size,
      temperature=settings.temperature,
    )
    surrogate = (logp, batch.old_logp, batch.advantages, mask)
    loss = policy_loss(*surrogate, denominator, **loss_clip)
    metrics = {
      'entropy': Mean.of(entropy, mask),
      'sampler_mismatch': Mean.of(jnp.abs(logp - batch.old_logp), mask),
    }
    for name, share in losses.clip_fractions(*surrogate, **clip).items():
      metrics[f'clip_ratio/{name}_mean'] = share
    if batch.ref_logp is not None:
      loss += settings.kl_coef * kl.kl_loss(
        logp, batch.ref_logp, mask, denominator, settings.kl_estimator
      )
      metrics['kl'] = Mean.of(kl.k3(logp, batch.ref_logp), mask)
    if settings.entropy_coef:
      loss += losses.entropy_bonus(
        entropy, mask, denominator, settings.entropy_coef
      )
    return loss, jax.lax.stop_gradient(metrics)

  return loss_fn


def make_train_step(
  policy, optimizer: optax.GradientTransformation, settings: Settings, mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The jitted step; `state` is donated.

  The batch holds `prompts_per_update * group_size` rows. Metrics are sums and
  counts, so that those of several updates can be added.
  """
  grad_fn = jax.value_and_grad(make_loss(policy, settings), has_aux=True)
  group, micro = settings.group_size, settings.prompts_per_micro_batch
  num_micro = settings.prompts_per_update // micro
  # With a KL or an entropy term a group without advantages still has a gradient.
  may_skip = not settings.kl_coef and not settings.entropy_coef

  def by_micro_batch(x, order):
    """[N, ...] -> [micro-batches, rows, ...], whole groups in `order`."""
    groups = x.reshape(-1, group, *x.shape[1:])[order]
    return groups.reshape(num_micro, micro * group, *x.shape[1:])

  def train_step(state: TrainState, batch: Batch):
    denominator = loss_denominator(settings, row_mask(batch))
    alive = jnp.any(
      ((batch.advantages != 0) & batch.row_valid).reshape(-1, group), axis=1
    )
    if may_skip:
      order = jnp.argsort(~alive, stable=True)
      trips = -(-jnp.sum(alive) // micro)
    else:
      order, trips = jnp.arange(alive.shape[0]), num_micro
    stacked = jax.tree.map(
      lambda x: by_micro_batch(x, order), (batch, denominator)
    )

    def piece(i):
      rows, denominator = jax.tree.map(lambda x: x[i], stacked)
      if micro * group % sharding.num_row_shards(mesh) == 0:
        rows, denominator = jax.lax.with_sharding_constraint(
          (rows, denominator), sharding.rows(mesh)
        )
      (loss, metrics), grads = grad_fn(state.params, rows, denominator)
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
    new = state._replace(
      updates=state.updates + finite.astype(jnp.int32),
      params=jax.tree.map(keep, params, state.params),
      opt=jax.tree.map(keep, opt, state.opt),
    )
    return new, metrics

  # Pinned at the boundary, so that the state comes out as it went in and the
  # second step finds the program of the first.
  placed = state_lib.state_shardings(
    mesh, state_lib.abstract_state(policy, optimizer)
  )
  return jax.jit(
    train_step,
    in_shardings=(placed, sharding.rows(mesh)),
    out_shardings=(placed, sharding.replicated(mesh)),
    donate_argnums=0,
  )
