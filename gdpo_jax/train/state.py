"""The optimizer, and the state that a checkpoint holds."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from gdpo_jax import sharding
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import TrainState


def learning_rate_schedule(settings: Settings) -> optax.Schedule:
  """Learning rate by optimizer step: linear warm-up, then the schedule."""
  updates = settings.num_steps * settings.updates_per_step
  warmup = round(settings.warmup_share * updates)
  peak, rest = settings.learning_rate, max(1, updates - warmup)
  after = {
    'constant': lambda: optax.constant_schedule(peak),
    'cosine': lambda: optax.cosine_decay_schedule(peak, rest),
    'linear': lambda: optax.linear_schedule(peak, 0.0, rest),
  }[settings.schedule]()
  if not warmup:
    return after
  # The first update already moves: rate peak / warmup, not 0.
  rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
  return optax.join_schedules([rise, after], [warmup])


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW.

  The learning rate and a factor on it live in the optimizer state
  (`inject_hyperparams`): a rule that halves the factor survives a restart.
  """

  @optax.inject_hyperparams
  def adamw(learning_rate, factor):
    return optax.adamw(
      learning_rate * factor,
      b1=settings.adam_b1,
      b2=settings.adam_b2,
      weight_decay=settings.weight_decay,
    )

  return optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    adamw(learning_rate=learning_rate_schedule(settings), factor=1.0),
  )


def learning_rate(opt_state: Any) -> jax.Array:
  """f32[], the rate that the last update used."""
  hyper = opt_state[1].hyperparams
  return hyper['learning_rate'] * hyper['factor']


def abstract_state(
  policy, optimizer: optax.GradientTransformation
) -> TrainState:
  """Shapes and dtypes of the state; nothing is computed."""

  def init(key):
    params = policy.init(key)
    zero = jnp.int32(0)
    return TrainState(zero, zero, params, optimizer.init(params), {}, key)

  return jax.eval_shape(init, jax.random.key(0))


def state_shardings(mesh, state: TrainState) -> TrainState:
  """Shardings for every leaf: the table for params and optimizer, else whole."""
  whole = sharding.replicated(mesh)
  return TrainState(
    step=whole,
    updates=whole,
    params=sharding.shardings(mesh, state.params),
    opt=sharding.shardings(mesh, state.opt),
    controllers=jax.tree.map(lambda _: whole, state.controllers),
    key=whole,
  )


def init_state(
  params: Any, optimizer: optax.GradientTransformation, seed: int, mesh
) -> TrainState:
  """Places a copy of `params` on the mesh and starts the optimizer beside it.

  A copy, because a training step donates the state that it is given.
  """
  placed = sharding.shardings(mesh, params)
  params = jax.jit(
    lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=placed
  )(params)
  opt_shape = jax.eval_shape(optimizer.init, params)
  opt = jax.jit(
    optimizer.init, out_shardings=sharding.shardings(mesh, opt_shape)
  )(params)
  # two buffers: a buffer that is there twice could not be donated
  step, updates = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
  state = TrainState(step, updates, params, opt, {}, jax.random.key(seed))
  return jax.device_put(state, state_shardings(mesh, state))
