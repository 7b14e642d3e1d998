"""What other methods would have made of the same batch.

`diagnose` answers four questions: do different rewards still give different
advantages (the collapse meter), which rewards pull against each other (the
conflict matrix), who has how much say (the shares), and how far apart GRPO,
Dr. GRPO and GDPO are on this batch (the counterfactuals).
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from gdpo_jax.objectives import combine, masked
from gdpo_jax.objectives.advantages import ADVANTAGES
from gdpo_jax.types import Array

# float32 leaves 1e-7; two advantages closer than this are one
_SAME = 1e-5
_COMPARED = ('grpo', 'dr_grpo', 'gdpo')


class Diagnosis(NamedTuple):
  """All of one batch; see `diagnose`."""

  distinct_rewards: Array  # i32[P], distinct reward tuples of the group
  distinct_advantages: dict[str, Array]  # by method, i32[P]
  conflict: Array  # f32[K, K], correlation of the weighted z-scores
  shares: dict[str, Array]  # by method (grpo, gdpo), f32[K], sum 1
  cosine: dict[str, Array]  # by pair 'grpo/gdpo', f32[]
  sign_flips: dict[str, Array]  # by pair, f32[], share of rows


def diagnose(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  aggregators: Sequence[str] = _COMPARED,
  eps: float = 1e-4,
  ddof: int = 1,
) -> Diagnosis:
  """Compares methods on one batch; may be jitted (names static).

  Args:
    rewards, valid, weights: as for the advantages.
    aggregators: names in `ADVANTAGES` to count distinct advantages of; those
      that need more than rewards cannot be among them.
  Returns:
    a Diagnosis. `distinct_advantages` far below `distinct_rewards` is the
    collapse that GDPO is about. A share is the mean absolute part that a reward
    has in the sum: of deviations from the group's mean for grpo, of z-scores
    for gdpo. Rows count as flipped where two methods push them opposite ways;
    values that are 0 but for rounding have no sign.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  rows = jnp.any(valid, axis=-1)
  settings = {'eps': eps, 'ddof': ddof}
  made = {
    name: ADVANTAGES[name](rewards, valid, weights, **settings)
    for name in {*aggregators, *_COMPARED}
  }
  centred = masked.moments(rewards, valid, axis=1).centred
  z = combine.group_normalize(rewards, valid, **settings)
  pairs = [(a, b) for i, a in enumerate(_COMPARED) for b in _COMPARED[i + 1 :]]
  return Diagnosis(
    distinct_rewards=_distinct(
      jnp.concatenate([rewards * valid, valid], axis=-1), rows, 0.0
    ),
    distinct_advantages={
      name: _distinct(made[name][..., None], rows, _SAME)
      for name in aggregators
    },
    conflict=combine.correlations(z * jnp.sign(weights), valid, (0, 1))[0, 0],
    shares={
      'grpo': _shares(centred * weights),
      'gdpo': _shares(z * weights),
    },
    cosine={f'{a}/{b}': _cosine(made[a], made[b]) for a, b in pairs},
    sign_flips={f'{a}/{b}': _flips(made[a], made[b], rows) for a, b in pairs},
  )


def distinct_per_group(advantages: Array, rows: Array | None = None) -> Array:
  """i32[P]: distinct values among the rows of each group of f32[P, G]."""
  rows = jnp.ones(advantages.shape, bool) if rows is None else rows
  return _distinct(advantages[..., None], rows, _SAME)


def _distinct(x: Array, rows: Array, tolerance: float) -> Array:
  """Rows of [P, G, F] that are unlike all rows before them, counted; i32[P]."""
  size = jnp.abs(jnp.where(rows[..., None], x, 0.0))
  scale = jnp.max(size, axis=(1, 2), keepdims=True)[..., None]
  apart = jnp.abs(x[:, :, None] - x[:, None, :])
  same = jnp.all(apart <= tolerance * scale, axis=-1)  # bool[P, G, G]
  earlier = jnp.tril(jnp.ones(same.shape[1:], bool), -1)
  seen = jnp.any(same & earlier & rows[:, None, :], axis=-1)
  return jnp.sum(rows & ~seen, axis=1)


def _shares(parts: Array) -> Array:
  size = jnp.sum(jnp.abs(parts), axis=(0, 1))
  return masked.safe_divide(size, jnp.sum(size))


def _cosine(a: Array, b: Array) -> Array:
  norm = jnp.sqrt(jnp.sum(a * a)) * jnp.sqrt(jnp.sum(b * b))
  return masked.safe_divide(jnp.sum(a * b), norm)


def _flips(a: Array, b: Array, rows: Array) -> Array:
  def sign(x):
    return jnp.sign(x) * (jnp.abs(x) > _SAME * jnp.max(jnp.abs(x)))

  return masked.masked_mean(sign(a) * sign(b) < 0, rows)
