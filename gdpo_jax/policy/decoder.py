"""The one decoder of the Llama, Qwen2 and Qwen3 families, in Flax Linen.

  tokens -> embedding -> L blocks -> norm -> hidden -> (head, see heads.py)
  block:  x += attention(norm(x));  x += mlp(norm(x))

A block does not know what its tokens may attend to: it hands queries, keys and
values to a context, a pytree with an `attend` method.

  Groups  training and prefill: prompts, each followed by its G completions
  Slots   decoding: one new token per row against a cache

The residual stream, the norms, attention and the softmax are float32; `dtype`
is that of the inputs of the dense products (None: as the weights are stored).
"""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.products import dense
from gdpo_jax.types import Array

# Finite, so that no softmax ever meets -inf minus -inf.
MASKED = -1e30

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
  half = config.head_dim // 2
  frequency = config.rope_base ** (-jnp.arange(half) / half)
  if (scaling := config.rope_scaling) is not None:
    turns = scaling.original_max_positions * frequency / (2 * jnp.pi)
    blend = (turns - scaling.low_freq_factor) / (
      scaling.high_freq_factor - scaling.low_freq_factor
    )
    blend = jnp.clip(blend, 0, 1)
    frequency *= blend + (1 - blend) / scaling.factor
  angles = positions[..., None, None] * frequency
  return jnp.cos(angles), jnp.sin(angles)


def _rotate(x, rope):
  cos, sin = rope
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


@flax.struct.dataclass
class Groups:
  """P prompts and the G completions of each, laid out as [P, C + G * T].

  A prompt is computed once and attends to itself; a completion attends to its
  prompt and to itself, never to its siblings. `group_size` 0 means prompts
  alone. Every token sees itself, so that a row of pads stays finite.
  """

  mask: Array  # bool[P, C], True on real prompt tokens
  group_size: int = flax.struct.field(pytree_node=False, default=0)

  def attend(self, q: Array, k: Array, v: Array):
    """Returns f32[P, S, H * HD] and the prompts' (k, v), each [P, KV, C, HD].

    Args:
      q: f32[P, S, H, HD], already scaled.
      k: f32[P, S, KV, HD], as v.
    """
    context = self.mask.shape[1]
    seen = self.mask[:, None, None, None, None, :] & _causal(context)
    seen |= jnp.eye(context, dtype=bool)
    qs, ks, vs = (_split_heads(x[:, :context], 1, k) for x in (q, k, v))
    prompt = ks[:, :, 0, 0], vs[:, :, 0, 0]
    out = _merge_heads(_attention(qs, ks, vs, seen))
    if self.group_size:
      qs, ks, vs = (
        _split_heads(x[:, context:], self.group_size, k) for x in (q, k, v)
      )
      answers = _attention(
        qs, ks, vs, _causal(ks.shape[-2]), (*prompt, self.mask)
      )
      out = jnp.concatenate([out, _merge_heads(answers)], axis=1)
    return out, prompt


@flax.struct.dataclass
class Slots:
  """One new token for each of B rows, against a cache of S slots."""

  k: Array  # [B, KV, S, HD]
  v: Array  # [B, KV, S, HD]
  mask: Array  # bool[B, S], True on slots in use, the new one among them
  slot: Array  # i32[], where the new token goes

  def attend(self, q, k, v):
    """q f32[B, 1, H, HD] -> f32[B, 1, H * HD], and (k, v) with the new token."""
    batch, kv_heads, _, head_dim = self.k.shape
    start = (0, 0, self.slot, 0)
    k, v = (
      jax.lax.dynamic_update_slice(
        cache,
        x.reshape(batch, kv_heads, 1, head_dim).astype(cache.dtype),
        start,
      )
      for cache, x in ((self.k, k), (self.v, v))
    )
    q = q.reshape(batch, kv_heads, -1, head_dim)
    scores = jnp.einsum('bkrd,bksd->bkrs', q, k)
    scores = jnp.where(self.mask[:, None, None, :], scores, MASKED)
    out = jnp.einsum('bkrs,bksd->bkrd', jax.nn.softmax(scores), v)
    return out.reshape(batch, 1, -1), (k, v)


def _causal(length):
  return jnp.tril(jnp.ones((length, length), bool))


def _split_heads(x, group_size, k):
  """[P, G * T, heads, HD] -> [P, KV, G, R, T, HD], R heads per key head."""
  num_prompts, _, _, head_dim = x.shape
  x = x.reshape(
    num_prompts, group_size, -1, k.shape[2], x.shape[2] // k.shape[2], head_dim
  )
  return x.transpose(0, 3, 1, 4, 2, 5)


def _merge_heads(x):
  """[P, KV, G, R, T, HD] -> [P, G * T, H * HD]."""
  num_prompts, kv_heads, group_size, ratio, length, head_dim = x.shape
  x = x.transpose(0, 2, 4, 1, 3, 5)
  return x.reshape(num_prompts, group_size * length, -1)


