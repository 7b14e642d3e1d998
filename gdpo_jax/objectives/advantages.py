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
  with equal weights sum to the constant 1, and their z-scores to 0: two rewards
  with a constant sum cancel in GDPO as in GRPO. The text of the GDPO paper says
  otherwise of this example; its formulas do not.
* The group is an axis of the array and is never split; statistics over the
  batch are over all P. Under `jit` P may be sharded at will; inside `shard_map`
  each device holds whole groups, and `axis_name` names the axis that P is
  sharded over.
* No gradient flows through an advantage.

Equations are cited as in the papers; where only the authors' code or somebody
else's account could be had, the docstring says so. The papers of MO-GRPO, DVAO,
SA-MRPO and DDCA use ddof 0; the default here is 1 for all, so that two methods
compared differ in the method alone.

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
from gdpo_jax.objectives.normalize_first import (
  dara,
  gd2po,
  gdpo,
  gdpo_clustered,
  mo_grpo,
  rvpo,
  sa_mrpo,
  saw,
)
from gdpo_jax.objectives.presets import PRESETS
from gdpo_jax.objectives.sum_first import (
  corr_grpo,
  ddca,
  dr_grpo,
  dvao,
  grpo,
  reinforce_pp,
  reinforce_pp_baseline,
  rloo,
)
from gdpo_jax.types import Array

__all__ = [
  'ADVANTAGES',
  'PRESETS',
  'SUM_FIRST',
  'corr_grpo',
  'dara',
  'ddca',
  'dr_grpo',
  'dvao',
  'gd2po',
  'gdpo',
  'gdpo_clustered',
  'group_normalize',
  'grpo',
  'informative',
  'mo_grpo',
  'reinforce_pp',
  'reinforce_pp_baseline',
  'rloo',
  'rvpo',
  'sa_mrpo',
  'saw',
  'scored',
]


def informative(
  rewards: Array,
  valid: Array | None,
  weights: Array | None = None,
  aggregator='gdpo',
  **settings,
) -> Array:
  """bool[P]: groups in which the chosen aggregator tells rows apart.

  What dynamic sampling asks, before the batch is complete: the batch step is
  left out. A constant total is no reason to drop a GDPO group: rewards
  (1,0,0,0), (0,1,1,0), (0,0,0,1) all add up to 1 and still rank the rows.
  `reinforce_pp`, whose baseline is the batch, may learn from any group unlike
  the rest of the batch. To leave rows out of the update, ask which advantages
  are 0 instead: a batch step over tokens, or of `rvpo`, moves rows away from 0.

  Args:
    aggregator: a name in `ADVANTAGES` or `PRESETS`, or such a function.
    settings: the aggregator's own keywords.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  if not callable(aggregator):
    aggregator = (ADVANTAGES | PRESETS)[aggregator]
  if aggregator is reinforce_pp:
    return jnp.any(aggregator(rewards, valid, weights, **settings) != 0, axis=1)
  settings['whiten'] = 'none'
  values = aggregator(rewards, valid, weights, **settings)
  return masked.moments(values, jnp.any(valid, -1), axis=1).varies[:, 0]


ADVANTAGES = {
  'grpo': grpo,
  'dr_grpo': dr_grpo,
  'rloo': rloo,
  'reinforce_pp': reinforce_pp,
  'reinforce_pp_baseline': reinforce_pp_baseline,
  'dvao': dvao,
  'corr_grpo': corr_grpo,
  'ddca': ddca,
  'mo_grpo': mo_grpo,
  'gdpo': gdpo,
  'gdpo_clustered': gdpo_clustered,
  'sa_mrpo': sa_mrpo,
  'saw': saw,
  'gd2po': gd2po,
  'dara': dara,
  'rvpo': rvpo,
}

# The family that adds the rewards of a row up before it normalizes.
SUM_FIRST = frozenset(
  {
    'grpo',
    'dr_grpo',
    'rloo',
    'reinforce_pp',
    'reinforce_pp_baseline',
    'dvao',
    'corr_grpo',
    'ddca',
  }
)
