"""Weights of the rewards, step by step: schedules as `(init, update)` pairs.

`update(state, means)` is called once per step with the batch means of the raw
rewards, f32[K], NaN where a reward is missing throughout; `state.weights` go
into the advantages and into the logs. Weight 0 makes a reward eval-only. The
gap-driven weights are a heuristic without a paper.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.types import Array


class WeightState(NamedTuple):
  """What a checkpoint keeps of a schedule."""

  weights: Array  # f32[K], for the step that comes
  step: Array  # i32[], updates so far
  memory: Array  # f32[K], what this schedule has to remember


class WeightSchedule(NamedTuple):
  """Pure functions; see the module's docstring."""

  init: Callable[[], WeightState]
  update: Callable[[WeightState, Array], WeightState]


def constant(weights: Sequence[float]) -> WeightSchedule:
  """The declared weights, always."""
  return progressive([(0, weights)])


def progressive(
  milestones: Sequence[tuple[int, Sequence[float]]], kind: str = 'piecewise'
) -> WeightSchedule:
  """From one set of weights to the next: basic rewards first, advanced later.

  Args:
    milestones: (step, weights), steps rising from 0; the last weights stay.
    kind: how to get from one to the next: 'piecewise' jumps at the milestone,
      'linear' and 'cosine' (half a period) are under way in between.
  """
  if kind not in ('piecewise', 'linear', 'cosine'):
    raise ValueError(f'kind must be piecewise, linear or cosine, got {kind!r}.')
  steps = np.array([step for step, _ in milestones])
  sizes = {len(weights) for _, weights in milestones}
  if not len(steps) or steps[0] != 0 or np.any(np.diff(steps) <= 0):
    raise ValueError(f'milestones must rise from step 0, got {steps.tolist()}.')
  if len(sizes) != 1:
    raise ValueError(f'milestones disagree on the number of rewards: {sizes}.')
  table = np.array([weights for _, weights in milestones], np.float32)

  def weights_at(step):
    here = jnp.searchsorted(steps, step, side='right') - 1
    then = jnp.minimum(here + 1, len(steps) - 1)
    span = jnp.maximum(jnp.asarray(steps)[then] - jnp.asarray(steps)[here], 1)
    way = (step - jnp.asarray(steps)[here]) / span
    if kind == 'piecewise':
      way = 0.0
    elif kind == 'cosine':
      way = 0.5 - 0.5 * jnp.cos(jnp.pi * way)
    start, end = jnp.asarray(table)[here], jnp.asarray(table)[then]
    return start + way * (end - start)

  def init():
    return WeightState(
      weights_at(jnp.int32(0)), jnp.int32(0), jnp.zeros(table.shape[1])
    )

  def update(state, means):
    del means
    step = state.step + 1
    return state._replace(weights=weights_at(step), step=step)

  return WeightSchedule(init, update)


def gap_driven(
  targets: Sequence[float], priorities: Sequence[float] | None = None
) -> WeightSchedule:
  """`w_k = 0.1 + 0.9 |target_k - mean_k| / sum |gap|`, times the priority.

  The reward that is furthest from its target gets most of the attention; where
  all targets are met, each has 0.1.

  Args:
    targets: [K], in the unit of the raw reward.
    priorities: [K]; 1 by default. Priority 0 leaves a reward out.
  """
  targets = np.array(targets, np.float32)
  if priorities is None:
    priorities = np.ones_like(targets)
  priorities = np.array(priorities, np.float32)
  if priorities.shape != targets.shape:
    raise ValueError(
      f'got {priorities.size} priorities for {targets.size} targets.'
    )

  def init():
    # nothing was measured: an equal share of the 0.9 each
    known = jnp.full(targets.shape, jnp.nan)
    share = (priorities != 0) / max(np.count_nonzero(priorities), 1)
    weights = jnp.asarray(priorities * (0.1 + 0.9 * share), jnp.float32)
    return WeightState(weights, jnp.int32(0), known)

  def update(state, means):
    # a reward that is missing keeps the mean it had
    known = jnp.where(jnp.isfinite(means), means, state.memory)
    measured = jnp.isfinite(known) & (priorities != 0)
    gap = jnp.where(measured, jnp.abs(targets - known), 0.0)
    total = jnp.sum(gap)
    share = jnp.where(total > 0, gap / jnp.where(total > 0, total, 1.0), 0.0)
    return WeightState(priorities * (0.1 + 0.9 * share), state.step + 1, known)

  return WeightSchedule(init, update)


