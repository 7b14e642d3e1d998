"""Softmax attention of lines of tokens, by what the device does best.

  attend  L lines of T tokens, each token against those before it in its line
          and, jointly, against C keys that all lines of a text share

  plain   anywhere, float32; long lines a block of queries at a time
  cudnn   GPUs, where the products of the policy are bfloat16: the flash kernel
          behind jax.nn.dot_product_attention
  splash  TPUs: the Pallas kernel jax.experimental.pallas.ops.tpu.
          splash_attention; not for packed lines, whose tokens must not see each
          other but all see what is shared, which its segment ids cannot say

Flash kernels get what is shared as keys in front of a line's own. They would
merge with a second call by its log-sum-exp, but cannot be differentiated then.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.types import Array

# Finite, so that no softmax ever meets -inf minus -inf.
MASKED = -1e30
# Queries that attend at once; a longer sequence is taken in blocks.
CHUNK = 512
# Queries and keys of the TPU kernel come in multiples of this.
LANES = 128


class Shared(NamedTuple):
  """Keys that all lines of a text see."""

  k: Array  # f32[P, C, KV, HD]
  v: Array  # f32[P, C, KV, HD]
  mask: Array  # bool[P, C], False on pads


def attend(
  q: Array,
  k: Array,
  v: Array,
  num_lines: int,
  segments: Array | None = None,
  shared: Shared | None = None,
  dtype=jnp.float32,
) -> Array:
  """f32[P, L * T, H * HD].

  Args:
    q: f32[P, L * T, H, HD], already scaled; line after line.
    k: f32[P, L * T, KV, HD], as v.
    num_lines: L.
    segments: i32[P, L * T]; a token sees earlier ones of its own segment. None:
      a line is one segment. Every token sees itself, pads included.
    shared: see Shared.
    dtype: of the products of the policy; flash kernels are given it.
  """
  if shared is not None and not shared.mask.shape[1]:
    shared = None
  packed = segments is not None and shared is not None
  how = _flash(jnp.dtype(dtype), packed, q, k)
  if how is None:
    return _plain(q, k, v, num_lines, segments, shared)
  return how(q, k, v, num_lines, segments, shared, dtype)


def _flash(dtype, packed, q, k):
  """The kernel of the device of the mesh, or of the default device, if any."""
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    platform = jax.default_backend()
  else:
    platform = mesh.abstract_device.platform
  if platform in ('gpu', 'cuda') and dtype == jnp.bfloat16:
    return _cudnn
  if platform == 'tpu' and not packed and _divides(mesh, q, k):
    return _splash
  return None


def _divides(mesh, q, k):
  """Whether every device gets whole texts and whole groups of heads."""
  if mesh.empty:
    return True
  rows = mesh.shape['data'] * mesh.shape['fsdp']
  return not (len(q) % rows or k.shape[2] % mesh.shape['tensor'])


def by_line(x: Array, num_lines: int) -> Array:
  """[P, L * T, ...] -> [P * L, T, ...]."""
  return x.reshape(len(x) * num_lines, -1, *x.shape[2:])


def _in_front(own: Array, shared: Array, num_lines: int) -> Array:
  """[P * L, T, ...] behind [P, C, ...], once in each line."""
  return jnp.concatenate([jnp.repeat(shared, num_lines, axis=0), own], axis=1)


def _seen(length: int, segments: Array | None) -> Array:
  """bool[..., T, T], [T, T] where a line is one segment; i32[..., T]."""
  causal = jnp.tril(jnp.ones((length, length), bool))
  if segments is None:
    return causal
  return causal & (segments[..., :, None] == segments[..., None, :])


def _cudnn(q, k, v, num_lines, segments, shared, dtype, implementation='cudnn'):
  lines = functools.partial(by_line, num_lines=num_lines)
  own = None if segments is None else lines(segments)
  q, k, v = lines(q), lines(k), lines(v)
  num_rows, length = q.shape[:2]
  seen = jnp.broadcast_to(_seen(length, own), (num_rows, length, length))
  if shared is not None:
    k = _in_front(k, shared.k, num_lines)
    v = _in_front(v, shared.v, num_lines)
    known = jnp.repeat(shared.mask, num_lines, axis=0)[:, None]
    known = jnp.broadcast_to(known, (num_rows, length, known.shape[-1]))
    seen = jnp.concatenate([known, seen], axis=-1)
  out = jax.nn.dot_product_attention(
    *(x.astype(dtype) for x in (q, k, v)),
    mask=seen[:, None],
    scale=1.0,
    implementation=implementation,
  )
  return out.astype(jnp.float32).reshape(
    num_rows // num_lines, -1, q[0, 0].size
  )


def _splash(q, k, v, num_lines, segments, shared, dtype, interpret=False):
  """Each device takes its rows and heads; the kernel knows of no mesh."""
  lines = functools.partial(by_line, num_lines=num_lines)
  own = None if segments is None else lines(segments)
  num_texts, heads = len(q), q.shape[2]
  q, k, v = (lines(x).astype(dtype) for x in (q, k, v))
  num_rows, length = q.shape[:2]
  if own is None:
    own = jnp.ones((num_rows, length), jnp.int32)
  keys, offset = own, 0
  if shared is not None:
    offset = shared.mask.shape[1]
    k = _in_front(k, shared.k.astype(dtype), num_lines)
    v = _in_front(v, shared.v.astype(dtype), num_lines)
    keys = _in_front(own, shared.mask.astype(jnp.int32), num_lines)
  run = functools.partial(_splash_rows, offset=offset, interpret=interpret)
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty and mesh.size > 1:
    spec = jax.sharding.PartitionSpec
    rows = ('data', 'fsdp')
    by_head, by_row = spec(rows, None, 'tensor'), spec(rows)
    run = jax.shard_map(
      run,
      in_specs=(by_head, by_head, by_head, by_row, by_row),
      out_specs=by_head,
      check_vma=False,
    )
  out = run(q, k, v, own, keys).astype(jnp.float32)
  return out.reshape(num_texts, num_lines * length, heads * q.shape[3])


def _splash_rows(q, k, v, own, keys, *, offset, interpret):
  """[B, T, H, HD] of lines whose own keys begin at `offset`."""
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernels,
  )
  from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
  )

  length, num_keys, heads = q.shape[1], k.shape[1], q.shape[2]
  q, own = (_rounded_up(x, length) for x in (q, own))
  k, v, keys = (_rounded_up(x, num_keys) for x in (k, v, keys))
  causal = masks.CausalMask((q.shape[1], k.shape[1]), offset)
  with jax.ensure_compile_time_eval():
    kernel = kernels.make_splash_mha_single_device(
      masks.MultiHeadMask([causal] * heads), interpret=interpret
    )

  def row(q, k, v, own, keys):
    q, k, v = (x.swapaxes(0, 1) for x in (q, k, v))
    return kernel(q, k, v, kernels.SegmentIds(own, keys)).swapaxes(0, 1)

  return jax.vmap(row)(q, k, v, own, keys)[:, :length]


def _rounded_up(x, length):
  """[B, n, ...] with n a multiple of LANES; behind a line nobody sees it."""
  more = [(0, 0)] * x.ndim
  more[1] = (0, -length % LANES)
  return jnp.pad(x, more)


def _plain(q, k, v, num_lines, segments, shared):
  length = q.shape[1] // num_lines
  if segments is not None:
    segments = segments.reshape(len(q), 1, num_lines, 1, length)
  seen = _seen(length, segments)
  qs, ks, vs = (_split_heads(x, num_lines, k) for x in (q, k, v))
  if shared is not None:
    # [P, C, KV, HD] -> [P, KV, C, HD]
    shared = (shared.k.swapaxes(1, 2), shared.v.swapaxes(1, 2), shared.mask)
  return _merge_heads(_in_blocks(qs, ks, vs, seen, shared))


def _split_heads(x, num_lines, k):
  """[P, L * T, heads, HD] -> [P, KV, L, R, T, HD], R heads per key head."""
  num_texts, _, _, head_dim = x.shape
  x = x.reshape(
    num_texts, num_lines, -1, k.shape[2], x.shape[2] // k.shape[2], head_dim
  )
  return x.transpose(0, 3, 1, 4, 2, 5)


def _merge_heads(x):
  """[P, KV, L, R, T, HD] -> [P, L * T, H * HD]."""
  num_texts, kv_heads, num_lines, ratio, length, head_dim = x.shape
  x = x.transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(num_texts, num_lines * length, -1)


def _in_blocks(q, k, v, seen, shared):
  """Softmax attention over own keys and, jointly, over shared ones.

  Long lines are taken a block of queries at a time, and again in the backward
  pass, so that memory grows with their length and not its square.

  Args:
    q: f32[P, KV, L, R, T, HD].
    k: f32[P, KV, L, 1, T, HD], as v.
    seen: bool, broadcast to [P, KV, L, R, T, T].
    shared: None, or k and v [P, KV, C, HD] and their bool[P, C].
  """
  length = q.shape[-2]
  if length <= CHUNK:
    return _scores_at_once(q, k, v, seen, shared)
  block = max(n for n in range(1, CHUNK + 1) if length % n == 0)

  def blocks(x):
    """[..., T, X] -> [T / block, ..., block, X]."""
    x = x.reshape(*x.shape[:-2], -1, block, x.shape[-1])
    return jnp.moveaxis(x, -3, 0)

  out = jax.lax.map(
    jax.checkpoint(
      lambda part: _scores_at_once(part[0], k, v, part[1], shared)
    ),
    (blocks(q), blocks(seen)),
  )
  return jnp.moveaxis(out, 0, -3).reshape(q.shape)


def _scores_at_once(q, k, v, seen, shared):
  k, v = k[:, :, :, 0], v[:, :, :, 0]
  scores = jnp.einsum('pkgrtd,pkgsd->pkgrts', q, k)
  parts = [(jnp.where(seen, scores, MASKED), v, 'pkgrts,pkgsd->pkgrtd')]
  if shared is not None:
    k, v, known = shared
    scores = jnp.einsum('pkgrtd,pksd->pkgrts', q, k)
    scores = jnp.where(known[:, None, None, None, None, :], scores, MASKED)
    parts.append((scores, v, 'pkgrts,pksd->pkgrtd'))
  tops = (scores.max(axis=-1, keepdims=True) for scores, _, _ in parts)
  top = jax.lax.stop_gradient(functools.reduce(jnp.maximum, tops))
  out, total = 0, 0
  for scores, values, product in parts:
    weights = jnp.exp(scores - top)
    out += jnp.einsum(product, weights, values)
    total += weights.sum(axis=-1, keepdims=True)
  return out / total
