"""Policy losses over token log-probabilities, and what divides them.

  loss = sum over tokens of mask * per-token loss / denominator

The denominator belongs to the batch that one optimizer step sees and comes from
its masks, before the forward pass. Micro-batches then just add up, whatever
their sizes, and rows that are skipped because their advantage is 0 change
nothing. Shapes: logp, old_logp f32[N, Tc]; advantages f32[N], or f32[N, Tc];
mask bool[N, Tc]. Values off the mask have no influence, NaN included.
"""

import jax
import jax.numpy as jnp

from gdpo_jax.objectives.masked import Mean, count, masked_mean, masked_sum
from gdpo_jax.types import Array

# exp overflows float32 at 88.7; e^20 is far outside of any trust region. The
# argument is clamped, not the result: the gradient is then 0 and not inf * 0.
MAX_LOG_RATIO = 20.0


def token_denominator(mask: Array, *, axis_name: str | None = None) -> Array:
  """f32[]: number of tokens, for a mean over them (DAPO, arXiv:2503.14476)."""
  return jnp.maximum(count(mask, axis_name=axis_name), 1.0)


def row_denominator(mask: Array, *, axis_name: str | None = None) -> Array:
  """f32[N, 1]: rows * tokens of the row; the mean of row means (GRPO).

  Rows without tokens are not counted: a row that is masked out leaves the
  denominator as well.
  """
  lengths = count(mask, -1, keepdims=True)
  rows = count(lengths > 0, axis_name=axis_name)
  return jnp.maximum(rows, 1.0) * jnp.maximum(lengths, 1.0)


def constant_denominator(
  mask: Array, length: int, *, axis_name: str | None = None
) -> Array:
  """f32[]: rows * `length` tokens (Dr. GRPO, arXiv:2503.20783, Listing 1).

  Args:
    length: the same for every batch, usually the limit on new tokens.
  """
  if length <= 0:
    raise ValueError(f'constant_denominator needs a length > 0, got {length}.')
  rows = count(jnp.any(mask, axis=-1), axis_name=axis_name)
  return jnp.maximum(rows, 1.0) * length


def clipped(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  entropy_scale: float = 0.0,
) -> Array:
  """`-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A)` (PPO, DAPO).

  Args:
    clip_low, clip_high: PPO 0.2 and 0.2; "clip higher" of DAPO 0.2 and 0.28.
      Numbers or f32[] (see `adaptive_clip`).
    dual_clip: c > 1 bounds what a negative advantage can cost at `c |A|`
      (arXiv:1912.09729; 3 there).
    entropy_scale: the entropy coefficient, where it is to scale the clipped
      term by `1 + 0.1 coef`. A heuristic without a paper: a constant factor.
  Returns:
    f32[].
  """
  if dual_clip is not None and dual_clip <= 1:
    raise ValueError(f'dual_clip must be above 1, got {dual_clip}.')
  check_shapes(mask, denominator, logp=logp, old_logp=old_logp)
  advantages = _per_token(advantages, mask)
  ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
  inside = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  bound = inside * advantages * (1 + 0.1 * entropy_scale)
  gain = jnp.minimum(ratio * advantages, bound)
  if dual_clip is not None:
    bounded = jnp.maximum(gain, dual_clip * advantages)
    gain = jnp.where(advantages < 0, bounded, gain)
  return masked_sum(-gain / denominator, mask)


def gspo(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
  clip_low: float = 3e-4,
  clip_high: float = 4e-4,
) -> Array:
  """The clipped loss with one ratio per sequence (GSPO, arXiv:2507.18071).

  `s = exp(mean_t log ratio)` (Eq. 7). Computed as the token variant of Eq.
  13-14, `s_t = sg[s] pi_t / sg[pi_t]`, which with one advantage per row and
  `row_denominator` has the value and the gradient of the sequence form (Eq. 5),
  and takes advantages per token and other denominators as well.
  """
  check_shapes(mask, denominator, logp=logp, old_logp=old_logp)
  advantages = _per_token(advantages, mask)
  ratio = jnp.exp(_sequence_log_ratio(logp, old_logp, mask))
  inside = jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
  gain = jnp.minimum(ratio * advantages, inside * advantages)
  return masked_sum(-gain / denominator, mask)


