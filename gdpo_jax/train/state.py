"""The optimizer, and the state that a checkpoint holds."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdpo_jax import sharding
from gdpo_jax.policy import lora
from gdpo_jax.train import subpolicies
from gdpo_jax.train.controllers import Controllers
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


def make_optimizer(
  settings: Settings, heads: tuple[str, ...] = ()
) -> optax.GradientTransformation:
  """Clip by global norm, then AdamW; with turns where there are sub-policies.

  `heads` are those of the policy.

  The learning rate and a factor on it live in the optimizer state
  (`inject_hyperparams`): a rule that halves the factor survives a restart.
  """

  @optax.inject_hyperparams
  def adamw(learning_rate, factor):
    def make():
      return optax.adamw(
        learning_rate * factor,
        b1=settings.adam_b1,
        b2=settings.adam_b2,
        weight_decay=settings.weight_decay,
      )

    return subpolicies.by_part(settings, heads, make) if heads else make()

  return optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    adamw(learning_rate=learning_rate_schedule(settings), factor=1.0),
  )


def learning_rate(opt_state: Any) -> jax.Array:
  """f32[], the rate that the last update used."""
  hyper = opt_state[1].hyperparams
  return hyper['learning_rate'] * hyper['factor']


def with_rate_factor(state: TrainState, factor: float) -> TrainState:
  """The learning rate times `factor` from the next update on."""
  clip, adamw = state.opt
  hyper = adamw.hyperparams
  hyper = {**hyper, 'factor': _like(hyper['factor'], factor)}
  return state._replace(opt=(clip, adamw._replace(hyperparams=hyper)))


def with_entropy_coef(state: TrainState, coef: float) -> TrainState:
  """Another coefficient of the entropy bonus from the next update on."""
  old = state.controllers['entropy_coef']
  return state._replace(
    controllers={**state.controllers, 'entropy_coef': _like(old, coef)}
  )


def _like(old: jax.Array, value: float) -> jax.Array:
  """`old` itself where nothing changes; else in its place on the mesh."""
  new = np.asarray(value, old.dtype)
  return old if new == np.asarray(old) else jax.device_put(new, old.sharding)


def _start(
  params: Any,
  optimizer: optax.GradientTransformation,
  settings: Settings,
  controllers: Controllers,
) -> TrainState:
  if settings.has_value_head and 'value' not in params:
    # Zeros: every value starts at 0, and the trunk feels nothing of it.
    width = params['embed']['embedding'].shape[1]
    params = {**params, 'value': {'kernel': jnp.zeros((width,), jnp.float32)}}
  params, _ = lora.split(params)
  # two buffers: a buffer that is there twice could not be donated
  step, updates = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
  return TrainState(
    step,
    updates,
    params,
    optimizer.init(params),
    controllers.init(params),
    jax.random.key(settings.seed),
  )


def abstract_state(
  policy,
  optimizer: optax.GradientTransformation,
  settings: Settings,
) -> TrainState:
  """Shapes and dtypes of the state, for one reward; nothing is computed."""
  controllers = _of_one_reward(settings)

  def init(key):
    return _start(policy.init(key), optimizer, settings, controllers)

  return jax.eval_shape(init, jax.random.key(0))


def _of_one_reward(settings: Settings) -> Controllers:
  """The state's tree does not depend on how many rewards there are."""
  plain = dataclasses.replace(
    settings, weight_schedule='constant', normalizers='none'
  )
  return Controllers(plain, ('reward',), (1.0,))


def state_shardings(mesh, state: TrainState) -> TrainState:
  """Shardings for every leaf: the table for params, optimizer and reference,
  else whole.
  """
  whole = sharding.replicated(mesh)
  controllers = jax.tree.map(lambda _: whole, state.controllers)
  if 'reference' in controllers:
    reference = state.controllers['reference']
    controllers['reference'] = sharding.shardings(mesh, reference)
  return TrainState(
    step=whole,
    updates=whole,
    params=sharding.shardings(mesh, state.params),
    opt=sharding.shardings(mesh, state.opt),
    controllers=controllers,
    key=whole,
  )


def init_state(
  params: Any,
  optimizer: optax.GradientTransformation,
  settings: Settings,
  mesh,
  controllers: Controllers | None = None,
) -> TrainState:
  """Places a copy of `params` on the mesh and starts the rest beside it.

  A copy, because a training step donates the state that it is given. Of
  parameters with LoRA the state has the trained part alone.

  Args:
    controllers: of the run's rewards; by default those of a run with one.
  """
  if controllers is None:
    controllers = _of_one_reward(settings)

  def init(params):
    return _start(
      jax.tree.map(jnp.copy, params), optimizer, settings, controllers
    )

  placed = state_shardings(mesh, jax.eval_shape(init, params))
  return jax.jit(init, out_shardings=placed)(params)
