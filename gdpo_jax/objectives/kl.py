"""Distance to the reference policy: estimators, places, controllers, refresh.

With `d = logp - ref_logp` on tokens sampled from the policy, the mean of `k1`
or `k3` estimates KL(policy || reference); the mean of `k2` has its gradient.
(Schulman, "Approximating KL divergence", 2020.) The distance can enter the loss
(`kl_loss`), the rewards of the tokens (`token_rewards`), the total of a row, or
as one more reward that is normalized like the others (`kl_as_reward`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.objectives.combine import scored
from gdpo_jax.objectives.losses import check_shapes
from gdpo_jax.objectives.masked import masked_sum
from gdpo_jax.types import Array

# exp overflows float32 at 88.7. Clamping the whole of d, not only inside the
# exponential, makes the gradient beyond the bound 0 and not one of wrong sign.
MAX_LOG_RATIO = 20.0


def k1(logp: Array, ref_logp: Array) -> Array:
  """`d`: unbiased, either sign, high variance."""
  return logp - ref_logp


def k2(logp: Array, ref_logp: Array) -> Array:
  """`d^2 / 2`: not negative, biased, the right gradient in expectation."""
  return 0.5 * jnp.square(logp - ref_logp)


def k3(logp: Array, ref_logp: Array) -> Array:
  """`exp(-d) + d - 1`: unbiased, not negative; d is bounded at +-20."""
  d = jnp.clip(logp - ref_logp, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  # expm1, because exp(-d) - 1 + d keeps no digit of a d of 1e-4
  return jnp.expm1(-d) + d


def kl_loss(
  logp: Array,
  ref_logp: Array,
  mask: Array,
  denominator: Array,
  estimator: str = 'k3',
) -> Array:
  """The KL term of a loss, f32[], to be multiplied by the coefficient.

  Args:
    logp, ref_logp: f32[N, Tc]; no gradient flows into `ref_logp`.
    mask: bool[N, Tc]; off it nothing counts, NaN included.
    denominator: as that of the policy loss (see `losses`).
    estimator: a name in `ESTIMATORS`.
  """
  check_shapes(mask, denominator, logp=logp, ref_logp=ref_logp)
  ref_logp = jnp.where(mask, jax.lax.stop_gradient(ref_logp), 0.0)
  kl = ESTIMATORS[estimator](jnp.where(mask, logp, 0.0), ref_logp)
  return masked_sum(kl / denominator, mask)


def sequence_kl(
  logp: Array, ref_logp: Array, mask: Array, estimator: str = 'k1'
) -> Array:
  """KL of each completion in nats, f32[N]: the sum over its tokens."""
  check_shapes(mask, 1.0, logp=logp, ref_logp=ref_logp)
  kl = ESTIMATORS[estimator](
    jnp.where(mask, logp, 0.0), jnp.where(mask, ref_logp, 0.0)
  )
  return jax.lax.stop_gradient(masked_sum(kl, mask, -1))


def kl_as_reward(
  rewards: Array, valid: Array, weights: Array, kl: Array, coef: Array
) -> tuple[Array, Array, Array]:
  """`-kl` as reward K + 1 with weight `coef`.

  A method that sums first thereby subtracts `coef * kl` from each row's total;
  a method that normalizes first gives the distance to the reference a z-score
  and a say of its own.

  Args:
    rewards, valid, weights: [P, G, K], [P, G, K], [K].
    kl: f32[P, G] or [N], nats per sequence; NaN where there is none.
    coef: f32[], at least 0.
  Returns:
    rewards, valid, weights with K + 1 rewards. A row that no other reward (of
    weight other than 0) scored has none of this one either.
  """
  kl = jnp.asarray(kl).reshape(*rewards.shape[:2], 1)
  exists = jnp.isfinite(kl) & scored(valid, weights)[..., None]
  return (
    jnp.concatenate([rewards, -jnp.where(exists, kl, 0.0)], axis=-1),
    jnp.concatenate([valid, exists], axis=-1),
    jnp.concatenate([weights, jnp.reshape(coef, 1)]),
  )


def token_rewards(
  scores: Array,
  mask: Array,
  logp: Array | None = None,
  ref_logp: Array | None = None,
  coef: float | Array = 0.0,
) -> Array:
  """The score on the last token of each row, less `coef * k1` on every token.

  What PPO's critic and REINFORCE++ (arXiv:2501.03262, Eq. 4) work with.

  Args:
    scores: f32[N]; NaN (nothing scored the row) counts as 0.
    mask: bool[N, Tc]; its last token is the EOS, not the padding after it.
    logp, ref_logp: f32[N, Tc]; may be left out where there is no KL.
  Returns:
    f32[N, Tc], 0 off the mask; no gradient.
  """
  # the last token is the one after which the mask has nothing more
  last = mask & (jnp.cumsum(mask[:, ::-1], axis=-1)[:, ::-1] == 1)
  rewards = jnp.where(last, jnp.nan_to_num(scores)[:, None], 0.0)
  if logp is not None and ref_logp is not None:
    rewards -= coef * k1(
      jnp.where(mask, logp, 0.0), jnp.where(mask, ref_logp, 0.0)
    )
  return jax.lax.stop_gradient(rewards)


class KLState(NamedTuple):
  """What a checkpoint keeps of a controller."""

  coef: Array  # f32[], multiplies the KL term
  step: Array  # i32[], updates so far


class KLController(NamedTuple):
  """A coefficient that may follow the measured KL; both functions are pure.

  `update(state, nats_per_sequence)` is called once per step, with the mean over
  completions of the summed token KL.
  """

  init: Callable[[], KLState]
  update: Callable[[KLState, Array], KLState]


def constant_kl(coef: float) -> KLController:
  """The coefficient stays what it is."""
  _check(coef)
  return KLController(
    init=lambda: KLState(jnp.float32(coef), jnp.int32(0)),
    update=lambda state, kl: state._replace(step=state.step + 1),
  )


def adaptive_kl(
  init_coef: float, target_nats_per_sequence: float, gain: float = 0.1
) -> KLController:
  """Proportional control (Ziegler et al., arXiv:1909.08593, sec. 2.2).

  `e = clip((kl - target) / target, -0.2, 0.2)`, `coef *= 1 + gain e`. Targets
  there are 6 to 10 nats per sequence.
  """
  return moving_target_kl(init_coef, target_nats_per_sequence, gain, swing=0.0)


def moving_target_kl(
  init_coef: float,
  base_target_nats_per_sequence: float,
  gain: float = 0.1,
  swing: float = 0.1,
  period_steps: float = 1000.0,
) -> KLController:
  """`adaptive_kl` after `target = base (1 + swing cos(step / period_steps))`.

  A heuristic without a paper.
  """
  _check(init_coef)
  base = base_target_nats_per_sequence
  if base <= 0:
    raise ValueError(
      f'a KL target must be above 0 nats per sequence, got {base}.'
    )

  def update(state, kl):
    target = base * (1 + swing * jnp.cos(state.step / period_steps))
    error = jnp.clip((kl - target) / target, -0.2, 0.2)
    # a step whose KL could not be measured changes nothing
    error = jnp.where(jnp.isfinite(error), error, 0.0)
    return KLState(state.coef * (1 + gain * error), state.step + 1)

  return KLController(
    init=lambda: KLState(jnp.float32(init_coef), jnp.int32(0)), update=update
  )


def refresh_every(steps: int) -> Callable[[Any, Any, Array], Any]:
  """`(reference, params, step) -> reference`: params copied every n steps."""
  if steps < 1:
    raise ValueError(f'refresh_every needs at least 1 step, got {steps}.')

  def refresh(reference, params, step):
    due = (step > 0) & (step % steps == 0)
    return jax.tree.map(
      lambda r, p: jnp.where(due, p.astype(r.dtype), r), reference, params
    )

  return refresh


def refresh_ema(decay: float) -> Callable[[Any, Any, Array], Any]:
  """`(reference, params, step) -> decay * reference + (1 - decay) * params`.

  Keep the reference in float32: in bfloat16 a decay above 0.996 moves nothing.
  """
  if not 0 <= decay < 1:
    raise ValueError(f'decay must be in [0, 1), got {decay}.')

  def refresh(reference, params, step):
    del step
    return jax.tree.map(
      lambda r, p: (decay * r + (1 - decay) * p).astype(r.dtype),
      reference,
      params,
    )

  return refresh


def _check(coef: float) -> None:
  if coef < 0:
    raise ValueError(f'a KL coefficient must be at least 0, got {coef}.')


ESTIMATORS = {'k1': k1, 'k2': k2, 'k3': k3}
