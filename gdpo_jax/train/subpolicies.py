"""Training of a decoupled policy (see policy/decoupled.py).

  trunk, fusion  <- the mixture, by the combined advantage, at every update
  head k         <- sub-policy k, by the advantage of reward k alone, at every
                    `subpolicy_every`-th update; a share of it enters the trunk

Both ratios are against the mixture, which drew the samples: a sub-policy moves
within the clip's band around it. In a cold start the heads alone learn, at
every update. What is not on its turn stands still bit for bit, Adam's moments
and counts included.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from gdpo_jax.objectives import kl, losses
from gdpo_jax.objectives.combine import group_normalize
from gdpo_jax.objectives.masked import Mean
from gdpo_jax.policy.decoupled import SubPolicies
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import Array, TrainState


def heads_turn(settings: Settings, updates: Array) -> Array:
  """bool[]: do the heads learn in the update that follows `updates` others?"""
  cold = settings.subpolicy_cold_start
  return (updates < cold) | ((updates - cold) % settings.subpolicy_every == 0)


def advantages(
  settings: Settings, rewards: Array, valid: Array, weights: Array
) -> Array:
  """f32[P, G, K]: each reward normalized in its group, for its own head.

  0 where it is missing or has weight 0; a negative weight turns the sign.
  """
  z = group_normalize(
    rewards,
    valid,
    eps=settings.advantage_eps,
    ddof=settings.advantage_ddof,
  )
  return z * jnp.sign(weights)


def loss(
  settings: Settings,
  policy_loss: Callable[..., Array],
  names: Sequence[str],
  logp: Array,
  parts: SubPolicies,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
  turn: Array,
  coef: Array,
) -> tuple[Array, dict[str, Mean]]:
  """What the sub-policies and the fusion add to the loss, and their metrics.

  Args:
    policy_loss: `(logp, old_logp, advantages, mask, denominator) -> f32[]`.
    logp: f32[N, Tc], of the mixture; old_logp: the same, before.
    advantages: f32[N, 1 or Tc, K], of each head.
    turn: bool[], of the heads.
    coef: f32[], of the entropy of the fusion weights.
  """
  total = losses.entropy_bonus(parts.entropy, mask, denominator, coef)
  metrics = {'fusion/entropy': Mean.of(parts.entropy, mask)}
  for k, name in enumerate(names):
    own = policy_loss(
      parts.own[..., k],
      old_logp,
      advantages[..., k],
      mask,
      denominator,
    )
    total += jnp.where(turn, own, 0.0)
    leads = jnp.argmax(parts.weights, axis=-1) == k
    metrics |= {
      f'fusion/{name}/weight': Mean.of(parts.weights[..., k], mask),
      f'fusion/{name}/leads': Mean.of(leads, mask),
      f'heads/{name}/kl': Mean.of(kl.k3(logp, parts.logp[..., k]), mask),
    }
  return total, metrics


def gradient_norms(
  gradients: Any, names: Sequence[str], turn: Array
) -> dict[str, Mean]:
  """Norms of the heads' gradients and their shares of the sum, on their turn."""
  squares = sum(
    jnp.sum(jnp.square(x), axis=(1, 2))
    for x in jax.tree.leaves(gradients['heads'])
  )
  norms = jnp.sqrt(squares)
  finite = jnp.isfinite(norms).all() & turn
  norms = jnp.where(finite, norms, 0.0)
  shares = norms / jnp.maximum(jnp.sum(norms), 1e-30)
  count = finite.astype(jnp.float32)
  metrics = {}
  for k, name in enumerate(names):
    metrics[f'heads/{name}/grad_norm'] = Mean(norms[k], count)
    metrics[f'heads/{name}/grad_share'] = Mean(shares[k], count)
  return metrics


class OnTurn(NamedTuple):
  """State of `on_turn`."""

  seen: Array  # i32[], updates, on turn or not
  inner: Any


def on_turn(
  inner: optax.GradientTransformation, is_turn: Callable[[Array], Array]
) -> optax.GradientTransformation:
  """`inner` where `is_turn(updates so far)`; else nothing moves at all."""

  def init(params):
    return OnTurn(jnp.zeros((), jnp.int32), inner.init(params))

  def update(updates, state, params=None):
    turn = is_turn(state.seen)
    new, moved = inner.update(updates, state.inner, params)
    new = jax.tree.map(lambda x: jnp.where(turn, x, 0.0), new)
    moved = jax.tree.map(lambda a, b: jnp.where(turn, a, b), moved, state.inner)
    return new, OnTurn(state.seen + 1, moved)

  return optax.GradientTransformation(init, update)


