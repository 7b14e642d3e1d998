"""Draws G completions of every prompt, all on the device.

  Prompts [P] --prefill--> Cache [P] --repeat--> Cache [N] --decode--> Rollout

1. The weights are unstacked and every prompt is read once.
2. Its cache is repeated for the G rows of its group.
3. One loop per cache size draws a token per row and step until all rows have
   ended or the slots are used up; then the cache grows.

A step costs one uniform number per row: a token is found by inverting the
distribution function, first over blocks of the vocabulary, then inside one.
"""

import contextlib
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import sharding
from gdpo_jax.policy.policy import Policy
from gdpo_jax.types import Array, Prompts, Rollout

# The cache starts with room for this many new tokens, and grows by at least
# as many: early steps attend over few slots, and few sizes are compiled.
BUCKET = 64


@dataclasses.dataclass(frozen=True)
class Sampling:
  """How completions are drawn; hashable, one compilation for each.

  Attributes:
    group_size: G, completions per prompt.
    max_new_tokens: Tc, the length limit, EOS included.
    temperature: divides the logits; 0 is greedy, with the log-probs of
      temperature 1.
    top_k: keep the k most likely tokens.
    top_p: then keep the smallest set with at least this mass (nucleus,
      arXiv:1904.09751).
    min_p: then keep tokens with at least this share of the largest
      probability (arXiv:2407.01082).
    eos_ids: a row ends with the first of these, which is kept.
    pad_id: fills the row after its end.
  Raises:
    ValueError: on values outside their range.
  """

  group_size: int
  max_new_tokens: int
  temperature: float = 1.0
  top_k: int | None = None
  top_p: float | None = None
  min_p: float | None = None
  eos_ids: tuple[int, ...] = ()
  pad_id: int = 0

  def __post_init__(self):
    for name in ('group_size', 'max_new_tokens', 'top_k'):
      value = getattr(self, name)
      if value is not None and (value != int(value) or value < 1):
        raise ValueError(f'{name} must be a whole number >= 1, got {value}.')
    if not (self.temperature >= 0 and math.isfinite(self.temperature)):
      raise ValueError(
        f'temperature must be finite and >= 0 (0 is greedy), got '
        f'{self.temperature}.'
      )
    for name in ('top_p', 'min_p'):
      value = getattr(self, name)
      if value is not None and not 0 < value <= 1:
        raise ValueError(f'{name} must be in (0, 1], got {value}.')
    # a list, or one id, as tokenizers give them
    ids = self.eos_ids
    ids = (ids,) if isinstance(ids, int) else tuple(int(i) for i in ids)
    object.__setattr__(self, 'eos_ids', ids)

  @property
  def cuts_support(self) -> bool:
    """True where a filter makes some tokens impossible."""
    return (self.top_k, self.top_p, self.min_p) != (None, None, None)


def generate(
  policy: Policy,
  params,
  prompts: Prompts,
  key: Array,
  sampling: Sampling,
  row_ids: Array | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> Rollout:
  """Samples `sampling.group_size` completions of each prompt.

  The sample of a row depends on its prompt, `key` and its row id alone: not on
  the other rows, nor on the padding.

  Args:
    policy: from `make_policy`.
    params: its parameters.
    prompts: tokens i32[P, Tp] and mask bool[P, Tp], left-padded; the examples
      are not read.
    key: the caller folds in what must differ (step, round).
    sampling: see Sampling.
    row_ids: i32[N], folded into the key of each row; row numbers by default.
    mesh: splits the rows over its devices, all of which have to get as many.
      Every process then gives all prompts, and holds its rows of the result.
  Returns:
    Rollout of N = P * G rows. `logp` is of the distribution drawn from, after
    temperature and filters.
  Raises:
    ValueError: where prompt and completion exceed the model's positions, or the
      devices of the mesh do not divide the prompts.
  """
  num_prompts, width = prompts.tokens.shape
  if width + sampling.max_new_tokens > policy.config.max_positions:
    raise ValueError(
      f'{width} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed '
      f'the {policy.config.max_positions} positions of the model; lower either.'
    )
  if row_ids is None:
    row_ids = np.arange(num_prompts * sampling.group_size)
  arrays = (prompts.tokens, prompts.mask, np.asarray(row_ids, np.int32))
  if mesh is not None:
    sharding.local_rows(mesh, num_prompts)  # or an error
    arrays = sharding.put_rows(mesh, arrays)
  return generate_arrays(policy, params, *arrays, key, sampling, mesh)


@functools.partial(jax.jit, static_argnames=('policy', 'sampling', 'mesh'))
def generate_arrays(
  policy, params, tokens, mask, row_ids, key, sampling, mesh=None
):
  """The program behind `generate`; one for each shape of tokens i32[P, Tp]."""
  on_mesh = contextlib.nullcontext() if mesh is None else sharding.use(mesh)
  with on_mesh:
    return _generate(policy, params, tokens, mask, row_ids, key, sampling)


def _generate(policy, params, tokens, mask, row_ids, key, sampling):
  tokens, mask = jnp.asarray(tokens, jnp.int32), jnp.asarray(mask, bool)
  width, limit = tokens.shape[1], sampling.max_new_tokens
  weights = policy.rollout_params(params)
  logits, cache = policy.prefill(weights, tokens, mask)
  repeat = functools.partial(jnp.repeat, repeats=sampling.group_size, axis=0)
  uniforms = jax.vmap(
    lambda row: jax.vmap(
      lambda t: jax.random.uniform(jax.random.fold_in(row, t))
    )(jnp.arange(limit)),
    out_axes=1,
  )(jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids))  # [Tc, N]
  eos = jnp.array(sampling.eos_ids, jnp.int32)
  start = repeat(jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1))

  def draw(state, logits):
    """Adds token t of every row to the state."""
    t, ended, out_tokens, out_mask, out_logp = state
    token, logp = sample(logits, uniforms[t], sampling)
    token = jnp.where(ended, sampling.pad_id, token)
    now = jnp.any(token[:, None] == eos, axis=1)
    return (
      t + 1,
      ended | now,
      out_tokens.at[t].set(token),
      out_mask.at[t].set(~ended),
      out_logp.at[t].set(jnp.where(ended, 0.0, logp)),
    )

  num_rows = row_ids.shape[0]
  state = (
    jnp.int32(0),
    jnp.zeros((num_rows,), bool),
    jnp.full((limit, num_rows), sampling.pad_id, jnp.int32),
    jnp.zeros((limit, num_rows), bool),
    jnp.zeros((limit, num_rows), jnp.float32),
  )
  state = draw(state, repeat(logits))
  cache = cache.repeat(sampling.group_size)

  for num_slots in bucket_sizes(width, limit):
    # Token t - 1 goes to slot width + t - 1, and gives the logits of token t.
    last = num_slots - width

    def unfinished(carry, last=last):
      (t, ended, *_), _ = carry
      return (t <= last) & (t < limit) & ~jnp.all(ended)

    def step(carry):
      state, cache = carry
      t, token = state[0], state[2][state[0] - 1]
      logits, cache = policy.decode(
        weights, cache, token, start + t - 1, width + t - 1
      )
      return draw(state, logits), cache

    carry = (state, cache.grow(num_slots))
    state, cache = jax.lax.while_loop(unfinished, step, carry)

  _, ended, out_tokens, out_mask, out_logp = state
  return Rollout(
    prompt=repeat(tokens),
    prompt_mask=repeat(mask),
    tokens=out_tokens.T,
    mask=out_mask.T,
    logp=out_logp.T,
    ended=ended,
  )


