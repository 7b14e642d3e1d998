"""A policy as a tuple of pure functions over a plain tree of parameters.

Training reads the tree as it is (layers stacked). A rollout first turns it into
per-layer weights, `rollout_params`, because a decode loop that slices stacked
weights copies them at every step; then `prefill` reads prompts, and `decode`
adds a token per row to a Cache that is an explicit argument.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax import sharding
from gdpo_jax.policy import decoupled, heads
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.decoder import (
  REMAT,
  Block,
  Continuation,
  Decoder,
  Groups,
  Past,
  RMSNorm,
  Slots,
  rope_table,
)
from gdpo_jax.policy.eight_bit import by_row
from gdpo_jax.policy.packing import lines
from gdpo_jax.policy.products import project, turned
from gdpo_jax.types import Array, Rollout


class Level(NamedTuple):
  """Keys and values of P texts in S slots; one array per layer.

  Separate arrays are updated in place in a decode loop, and with these axes
  both products of attention read them without a transpose (on a CPU 4 times
  faster than with KV after S, and 1.5 times than with S before HD in both).
  """

  k: tuple[Array, ...]  # [P, KV, HD, S] each
  v: tuple[Array, ...]  # [P, KV, S, HD] each
  mask: Array  # bool[P, S], True on slots in use

  @property
  def num_slots(self) -> int:
    return self.mask.shape[1]

  def grow(self, num_slots: int) -> 'Level':
    """With free slots at the end, up to `num_slots` of them in all."""
    extra = num_slots - self.num_slots
    keep, free = (0, 0), (0, extra)
    return Level(
      tuple(jnp.pad(x, (keep, keep, keep, free)) for x in self.k),
      tuple(jnp.pad(x, (keep, keep, free, keep)) for x in self.v),
      jnp.pad(self.mask, (keep, free)),
    )

  def drop(self, num_slots: Array) -> 'Level':
    """Without so many slots in front; as many at the end are free."""
    free = jnp.arange(self.num_slots) >= self.num_slots - num_slots
    return Level(
      tuple(jnp.roll(x, -num_slots, axis=3) for x in self.k),
      tuple(jnp.roll(x, -num_slots, axis=2) for x in self.v),
      jnp.roll(self.mask, -num_slots, axis=1) & ~free,
    )

  def past(self) -> list[Past]:
    """The same, layer by layer."""
    return [Past(k, v, self.mask) for k, v in zip(self.k, self.v, strict=True)]


class Cache(NamedTuple):
  """What B rows know: texts that B / P rows in a row share, and their own.

  A prompt is kept once for its G rows, and a prefix once for all of them: read
  once, it costs a product with more rows and less memory.
  """

  shared: tuple[Level, ...]
  own: Level  # P = B


class Policy(NamedTuple):
  """Pure functions of one decoder; see `make_policy` for what each takes."""

  config: PolicyConfig
  init: Callable[[Array], Any]
  logits: Callable[[Any, Array, Array], Array]
  log_probs: Callable[..., tuple[Array, ...]]
  rollout_params: Callable[..., Any]
  prefill: Callable[..., tuple[Array, Level]]
  new_cache: Callable[..., Cache]
  decode: Callable[..., tuple[Array, Cache]]
  hidden: Callable[..., tuple[Array, Array]]
  dtype: Any  # of the inputs of the products in training
  heads: tuple[str, ...] = ()  # rewards with a sub-policy (see decoupled.py)


@functools.cache
def make_policy(
  config: PolicyConfig,
  compute_dtype: Any = jnp.float32,
  remat: str = 'none',
) -> Policy:
  """The policy of a config; the same arguments give the same object.

  Args:
    config: the shape of the decoder.
    compute_dtype: of the inputs of the dense products in training, forward and
      backward; float32 or bfloat16. Sums, norms, softmax, the residual stream
      and the parameters stay float32.
    remat: which values the backward pass computes again: 'none', 'dots' (all
      but the dense products) or 'block' (all inside a layer).
  Raises:
    ValueError: on an unknown `remat` or `compute_dtype`.
  """
  if remat not in REMAT:
    raise ValueError(f'remat {remat!r} is unknown; use one of {list(REMAT)}.')
  dtype = jnp.dtype(compute_dtype)
  if dtype.name not in ('float32', 'bfloat16'):
    raise ValueError(
      f'compute_dtype {dtype.name} is not supported; use float32 or bfloat16.'
    )
  decoder = Decoder(config, dtype, remat)
  block = Block(config, rollout=True)
  final_norm = RMSNorm(config.norm_eps)

  def init(key: Array) -> Any:
    """float32 parameters: normal(0.02) matrices, unit norms, zero biases."""
    tokens = jnp.zeros((1, 1), jnp.int32)
    context = Groups(jnp.ones((1, 1), bool))
    return decoder.init(key, tokens, tokens, context)['params']

  def logits(params: Any, tokens: Array, mask: Array) -> Array:
    """f32[B, S, V]; tokens i32[B, S], mask bool[B, S] (pads on either side)."""
    hidden, head = decoder.apply(
      _variables(params), tokens, _positions(mask), Groups(mask)
    )
    if 'heads' in params:
      return decoupled.mixture_logits(params, hidden, head)
    return heads.logits(hidden, head, dtype)

  def log_probs(
    params: Any,
    rollout: Rollout,
    *,
    group_size: int = 1,
    temperature: float | Array = 1.0,
    with_values: bool = False,
    place: Array | None = None,
    line_tokens: int = 0,
  ) -> tuple[Array, ...]:
    """(logp, entropy), f32[N, Tc] each, of softmax(logits / temperature).

    Differentiable; 0 off the mask. The prompt of each `group_size` rows in a
    row is computed once, from the first of them. `with_values` adds a third,
    the value head's on the state before each token (params['value'], f32[D]).
    With `place` and `line_tokens` (see packing.py) the rows of a group are
    computed in fewer lines; the result is the same.
    """
    packed = None
    if place is not None:
      packed = lines(place, rollout.mask, group_size, line_tokens)
    hidden, targets, head = in_lines(params, rollout, group_size, packed)
    logp, entropy = heads.token_log_probs(
      hidden, head, targets, temperature=temperature, dtype=dtype
    )
    scores = (logp, entropy)
    if with_values:
      scores += (hidden @ params['value']['kernel'],)
    if packed is not None:
      by_group = (packed.source.shape[0], -1)
      scores = tuple(
        packed.back(x.reshape(by_group), rollout.tokens.shape) for x in scores
      )
    zero = jnp.zeros((), jnp.float32)
    return tuple(jnp.where(rollout.mask, x, zero) for x in scores)

  def states(
    params: Any, rollout: Rollout, group_size: int = 1
  ) -> tuple[Array, Array]:
    """(hidden f32[N, Tc, D] before each completion token, LM head [V, D])."""
    hidden, _, head = in_lines(params, rollout, group_size, None)
    return hidden, head

  def in_lines(params, rollout, group_size, packed):
    """Hidden states f32[B, T, D], targets i32[B, T] and head, B lines in all.

    Without `packed` the lines are the rows.
    """
    targets = rollout.tokens
    num_rows, length = targets.shape
    if num_rows % group_size:
      raise ValueError(
        f'{num_rows} rows do not divide into groups of {group_size}.'
      )
    # A group that lies on several devices is computed in parts, one on each,
    # with the prompt once in each part.
    part = math.gcd(group_size, sharding.rows_per_device(num_rows))
    if packed is not None and part != group_size:
      raise ValueError(
        f'{num_rows} rows of a micro-batch put groups of {group_size} on '
        'several devices each, which cannot be packed; make '
        'prompts_per_micro_batch a multiple of the devices, or pack_tokens 0.'
      )
    group_size = part
    num_prompts = num_rows // group_size

    def first_of_each(x):
      return x.reshape(num_prompts, group_size, -1)[:, 0]

    tokens = first_of_each(rollout.prompt)
    mask = _at_least_one(first_of_each(rollout.prompt_mask))
    # A completion's inputs start with the last prompt token, whose state
    # predicts the first target, and stop before the last target.
    first = jnp.repeat(tokens[:, -1:], group_size, axis=0)
    inputs = jnp.concatenate([first, targets[:, :-1]], axis=1)
    inputs = inputs.reshape(num_prompts, group_size * length)
    targets = targets.reshape(num_prompts, group_size * length)
    steps = jnp.tile(jnp.arange(length, dtype=jnp.int32), group_size)
    num_lines, segments = group_size, None
    if packed is not None:
      inputs, targets = packed.take(inputs), packed.take(targets)
      steps, segments = packed.step, packed.segment
      num_lines = packed.num_lines
    start = mask.sum(axis=1, keepdims=True, dtype=jnp.int32) - 1
    hidden, head = decoder.apply(
      _variables(params),
      jnp.concatenate([tokens[:, :-1], inputs], axis=1),
      jnp.concatenate([_positions(mask)[:, :-1], start + steps], axis=1),
      Groups(mask[:, :-1], segments, num_lines, dtype),
    )
    hidden = hidden[:, mask.shape[1] - 1 :]
    shape = (num_prompts * num_lines, -1)
    return (
      hidden.reshape(*shape, hidden.shape[-1]),
      targets.reshape(shape),
      head,
    )

  def rollout_params(params: Any, dtype: Any = None) -> Any:
    """Per-layer weights for `prefill` and `decode`, made once per rollout.

    The layers are unstacked; q, k, v and gate, up are joined to one matrix
    each; kernels are stored [outputs, inputs] (see `products.project`).
    Matrices are kept, and multiplied, in `dtype` (None: as they are); 'int8'
    keeps whole numbers and a scale for each output (see eight_bit.py). The
    embedding, of which a few rows are read, is that of `params`. On a mesh they
    are gathered over `data` and `fsdp`, once instead of at every token, and
    stay split over `tensor`.
    """
    layers, head = unstack(
      params['layers'], params.get('head', params['embed']), dtype
    )
    weights = {
      'embed': params['embed']['embedding'],
      'layers': layers,
      'norm': params['norm'],
      **head,
    }
    return jax.tree_util.tree_map_with_path(place, weights)

  def place(path, x):
    if x.ndim < 2:
      return sharding.constrain(x, None)
    inward = any(getattr(k, 'key', 0) in ('o', 'down') for k in path)
    axes = (None, 'tensor') if inward else ('tensor', None)
    return sharding.constrain(x, *axes)

  @functools.partial(jax.jit, static_argnames='dtype')
  def unstack(layers, head, dtype):
    int8 = dtype == 'int8'

    def cast(x):
      return x if dtype is None or int8 or x.ndim < 2 else x.astype(dtype)

    def rounded(weights):
      if not isinstance(weights, dict):
        return weights
      weights = {name: rounded(x) for name, x in weights.items()}
      if 'kernel' in weights:
        weights['kernel'], weights['scale'] = by_row(weights['kernel'])
      return weights

    def joined_head(rows):
      if not int8:
        return {'head': cast(rows)}
      values, scale = by_row(rows)
      return {'head': values, 'head_scale': scale}

    def join(*xs):
      return jnp.concatenate(xs, axis=0)

    def layer(weights):
      weights = jax.tree.map(lambda x: turned(cast(x)), weights)
      attn, mlp = dict(weights['attn']), weights['mlp']
      attn['qkv'] = jax.tree.map(join, *(attn.pop(name) for name in 'qkv'))
      gate_up = jax.tree.map(join, mlp['gate'], mlp['up'])
      mlp = {'gate_up': gate_up, 'down': mlp['down']}
      weights = dict(weights, attn=attn, mlp=mlp)
      return rounded(weights) if int8 else weights

    return tuple(
      layer(jax.tree.map(lambda x: x[i], layers))  # noqa: B023
      for i in range(config.num_layers)
    ), joined_head(head['embedding'])

  def run(weights, tokens, positions, contexts):
    x = weights['embed'][tokens].astype(jnp.float32)
    x = sharding.constrain(x, 'rows')
    rope = rope_table(config, positions)
    kept = []
    for layer, context in zip(weights['layers'], contexts, strict=True):
      x, kv = block.apply({'params': layer}, x, rope, context)
      kept.append(kv)
    x = final_norm.apply({'params': weights['norm']}, x[:, -1])
    k, v = (
      tuple(sharding.constrain(x, 'rows', 'tensor') for x in xs)
      for xs in zip(*kept, strict=True)
    )
    if 'heads' in weights:
      logits = decoupled.mixture_logits(weights, x, weights['head'])
    else:
      logits = project(x, weights['head'], weights.get('head_scale'))
    return sharding.constrain(logits, 'rows', 'tensor'), k, v

  def prefill(
    weights: Any, tokens: Array, mask: Array, prefix: Level | None = None
  ) -> tuple[Array, Level]:
    """(logits f32[P, V] after the last token, Level of Tp slots).

    tokens i32[P, Tp] and mask bool[P, Tp], left-padded. A prompt of pads alone
    counts as the one token in its last place. With a `prefix`, one text of a
    Level without pads, all prompts continue it.
    """
    mask = _at_least_one(mask)
    positions = _positions(mask)
    if prefix is None:
      contexts = [Groups(mask)] * config.num_layers
    else:
      positions += prefix.num_slots
      contexts = [
        Continuation(k, v, mask)
        for k, v in zip(prefix.k, prefix.v, strict=True)
      ]
    logits, k, v = run(weights, tokens, positions, contexts)
    return logits, Level(k, v, mask)

  def new_cache(shared: tuple[Level, ...], num_rows: int, num_slots: int):
    """A Cache of `num_rows` rows that know what they share, and free slots."""
    heads = num_rows, config.num_kv_heads
    k, v = (
      sharding.constrain(jnp.zeros((*heads, *shape)), 'rows', 'tensor')
      for shape in (
        (config.head_dim, num_slots),
        (num_slots, config.head_dim),
      )
    )
    own = Level(
      (k,) * config.num_layers,
      (v,) * config.num_layers,
      jnp.zeros((num_rows, num_slots), bool),
    )
    return Cache(shared, own)

  def decode(
    weights: Any, cache: Cache, token: Array, position: Array, slot: Array
  ) -> tuple[Array, Cache]:
    """(logits f32[B, V], Cache) after one more token in each row.

    token i32[B] at position i32[B] of its own row goes to slot i32[] of the
    rows' own level, the same in every row. A slot past the end would overwrite
    the last one; the caller grows the level first.
    """
    own = cache.own
    own = own._replace(mask=own.mask | (jnp.arange(own.num_slots) == slot))
    levels = [level.past() for level in (*cache.shared, own)]
    contexts = [Slots(past, slot) for past in zip(*levels, strict=True)]
    logits, k, v = run(weights, token[:, None], position[:, None], contexts)
    return logits, cache._replace(own=Level(k, v, own.mask))

  return Policy(
    config,
    jax.jit(init),
    jax.jit(logits),
    jax.jit(
      log_probs, static_argnames=('group_size', 'with_values', 'line_tokens')
    ),
    rollout_params,
    jax.jit(prefill),
    new_cache,
    jax.jit(decode),
    jax.jit(states, static_argnames='group_size'),
    dtype,
  )


def _variables(params):
  """Flax's collections: adapters (see lora.py) are apart from what they adapt."""
  return {'params': params, 'lora': params.get('lora', {})}


def _positions(mask):
  """Real tokens count 0, 1, 2, ...; pads in front of them sit at 0."""
  return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


def _at_least_one(mask):
  return jnp.asarray(mask).at[:, -1].set(True)
