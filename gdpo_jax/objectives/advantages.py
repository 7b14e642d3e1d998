"""From a matrix of rewards to one advantage per completion.

  rewards f32[P, G, K], valid bool[P, G, K], weights f32[K]
      --group statistics--> f32[P, G]  --batch step--> advantages f32[P, G]

Two families. *Sum, then normalize* (grpo, dr_grpo, ...) first adds the weighted
rewards of a row, and so cannot tell rows with equal sums apart. *Normalize,
then sum* (mo_grpo, gdpo, ...) takes a z-score of every reward inside its group
first, so every reward speaks with the same loudness, and the weights are the
weights of the rewards and not of their units.

What holds for every function here:

* NaN or `valid=False` means missing, never zero: the entry leaves its reward's
  statistics, and its row gets 0 from that reward. With fewer than two values a
  reward adds 0 to its group. A row that no reward (of weight other than 0)
  scored has advantage 0 and leaves the batch statistics: see `scored`.
* A group of equal values gives exactly 0, and so does a group in which the
  rewards cancel, up to a few float32 roundings. Rewards (1,1,0) and (0,0,1)
  with equal weights sum to the constant 1 and their z-scores to 0: two rewards
  with a constant sum always cancel, in every method here, whatever is said of
  this example elsewhere.
* The group is an axis of the array and is never split; statistics over the
  batch are over all P. Under `jit` P may be sharded at will; inside `shard_map`
  each device holds whole groups, and `axis_name` names the axis that P is
  sharded over.
* No gradient flows through an advantage.

Shared keywords:

  eps        added to every standard deviation that divides.
  ddof       1 (sample) or 0 (population), in the group and in the batch.
  whiten     the batch step: 'none', 'sequence' (every completion counts once)
             or 'token' (every completion counts once per token).
  mask       bool[N, Tc] or bool[P, G, Tc], which tokens count; for 'token'.
  axis_name  see above.
"""

import jax.numpy as jnp

from gdpo_jax.objectives import combine, masked
from gdpo_jax.objectives.combine import group_normalize, scored
from gdpo_jax.types import Array

__all__ = [
  'ADVANTAGES',
  'dr_grpo',
  'gdpo',
  'group_normalize',
  'grpo',
  'informative',
  'mo_grpo',
  'scored',
]


def grpo(
  rewards: Array,
  valid: Array,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  scale: str = 'group',
  renormalize: bool = False,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`(s - mean_g s) / (std_g s + eps)`, `s = sum_k w_k r_k` (arXiv:2402.03300).

  Args:
    scale: 'group' divides by the group's std, 'batch' by the std of the raw `s`
      over the batch, 'none' not at all.
    renormalize: `s = sum w r / sum |w|` over the rewards that a row has, so that
      a missing reward does not read as a low one.
  Returns:
    f32[P, G].
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  total = combine.weighted_sum(rewards, valid, weights, renormalize)
  group = combine.within_group(total, ddof)
  if scale == 'group':
    advantages = masked.safe_divide(group.centred, group.std + eps)
  elif scale == 'batch':
    std = combine.over_batch(total, ddof, axis_name=axis_name).std
    advantages = masked.safe_divide(group.centred, std + eps)
  elif scale == 'none':
    advantages = group.centred
  else:
    raise ValueError(
      f"scale must be 'group', 'batch' or 'none', got {scale!r}."
    )
  total = combine.Combined(advantages, jnp.abs(advantages), total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def dr_grpo(
  rewards: Array,
  valid: Array,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  renormalize: bool = False,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`s - mean_g s`: GRPO without the std (Dr. GRPO, arXiv:2503.20783, sec. 3.2).

  `eps` and `ddof` only matter to the batch step. The method's other half is the
  loss denominator, `losses.constant_denominator`.
  """
  return grpo(
    rewards,
    valid,
    weights,
    eps=eps,
    ddof=ddof,
    scale='none',
    renormalize=renormalize,
    whiten=whiten,
    mask=mask,
    axis_name=axis_name,
  )


def mo_grpo(
  rewards: Array,
  valid: Array,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`sum_k w_k z_k` (MO-GRPO, arXiv:2509.22047, Eq. 5; there ddof 0, no weights).

  GDPO without the batch step.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  total = combine.weighted_sum(z, valid, weights)
  total = total._replace(values=combine.within_group(total).centred)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def gdpo(
  rewards: Array,
  valid: Array,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`A = sum_k w_k z_k`, then `(A - mean A) / (std A + eps)` over the batch.

  GDPO, arXiv:2601.05242, Eq. 4-7: each reward is normalized in its own group
  first, and the batch step keeps the scale of the advantage independent of the
  number of rewards. A batch of one group hides what the method does: there the
  batch step undoes the group's scale.
  """
  return mo_grpo(
    rewards,
    valid,
    weights,
    eps=eps,
    ddof=ddof,
    whiten=whiten,
    mask=mask,
    axis_name=axis_name,
  )


def informative(
  rewards: Array,
  valid: Array,
  weights: Array | None = None,
  aggregator='gdpo',
  **settings,
) -> Array:
  """bool[P]: groups in which the chosen aggregator tells rows apart.

  What dynamic sampling asks, before the batch is complete: the batch step is
  left out. A constant total is no reason to drop a GDPO group: rewards
  (1,0,0,0), (0,1,1,0), (0,0,0,1) all add up to 1 and still rank the rows.

  Args:
    aggregator: a name in `ADVANTAGES` or such a function.
    settings: the aggregator's own keywords.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  if not callable(aggregator):
    aggregator = ADVANTAGES[aggregator]
  values = aggregator(rewards, valid, weights, **settings, whiten='none')
  spread = masked.moments(values, scored(valid, weights), axis=1, ddof=0)
  return jnp.any(spread.centred != 0, axis=1)


ADVANTAGES = {
  'grpo': grpo,
  'dr_grpo': dr_grpo,
  'mo_grpo': mo_grpo,
  'gdpo': gdpo,
}
