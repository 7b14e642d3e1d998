"""What is read off the last hidden state: logits, token log-probs, entropies."""

import jax
import jax.numpy as jnp

from gdpo_jax.policy.decoder import Dot, weight_dot
from gdpo_jax.types import Array

# Logits alive at once; large enough for full-speed products, small enough to
# vanish beside the weights.
CHUNK_BYTES = 2**25


def logits(hidden: Array, head: Array, dot: Dot = weight_dot) -> Array:
  """f32[..., V] for hidden f32[..., D] and head [V, D]."""
  return dot(hidden, head.T)


def token_log_probs(
  hidden: Array,
  head: Array,
  targets: Array,
  *,
  temperature: float | Array = 1.0,
  dot: Dot = weight_dot,
  chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Array, Array]:
  """Log-prob of each target, and the entropy of the distribution it came from.

  Both are those of softmax(logits / temperature), in nats. The logits are made
  a few time steps at a time, for all rows (so that rows may be sharded), and
  made again in the backward pass: no [N, T, V] array exists in either.

  Args:
    hidden: f32[N, T, D], the state that predicts targets[:, t] at t.
    head: [V, D].
    targets: i32[N, T].
    temperature: > 0.
    dot: multiplies hidden states with the head.
    chunk_bytes: upper bound of the logits alive at once, unless one time step
      of all rows is already more.
  Returns:
    (logp, entropy), f32[N, T] each.
  """
  num_rows, length, width = hidden.shape
  steps = max(1, chunk_bytes // (4 * num_rows * head.shape[0]))
  num_chunks = -(-length // steps)
  steps = -(-length // num_chunks)

  def split(x):
    pad = [(0, 0), (0, num_chunks * steps - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(num_rows, num_chunks, steps, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  @jax.checkpoint
  def chunk(hidden, targets):
    z = logits(hidden, head, dot) / temperature
    lse = jax.nn.logsumexp(z, axis=-1)
    logp = jnp.take_along_axis(z, targets[..., None], axis=-1)[..., 0] - lse
    mean = jnp.sum(jax.nn.softmax(z) * z, axis=-1)
    return logp, lse - mean

  out = jax.lax.map(lambda xs: chunk(*xs), (split(hidden), split(targets)))
  return jax.tree.map(
    lambda x: jnp.moveaxis(x, 0, 1).reshape(num_rows, -1)[:, :length], out
  )