class Constraint(NamedTuple):
  """The batch mean of reward `index` shall be at most (at least) `limit`."""

  index: int
  limit: float  # in the unit of the raw reward, for instance tokens
  at_most: bool = True


def lagrangian(
  weights: Sequence[float],
  constraints: Sequence[Constraint],
  rate: float = 0.1,
  max_multiplier: float = 10.0,
) -> WeightSchedule:
  """Dual ascent on constraints: "at most 200 tokens, correctness at its best".

  A constrained reward has weight `-multiplier` (at most) or `+multiplier` (at
  least), and the multiplier moves by `rate` times the violation relative to the
  limit, within [0, max_multiplier]. A multiplier that has come back to 0 takes
  its reward out of the advantage. (As in Safe RLHF, arXiv:2310.12773.)

  Args:
    weights: [K]; of a constrained reward, the initial multiplier.
  """
  start = np.array(weights, np.float32)
  limit, sign = np.zeros_like(start), np.zeros_like(start)
  for index, value, at_most in constraints:
    if not 0 <= index < start.size:
      raise ValueError(
        f'constraint on reward {index}, but there are {start.size} rewards.'
      )
    limit[index], sign[index] = value, -1.0 if at_most else 1.0
  constrained = sign != 0
  if np.any(start[constrained] < 0):
    raise ValueError('initial multipliers of constraints must be at least 0.')
  scale = np.where(limit != 0, np.abs(limit), 1.0)

  def weights_of(multiplier):
    return jnp.where(constrained, sign * multiplier, start)

  def init():
    multiplier = jnp.where(constrained, start, 0.0)
    return WeightState(weights_of(multiplier), jnp.int32(0), multiplier)

  def update(state, means):
    violation = -sign * (jnp.where(jnp.isfinite(means), means, limit) - limit)
    multiplier = state.memory + rate * violation / scale
    multiplier = jnp.clip(multiplier, 0.0, max_multiplier)
    multiplier = jnp.where(constrained, multiplier, 0.0)
    return WeightState(weights_of(multiplier), state.step + 1, multiplier)

  return WeightSchedule(init, update)


def sampled(weights: Sequence[float], seed: int) -> WeightSchedule:
  """Other weights at every step: linear scalarization in random directions.

  The classic of multi-objective RL (survey: arXiv:1402.0590): each step's
  shares are drawn uniformly from the simplex, and share out the sum of the
  absolute declared weights. Signs stay, and a weight of 0 stays 0. A step draws
  the same whatever was drawn before it.

  Args:
    weights: the declared ones.
    seed: of the run.
  """
  start = np.asarray(weights, np.float32)
  counts = start != 0

  def weights_at(step):
    key = jax.random.fold_in(jax.random.key(seed), step)
    draws = jnp.where(counts, jax.random.exponential(key, start.shape), 0.0)
    shares = draws / jnp.maximum(jnp.sum(draws), 1e-30)
    return jnp.sign(start) * np.abs(start).sum() * shares

  def init():
    return WeightState(
      weights_at(jnp.int32(0)), jnp.int32(0), jnp.zeros(start.shape)
    )

  def update(state, means):
    del means
    step = state.step + 1
    return state._replace(weights=weights_at(step), step=step)

  return WeightSchedule(init, update)


SCHEDULES = {
  'constant': constant,
  'progressive': progressive,
  'gap_driven': gap_driven,
  'lagrangian': lagrangian,
  'sampled': sampled,
}
