"""The one decoder of the Llama, Qwen2 and Qwen3 families, in Flax Linen.

  tokens -> embedding -> L blocks -> norm -> hidden -> (head, see heads.py)
  block:  x += attention(norm(x));  x += mlp(norm(x))

A block does not know what its tokens may attend to: it hands queries, keys and
values to a context, a pytree with an `attend` method.

  Groups        training, prefill: prompts, each followed by its completions
  Continuation  prefill: texts that continue one prefix
  Slots         decoding: one new token per row against what is known so far

The residual stream, the norms, attention and the softmax are float32; `dtype`
is that of the inputs of the dense products (None: as the weights are stored).
"""

import functools
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from gdpo_jax import sharding
from gdpo_jax.policy.attention import MASKED, Shared, attend
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.products import by_rows, dense, project
from gdpo_jax.types import Array

REMAT = {
  'none': None,  # keep every intermediate value
  'dots': jax.checkpoint_policies.save_only_these_names('dense'),
  'block': jax.checkpoint_policies.nothing_saveable,
}


def rope_table(config: PolicyConfig, positions: Array) -> tuple[Array, Array]:
  """cos and sin f32[B, S, 1, HD/2] of the angles at i32[B, S] positions.

  Rotary embedding (arXiv:2104.09864), in the two-halves layout of HF, with
  llama-3 scaling of the frequencies where the config has it.
  """
  # In float64, once: rounding grows with the position.
  half = config.head_dim // 2
  frequency = config.rope_base ** (-np.arange(half) / half)
  if (scaling := config.rope_scaling) is not None:
    turns = scaling.original_max_positions * frequency / (2 * np.pi)
    blend = (turns - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = np.clip(blend, 0, 1)
    frequency *= blend + (1 - blend) / scaling.factor
  angles = positions[..., None, None] * frequency.astype(np.float32)
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rope):
  cos, sin = rope
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@flax.struct.dataclass
class Groups:
  """P prompts and L lines of completions of each, laid out as [P, C + L * T].

  A prompt is computed once and attends to itself; a completion attends to its
  prompt and to itself, never to its siblings. There is a line for each of the G
  completions, or fewer, into which they are packed (see packing.py).
  `num_lines` 0 means prompts alone. Every token sees itself, so that a row of
  pads stays finite.
  """

  mask: Array  # bool[P, C], True on real prompt tokens
  segments: Array | None = None  # i32[P, L * T] where lines are packed
  num_lines: int = flax.struct.field(pytree_node=False, default=0)
  dtype: Any = flax.struct.field(pytree_node=False, default=jnp.float32)

  def attend(self, q: Array, k: Array, v: Array):
    """f32[P, S, H * HD], and the start of a cache: the prompts' (k, v).

    Args:
      q: f32[P, S, H, HD], already scaled.
      k: f32[P, S, KV, HD], as v.
    """
    context = self.mask.shape[1]
    real = self.mask.astype(jnp.int32)
    before = [x[:, :context] for x in (q, k, v)]
    out = attend(*before, 1, real, dtype=self.dtype) if context else None
    if self.num_lines:
      shared = Shared(*before[1:], self.mask)
      answers = attend(
        *(x[:, context:] for x in (q, k, v)),
        self.num_lines,
        self.segments,
        shared,
        self.dtype,
      )
      parts = [answers] if out is None else [out, answers]
      out = jnp.concatenate(parts, axis=1)
    return out, _cached(*before[1:])


@flax.struct.dataclass
class Continuation:
  """P left-padded texts that all continue one prefix of C tokens."""

  k: Array  # [1, KV, HD, C], of the prefix
  v: Array  # [1, KV, C, HD]
  mask: Array  # bool[P, T], True on real tokens of the texts

  def attend(self, q: Array, k: Array, v: Array):
    """f32[P, T, H * HD], and (k, v) of the texts; arguments as in Groups."""
    num_texts, length = self.mask.shape
    own = _cached(k, v)

    def in_one_row(x):
      return x.reshape(1, num_texts * length, *x.shape[2:])

    prefix = Shared(
      self.k.transpose(0, 3, 1, 2),
      self.v.swapaxes(1, 2),
      jnp.ones((1, self.v.shape[2]), bool),
    )
    out = attend(
      *map(in_one_row, (q, k, v)),
      num_texts,
      in_one_row(self.mask.astype(jnp.int32)),
      prefix,
    )
    return out.reshape(num_texts, length, -1), own


