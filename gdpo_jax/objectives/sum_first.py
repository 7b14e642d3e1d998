"""Sum, then normalize: methods in which a row is the total of its rewards.

All but `reinforce_pp` share one numerator, the total less its mean over the
group, and differ in a positive factor per group or batch. Inside a group they
agree on signs and order, and rows with equal totals get equal advantages. What
holds for every method, and the shared keywords: see `advantages`.
"""

import jax
import jax.numpy as jnp

from gdpo_jax.objectives import combine, masked
from gdpo_jax.objectives.combine import group_normalize
from gdpo_jax.types import Array


def grpo(
  rewards: Array,
  valid: Array | None,
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
    renormalize: `s = sum w r / sum |w|` over the rewards that a row has, so
      that a missing reward does not read as a low one.
  Returns:
    f32[P, G].
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  total = combine.weighted_sum(rewards, valid, weights, renormalize)
  group = combine.within_group(total, ddof)
  if scale == 'group':
    values = masked.safe_divide(group.centred, group.std + eps)
  elif scale == 'batch':
    std = combine.over_batch(total, ddof, axis_name=axis_name).std
    values = masked.safe_divide(group.centred, std + eps)
  elif scale == 'none':
    values = group.centred
  else:
    raise ValueError(
      f"scale must be 'group', 'batch' or 'none', got {scale!r}."
    )
  total = combine.single(values, total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def dr_grpo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  renormalize: bool = False,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`s - mean_g s`, GRPO without the std (Dr. GRPO, arXiv:2503.20783).

  Sec. 3.2. `eps` and `ddof` only matter to the batch step. The method's other
  half is the loss denominator, `losses.constant_denominator`.
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


def rloo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  renormalize: bool = False,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`s` minus the mean of the other samples (RLOO, arXiv:2402.14740).

  Equal to `n / (n - 1) * (s - mean_g s)` for n scored rows; 0 for n = 1. No
  equation number: read from other implementations.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  total = combine.weighted_sum(rewards, valid, weights, renormalize)
  group = combine.within_group(total, ddof)
  n = group.count
  values = group.centred * n / jnp.maximum(n - 1, 1)
  total = combine.single(values, total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def reinforce_pp(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  renormalize: bool = False,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`s` whitened over the batch, no group (REINFORCE++, arXiv:2501.03262).

  Eq. 5. There the KL of every token is taken off first (Eq. 4): see
  `kl.token_rewards`. The paper whitens over tokens.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  total = combine.weighted_sum(rewards, valid, weights, renormalize)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def reinforce_pp_baseline(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  renormalize: bool = False,
  whiten: str = 'sequence',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """`s - mean_g s`, whitened over the batch (arXiv:2501.03262, Eq. 6-7).

  There with a separate k2 loss for the KL (Eq. 8).
  """
  return dr_grpo(
    rewards,
    valid,
    weights,
    eps=eps,
    ddof=ddof,
    renormalize=renormalize,
    whiten=whiten,
    mask=mask,
    axis_name=axis_name,
  )


def dvao(
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
  """`(s - mean_g s) / (sum_k |w_k| std_g r_k + eps)` (DVAO, arXiv:2605.25604).

  Eq. 9: z-scores weighted by `w_k std_k`, so that a reward that tells the group
  apart counts more. Never larger than GRPO's, and equal to it where all rewards
  are perfectly correlated. The scale of the weights cancels. One constant
  reward is harmless; where all are constant the group is 0. A row without some
  reward gets 0 from it. The authors use ddof 0 and no eps, and warn of groups
  of four and fewer.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  group = masked.moments(rewards, valid, axis=1, ddof=ddof)
  total = combine.weighted_sum(group.centred, valid, weights)
  total = combine.settle(total)
  loudness = jnp.sum(group.std * jnp.abs(weights), axis=-1)
  values = masked.safe_divide(total.values, loudness + eps)
  total = combine.single(values, total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def corr_grpo(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-6,
  ddof: int = 1,
  on: str = 'grpo',
  floor: float = 0.1,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """Centred `s` over the root of the summed correlations (arXiv:2609.36820).

  `(s - mean_g s) / max(sqrt(sum_lm rho_lm + eps), floor)` (CorrGRPO, Eq. 2; eps
  inside the root as in the authors' code), with rho the correlations of the
  weighted rewards in the group. Not free of scale: rewards times 10 give
  advantages times 10. `ddof` only matters to the batch step.

  Args:
    on: 'grpo', or 'gdpo' (Eq. 18-22): the weighted z-scores are summed and
      centred over the batch, and the correlations are theirs over the batch.
      `ddof` and 1e-6 as eps then also make the z-scores.
    floor: least divisor. Rewards that are opposed have a sum of correlations of
      0 whatever their scales, and the published form (floor 0) then multiplies
      what their sum leaves by 1000.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  if on == 'grpo':
    total = combine.weighted_sum(rewards, valid, weights)
    centred = combine.within_group(total).centred
    rho = combine.correlations(rewards * jnp.sign(weights), valid, axis=1)
  elif on == 'gdpo':
    z = group_normalize(rewards, valid, eps=eps, ddof=ddof)
    total = combine.settle(combine.weighted_sum(z, valid, weights))
    centred = combine.over_batch(total, axis_name=axis_name).centred
    signed = z * jnp.sign(weights)
    rho = combine.correlations(signed, valid, (0, 1), axis_name)
  else:
    raise ValueError(f"on must be 'grpo' or 'gdpo', got {on!r}.")
  spread = jnp.maximum(jnp.sum(rho, axis=(-2, -1)), 0.0)
  divisor = jnp.maximum(jnp.sqrt(spread + eps), floor)
  values = masked.safe_divide(centred, divisor)
  total = combine.single(values, total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)


def ddca(
  rewards: Array,
  valid: Array | None,
  weights: Array,
  *,
  eps: float = 1e-4,
  ddof: int = 1,
  lengths: Array | None = None,
  correct: int = 0,
  threshold: float = 0.5,
  beta: float = 0.2,
  difficulty: bool = True,
  leave_one_out: bool = False,
  whiten: str = 'none',
  mask: Array | None = None,
  axis_name: str | None = None,
) -> Array:
  """GRPO plus `beta` times a length advantage among the correct samples.

  DDCA, arXiv:2602.02099, Eq. 12-13 as cited by the authors' code. In the
  cluster C of n correct samples `sg = sigmoid(z-score of the length in C)`, and
  the length advantage is `-(sg - mean_C sg) * n / G`; 0 outside. Where
  everything is correct, length alone remains. There ddof 0, eps 1e-8, G 8, and
  one reward; here other rewards join the sum that GRPO normalizes.

  Args:
    lengths: f32[P, G] or [N], tokens; counted from `mask` by default.
    correct: index of the reward that tells correct samples.
    threshold: a sample is correct where that reward is above it.
    difficulty: the factor n / G; without it, the method is DCA.
    leave_one_out: both baselines leave the sample itself out.
  """
  rewards, valid, weights = combine.prepare(rewards, valid, weights)
  if lengths is None:
    if mask is None:
      raise ValueError('ddca needs the lengths: pass lengths=... or mask=...')
    lengths = jnp.sum(mask, axis=-1)
  total = combine.weighted_sum(rewards, valid, weights)
  lengths = jnp.asarray(lengths, jnp.float32).reshape(total.values.shape)
  inside = valid[..., correct] & (rewards[..., correct] > threshold)
  length = masked.moments(lengths, inside, axis=1, ddof=ddof)
  score = length.centred / jnp.maximum(length.std, 1e-8)
  score = jax.nn.sigmoid(jnp.clip(score, -20.0, 20.0))
  short = -masked.moments(score, inside, axis=1).centred
  n, size = length.count, jnp.sum(total.valid, axis=1, keepdims=True)
  if difficulty:
    short *= n / jnp.maximum(size, 1)
  if leave_one_out:
    short *= n / jnp.maximum(n - 1, 1)
    base = rloo(rewards, valid, weights)
  else:
    base = grpo(rewards, valid, weights, eps=eps, ddof=ddof)
  total = combine.single(base + beta * short, total.valid)
  return combine.batch_step(total, whiten, eps, ddof, mask, axis_name)
