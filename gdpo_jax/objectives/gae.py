"""Advantages resolved in time, for policies with a value head.

  delta_t = r_t + gamma_t V_{t+1} - V_t
  A_t     = delta_t + gamma_t lambda_t A_{t+1}        (arXiv:1506.02438)

Time runs over the tokens of the mask: what is masked out between them is
skipped, and carries the value of the next token over. `kl.token_rewards` makes
the rewards, `losses.value_loss` trains the head. The dynamic lambda and the
segmented gamma are heuristics without a paper.
"""

import jax
import jax.numpy as jnp

from gdpo_jax.objectives import masked
from gdpo_jax.types import Array


def gae(
  rewards: Array,
  values: Array,
  mask: Array,
  gamma: float | Array = 1.0,
  lam: float | Array = 0.95,
  bootstrap: Array | None = None,
) -> tuple[Array, Array]:
  """Generalized advantage estimation.

  Args:
    rewards, values: f32[N, Tc].
    mask: bool[N, Tc].
    gamma, lam: a number, f32[N, 1] or f32[N, Tc].
    bootstrap: f32[N], the value after the last token, for rows that were cut
      off; 0 by default, and for rows that ended.
  Returns:
    advantages and returns (`advantages + values`, what the value head is
    trained towards), f32[N, Tc] each; 0 off the mask; no gradient.
  """
  rewards, values = jax.lax.stop_gradient(
    (jnp.where(mask, rewards, 0.0), jnp.where(mask, values, 0.0))
  )
  gamma = jnp.broadcast_to(jnp.asarray(gamma, jnp.float32), mask.shape)
  lam = jnp.broadcast_to(jnp.asarray(lam, jnp.float32), mask.shape)
  if bootstrap is None:
    bootstrap = jnp.zeros(mask.shape[0])
  bootstrap = jax.lax.stop_gradient(bootstrap)

  def step(after, token):
    next_value, next_advantage = after
    reward, value, counts, gamma, lam = token
    delta = reward + gamma * next_value - value
    advantage = delta + gamma * lam * next_advantage
    after = (
      jnp.where(counts, value, next_value),
      jnp.where(counts, advantage, next_advantage),
    )
    return after, jnp.where(counts, advantage, 0.0)

  start = (bootstrap, jnp.zeros_like(bootstrap))
  tokens = jax.tree.map(jnp.transpose, (rewards, values, mask, gamma, lam))
  _, advantages = jax.lax.scan(step, start, tokens, reverse=True)
  advantages = advantages.T
  return advantages, jnp.where(mask, advantages + values, 0.0)


def layered_gae(
  rewards: Array,
  values: Array,
  mask: Array,
  gamma: float | Array,
  lambdas: Array,
) -> tuple[Array, Array]:
  """One estimate per head, each with its own lambda.

  Args:
    rewards, values: f32[H, N, Tc]; mask: bool[N, Tc]; lambdas: f32[H].
  Returns:
    advantages and returns, f32[H, N, Tc] each.
  """
  return jax.vmap(lambda r, v, lam: gae(r, v, mask, gamma, lam))(
    rewards, values, lambdas
  )


def dynamic_lambda(lam: float, uncertainty: Array) -> Array:
  """`clip(lam (1 + 0.5 tanh(uncertainty)), 0, 1)`; f32[N, Tc].

  Args:
    uncertainty: f32[N, Tc], at least 0: token entropy in nats, or the spread of
      an ensemble of values (`jnp.std(values, axis=0)`).
  """
  return jnp.clip(lam * (1 + 0.5 * jnp.tanh(uncertainty)), 0.0, 1.0)


def segmented_gamma(gamma: float, mask: Array) -> Array:
  """From `gamma` on the first token to `gamma^2` on the last; f32[N, Tc].

  Linear over the length of each sequence; a single token has `gamma`.
  """
  length = jnp.sum(mask, axis=-1, keepdims=True)
  place = jnp.cumsum(mask, axis=-1) - 1
  progress = jnp.clip(place / jnp.maximum(length - 1, 1), 0.0, 1.0)
  return gamma + (gamma**2 - gamma) * progress


def whiten_tokens(
  advantages: Array,
  mask: Array,
  eps: float = 1e-8,
  axis_name: str | None = None,
) -> Array:
  """`(A - mean A) / (std A + eps)` over all tokens of the mask; f32[N, Tc]."""
  tokens = masked.moments(advantages, mask, ddof=1, axis_name=axis_name)
  return masked.safe_divide(tokens.centred, tokens.std + eps)