def cispo(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
  clip_low: float | None = None,
  clip_high: float = 0.28,
  mask_clipped: bool = False,
) -> Array:
  """`-sg[clip(ratio)] A logp`: clipped weights, no token without gradient.

  CISPO, arXiv:2506.13585, Eq. 4-5. The paper sets no lower bound in practice
  and does not disclose the upper one. Not 0 on policy, unlike the clipped loss.

  Args:
    clip_low: None for no lower bound.
    mask_clipped: drops the tokens whose gradient PPO's clip would remove
      (Eq. 6-7).
  """
  check_shapes(mask, denominator, logp=logp, old_logp=old_logp)
  advantages = _per_token(advantages, mask)
  ratio = jnp.exp(_log_ratio(logp, old_logp, mask))
  low = 0.0 if clip_low is None else 1 - clip_low
  weight = jax.lax.stop_gradient(jnp.clip(ratio, low, 1 + clip_high))
  if mask_clipped:
    past = (advantages > 0) & (ratio > 1 + clip_high)
    past |= (advantages < 0) & (ratio < low)
    weight = jnp.where(past, 0.0, weight)
  gain = weight * advantages * jnp.where(mask, logp, 0.0)
  return masked_sum(-gain / denominator, mask)


def reinforce(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  denominator: Array,
) -> Array:
  """`-A logp`: the score function, on policy; `old_logp` is not looked at."""
  del old_logp
  check_shapes(mask, denominator, logp=logp)
  gain = _per_token(advantages, mask) * jnp.where(mask, logp, 0.0)
  return masked_sum(-gain / denominator, mask)


def importance_weight(
  logp: Array, sampler_logp: Array, mask: Array, cap: float
) -> Array:
  """`min(exp(logp - sampler_logp), cap)`, f32[N, Tc], without a gradient.

  Corrects for a sampler that rounds differently from the trainer of the same
  parameters: multiplies the advantages, token by token. Truncated importance
  sampling (Ionides 2008), 1 off the mask.

  Args:
    logp: of the trainer, with the parameters that were sampled from.
  """
  ratio = jnp.exp(_log_ratio(logp, sampler_logp, mask))
  return jax.lax.stop_gradient(jnp.minimum(ratio, cap))


def value_loss(
  values: Array,
  old_values: Array,
  returns: Array,
  mask: Array,
  denominator: Array,
  clip: float | None = 0.2,
) -> Array:
  """`max((v - R)^2, (clip(v, old +- clip) - R)^2) / 2` (PPO's critic); f32[].

  Args:
    values, old_values, returns: f32[N, Tc]; only `values` has a gradient.
    clip: None for the plain square.
  """
  check_shapes(
    mask, denominator, values=values, old_values=old_values, returns=returns
  )
  old_values, returns = jax.lax.stop_gradient((old_values, returns))
  values, old_values, returns = (
    jnp.where(mask, x, 0.0) for x in (values, old_values, returns)
  )
  loss = jnp.square(values - returns)
  if clip is not None:
    near = jnp.clip(values, old_values - clip, old_values + clip)
    loss = jnp.maximum(loss, jnp.square(near - returns))
  return masked_sum(0.5 * loss / denominator, mask)


def adaptive_clip(
  kl: Array,
  target_kl: float,
  base: float = 0.2,
  low: float = 0.15,
  high: float = 0.25,
) -> Array:
  """`base (1 + 0.2 tanh(kl / target_kl))`, kept within [low, high]; f32[].

  A heuristic without a paper: the clip widens with the measured KL.

  Args:
    kl: f32[], in the unit of `target_kl`, measured before the update.
  """
  if target_kl <= 0:
    raise ValueError(f'adaptive_clip needs a target_kl > 0, got {target_kl}.')
  return jnp.clip(base * (1 + 0.2 * jnp.tanh(kl / target_kl)), low, high)


