"""What moves from step to step beside the parameters.

  TrainState.controllers = {
    'kl'            KLState: the coefficient of the KL term
    'entropy_coef'  f32[]: a rule may raise it for a while
    'fusion_entropy_coef'  f32[]: the same for the weights of sub-policies
    'update_kl'     f32[]: KL to the sampler, measured by the last update
    'weights'       WeightState: of the declared rewards
    'normalizer'    NormalizerState: running statistics of the rewards
    'online'        optimizer of the sub-policy that learns online, if one does
    'reference'     parameters, only where the reference policy moves
  }

All of it is in the checkpoint. `advance` is called once per step, after the
updates; within a step nothing moves but `update_kl`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.objectives import kl, schedules, shaping
from gdpo_jax.train import online
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import Array


def make_kl(settings: Settings) -> kl.KLController:
  """The controller of the KL coefficient."""
  if settings.kl_controller == 'constant':
    return kl.constant_kl(settings.kl_coef)
  make = {'adaptive': kl.adaptive_kl, 'moving_target': kl.moving_target_kl}
  return make[settings.kl_controller](
    settings.kl_coef, settings.kl_target, settings.kl_gain
  )


def make_schedule(
  settings: Settings, names: Sequence[str], weights: Sequence[float]
) -> schedules.WeightSchedule:
  """The schedule of the weights of the declared rewards.

  Args:
    names, weights: of the K declared rewards.
  Raises:
    ValueError: a setting has entries for another number of rewards, or names
      one that does not exist.
  """

  def one_each(field, entries):
    if len(entries) != len(weights):
      raise ValueError(
        f'{field} has {len(entries)} entries, but there are {len(weights)} '
        f'rewards: {", ".join(names)}.'
      )
    return entries

  kind = settings.weight_schedule
  if kind == 'constant':
    return schedules.constant(weights)
  if kind == 'sampled':
    return schedules.sampled(weights, settings.seed)
  if kind == 'gap_driven':
    return schedules.gap_driven(
      one_each('weight_targets', settings.weight_targets), weights
    )
  if kind == 'lagrangian':
    constraints = []
    for name, sign, limit in settings.weight_constraints:
      if name not in names or sign not in ('<=', '>='):
        raise ValueError(
          f'cannot read the constraint {(name, sign, limit)}; write (reward, '
          f"'<=' or '>=', limit), where the reward is one of {', '.join(names)}."
        )
      constraints.append(
        schedules.Constraint(names.index(name), float(limit), sign == '<=')
      )
    return schedules.lagrangian(
      weights, constraints, settings.weight_rate, settings.weight_max
    )
  for _, entries in settings.weight_milestones:
    one_each('an entry of weight_milestones', entries)
  return schedules.progressive(settings.weight_milestones, kind)


def make_normalizer(settings: Settings, num_rewards: int) -> shaping.Normalizer:
  """One kind for all declared rewards, or one for each, joined by commas."""
  kinds = [kind.strip() for kind in settings.normalizers.split(',')]
  if len(kinds) == 1:
    kinds *= num_rewards
  if len(kinds) != num_rewards:
    raise ValueError(
      f'normalizers has {len(kinds)} entries for {num_rewards} rewards; give '
      'one for all or one for each.'
    )
  return shaping.make_normalizer(kinds)


def moves_reference(settings: Settings) -> bool:
  return bool(settings.reference_every or settings.reference_decay)


class Controllers:
  """The chosen controllers of a run with K declared rewards."""

  def __init__(
    self, settings: Settings, names: Sequence[str], weights: Sequence[float]
  ):
    names, weights = tuple(names), tuple(map(float, weights))
    self._settings = settings
    self._declared = np.asarray(weights, np.float32)
    self._kl = make_kl(settings)
    self._schedule = make_schedule(settings, names, weights)
    self.normalizer = make_normalizer(settings, len(names))
    refresh = None
    if settings.reference_every:
      refresh = kl.refresh_every(settings.reference_every)
    elif settings.reference_decay:
      refresh = kl.refresh_ema(settings.reference_decay)
    self._refresh = refresh and jax.jit(refresh, donate_argnums=0)
    self._advance = jax.jit(self._advance_fn)

  def init(self, params: Any) -> dict[str, Any]:
    """The controllers of step 0."""
    state = {
      'kl': self._kl.init(),
      'entropy_coef': jnp.float32(self._settings.entropy_coef),
      'fusion_entropy_coef': jnp.float32(self._settings.fusion_entropy_coef),
      'update_kl': jnp.float32(0),
      'weights': self._schedule.init(),
      'normalizer': self.normalizer.init(),
    }
    if self._settings.online_head:
      head = online.own_part(params['heads'], 0)
      state['online'] = online.make_optimizer(self._settings).init(head)
    if moves_reference(self._settings):
      state['reference'] = jax.tree.map(jnp.copy, params)
    return state

  def weights(self, state: dict[str, Any], scored: np.ndarray) -> np.ndarray:
    """f32[K], the weights of this step: 0 where a reward is muted.

    Args:
      scored: f32[K], the declared weights as the pipeline gives them, with 0
        where a reward is muted.
    """
    scheduled = np.asarray(state['weights'].weights, np.float32)
    muted = (scored == 0) & (self._declared != 0)
    return np.where(muted, np.float32(0), scheduled)

  def advance(
    self,
    state: dict[str, Any],
    params: Any,
    step: Array,
    raw: np.ndarray,
    conditioned: np.ndarray,
    valid: np.ndarray,
    kl_nats: float | None,
  ) -> dict[str, Any]:
    """The controllers of the next step; a moving reference is donated.

    Args:
      params: after the updates of this step.
      step: i32[], rollout batches so far, this one included.
      raw: f32[P, G, K], NaN where missing.
      conditioned: f32[P, G, K] and valid: bool[P, G, K], before normalizers.
      kl_nats: the mean KL of a completion, None where there is no reference.
    """
    seen = np.isfinite(raw)
    count = seen.sum((0, 1))
    total = np.where(seen, raw, 0).sum((0, 1))
    means = np.where(count, total / np.maximum(count, 1), np.nan)
    state = dict(state)
    reference = state.pop('reference', None)
    state = self._advance(
      state,
      means.astype(np.float32),
      np.float32(np.nan if kl_nats is None else kl_nats),
      conditioned,
      valid,
    )
    if reference is not None:
      state['reference'] = self._refresh(reference, params, step)
    return state

  def _advance_fn(self, state, means, nats, values, valid):
    return dict(
      state,
      kl=self._kl.update(state['kl'], nats),
      weights=self._schedule.update(state['weights'], means),
      normalizer=self.normalizer.update(state['normalizer'], values, valid),
    )
