"""LoRA: a small trainable tree beside a frozen decoder (arXiv:2106.09685).

  y = x W + scale * (x A) B,   A [in, r] random, B [r, out] zero at the start

The parameters of an adapted policy are those of the base with one more entry,
`{**base, 'lora': {'layers': {'attn': {'q': {'a': [L, in, r], 'b': [L, r, out]},
...}}}}`. Training splits them (`split`): gradients, optimizer and checkpoints
see the small part, and the base without it is the reference policy. A rollout
merges, so that a decoding step costs what it costs without LoRA.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import Policy
from gdpo_jax.types import Array

# What is trained where the rest of the tree is frozen under LoRA.
TRAINED = ('lora', 'value', 'heads', 'fusion')


@dataclasses.dataclass(frozen=True)
class Lora:
  """Which projections are adapted, and how strongly; hashable.

  Attributes:
    rank: r, columns of A and rows of B.
    alpha: the product counts alpha / rank times.
    targets: a regular expression that matches whole names of projections:
      attn/q, attn/k, attn/v, attn/o, mlp/gate, mlp/up, mlp/down.
    rank_stabilized: alpha / sqrt(rank) instead, which keeps the size of the
      change when the rank grows (arXiv:2312.03732).
  Raises:
    ValueError: values outside their range, or targets that match nothing.
  """

  rank: int
  alpha: float = 16.0
  targets: str = '.*'
  rank_stabilized: bool = False

  def __post_init__(self):
    if self.rank < 1 or self.alpha <= 0:
      raise ValueError(
        f'LoRA needs a rank of at least 1 and alpha above 0, got rank '
        f'{self.rank} and alpha {self.alpha}.'
      )
    try:
      pattern = re.compile(self.targets)
    except re.error as error:
      raise ValueError(
        f'the LoRA targets {self.targets!r} are no regular expression: {error}.'
      ) from error
    if not any(map(pattern.fullmatch, PROJECTIONS)):
      raise ValueError(
        f'the LoRA targets {self.targets!r} match no projection; there are '
        f'{", ".join(PROJECTIONS)}.'
      )

  @property
  def scale(self) -> float:
    root = math.sqrt(self.rank) if self.rank_stabilized else self.rank
    return self.alpha / root

  @property
  def projections(self) -> tuple[str, ...]:
    """The names that `targets` matches."""
    return tuple(n for n in PROJECTIONS if re.fullmatch(self.targets, n))


PROJECTIONS = (
  *(f'attn/{name}' for name in 'qkvo'),
  *(f'mlp/{name}' for name in ('gate', 'up', 'down')),
)


def sizes(config: PolicyConfig, projection: str) -> tuple[int, int]:
  """(inputs, outputs) of a projection."""
  queries = config.num_heads * config.head_dim
  keys = config.num_kv_heads * config.head_dim
  width, hidden = config.width, config.mlp_width
  return {
    'attn/q': (width, queries),
    'attn/k': (width, keys),
    'attn/v': (width, keys),
    'attn/o': (queries, width),
    'mlp/gate': (width, hidden),
    'mlp/up': (width, hidden),
    'mlp/down': (hidden, width),
  }[projection]


def init(config: PolicyConfig, lora: Lora, key: Array) -> Any:
  """The small tree, f32: A uniform within 1/sqrt(inputs), B zero."""
  tree: dict[str, Any] = {}
  for name in lora.projections:
    inputs, outputs = sizes(config, name)
    shape, bound = (config.num_layers, inputs, lora.rank), inputs**-0.5
    own = jax.random.fold_in(key, PROJECTIONS.index(name))
    part, leaf = name.split('/')
    tree.setdefault(part, {})[leaf] = {
      'a': jax.random.uniform(own, shape, minval=-bound, maxval=bound),
      'b': jnp.zeros((config.num_layers, lora.rank, outputs)),
    }
  return {'layers': tree}


def merge(params: Any, lora: Lora) -> Any:
  """The tree of a plain policy, W + scale * A B; the rest as it is."""
  base = {name: tree for name, tree in params.items() if name != 'lora'}
  if 'lora' not in params:
    return base

  def add(tree, adapter):
    if 'a' in adapter:
      product = jnp.matmul(
        adapter['a'], adapter['b'], precision=jax.lax.Precision.HIGHEST
      )
      return {**tree, 'kernel': tree['kernel'] + lora.scale * product}
    return {
      name: add(child, adapter[name]) if name in adapter else child
      for name, child in tree.items()
    }

  return add(base, params['lora'])


def split(params: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
  """(trained, frozen) parts of the parameters; {**frozen, **trained} is whole.

  Without LoRA everything is trained.
  """
  if 'lora' not in params:
    return dict(params), {}
  trained = {n: tree for n, tree in params.items() if n in TRAINED}
  return trained, {n: tree for n, tree in params.items() if n not in TRAINED}


@functools.cache
def adapt(policy: Policy, lora: Lora) -> Policy:
  """`policy` with adapters; parameters without 'lora' are those of the base.

  Training multiplies by A and B apart, and computes no gradient of a kernel;
  rollouts run on merged kernels. The same arguments give the same object.
  """

  def scaled(params):
    if 'lora' not in params:
      return params

    def scale(path, leaf):
      return leaf * lora.scale if path[-1].key == 'b' else leaf

    adapters = jax.tree_util.tree_map_with_path(scale, params['lora'])
    return {**params, 'lora': adapters}

  def init_all(key):
    own = init(policy.config, lora, jax.random.fold_in(key, 1))
    return {**policy.init(key), 'lora': own}

  def rollout_params(params, dtype=None):
    return policy.rollout_params(merge(params, lora), dtype)

  def logits(params, tokens, mask):
    return policy.logits(scaled(params), tokens, mask)

  def log_probs(params, rollout, **options):
    return policy.log_probs(scaled(params), rollout, **options)

  def hidden(params, rollout, **options):
    return policy.hidden(scaled(params), rollout, **options)

  return policy._replace(
    init=jax.jit(init_all),
    logits=logits,
    log_probs=log_probs,
    hidden=hidden,
    rollout_params=jax.jit(rollout_params, static_argnames='dtype'),
  )
