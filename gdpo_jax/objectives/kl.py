"""Distance to the reference policy: estimators and coefficient controllers.

With `d = logp - ref_logp` on tokens sampled from the policy, the mean of `k1`
or `k3` estimates KL(policy || reference); the mean of `k2` has its gradient.
(Schulman, "Approximating KL divergence", 2020.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

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
  ref_logp = jnp.where(mask, jax.lax.stop_gradient(ref_logp), 0.0)
  kl = ESTIMATORS[estimator](jnp.where(mask, logp, 0.0), ref_logp)
  return masked_sum(kl / denominator, mask)


class KLState(NamedTuple):
  """What a checkpoint keeps of a controller."""

  coef: Array  # f32[], multiplies the KL term
  step: Array  # i32[], updates so far


class KLController(NamedTuple):
  """A coefficient that may follow the measured KL; both functions are pure."""

  init: Callable[[], KLState]
  update: Callable[[KLState, Array], KLState]  # measured nats per sequence


def constant_kl(coef: float) -> KLController:
  """The coefficient stays what it is."""
  if coef < 0:
    raise ValueError(f'a KL coefficient must be >= 0, got {coef}.')
  return KLController(
    init=lambda: KLState(jnp.float32(coef), jnp.int32(0)),
    update=lambda state, kl: state._replace(step=state.step + 1),
  )


ESTIMATORS = {'k1': k1, 'k2': k2, 'k3': k3}