def _cached(k, v):
  """[P, S, KV, HD] both -> [P, KV, HD, S] and [P, KV, S, HD]."""
  return k.transpose(0, 2, 3, 1), v.swapaxes(1, 2)


@flax.struct.dataclass
class Past:
  """Keys and values of P texts; every B / P of B rows in a row share one."""

  k: Array  # [P, KV, HD, S]
  v: Array  # [P, KV, S, HD]
  mask: Array  # bool[P, S], True on slots in use

  def by_text(self, x: Array) -> Array:
    """[B, KV, R, ...] -> [P, KV, B / P * R, ...]."""
    num_texts, (_, kv_heads, ratio, *rest) = len(self.k), x.shape
    x = x.reshape(num_texts, -1, kv_heads, ratio, *rest).swapaxes(1, 2)
    return x.reshape(num_texts, kv_heads, -1, *rest)

  def by_row(self, x: Array, ratio: int) -> Array:
    """[P, KV, B / P * R, ...] -> [B, KV, R, ...]."""
    num_texts, kv_heads, _, *rest = x.shape
    x = x.reshape(num_texts, kv_heads, -1, ratio, *rest).swapaxes(1, 2)
    return x.reshape(-1, kv_heads, ratio, *rest)


@flax.struct.dataclass
class Slots:
  """One new token for each of B rows, against what is known so far.

  The last past is the rows' own (P = B) and takes the new token; those before
  it are prompts and prefixes, read once for all the rows that share them.
  """

  past: tuple[Past, ...]
  slot: Array  # i32[], where the new token goes

  def attend(self, q, k, v):
    """q f32[B, 1, H, HD] -> f32[B, 1, H * HD], and own (k, v) with the token."""
    *shared, own = self.past
    batch, kv_heads, head_dim, _ = own.k.shape
    k, v = (x.reshape(batch, kv_heads, head_dim) for x in (k, v))
    own = own.replace(
      k=_put(own.k, k[:, :, :, None], (0, 0, 0, self.slot)),
      v=_put(own.v, v[:, :, None, :], (0, 0, self.slot, 0)),
    )
    q = q.reshape(batch, kv_heads, -1, head_dim)
    ratio = q.shape[2]
    scored, tops = [], []
    for past in (*shared, own):
      scores = jnp.einsum('pkrd,pkds->pkrs', past.by_text(q), past.k)
      scores = jnp.where(past.mask[:, None, None, :], scores, MASKED)
      scored.append((past, scores))
      tops.append(past.by_row(scores.max(axis=-1), ratio))
    top = functools.reduce(jnp.maximum, tops)
    out, total = 0, 0
    for past, scores in scored:
      weights = jnp.exp(scores - past.by_text(top)[..., None])
      mixed = jnp.einsum('pkrs,pksd->pkrd', weights, past.v)
      out += past.by_row(mixed, ratio)
      total += past.by_row(weights.sum(axis=-1), ratio)
    out /= total[..., None]
    return out.reshape(batch, 1, -1), (own.k, own.v)


