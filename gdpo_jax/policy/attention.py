"""Softmax attention of lines of tokens, by what the device does best.

  attend  L lines of T tokens, each token against those before it in its line
          and, jointly, against C keys that all lines of a text share

  plain   anywhere, float32, as the sampler has it; a block of queries at a time
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
from jax.ad_checkpoint import checkpoint_name

from gdpo_jax.types import Array

# Finite, so that no softmax ever meets -inf minus -inf.
MASKED = -1e30
# Queries that attend at once, unless that makes more blocks than MAX_BLOCKS:
# every block is compiled.
BLOCK = 64
MAX_BLOCKS = 16
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


def _cudnn(q, k, v, num_lines, segments, shared, dtype, implementation='cudnn'):
  lines = functools.partial(by_line, num_lines=num_lines)
  own = None if segments is None else lines(segments)
  q, k, v = lines(q), lines(k), lines(v)
  num_rows, length = q.shape[:2]
  known = None
  if shared is not None:
    k = _in_front(k, shared.k, num_lines)
    v = _in_front(v, shared.v, num_lines)
    known = jnp.repeat(shared.mask, num_lines, axis=0)
  seen = _may_see(0, length, own, known)[:, :, 0]
  seen = jnp.broadcast_to(seen, (num_rows, *seen.shape[1:]))
  out = jax.nn.dot_product_attention(
    *(x.astype(dtype) for x in (q, k, v)),
    mask=seen,
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
  """Every line [T, HD] of queries against its C + T keys."""
  num_texts, rows, heads, head_dim = q.shape
  lines = functools.partial(by_line, num_lines=num_lines)
  own = None if segments is None else lines(segments)
  q, k, v = lines(q), lines(k), lines(v)
  known = None
  if shared is not None:
    k = _in_front(k, shared.k, num_lines)
    v = _in_front(v, shared.v, num_lines)
    known = jnp.repeat(shared.mask, num_lines, axis=0)
  # the query heads of a key head lie one behind the other
  q = q.reshape(*q.shape[:2], k.shape[2], -1, head_dim).transpose(0, 2, 3, 1, 4)
  k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
  out = _softmax(q, k, v, own, known)
  return out.transpose(0, 3, 1, 2, 4).reshape(num_texts, rows, -1)


def _blocks(length):
  """[start, stop) of the queries that attend at once."""
  size = max(BLOCK, -(-length // MAX_BLOCKS))
  return [(i, min(i + size, length)) for i in range(0, length, size)]


def _may_see(start, stop, segments, known):
  """bool, broadcast to [B, 1, 1, stop - start, C + stop]."""
  seen = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
  seen = seen[None, None, None]
  if segments is not None:
    same = segments[:, start:stop, None] == segments[:, None, :stop]
    seen &= same[:, None, None]
  if known is None:
    return seen
  size = (len(known), 1, 1, stop - start)
  before = jnp.broadcast_to(known[:, None, None, None], (*size, known.shape[1]))
  return jnp.concatenate(
    [before, jnp.broadcast_to(seen, (*size, stop))], axis=-1
  )


@jax.custom_vjp
def _softmax(q, k, v, segments, known):
  """f32[B, KV, R, T, HD], a block of queries after the other.

  A block is given no later keys than it may see, which spares half of the work,
  and none of its scores are kept: the backward pass computes them again from
  the logarithm of the sum of weights, as FlashAttention-2 (arXiv:2307.08691,
  algorithm 2) does.

  Args:
    q: f32[B, KV, R, T, HD].
    k: f32[B, KV, C + T, HD], as v.
    segments: i32[B, T] or None; see `attend`.
    known: bool[B, C], which of the first C keys are real; None where C is 0.
  """
  return _softmax_parts(q, k, v, segments, known)[0]


def _softmax_parts(q, k, v, segments, known):
  """The same, and f32[B, KV, R, T], the logarithm of the sum of weights."""
  context = k.shape[2] - q.shape[3]
  outs, logs = [], []
  for start, stop in _blocks(q.shape[3]):
    rows, keys = slice(start, stop), slice(context + stop)
    scores = jnp.einsum('bkrtd,bksd->bkrts', q[:, :, :, rows], k[:, :, keys])
    scores = jnp.where(_may_see(start, stop, segments, known), scores, MASKED)
    top = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    outs.append(jnp.einsum('bkrts,bksd->bkrtd', weights, v[:, :, keys]) / total)
    logs.append((top + jnp.log(total))[..., 0])
  return jnp.concatenate(outs, axis=3), jnp.concatenate(logs, axis=3)


def _softmax_fwd(q, k, v, segments, known):
  # saved where the results of dense products are, see decoder.REMAT
  out, logs = checkpoint_name(_softmax_parts(q, k, v, segments, known), 'dense')
  return out, (q, k, v, segments, known, out, logs)


def _softmax_bwd(kept, gradient):
  q, k, v, segments, known, out, logs = kept
  context = k.shape[2] - q.shape[3]
  shift = (gradient * out).sum(axis=-1)
  dq, dk, dv = [], jnp.zeros_like(k), jnp.zeros_like(v)
  for start, stop in _blocks(q.shape[3]):
    rows, keys = slice(start, stop), slice(context + stop)
    qs, gs = q[:, :, :, rows], gradient[:, :, :, rows]
    ks, vs = k[:, :, keys], v[:, :, keys]
    seen = _may_see(start, stop, segments, known)
    # [B, KV, keys, R, queries]: two of the three sums below run over the last
    # axes, as CPUs have it fastest, and one would with the queries first.
    seen = jnp.moveaxis(seen, -1, 2)
    scores = jnp.einsum('bksd,bkrtd->bksrt', ks, qs)
    weights = jnp.exp(scores - logs[:, :, None, :, rows])
    weights = jnp.where(seen, weights, 0)
    change = jnp.einsum('bksd,bkrtd->bksrt', vs, gs)
    change = weights * (change - shift[:, :, None, :, rows])
    dq.append(jnp.einsum('bksrt,bksd->bkrtd', change, ks))
    dk = dk.at[:, :, keys].add(jnp.einsum('bksrt,bkrtd->bksd', change, qs))
    dv = dv.at[:, :, keys].add(jnp.einsum('bksrt,bkrtd->bksd', weights, gs))
  return jnp.concatenate(dq, axis=3), dk, dv, None, None


_softmax.defvjp(_softmax_fwd, _softmax_bwd)
