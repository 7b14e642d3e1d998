"""Normalize, then sum: methods in which a row is the z-scores of its rewards.

Each reward is compared inside its group first, so its unit and offset do not
matter, and its weight is the weight of the reward. The order of the rows of a
group may differ from that of their totals. What holds for every method, and the
shared keywords: see `advantages`.
"""

import jax
import jax.numpy as jnp

from gdpo_jax.objectives import combine, masked
from gdpo_jax.objectives.combine import group_normalize
from gdpo_jax.objectives.sum_first import grpo
from gdpo_jax.types import Array


def mo_grpo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`sum_k w_k z_k`, GDPO without the batch step (MO-GRPO, arXiv:2509.22047).

  Eq. 5; there ddof 0 and no weights.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def gdpo(
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


def sa_mrpo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  bounds: Array | None = None,
  gamma: float = 0.5,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GDPO with saturated rewards damped: weights `w_k (1 - sat_k)^gamma`.

  SA-MRPO, arXiv:2608.16072. `sat_k` is the batch mean of reward k within its
  declared range, and Eq. 1 the batch step; gamma 0 is GDPO. There ddof 0, no
  eps, gamma 0.25 or 0.5.

  Args:
    bounds: [K, 2], lowest and highest value of each reward. NaN: no declared
      range, taken as not saturated.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  if bounds is None:
    raise ValueError(
      'sa_mrpo needs the range of each reward: pass bounds=[K, 2].'
    )
  low, width = _range(bounds, weights)
  mean = masked.masked_mean(rewards, valid, (0, 1), axis_name=axis_name)
  saturation = jnp.clip(masked.safe_divide(mean - low, width), 0.0, 1.0)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  total = combine.weighted_sum(z, valid, weights * (1 - saturation) ** gamma)
  total = combine.settle(total)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def saw(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  bounds: Array | None = None,
  on: str = 'gdpo',
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GRPO or GDPO with weights from the batch coefficient of variation.

  SAW, arXiv:2606.07705, from the authors' code: `CV_k = std_k / mean_k` over
  the batch, `omega_k = CV_k / sum CV`, weights `w_k K omega_k`. Where no reward
  varies, the weights are equal (the code lets them go to 0).

  Args:
    bounds: [K, 2]; the lower bound is taken off a reward before its mean, which
      a reward that may be negative needs: the result depends on it. NaN or
      None: nothing is taken off.
    on: 'gdpo' (weights on the z-scores) or 'grpo' (on the raw rewards; there
      `whiten='none'`).
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  low = 0.0 if bounds is None else _range(bounds, weights)[0]
  batch = masked.moments(
    rewards, valid, axis=(0, 1), ddof=ddof, axis_name=axis_name
  )
  variation = (batch.std / (jnp.abs(batch.mean - low) + 1e-8))[0, 0]
  share = masked.safe_divide(variation, jnp.sum(variation))
  share = jnp.where(
    jnp.sum(variation) > 1e-8, share * jnp.sum(weights != 0), 1.0
  )
  method = {'grpo': grpo, 'gdpo': gdpo}.get(on)
  if method is None:
    raise ValueError(f"on must be 'grpo' or 'gdpo', got {on!r}.")
  return method(
    rewards,
    valid,
    weights * share,
    eps=eps,
    ddof=ddof,
    whiten=whiten,
    mask=mask,
    axis_name=axis_name,
  )


def gd2po(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  mode: str = 'hard',
  tau: float = 0.2,
  query_weight: str = 'before',
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GDPO without the rows whose rewards disagree (GD2PO, arXiv:2606.16771).

  From the authors' code, for want of the paper's equations. A row is in
  conflict when one of its weighted z-scores is positive and another negative.
  Rows that are kept make the batch statistics; the others get 0, and stay in
  the loss mask.

  Args:
    mode: 'hard' drops every row in conflict; 'snr' only those with
      `|sum_k w_k z_k| / sum_k |w_k z_k| < tau`.
    tau: 0.2 in the code, 0.8 in its scripts.
    query_weight: the share of a group's rows that is kept multiplies the group
      'before' the batch step (the code) or 'after' it (the paper as others read
      it: a weight on the loss).
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  signed = z * weights
  # z-scores that are 0 by algebra may be 1e-8 by rounding
  dropped = jnp.any(signed > 1e-6, -1) & jnp.any(signed < -1e-6, -1)
  if mode == 'snr':
    agreement = masked.safe_divide(jnp.abs(total.values), total.terms)
    dropped &= agreement < tau
  elif mode != 'hard':
    raise ValueError(f"mode must be 'hard' or 'snr', got {mode!r}.")
  kept = total.valid & ~dropped
  share = masked.masked_mean(kept, total.valid, 1, keepdims=True)
  before = {'before': share, 'after': 1.0}.get(query_weight)
  if before is None:
    raise ValueError(
      f"query_weight must be 'before' or 'after', got {query_weight!r}."
    )
  total = combine.single(jnp.where(kept, before * total.values, 0.0), kept)
  values = combine.batch_step(total, whiten, eps, ddof, mask, axis_name)
  return values if query_weight == 'before' else share * values


def dara(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  mode: str = 'asymmetric',
  cap: float = 5.0,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GDPO with rewards that are seldom active made louder.

  DARA, arXiv:2610.00574, from the authors' description of their code. With the
  share `pi_k` of groups in which reward k varies, its activity weight is
  `a_k = min(cap, sqrt(max_l pi_l / pi_k))`, and 1 if `pi_k = 0`.

  Args:
    mode: 'asymmetric' `sum_k w_k (z_k + (a_k - 1) max(z_k, 0))`, or 'symmetric'
      `sum_k w_k a_k z_k`.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  exists = jnp.any(valid, axis=1)
  active = jnp.any(z != 0, axis=1)
  pi = masked.masked_mean(active, exists, 0, axis_name=axis_name)
  boost = jnp.sqrt(masked.safe_divide(jnp.max(pi), pi))
  boost = jnp.where(pi > 0, jnp.minimum(cap, boost), 1.0)
  if mode == 'asymmetric':
    z = z + (boost - 1) * jnp.maximum(z, 0.0)
  elif mode == 'symmetric':
    z = z * boost
  else:
    raise ValueError(f"mode must be 'asymmetric' or 'symmetric', got {mode!r}.")
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def rvpo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  sharpness: float = 1.0,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """Soft minimum of the z-scores that exist (RVPO, arXiv:2605.05750).

  `-1/k log(sum_j w_j exp(-k z_j) / sum_j w_j)`, then the batch step: the row is
  as good as its worst reward for large `sharpness` k, and the mean for k -> 0.
  The weights are ours; a negative one turns its z-score around.
  """
  if sharpness <= 0:
    raise ValueError(f'sharpness must be above 0, got {sharpness}.')
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof) * jnp.sign(weights)
  size = jnp.where(valid, jnp.abs(weights), 0.0)
  share = masked.safe_divide(size, jnp.sum(size, axis=-1, keepdims=True))
  # the smallest is taken out of the logarithm, as in logsumexp
  worst = jnp.min(jnp.where(valid, z, jnp.inf), axis=-1, keepdims=True)
  worst = jnp.where(jnp.isfinite(worst), worst, 0.0)
  decay = share * jnp.exp(-sharpness * jnp.where(valid, z - worst, 0.0))
  present = jnp.any(valid, axis=-1)
  log_mean = jnp.log(jnp.where(present, jnp.sum(decay, axis=-1), 1.0))
  values = jnp.where(present, worst[..., 0] - log_mean / sharpness, 0.0)
  terms = jnp.max(jnp.abs(z), axis=-1)
  total = combine.settle(combine.Combined(values, terms, present))
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def gdpo_clustered(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  threshold: float = 0.5,
  max_separate: int = 5,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GDPO in which rewards that say the same speak with one voice.

  With up to `max_separate` rewards this is `gdpo`. With more, rewards whose
  weighted z-scores correlate above `threshold` over the batch, directly or
  through others, form a cluster; the sum of a cluster is normalized in its
  group again, and enters with the mean absolute weight of its members. A
  heuristic without a paper.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
  if z.shape[-1] > max_separate:
    signed = z * jnp.sign(weights)
    linked = combine.correlations(signed, valid, (0, 1), axis_name)[0, 0]
    member = _components(linked > threshold)  # [cluster, K]
    parts = member[:, None, None] & valid
    sums = jax.vmap(lambda part: combine.weighted_sum(z, part, weights))(parts)
    groups = jax.vmap(combine.within_group)(sums)
    z = masked.safe_divide(groups.centred, groups.std)
    z, valid = jnp.moveaxis(z, 0, -1), jnp.moveaxis(sums.valid, 0, -1)
    weights = masked.masked_mean(
      jnp.broadcast_to(jnp.abs(weights), member.shape), member, 1
    )
  total = combine.settle(combine.weighted_sum(z, valid, weights))
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def _range(bounds, weights: Array) -> tuple[Array, Array]:
  """Lower bound and width, f32[K] each; 0 where no range is declared."""
  bounds = jnp.asarray(bounds, jnp.float32)
  if bounds.shape != (weights.size, 2):
    raise ValueError(
      f'bounds must be [{weights.size}, 2] (lowest, highest of each reward), '
      f'got shape {bounds.shape}.'
    )
  bounds = jnp.where(jnp.isnan(bounds), 0.0, jax.lax.stop_gradient(bounds))
  return bounds[:, 0], bounds[:, 1] - bounds[:, 0]


def _components(linked: Array) -> Array:
  """bool[K, K]: row c has the members of cluster c; an empty row is none."""
  size = linked.shape[0]
  reach = linked | linked.T | jnp.eye(size, dtype=bool)
  for _ in range(max(size - 1, 1).bit_length()):
    reach = jnp.any(reach[:, :, None] & reach[None, :, :], axis=1)
  first = jnp.argmax(reach, axis=1)  # the smallest member names the cluster
  return first[None, :] == jnp.arange(size)[:, None]
