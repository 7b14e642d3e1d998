"""One sub-policy per reward on a shared trunk, and a fusion that mixes them.

  trunk --> h f32[.., D] --block k--> h_k f32[.., K, D] --LM head--> p_k
            h, h_1 ... h_K --fusion--> w f32[.., K], sums to one
  p = sum_k w_k p_k, token by token: what is sampled is what is scored

A block is a low-rank residual, h_k = h + h down_k up_k, with `up` zero at the
start: every p_k, and so the mixture, is then the policy of the trunk. Being
linear, it can be merged into the LM head: one sub-policy alone is a plain model
(`alone`). A mixture of softmaxes is none, and is not exported. The fusion is attention with one head per reward: a query from h, keys and values
from the h_k. Each attention head weighs the sub-policies, and the attended
values weigh the attention heads.

The mixture teaches the trunk and the fusion; a sub-policy learns from its own
scores (`SubPolicies.own`), of which only the share `isolation` enters the
trunk. Parameters: {**trunk, 'heads': ..., 'fusion': ...}.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gdpo_jax.policy import heads as lm_head
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.products import dense, project
from gdpo_jax.types import Array, Rollout


@dataclasses.dataclass(frozen=True)
class Decoupled:
  """The shape of the sub-policies; hashable.

  Attributes:
    names: of the K rewards, one sub-policy each.
    rank: width of a block.
    fusion_width: of queries and keys.
    isolation: share of a sub-policy's own gradient that enters the trunk;
      0 leaves the trunk alone, 1 is plain.
  """

  names: tuple[str, ...]
  rank: int = 8
  fusion_width: int = 16
  isolation: float = 0.25

  def __post_init__(self):
    if len(self.names) < 2:
      raise ValueError(
        f'sub-policies are for two rewards or more, got {list(self.names)}; '
        'set subpolicy_rank to 0.'
      )
    if self.rank < 1 or self.fusion_width < 1:
      raise ValueError(
        f'rank and fusion_width are at least 1, got {self.rank} and '
        f'{self.fusion_width}.'
      )
    if not 0 <= self.isolation <= 1:
      raise ValueError(f'isolation is in [0, 1], got {self.isolation}.')


class SubPolicies(NamedTuple):
  """What the K sub-policies make of the tokens of N rows; 0 off the mask."""

  logp: Array  # f32[N, Tc, K], log-probs, constants to the gradient
  own: Array  # f32[N, Tc, K], the same with the sub-policies' gradient
  weights: Array  # f32[N, Tc, K], of the fusion, with its gradient
  entropy: Array  # f32[N, Tc], of the weights, nats, with its gradient


def init(width: int, spec: Decoupled, key: Array) -> dict[str, Any]:
  """{'heads', 'fusion'}, f32, for a trunk of `width` D."""
  num, d = len(spec.names), spec.fusion_width
  keys = jax.random.split(key, 5)

  def normal(key, *shape, scale=width**-0.5):
    return scale * jax.random.normal(key, shape)

  return {
    'heads': {
      'down': normal(keys[0], num, width, spec.rank),
      'up': jnp.zeros((num, spec.rank, width)),
    },
    'fusion': {
      'query': normal(keys[1], width, num, d),
      'key': normal(keys[2], width, num, d),
      # tells the sub-policies apart where their states are the same
      'tag': normal(keys[3], num, num, d, scale=0.1),
      'value': normal(keys[4], width, num, scale=0.02),
    },
  }


def sub_states(heads: Any, hidden: Array) -> Array:
  """f32[..., K, D] for hidden f32[..., D]."""
  inner = jnp.einsum('...d,kdr->...kr', hidden, heads['down'])
  return hidden[..., None, :] + jnp.einsum(
    '...kr,krd->...kd', inner, heads['up']
  )


def log_fusion(fusion: Any, hidden: Array, states: Array) -> Array:
  """log w, f32[..., K]; w sums to one.

  Args:
    hidden: f32[..., D].
    states: f32[..., K, D], of the sub-policies.
  """
  query = jnp.einsum('...d,dje->...je', hidden, fusion['query'])
  keys = jnp.einsum('...kd,dje->...jke', states, fusion['key'])
  scores = jnp.einsum('...je,...jke->...jk', query, keys + fusion['tag'])
  attention = jax.nn.log_softmax(scores * query.shape[-1] ** -0.5)
  values = jnp.einsum('...kd,dj->...jk', states, fusion['value'])
  gates = jax.nn.log_softmax(jnp.sum(jnp.exp(attention) * values, axis=-1))
  return jax.nn.logsumexp(gates[..., None] + attention, axis=-2)


def alone(
  config: PolicyConfig, params: Any, names: Sequence[str], name: str
) -> tuple[PolicyConfig, Any]:
  """The sub-policy of one reward as a plain, untied model.

  Args:
    names: of all rewards with a sub-policy, in their order.
  Raises:
    ValueError: there is no sub-policy of that name.
  """
  if name not in names:
    raise ValueError(
      f'there is no sub-policy {name!r}; there are {", ".join(names)}.'
    )
  k = tuple(names).index(name)
  plain = {n: x for n, x in params.items() if n not in ('heads', 'fusion')}
  head = params.get('head', params['embed'])['embedding']
  # head (I + down up)^T
  down, up = (params['heads'][n][k] for n in ('down', 'up'))
  exact = jax.lax.Precision.HIGHEST
  inner = jnp.matmul(head, up.T, precision=exact)
  head = head + jnp.matmul(inner, down.T, precision=exact)
  return dataclasses.replace(config, tied=False), {
    **plain,
    'head': {'embedding': head},
  }


def mixture_logits(params: Any, hidden: Array, head: Array) -> Array:
  """Log-probs f32[..., V] of the mixture, which serve as logits.

  Args:
    params: with 'heads' and 'fusion'.
    hidden: f32[..., D].
    head: [V, D].
  """
  states = sub_states(params['heads'], hidden)
  log_w = log_fusion(params['fusion'], hidden, states)
  each = jax.nn.log_softmax(project(states, head))
  return jax.nn.logsumexp(log_w[..., None] + each, axis=-2)


def token_scores(
  params: Any,
  hidden: Array,
  head: Array,
  targets: Array,
  *,
  temperature: float | Array = 1.0,
  dtype: Any = None,
  turn: Array | None = None,
  isolation: float = 1.0,
) -> tuple[Array, Array, SubPolicies]:
  """Log-prob and entropy of the mixture, f32[N, T] each, and its parts.

  Of mixture ** (1 / temperature), normalized, as the sampler draws. The
  vocabulary is taken in blocks: no [N, T, V] exists.

  Args:
    hidden: f32[N, T, D]; head: [V, D]; targets: i32[N, T].
    turn: bool[], whether `own` is computed; else it is 0 without gradient.
    isolation: see Decoupled.
  """
  # The mixture passes through the blocks, but does not teach them.
  blocks = jax.lax.stop_gradient(params['heads'])
  states = sub_states(blocks, hidden)
  log_w = log_fusion(params['fusion'], hidden, states)

  def each(states, head, temperature):
    num_rows, length, num, width = states.shape
    logp, _ = lm_head.token_log_probs(
      states.reshape(num_rows, length * num, width),
      head,
      jnp.repeat(targets, num, axis=1),
      temperature=temperature,
      dtype=dtype,
    )
    return logp.reshape(num_rows, length, num)

  logp = each(states, head, 1.0)
  normalize = functools.partial(
    _normalizer, states, log_w, logp, head, targets, temperature, dtype
  )
  log_total, entropy = normalize()
  # At temperature 1 the mixture is normalized as it is: no second backward pass.
  log_total = jax.lax.cond(
    jnp.asarray(temperature) == 1.0,
    lambda: jnp.zeros_like(log_total),
    lambda: normalize()[0],
  )
  mixed = jax.nn.logsumexp(log_w + logp, axis=-1) / temperature - log_total

  def own_scores():
    return each(
      sub_states(params['heads'], _scale_gradient(hidden, isolation)),
      _scale_gradient(head, isolation),
      temperature,
    )

  own = jnp.zeros_like(logp)
  if turn is not None:
    own = jax.lax.cond(turn, own_scores, lambda: own)
  weights = jnp.exp(log_w)
  spread = -jnp.sum(weights * log_w, axis=-1)
  constant = jax.lax.stop_gradient(logp)
  return mixed, entropy, SubPolicies(constant, own, weights, spread)


def _scale_gradient(x, share):
  still = jax.lax.stop_gradient(x)
  return still + share * (x - still)


def _normalizer(states, log_w, logp, head, targets, temperature, dtype):
  """(log of the sum, entropy) of mixture ** (1 / temperature), f32[N, T] each.

  A scan over blocks of the vocabulary whose logits are computed again in the
  backward pass.
  """
  num_rows, length, num, width = states.shape
  dtype = jnp.dtype(head.dtype if dtype is None else dtype)
  # logits of the targets, with inputs rounded as in the products
  rounded = [
    x.astype(dtype).astype(jnp.float32) for x in (states, head[targets])
  ]
  picked = jnp.einsum(
    'ntkd,ntd->ntk', *rounded, precision=jax.lax.Precision.HIGHEST
  )
  shift = (log_w - (picked - logp)).reshape(-1, num, 1)
  states = states.reshape(-1, width)
  block = max(lm_head.MIN_BLOCK, lm_head.BLOCK_BYTES // (4 * len(states)))
  block = lm_head.block_size(head.shape[0], block)

  @jax.checkpoint
  def step(carry, xs):
    top, total, weighted = carry
    rows, columns = xs
    z = dense(states, rows.T, dtype).reshape(-1, num, len(columns))
    z = jax.nn.logsumexp(z + shift, axis=1) / temperature
    z = jnp.where(columns < head.shape[0], z, -1e30)
    new_top = jax.lax.stop_gradient(jnp.maximum(top, z.max(axis=1)))
    p, shrink = jnp.exp(z - new_top[:, None]), jnp.exp(top - new_top)
    total = total * shrink + p.sum(axis=1)
    weighted = weighted * shrink + (p * z).sum(axis=1)
    return (new_top, total, weighted), None

  zero = jnp.zeros(num_rows * length, jnp.float32)
  (top, total, weighted), _ = jax.lax.scan(
    step, (zero - 1e30, zero, zero), lm_head.blocks(head, block)
  )
  log_total = top + jnp.log(total)
  entropy = log_total - weighted / total
  shape = (num_rows, length)
  return log_total.reshape(shape), entropy.reshape(shape)


@functools.cache
def adapt(policy, spec: Decoupled):
  """`policy` with sub-policies; the same arguments give the same object.

  Its `log_probs` takes `turn` (bool[]) as well and then gives SubPolicies last.
  Parameters without 'heads' are those of the trunk alone.
  """

  def init_all(key):
    own = init(policy.config.width, spec, jax.random.fold_in(key, 2))
    return {**policy.init(key), **own}

  def rollout_params(params, dtype=None):
    own = {n: params[n] for n in ('heads', 'fusion') if n in params}
    return {**policy.rollout_params(params, dtype), **own}

  def log_probs(
    params: Any,
    rollout: Rollout,
    *,
    group_size: int = 1,
    temperature: float | Array = 1.0,
    with_values: bool = False,
    turn: Array | None = None,
  ):
    if 'heads' not in params:  # the trunk, as a reference
      return policy.log_probs(
        params,
        rollout,
        group_size=group_size,
        temperature=temperature,
        with_values=with_values,
      )
    hidden, head = policy.hidden(params, rollout, group_size=group_size)
    logp, entropy, parts = token_scores(
      params,
      hidden,
      head,
      rollout.tokens,
      temperature=temperature,
      dtype=policy.dtype,
      turn=turn,
      isolation=spec.isolation,
    )
    scores: tuple = (logp, entropy)
    if with_values:
      scores += (hidden @ params['value']['kernel'],)
    if turn is not None:
      scores += (parts,)

    def masked(x):
      mask = rollout.mask if x.ndim == 2 else rollout.mask[..., None]
      return jnp.where(mask, x, 0.0)

    return jax.tree.map(masked, scores)

  return policy._replace(
    init=jax.jit(init_all),
    rollout_params=rollout_params,
    log_probs=jax.jit(log_probs, static_argnames=('group_size', 'with_values')),
    heads=spec.names,
  )