def bucket_sizes(prompt_tokens: int, max_new_tokens: int) -> list[int]:
  """Numbers of cache slots, growing by 64 or by half, whichever is more.

  Multiples of 16, the width of a vector. The last token drawn is never read
  again and needs no slot, so that [] is the answer where only one is drawn.
  """
  end = prompt_tokens + max_new_tokens - 1
  sizes, size = [], prompt_tokens
  while size < end:
    size = -(-max(size + BUCKET, size * 3 // 2) // BUCKET) * BUCKET
    sizes.append(min(size, -(-end // 16) * 16))
  return sizes


def sample(
  logits: Array, uniform: Array, sampling: Sampling
) -> tuple[Array, Array]:
  """One token i32[N] of each row and its log-prob f32[N].

  Args:
    logits: f32[N, V].
    uniform: f32[N], in [0, 1).
    sampling: temperature and filters.
  """
  if sampling.temperature == 0:
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logp = jax.nn.log_softmax(logits)
    return token, jnp.take_along_axis(logp, token[:, None], axis=1)[:, 0]
  logits = logits / sampling.temperature
  if sampling.cuts_support:
    logits = jnp.where(_support(logits, sampling), logits, -jnp.inf)
  top = logits.max(axis=-1, keepdims=True)
  weights = jnp.exp(logits - top)
  token, total = _invert(weights, uniform)
  chosen = jnp.take_along_axis(logits - top, token[:, None], axis=1)[:, 0]
  return token, chosen - jnp.log(total)


def _invert(weights, uniform, block=128):
  """Token with cumulative weight just above uniform * total, and the total.

  Two levels: the sums of blocks of the vocabulary, then the one block found.
  A token of weight 0 is never chosen, whatever the rounding.
  """
  num_rows, vocab_size = weights.shape
  weights = jnp.pad(weights, ((0, 0), (0, -vocab_size % block)))
  blocks = weights.reshape(num_rows, -1, block)

  def first_above(weights, target):
    # Rounding makes cumulative sums differ where a weight is 0, and brings the
    # target up to the total: so only entries that have weight can be hit, and
    # the target stays below the largest of them.
    cumulative = jnp.cumsum(weights, axis=-1)
    reachable = jnp.where(weights > 0, cumulative, 0)
    total = reachable.max(axis=-1)
    target = jnp.minimum(target, jnp.nextafter(total, jnp.float32(0)))
    index = jnp.argmax(reachable > target[:, None], axis=-1)[:, None]
    before = jnp.pad(cumulative, ((0, 0), (1, 0)))
    rest = target - jnp.take_along_axis(before, index, axis=-1)[:, 0]
    return index.astype(jnp.int32)[:, 0], rest

  sums = blocks.sum(axis=-1)
  total = sums.sum(axis=-1)
  which, rest = first_above(sums, uniform * total)
  inside = jnp.take_along_axis(blocks, which[:, None, None], axis=1)[:, 0]
  index, _ = first_above(inside, rest)
  return which * block + index, total


def _support(logits, sampling):
  """bool[N, V], True on tokens that pass top-k, then top-p, and min-p."""
  order = jnp.argsort(-logits, axis=-1, stable=True)
  ranked = jnp.take_along_axis(logits, order, axis=-1)
  kept = jnp.ones(ranked.shape, bool)
  if sampling.top_k is not None:
    kept &= jnp.arange(ranked.shape[1]) < sampling.top_k
  if sampling.top_p is not None:
    p = jax.nn.softmax(jnp.where(kept, ranked, -jnp.inf))
    kept &= jnp.cumsum(p, axis=-1) - p < sampling.top_p
  if sampling.min_p is not None:
    kept &= ranked >= ranked[:, :1] + jnp.log(sampling.min_p)
  rows = jnp.arange(logits.shape[0])[:, None]
  return jnp.zeros(kept.shape, bool).at[rows, order].set(kept)