def clip_fractions(
  logp: Array,
  old_logp: Array,
  advantages: Array,
  mask: Array,
  clip_low: float = 0.2,
  clip_high: float = 0.2,
  dual_clip: float | None = None,
  sequence: bool = False,
) -> dict[str, Mean]:
  """Shares of tokens whose gradient the clip removes.

  Args:
    sequence: one ratio per sequence, as in `gspo`.
  Returns:
    'low' (A < 0 below the band), 'high' (A > 0 above it), 'region' (either)
    and, with a dual clip, 'dual' (A < 0 beyond c), each a `Mean` over tokens.
  """
  advantages = _per_token(advantages, mask)
  log_ratio = _sequence_log_ratio if sequence else _log_ratio
  ratio = jnp.exp(log_ratio(logp, old_logp, mask))
  low = (advantages < 0) & (ratio < 1 - clip_low)
  high = (advantages > 0) & (ratio > 1 + clip_high)
  fractions = {'low': low, 'high': high, 'region': low | high}
  if dual_clip is not None:
    fractions['dual'] = (advantages < 0) & (ratio > dual_clip)
  return {name: Mean.of(hit, mask) for name, hit in fractions.items()}


def entropy_bonus(
  entropy: Array, mask: Array, denominator: Array, coef: float | Array
) -> Array:
  """`-coef * entropy`, f32[]; added to a loss it rewards spread-out policies.

  Args:
    entropy: f32[N, Tc], nats.
  """
  return -coef * masked_sum(entropy / denominator, mask)


def check_shapes(
  mask: Array, denominator: float | Array, **per_token: Array
) -> None:
  """Refuses what would broadcast into a wrong loss: every array is [N, Tc].

  Raises:
    ValueError: names the array; the denominator is f32[], [N, 1] or [N, Tc].
  """
  for name, array in per_token.items():
    if jnp.shape(array) != mask.shape:
      raise ValueError(
        f'{name} has shape {jnp.shape(array)}, the mask {mask.shape}; both are '
        '[rows, completion tokens].'
      )
  shape = jnp.shape(denominator)
  if shape not in ((), (mask.shape[0], 1), mask.shape):
    raise ValueError(
      f'the denominator has shape {shape}; it is a number or '
      f'[{mask.shape[0]}, 1], one for each row.'
    )


def _per_token(advantages: Array, mask: Array) -> Array:
  """f32[N, Tc]; constants to the gradient, 0 off the mask."""
  rows = mask.shape[:1]
  if advantages.shape not in (rows, (*rows, 1), mask.shape):
    raise ValueError(
      f'advantages have shape {advantages.shape}; for a mask of {mask.shape} '
      f'they are [{rows[0]}], one per row ([P, G] reshaped to [P * G]), or one '
      'per token.'
    )
  advantages = jax.lax.stop_gradient(advantages)
  if advantages.ndim == 1:
    advantages = advantages[:, None]
  return jnp.where(mask, advantages, 0.0)


def _log_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
  difference = jnp.where(mask, logp - jax.lax.stop_gradient(old_logp), 0.0)
  return jnp.clip(difference, -MAX_LOG_RATIO, MAX_LOG_RATIO)


def _sequence_log_ratio(logp: Array, old_logp: Array, mask: Array) -> Array:
  """f32[N, Tc]: the mean over the row in value, its own token in gradient."""
  log_ratio = _log_ratio(logp, old_logp, mask)
  mean = masked_mean(log_ratio, mask, -1, keepdims=True)
  return log_ratio + jax.lax.stop_gradient(mean - log_ratio)


LOSSES = {
  'clipped': clipped,
  'gspo': gspo,
  'cispo': cispo,
  'reinforce': reinforce,
}