def _put(cache, new, start):
  return jax.lax.dynamic_update_slice(cache, new.astype(cache.dtype), start)


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, in float32 (arXiv:1910.07467)."""

  epsilon: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
    power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(power + self.epsilon) * scale


class Dense(nn.Module):
  """x @ kernel (+ bias); the kernel of a rollout is stored transposed."""

  features: int
  dtype: Any = None
  use_bias: bool = False
  rollout: bool = False

  @nn.compact
  def __call__(self, x):
    shape = (x.shape[-1], self.features)
    shape = shape[::-1] if self.rollout else shape
    kernel = self.param('kernel', nn.initializers.normal(0.02), shape)
    if self.rollout:
      scale = None
      if self.has_variable('params', 'scale'):  # of an int8 kernel
        scale = self.get_variable('params', 'scale')
      y = project(x, kernel, scale)
    else:
      y = checkpoint_name(dense(x, kernel, self.dtype), 'dense')
      if self.has_variable('lora', 'a'):  # see lora.py
        a, b = (self.get_variable('lora', name) for name in 'ab')
        inner = checkpoint_name(dense(x, a, self.dtype), 'dense')
        y += dense(inner, b, self.dtype)
    if self.use_bias:
      y += self.param('bias', nn.initializers.zeros, (self.features,))
    return y


class Attention(nn.Module):
  """Grouped-query attention with rotary positions, bias and q/k norm by config.

  `rollout`: q, k and v are one kernel, 'qkv'.
  """

  config: PolicyConfig
  dtype: Any = None
  rollout: bool = False

  @nn.compact
  def __call__(self, x, rope, context):
    c = self.config
    dense = functools.partial(Dense, dtype=self.dtype, rollout=self.rollout)
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    widths = [n * c.head_dim for n in heads]
    if self.rollout:
      qkv = dense(sum(widths), use_bias=c.qkv_bias, name='qkv')(x)
      qkv = jnp.split(by_rows(qkv), (widths[0], widths[0] + widths[1]), axis=-1)
    else:
      qkv = [
        dense(width, use_bias=c.qkv_bias, name=name)(x)
        for name, width in zip('qkv', widths)
      ]
    q, k, v = (
      sharding.constrain(
        y.reshape(*y.shape[:-1], -1, c.head_dim), 'rows', None, 'tensor'
      )
      for y in qkv
    )
    if c.qk_norm:
      q = RMSNorm(c.norm_eps, name='q_norm')(q)
      k = RMSNorm(c.norm_eps, name='k_norm')(k)
    q, k = _rotate(q, rope) * c.head_dim**-0.5, _rotate(k, rope)
    out, kv = context.attend(q, k, v)
    return dense(c.width, name='o')(out), kv


class MLP(nn.Module):
  """down(silu(gate(x)) * up(x)), arXiv:2002.05202.

  `rollout`: gate and up are one kernel, 'gate_up'.
  """

  config: PolicyConfig
  dtype: Any = None
  rollout: bool = False

  @nn.compact
  def __call__(self, x):
    c = self.config
    dense = functools.partial(Dense, dtype=self.dtype, rollout=self.rollout)
    if self.rollout:
      both = dense(2 * c.mlp_width, name='gate_up')(x)
      gate, up = jnp.split(both, 2, axis=-1)
    else:
      gate = dense(c.mlp_width, name='gate')(x)
      up = dense(c.mlp_width, name='up')(x)
    hidden = sharding.constrain(nn.silu(gate) * up, 'rows', None, 'tensor')
    return dense(c.width, name='down')(hidden)


class Block(nn.Module):
  """One layer: returns the residual stream and what the context keeps."""

  config: PolicyConfig
  dtype: Any = None
  rollout: bool = False

  @nn.compact
  def __call__(self, x, rope, context):
    options = (self.config, self.dtype, self.rollout)
    y = RMSNorm(self.config.norm_eps, name='attn_norm')(x)
    y, kv = Attention(*options, name='attn')(y, rope, context)
    x = sharding.constrain(x + y, 'rows')
    y = RMSNorm(self.config.norm_eps, name='mlp_norm')(x)
    y = MLP(*options, name='mlp')(y)
    return sharding.constrain(x + y, 'rows'), kv


class Table(nn.Module):
  """The V rows of an embedding or of a head."""

  config: PolicyConfig

  @nn.compact
  def __call__(self):
    shape = (self.config.vocab_size, self.config.width)
    return self.param('embedding', nn.initializers.normal(0.02), shape)


def _look_up(embedding, tokens):
  """f32[B, S, D]; each device looks up its part of D, then gets its own rows."""
  x = sharding.constrain(embedding[tokens], 'data', None, 'fsdp')
  return sharding.constrain(x, 'rows')


class Decoder(nn.Module):
  """Layers scanned over stacked weights, rematerialized by name (see REMAT)."""

  config: PolicyConfig
  dtype: Any = None
  remat: str = 'none'

  @nn.compact
  def __call__(self, tokens: Array, positions: Array, context: Groups):
    """(hidden f32[B, S, D], head [V, D]) for tokens, positions i32[B, S]."""
    c = self.config
    embedding = Table(c, name='embed')()
    head = embedding if c.tied else Table(c, name='head')()

    def layer(block, x, rope, context):
      return block(x, rope, context)[0], None

    if REMAT[self.remat] is not None:
      layer = nn.remat(layer, prevent_cse=False, policy=REMAT[self.remat])
    x, _ = nn.scan(
      layer,
      variable_axes={'params': 0, 'lora': 0},
      split_rngs={'params': True},
      in_axes=nn.broadcast,
      length=c.num_layers,
    )(
      Block(c, self.dtype, name='layers'),
      _look_up(embedding, tokens),
      rope_table(c, positions),
      context,
    )
    return RMSNorm(c.norm_eps, name='norm')(x), head
