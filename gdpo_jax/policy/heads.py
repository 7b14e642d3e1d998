"""What is read off the last hidden state: logits, token log-probs, entropies."""

import functools

import jax
import jax.numpy as jnp

from gdpo_jax import sharding
from gdpo_jax.policy.products import dense, multiply
from gdpo_jax.types import Array

# Logits alive at once: enough columns for full-speed products, few enough to
# stay near the processor and to vanish beside the weights.
BLOCK_BYTES = 2**22
# ... but so many tokens at least: with the rows of many devices a block would
# shrink to nothing, though each device holds only its own part of it.
MIN_BLOCK = 256


def logits(hidden: Array, head: Array, dtype=None) -> Array:
  """f32[..., V] for hidden f32[..., D] and head [V, D]."""
  return dense(hidden, head.T, dtype)


def token_log_probs(
  hidden: Array,
  head: Array,
  targets: Array,
  *,
  temperature: float | Array = 1.0,
  dtype=None,
  block_bytes: int | None = None,
) -> tuple[Array, Array]:
  """Log-prob of each target, and the entropy of the distribution it came from.

  Both are those of softmax(logits / temperature), in nats. The vocabulary is
  taken a block at a time with running sums (as in arXiv:1805.02867), and again
  in the backward pass: no [N, T, V] array exists in either, and memory does
  not grow with V.

  Args:
    hidden: f32[N, T, D], the state that predicts targets[:, t] at t.
    head: [V, D].
    targets: i32[N, T].
    temperature: > 0.
    dtype: of the inputs of the products; None: that of the head.
    block_bytes: of the logits alive at once; a divisor of V may make it half
      or twice as much, one token of the vocabulary is the least; None:
      `BLOCK_BYTES`, and `MIN_BLOCK` tokens.
  Returns:
    (logp, entropy), f32[N, T] each.
  """
  if isinstance(temperature, (int, float)) and temperature <= 0:
    raise ValueError(
      f'temperature is {temperature}: a greedy choice has no log-probability; '
      'give a temperature above 0.'
    )
  num_rows, length, width = hidden.shape
  vocab_size = head.shape[0]
  least = 1
  if block_bytes is None:
    block_bytes, least = BLOCK_BYTES, MIN_BLOCK
  most = max(least, block_bytes // (4 * num_rows * length))
  block = block_size(vocab_size, most)
  # z / temperature, at the width of a state instead of a vocabulary
  hidden = (hidden / temperature).reshape(-1, width)
  hidden = sharding.constrain(hidden, 'rows')
  out = _log_probs(hidden, head, targets.reshape(-1), dtype, block)
  return tuple(x.reshape(num_rows, length) for x in out)


def block_size(vocab_size: int, most: int) -> int:
  """Tokens of a block: a divisor of V near `most`, where there is one.

  Else the last block is filled up, which copies the head and its gradient.
  """
  most = min(most, vocab_size)
  for block in (*range(most, most // 2, -1), *range(most + 1, 2 * most + 1)):
    if vocab_size % block == 0:
      return block
  num_blocks = -(-vocab_size // most)
  return -(-vocab_size // num_blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _log_probs(hidden, head, targets, dtype, block):
  return _forward(hidden, head, targets, dtype, block)[0]


def blocks(head, block):
  """Scan inputs: rows [block, D] of the head, and their tokens i32[block].

  The last block is filled up with rows of tokens >= V.
  """
  vocab_size, width = head.shape
  num_blocks = -(-vocab_size // block)
  # A scan cannot run over an axis that is split; each block is, in `_logits`.
  head = sharding.constrain(head, None, 'fsdp')
  head = jnp.pad(head, ((0, num_blocks * block - vocab_size), (0, 0)))
  columns = jnp.arange(num_blocks * block).reshape(num_blocks, block)
  return head.reshape(num_blocks, block, width), columns


def _logits(hidden, rows, dtype):
  """f32[N * T, block], and the whole `rows` of the head that they come from."""
  rows = sharding.constrain(rows, 'tensor')
  z = multiply(hidden, rows, dtype, (1, 1))
  return sharding.constrain(z, 'rows', 'tensor'), rows


def _forward(hidden, head, targets, dtype, block):
  """((logp, entropy), residual) by running sums over blocks of tokens."""
  vocab_size = head.shape[0]

  def step(carry, xs):
    top, total, weighted, picked = carry
    rows, columns = xs
    z, _ = _logits(hidden, rows, dtype)
    if vocab_size % block:
      z = jnp.where(columns < vocab_size, z, -jnp.inf)
    new_top = jnp.maximum(top, z.max(axis=1))
    p = jnp.exp(z - new_top[:, None])
    shrink = jnp.exp(top - new_top)
    total = total * shrink + p.sum(axis=1)
    weighted = weighted * shrink + jnp.where(p > 0, p * z, 0).sum(axis=1)
    index = targets - columns[0]
    inside = (index >= 0) & (index < block)
    index = jnp.clip(index, 0, block - 1)[:, None]
    found = jnp.take_along_axis(z, index, axis=1)[:, 0]
    return (new_top, total, weighted, jnp.where(inside, found, picked)), None

  zero = jnp.zeros(targets.shape, jnp.float32)
  carry = (zero - jnp.inf, zero, zero, zero)
  carry, _ = jax.lax.scan(step, carry, blocks(head, block))
  top, total, weighted, picked = carry
  lse, mean = top + jnp.log(total), weighted / total
  return (picked - lse, lse - mean), (hidden, head, targets, lse, mean)


def _backward(dtype, block, residual, cotangents):
  hidden, head, targets, lse, mean = residual
  g_logp, g_entropy = (g[:, None] for g in cotangents)
  lse, mean, targets = (x[:, None] for x in (lse, mean, targets))

  def step(d_hidden, xs):
    rows, columns = xs
    z, rows = _logits(hidden, rows, dtype)
    # d logp / dz = onehot - p;  d entropy / dz = -p (z - mean)
    dz = jnp.exp(z - lse) * (g_logp + g_entropy * (z - mean))
    dz = jnp.where(targets == columns, g_logp, 0) - dz
    if head.shape[0] % block:
      dz = jnp.where(columns < head.shape[0], dz, 0)
    dz = dz.astype(dtype or head.dtype)
    d_hidden += multiply(dz, rows, dtype, (1, 0))
    d_rows = multiply(dz, hidden, dtype or head.dtype, (0, 0))
    return d_hidden, sharding.constrain(d_rows, None, 'fsdp')

  d_hidden, d_head = jax.lax.scan(
    step, jnp.zeros_like(hidden), blocks(head, block)
  )
  d_head = d_head.reshape(-1, head.shape[1])[: head.shape[0]]
  return d_hidden, d_head, None


_log_probs.defvjp(_forward, _backward)
