"""From raw rewards to advantages as the settings say, and what it did.

values f32[P, G, K] --conditions--> --normalizers--> rewards f32[P, G, K]
    --aggregator--> advantages f32[P, G]
    --diagnose--> a row of metrics;  --single rewards--> gradient cosines
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.objectives import advantages as adv
from gdpo_jax.objectives import shaping
from gdpo_jax.objectives.diagnose import diagnose
from gdpo_jax.train.settings import Settings, asked_for


def aggregator(settings: Settings):
  """The function of `settings.advantage`; None where a value head decides."""
  if settings.has_value_head:
    return None
  known = adv.ADVANTAGES | adv.PRESETS
  return known.get(settings.advantage, settings.advantage)


def combine(settings: Settings, rewards, valid, weights, mask, bounds):
  """f32[P, G] by the chosen aggregator; one trace for a whole run."""
  aggregate = aggregator(settings)
  return aggregate(
    rewards,
    valid,
    weights,
    **asked_for(
      aggregate,
      eps=settings.advantage_eps,
      ddof=settings.advantage_ddof,
      whiten=settings.whiten,
      mask=mask,
      bounds=bounds,
    ),
  )


class Shaped(NamedTuple):
  """What conditions and normalizers make of raw rewards."""

  held: jax.Array  # bool[P, G, K]
  conditioned: jax.Array  # f32[P, G, K]
  rewards: jax.Array  # f32[P, G, K]
  valid: jax.Array  # bool[P, G, K]
  informative: jax.Array  # bool[P], the aggregator tells rows apart


def shape_rewards(
  settings: Settings, hierarchy, values, weights, mask, bounds, normalize=None
) -> Shaped:
  """Conditions, then normalizers, then which groups tell rows apart.

  Args:
    values: f32[P, G, K], NaN where missing.
    normalize: `(values, valid) -> values`; None for none.
  """
  conditioned, valid, held = shaping.apply_conditions(
    hierarchy, values, jnp.isfinite(values), mode=settings.condition_mode
  )
  rewards = normalize(conditioned, valid) if normalize else conditioned
  aggregate = aggregator(settings)
  if aggregate is None:
    informative = jnp.any(valid, axis=(1, 2))
  else:
    informative = adv.informative(
      rewards,
      valid,
      weights,
      aggregator=aggregate,
      **asked_for(aggregate, mask=mask, bounds=bounds),
    )
  return Shaped(held, conditioned, rewards, valid, informative)


@functools.partial(jax.jit, static_argnames=('eps', 'ddof'))
def _diagnose(rewards, valid, weights, eps, ddof):
  return diagnose(rewards, valid, weights, eps=eps, ddof=ddof)


def diagnosis(settings: Settings, names, rewards, valid, weights, held):
  """What the rewards did to each other in this batch, as a row of metrics.

  `collapse/...`: distinct reward tuples and distinct advantages per group, by
  method. `conflict/A/B`: correlation of the weighted z-scores.
  `advantage_share/A`: share of the sum that the method at hand forms.
  `counterfactual/...`: cosine and share of flipped signs between methods.
  `condition/A/held`: share of rows where the condition of A held.
  """
  d = jax.device_get(
    _diagnose(
      rewards,
      valid,
      weights,
      settings.advantage_eps,
      settings.advantage_ddof,
    )
  )
  sums_first = settings.advantage in adv.SUM_FIRST or settings.has_value_head
  shares = d.shares['grpo' if sums_first else 'gdpo']
  row = {'collapse/distinct_rewards': d.distinct_rewards.mean()}
  for method, distinct in d.distinct_advantages.items():
    row[f'collapse/distinct_advantages/{method}'] = distinct.mean()
  for k, name in enumerate(names):
    row[f'advantage_share/{name}'] = shares[k]
    row[f'condition/{name}/held'] = held[..., k].mean()
    for j, other in enumerate(names[:k]):
      row[f'conflict/{other}/{name}'] = d.conflict[j, k]
  for pair, cosine in d.cosine.items():
    row[f'counterfactual/cosine/{pair}'] = cosine
    row[f'counterfactual/sign_flips/{pair}'] = d.sign_flips[pair]
  return {name: float(value) for name, value in row.items()}


def make_gradient_cosines(
  loss_fn: Callable, settings: Settings, names: Sequence[str]
) -> Callable:
  """Do the rewards pull the parameters the same way?

  For each reward alone (the aggregator with its weight and no other, no batch
  step), the gradient of the policy loss on the first micro-batch; then the
  cosines between them.

  Args:
    loss_fn: of `step.make_loss`, for settings without KL, entropy and values.
  Returns:
    `(params, frozen, controllers, batch, rewards, valid, weights) -> row`,
    which holds K gradients of `params` at once; `frozen` is beside them under
    LoRA, else {}.
  """
  count = settings.prompts_per_micro_batch
  rows = count * settings.group_size
  single = settings
  if settings.has_value_head:
    single = dataclasses.replace(settings, advantage='grpo')

  @jax.jit
  def cosines(params, frozen, controllers, batch, rewards, valid, weights):
    batch = jax.tree.map(lambda x: x[:rows], batch)
    mask = batch.rollout.mask & batch.row_valid[:, None]
    shape = (count, settings.group_size, -1)
    bounds = jnp.full((len(names), 2), jnp.nan)

    def gradient(k):
      alone = jnp.where(jnp.arange(len(names)) == k, weights, 0.0)
      a = combine(
        dataclasses.replace(single, whiten='none'),
        rewards[:count],
        valid[:count],
        alone,
        mask.reshape(shape),
        bounds,
      )
      one = batch._replace(advantages=a.reshape(-1), head_advantages=None)
      denominator = jnp.maximum(jnp.sum(mask), 1)
      denominator = jnp.full((rows, 1), denominator, jnp.float32)
      return jax.grad(
        lambda p: loss_fn({**frozen, **p}, controllers, one, denominator)[0]
      )(params)

    gradients = jax.lax.map(gradient, jnp.arange(len(names)))
    products = sum(
      jnp.einsum('ki,li->kl', g, g)
      for g in (
        leaf.reshape(len(names), -1) for leaf in jax.tree.leaves(gradients)
      )
    )
    norm = jnp.sqrt(jnp.diagonal(products))
    return jnp.where(
      jnp.outer(norm, norm) > 0, products / jnp.outer(norm, norm), jnp.nan
    )

  def measure(*inputs):
    table = np.asarray(cosines(*inputs))
    return {
      f'gradient_cosine/{a}/{b}': float(table[i, j])
      for j, b in enumerate(names)
      for i, a in enumerate(names[:j])
      if np.isfinite(table[i, j])
    }

  return measure