def _attention(q, k, v, seen, shared=None):
  """Softmax attention over own keys and, jointly, over keys that G rows share.

  Args:
    q: f32[P, KV, G, R, T, HD].
    k: f32[P, KV, G, 1, T, HD], as v.
    seen: bool, broadcast to [P, KV, G, R, T, T].
    shared: None, or k and v [P, KV, C, HD] and their bool[P, C].
  """
  k, v = k[:, :, :, 0], v[:, :, :, 0]
  scores = jnp.einsum('pkgrtd,pkgsd->pkgrts', q, k)
  scores = jnp.where(seen, scores, MASKED)
  top = scores.max(axis=-1, keepdims=True)
  if shared is not None:
    k_shared, v_shared, seen = shared
    more = jnp.einsum('pkgrtd,pkcd->pkgrtc', q, k_shared)
    more = jnp.where(seen[:, None, None, None, None, :], more, MASKED)
    if more.shape[-1]:
      top = jnp.maximum(top, more.max(axis=-1, keepdims=True))
  top = jax.lax.stop_gradient(top)
  scores = jnp.exp(scores - top)
  total = scores.sum(axis=-1, keepdims=True)
  out = jnp.einsum('pkgrts,pkgsd->pkgrtd', scores, v)
  if shared is not None:
    more = jnp.exp(more - top)
    total += more.sum(axis=-1, keepdims=True)
    out += jnp.einsum('pkgrtc,pkcd->pkgrtd', more, v_shared)
  return out / total


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, in float32 (arXiv:1910.07467)."""

  epsilon: float

  @nn.compact
  def __call__(self, x):
    scale = self.param('scale', nn.initializers.ones, (x.shape[-1],))
    power = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(power + self.epsilon) * scale


class Dense(nn.Module):
  """x @ kernel (+ bias)."""

  features: int
  dtype: Any = None
  use_bias: bool = False

  @nn.compact
  def __call__(self, x):
    shape = (x.shape[-1], self.features)
    kernel = self.param('kernel', nn.initializers.normal(0.02), shape)
    y = checkpoint_name(dense(x, kernel, self.dtype), 'dense')
    if self.use_bias:
      y += self.param('bias', nn.initializers.zeros, (self.features,))
    return y


class Attention(nn.Module):
  """Grouped-query attention with rotary positions, bias and q/k norm by config.

  `fused` reads one kernel 'qkv' in place of three, as rollout weights have it.
  """

  config: PolicyConfig
  dtype: Any = None
  fused: bool = False

  @nn.compact
  def __call__(self, x, rope, context):
    c = self.config
    heads = (c.num_heads, c.num_kv_heads, c.num_kv_heads)
    widths = [n * c.head_dim for n in heads]
    names = {'qkv': sum(widths)} if self.fused else dict(zip('qkv', widths))
    qkv = [
      Dense(n, self.dtype, c.qkv_bias, name=name)(x)
      for name, n in names.items()
    ]
    if self.fused:
      qkv = jnp.split(qkv[0], (widths[0], widths[0] + widths[1]), axis=-1)
    q, k, v = (y.reshape(*y.shape[:-1], -1, c.head_dim) for y in qkv)
    if c.qk_norm:
      q = RMSNorm(c.norm_eps, name='q_norm')(q)
      k = RMSNorm(c.norm_eps, name='k_norm')(k)
    q, k = _rotate(q, rope) * c.head_dim**-0.5, _rotate(k, rope)
    out, kv = context.attend(q, k, v)
    return Dense(c.width, self.dtype, name='o')(out), kv


class MLP(nn.Module):
  """down(silu(gate(x)) * up(x)), arXiv:2002.05202; `fused` as in Attention."""

  config: PolicyConfig
  dtype: Any = None
  fused: bool = False

  @nn.compact
  def __call__(self, x):
    c = self.config
    if self.fused:
      both = Dense(2 * c.mlp_width, self.dtype, name='gate_up')(x)
      gate, up = jnp.split(both, 2, axis=-1)
    else:
      gate = Dense(c.mlp_width, self.dtype, name='gate')(x)
      up = Dense(c.mlp_width, self.dtype, name='up')(x)
    return Dense(c.width, self.dtype, name='down')(nn.silu(gate) * up)


class Block(nn.Module):
  """One layer: returns the residual stream and what the context keeps."""

  config: PolicyConfig
  dtype: Any = None
  fused: bool = False

  @nn.compact
  def __call__(self, x, rope, context):
    c = self.config
    y = RMSNorm(c.norm_eps, name='attn_norm')(x)
    attention = Attention(c, self.dtype, self.fused, name='attn')
    y, kv = attention(y, rope, context)
    x = x + y
    y = RMSNorm(c.norm_eps, name='mlp_norm')(x)
    return x + MLP(c, self.dtype, self.fused, name='mlp')(y), kv


class Table(nn.Module):
  """The V rows of an embedding or of a head."""

  config: PolicyConfig

  @nn.compact
  def __call__(self):
    shape = (self.config.vocab_size, self.config.width)
    return self.param('embedding', nn.initializers.normal(0.02), shape)


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
      variable_axes={'params': 0},
      split_rngs={'params': True},
      in_axes=nn.broadcast,
      length=c.num_layers,
    )(
      Block(c, self.dtype, name='layers'),
      embedding[tokens],
      rope_table(c, positions),
      context,
    )
    return RMSNorm(c.norm_eps, name='norm')(x), head
