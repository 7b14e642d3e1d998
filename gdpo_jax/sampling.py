"""One token from logits: how it is drawn, and with which probability.

A step costs one uniform number per row: a token is found by inverting the
distribution function, first over blocks of the vocabulary, then inside one.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from gdpo_jax.types import Array


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
    dtype: of the weights of the rollout and of what they are multiplied with,
      'float32', 'bfloat16', or 'int8' with a scale per output; sums and caches
      are float32.
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
  dtype: str = 'float32'

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
    if self.dtype not in ('float32', 'bfloat16', 'int8'):
      raise ValueError(
        f'dtype must be float32, bfloat16 or int8, got {self.dtype!r}.'
      )
    # a list, or one id, as tokenizers give them
    ids = self.eos_ids
    ids = (ids,) if isinstance(ids, int) else tuple(int(i) for i in ids)
    object.__setattr__(self, 'eos_ids', ids)

  @property
  def cuts_support(self) -> bool:
    """True where a filter makes some tokens impossible."""
    return (self.top_k, self.top_p, self.min_p) != (None, None, None)


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
