"""GDPO as others compute it: same numbers, same treatment of the edges.

Each preset has the signature of `advantages.gdpo`; the defaults of `eps`,
`ddof` and `whiten` are those of the implementation that it is named after.
Where these leave rounding residue in groups of equal values (eight rewards of
0.1 give up to 0.4 with a small eps), the presets give 0 like everything else
here.
"""

import jax.numpy as jnp

from gdpo_jax.objectives import combine, masked
from gdpo_jax.types import Array


def paper(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-8,
  ddof: int = 1,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """arXiv:2601.05242, Eq. 4-7: `eps` in the batch step only.

  Missing values, of which the paper does not speak, as in `gdpo`.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = combine.group_normalize(rewards, valid, eps=0.0, ddof=ddof)
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def trl(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """TRL 1.16, `multi_objective_aggregation='normalize_then_sum'`.

  Differs from `gdpo` in one thing: a row that only rewards of weight 0 have
  scored counts as a 0 in the batch statistics.
  """
  row_valid = jnp.any(combine.prepare(rewards, valid)[1], axis=-1)
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = combine.group_normalize(rewards, valid, eps=eps, ddof=ddof)
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  total = total._replace(valid=row_valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def verl(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-6,
  ddof: int = 1,
  whiten: str = 'token',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """verl, `adv_estimator=gdpo`: the batch step counts tokens.

  A group of one keeps its raw reward; a score that is missing is 0, as in
  verl's zero-filled score tensors. The batch step divides by
  `sqrt(var + 1e-8)`, the variance with Bessel's correction on the number of
  tokens. Rows that nothing scored get 0 in the end, but count before.
  """
  rewards, exists, weights = combine.prepare(rewards, valid, weights)
  everything = jnp.ones(rewards.shape, bool)
  if rewards.shape[1] == 1:
    z = rewards / (1 + eps)
    total = combine.weighted_sum(z, everything, weights)
  else:
    z = combine.group_normalize(rewards, everything, eps=eps, ddof=ddof)
    total = combine.settle(combine.weighted_sum(z, everything, weights))
  values = total.values
  if whiten != 'none':
    tokens = mask if whiten == 'token' else None
    batch = combine.over_batch(total, ddof, tokens, axis_name)
    values = batch.centred / jnp.sqrt(jnp.square(batch.std) + 1e-8)
  return jnp.where(jnp.any(exists, axis=-1), values, 0.0)


def nemo_rl(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-6,
  ddof: int = 1,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
  leave_one_out: bool = False,
) -> Array:
  """NeMo-RL, `adv_estimator.name=gdpo`: `eps` in the group step only.

  A deviation is divided by `std + eps` where the std is above 0, and left as it
  is elsewhere. A component that is missing is 0, as NeMo-RL's environments fill
  it in. Rows that nothing scored get 0 in the end, but count before.

  Args:
    leave_one_out: baseline and std of a row come from the other rows. A sole
      winner's siblings are all alike: its deviation is then left unscaled.
  """
  rewards, exists, weights = combine.prepare(rewards, valid, weights)
  everything = jnp.ones(rewards.shape, bool)
  if leave_one_out and rewards.shape[1] > 1:
    others = ~jnp.eye(rewards.shape[1], dtype=bool)[..., None]
    siblings = jnp.broadcast_to(
      rewards[:, None], (rewards.shape[0], *others.shape[:2], weights.size)
    )
    group = masked.moments(siblings, others, axis=2, ddof=ddof)
    std = group.std[:, :, 0]
    deviation = rewards - group.mean[:, :, 0]
    constant = ~masked.moments(rewards, everything, axis=1).varies
    deviation = jnp.where(constant, 0.0, deviation)
  else:
    group = masked.moments(rewards, everything, axis=1, ddof=ddof)
    std, deviation = group.std, group.centred
  z = deviation / jnp.where(std > 0, std + eps, 1.0)
  total = combine.settle(combine.weighted_sum(z, everything, weights))
  values = combine.batch_step(total, whiten, 0.0, ddof, mask, axis_name)
  return jnp.where(jnp.any(exists, axis=-1), values, 0.0)


PRESETS = {'paper': paper, 'trl': trl, 'verl': verl, 'nemo_rl': nemo_rl}