class HeadRates(NamedTuple):
  """State of `head_rates`: a rule may raise the rate of one head."""

  head_factor: Array  # f32[K]


def head_rates(rates: Sequence[float]) -> optax.GradientTransformation:
  """Multiplies the update of head k by rates[k]; 0 leaves it bit for bit."""
  rates = jnp.asarray(rates, jnp.float32)

  def update(updates, state, params=None):
    del params
    factor = (rates * state.head_factor)[:, None, None]
    return jax.tree.map(
      lambda x: jnp.where(factor == 0, 0.0, x * factor), updates
    ), state

  return optax.GradientTransformation(
    lambda params: HeadRates(jnp.ones_like(rates)), update
  )


def by_part(
  settings: Settings,
  names: Sequence[str],
  make: Callable[[], optax.GradientTransformation],
) -> optax.GradientTransformation:
  """An optimizer each for trunk, fusion and heads, with turns and rates.

  Args:
    names: of the rewards with a head.
    make: the optimizer that each part has for itself.
  """
  cold = settings.subpolicy_cold_start
  frozen = set(_words(settings.subpolicy_frozen))
  rates = list(map(float, _words(settings.subpolicy_rates)))
  rates = rates or [1.0] * len(names)
  rates = [0.0 if n in frozen else r for n, r in zip(names, rates, strict=True)]
  parts = {
    'trunk': on_turn(make(), lambda seen: seen >= cold),
    'fusion': on_turn(make(), lambda seen: seen >= cold),
    'heads': optax.chain(
      on_turn(make(), lambda seen: heads_turn(settings, seen)),
      head_rates(rates),
    ),
  }
  for part in {'trunk', 'fusion'} & frozen:
    parts[part] = optax.set_to_zero()

  def labels(params):
    return {
      name: jax.tree.map(
        lambda _, name=name: name if name in parts else 'trunk', tree
      )
      for name, tree in params.items()
    }

  return optax.partition(parts, labels)


def adjusted(
  state: TrainState, fusion_entropy_coef: float, factors: Sequence[float]
) -> TrainState:
  """With what the rules ask for, in its place on the mesh; absolute values.

  Args:
    factors: one for the rate of each head; [] without sub-policies.
  """
  if not factors:
    return state

  def put(value, old):
    return jax.device_put(jnp.asarray(value, old.dtype), old.sharding)

  def rates(path, leaf):
    mine = getattr(path[-1], 'name', None) == 'head_factor'
    return put(factors, leaf) if mine else leaf

  old = state.controllers['fusion_entropy_coef']
  return state._replace(
    opt=jax.tree_util.tree_map_with_path(rates, state.opt),
    controllers={
      **state.controllers,
      'fusion_entropy_coef': put(fusion_entropy_coef, old),
    },
  )


def check(settings: Settings, names: Sequence[str]) -> None:
  """Raises ValueError where a setting does not fit the rewards of the run."""
  words = _words(settings.subpolicy_rates)
  try:
    good = all(0 <= float(rate) < math.inf for rate in words)
  except ValueError:
    good = False
  if not good or len(words) not in (0, len(names)):
    raise ValueError(
      f'subpolicy_rates is {settings.subpolicy_rates!r}; give a number of at '
      f'least 0 for each of the {len(names)} rewards: {", ".join(names)}.'
    )
  known = {*names, 'trunk', 'fusion'}
  if unknown := set(_words(settings.subpolicy_frozen)) - known:
    raise ValueError(
      f'subpolicy_frozen names {sorted(unknown)}; there are '
      f'{", ".join(sorted(known))}.'
    )
  if clash := set(names) & {'trunk', 'fusion', 'entropy'}:
    raise ValueError(
      f'a reward is named {sorted(clash)}, which means a part of a policy with '
      'sub-policies; rename it.'
    )


def _words(text: str) -> list[str]:
  """'a, b' -> ['a', 'b']; a setting that a command line can give."""
  return [word.strip() for word in text.split(',') if word.strip()]
