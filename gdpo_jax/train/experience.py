"""Turns prompts into a learner batch.

  gather  Prompts [P] --generate--> Rollout [P*G] --score--> Scores [P*G, K]
                      --shape--> rewards [P, G, K]
  finish  rewards [P, G, K] --advantages--> [P, G] --> Batch

Groups are dropped whole or kept whole, so [P, G] survives every step. Beyond
the K declared rewards two may be added: `overlong`, and `kl`, the distance to
the reference, known once the batch is complete.
"""

import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import sampler, sharding
from gdpo_jax.objectives import advantages as adv
from gdpo_jax.objectives import gae, kl, shaping
from gdpo_jax.policy import packing
from gdpo_jax.rewards.pipeline import Pipeline, Scores
from gdpo_jax.tasks.base import PromptIterator
from gdpo_jax.train import accounting, subpolicies
from gdpo_jax.train.advantage import combine, shape_rewards
from gdpo_jax.train.controllers import Controllers
from gdpo_jax.train.metrics import Timer
from gdpo_jax.train.scoring import Scoring
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import trimmed
from gdpo_jax.types import Batch, Prompts, Rollout


class Groups(NamedTuple):
  """Scored groups on the host; every leaf starts with the axis of groups."""

  prompt: np.ndarray  # i32[P, Tp]
  prompt_mask: np.ndarray  # bool[P, Tp]
  examples: np.ndarray  # object[P], the task's records
  tokens: np.ndarray  # i32[P, G, Tc]
  mask: np.ndarray  # bool[P, G, Tc]
  logp: np.ndarray  # f32[P, G, Tc]
  ended: np.ndarray  # bool[P, G]
  texts: np.ndarray  # object[P, G]
  values: np.ndarray  # f32[P, G, K], raw rewards, NaN where missing
  held: np.ndarray  # bool[P, G, K], the reward's condition held
  conditioned: np.ndarray  # f32[P, G, K], after conditions
  rewards: np.ndarray  # f32[P, G, K], after normalizers as well
  valid: np.ndarray  # bool[P, G, K]
  informative: np.ndarray  # bool[P]: the aggregator tells its rows apart


class Gathered(NamedTuple):
  """P groups that were sampled and scored; nothing compares them yet."""

  groups: Groups
  counted: np.ndarray  # bool[P], False: the group counts for nothing
  scores: tuple[Scores, ...]  # of every part that was sampled, in order
  rollouts: tuple[Rollout, ...]  # of every round, N rows as they were sampled
  cursor: dict[str, Any]  # where the prompts of the next batch begin


class Experience(NamedTuple):
  """One learner batch with everything that is known about it."""

  batch: Batch
  groups: Groups
  names: tuple[str, ...]  # of the K rewards
  weights: np.ndarray  # f32[K], of this step
  advantages: np.ndarray  # f32[P, G]; where resolved in time, means over tokens
  counted: np.ndarray  # bool[P, G], False: the row counts for nothing
  kl_nats: np.ndarray | None  # f32[P, G], of completions to the reference
  scores: tuple[Scores, ...]  # of every part that was sampled, in order
  rounds: int  # of sampling


def sample(
  policy,
  params,
  prompts: Prompts,
  key,
  sampling,
  mesh,
  row_ids=None,
  timer=contextlib.nullcontext,
) -> Rollout:
  """`generate` over the mesh: rows on the host, whole on every process.

  Where the devices do not divide the prompts, copies of the last one fill up
  the batch and are dropped again.
  """
  num_prompts, group = len(prompts.tokens), sampling.group_size
  missing = -num_prompts % sharding.num_row_shards(mesh)
  tokens, mask = (
    np.concatenate([x, np.repeat(x[-1:], missing, axis=0)])
    for x in (prompts.tokens, prompts.mask)
  )
  if row_ids is not None:
    beyond = row_ids[-1] + 1 + np.arange(missing * group)
    row_ids = np.concatenate([row_ids, beyond])
  rollout = sampler.generate(
    policy,
    params,
    Prompts(tokens, mask, []),
    key,
    sampling,
    row_ids,
    mesh,
    timer,
  )
  with timer('transfer'):
    rollout = sharding.to_host(rollout)
  return jax.tree.map(lambda x: x[: num_prompts * group], rollout)


class Collector:
  """`gather`, then `finish`; holds what does not change between steps."""

  def __init__(
    self,
    policy,
    tokenizer,
    iterator: PromptIterator,
    pipeline: Pipeline,
    sampling: sampler.Sampling,
    controllers: Controllers,
    settings: Settings,
    mesh,
  ):
    self.policy, self.tokenizer, self.iterator = policy, tokenizer, iterator
    self.pipeline, self.sampling = pipeline, sampling
    self.controllers = controllers
    self.settings, self.mesh = settings, mesh
    declared = pipeline.rewards
    self._declared = len(declared)
    overlong = bool(settings.overlong_margin)
    kl_reward = bool(settings.kl_coef) and not settings.kl_in_loss
    kl_reward &= not settings.has_value_head  # there each token pays its own
    extra = ('overlong',) * overlong + ('kl',) * kl_reward
    taken = {reward.name for reward in declared} & set(extra)
    if taken:
      raise ValueError(
        f'a reward is named {sorted(taken)}, as one that the settings '
        '(overlong_share, kl_place) add; rename it.'
      )
    self.names = (*(reward.name for reward in declared), *extra)
    hierarchy = shaping.make_hierarchy(
      self.names[: self._declared + overlong],
      [reward.condition for reward in declared] + [None] * overlong,
    )
    undeclared = (np.nan, np.nan)
    bounds = np.float32(
      [reward.range or undeclared for reward in declared]
      + [(-1.0, 0.0)] * overlong
      + [undeclared] * kl_reward
    )
    shaped = len(bounds) - kl_reward

    def shape(values, weights, mask, running):
      def normalize(values, valid):
        k = self._declared
        own = controllers.normalizer.apply(
          running, values[..., :k], valid[..., :k]
        )
        return jnp.concatenate([own, values[..., k:]], axis=-1)

      return shape_rewards(
        settings, hierarchy, values, weights, mask, bounds[:shaped], normalize
      )

    self._shape = jax.jit(shape)
    self._combine = jax.jit(
      lambda rewards, valid, weights, mask: combine(
        settings, rewards, valid, weights, mask, bounds
      )
    )
    self._score = jax.jit(self._token_scores, static_argnames='with_values')
    self._resolve = jax.jit(self._resolve_in_time)

  def gather(
    self,
    params: Any,
    controllers: dict[str, Any],
    key: jax.Array,
    step: int,
    timer: Timer,
    replay: tuple[Rollout, ...] = (),
  ) -> Gathered:
    """Samples and scores P groups.

    `controllers` are those of the state; they are read, never advanced here.

    With `max_rounds` > 1 (dynamic sampling, DAPO) rounds go on until P groups
    carry signal for the chosen aggregator. If they run dry, the batch is filled
    up with groups that count for nothing (`when_dry='train'`), or the whole
    batch counts for nothing (`when_dry='skip'`).

    Args:
      params: to sample with; not read where there is a `replay`.
      replay: rollouts that a checkpoint kept, to be scored as they were.
    """
    s, size = self.settings, self.settings.prompts_per_step
    groups, scores, rollouts = None, [], []
    for round_ in range(len(replay) or s.max_rounds):
      round_key = jax.random.fold_in(key, round_)
      fresh, new_scores, rollout = self._round(
        params,
        controllers,
        round_key,
        step,
        timer,
        replay[round_] if replay else None,
      )
      scores += new_scores
      rollouts.append(rollout)
      groups = jax.tree.map(_join, groups, fresh) if groups else fresh
      informative = groups.informative
      if informative.sum() >= size:
        break
    counts = np.ones(size, bool)
    if s.max_rounds > 1:
      # Groups with signal first, in the order in which they were sampled.
      chosen = np.argsort(~informative, kind='stable')[:size]
      groups = jax.tree.map(lambda x: x[chosen], groups)
      counts = informative[chosen]
      if s.when_dry == 'skip' and not counts.all():
        counts[:] = False
    return Gathered(
      groups, counts, tuple(scores), tuple(rollouts), self.iterator.cursor
    )

  def _weights(self, controllers, scores: Scores) -> np.ndarray:
    """f32[K] of this step, without that of `kl`."""
    overlong = np.ones(int('overlong' in self.names), np.float32)
    declared = self.controllers.weights(controllers, scores.weights)
    return np.concatenate([declared, overlong])

  def _round(
    self, params, controllers, key, step, timer, replay
  ) -> tuple[Groups, list[Scores], Rollout]:
    """P fresh groups, sampled a part at a time, or taken from `replay`.

    While the rest is sampled, the rewards look at the parts that are complete.
    """
    s, prompts = self.settings, self.iterator.next()
    order = np.arange(s.prompts_per_step)
    if s.prompts_per_rollout < s.prompts_per_step:
      # The longest first: the last of them would keep all slots waiting.
      expected = self.iterator.expected_tokens(prompts.examples)
      order = np.argsort(-expected, kind='stable')
    entering = _chosen(prompts, order)
    rows = self._grouped(np.arange(s.prompts_per_step * s.group_size))[order]
    parts, pending = [], []
    sampled = self._sampled(params, entering, rows, key, timer, replay)
    for start in range(0, s.prompts_per_step, s.prompts_per_rollout):
      with timer('generate'), accounting.out_of_memory_named('generate', s):
        parts.append(next(sampled))
      part = np.arange(start, start + s.prompts_per_rollout)
      part = _chosen(entering, part)
      pending.append(
        Scoring(self.pipeline, self.tokenizer, part, parts[-1], step)
      )
    with timer('rewards'):
      texts, scores = zip(*(p.result() for p in pending))
    scores = _in_batch_order(scores, rows.reshape(-1))
    back = np.argsort(order)

    def in_order(x):
      x = self._grouped(x)[back]
      return x.reshape(-1, *x.shape[2:])

    rollout = jax.tree.map(lambda *xs: in_order(np.concatenate(xs)), *parts)
    texts = in_order(_objects([text for part in texts for text in part]))
    values = np.concatenate([s.values for s in scores])
    values = self._grouped(in_order(values))
    if s.prompts_per_rollout < s.prompts_per_step:
      lengths = self._grouped(rollout.mask.sum(-1)).mean(-1)
      self.iterator.observe_tokens(prompts.examples, lengths)
    declared = [reward.name for reward in self.pipeline.rewards]
    self.iterator.observe(
      prompts.examples, dict(zip(declared, np.moveaxis(values, -1, 0)))
    )
    mask = self._grouped(rollout.mask)
    if 'overlong' in self.names:
      penalty = shaping.overlong_penalty(
        mask.sum(-1),
        limit_tokens=s.max_new_tokens,
        margin_tokens=s.overlong_margin,
      )
      # What nobody judged is not judged by its length alone.
      weights = self._weights(controllers, scores[-1])[:-1]
      judged = adv.scored(np.isfinite(values), weights)
      values = _append(values, np.where(judged, penalty, np.nan))
    shaped = jax.device_get(
      self._shape(
        values,
        self._weights(controllers, scores[-1]),
        mask,
        controllers['normalizer'],
      )
    )
    groups = Groups(
      prompt=prompts.tokens,
      prompt_mask=prompts.mask,
      examples=_objects(prompts.examples),
      tokens=self._grouped(rollout.tokens),
      mask=mask,
      logp=self._grouped(rollout.logp),
      ended=self._grouped(rollout.ended),
      texts=self._grouped(texts),
      values=values,
      **shaped._asdict(),
    )
    return groups, scores, rollout

  def _sampled(self, params, prompts, rows, key, timer, replay):
    """Yields the Rollout of `prompts_per_rollout` prompts, until all are done.

    On one device the next prompts enter as rows end; on a mesh, where sampling
    is one program, they wait for the part before them.

    Args:
      rows: i[P, G], numbers in the batch: parts and order change no sample.
    """
    s = self.settings
    size = s.prompts_per_rollout

    def parts_timer(name):
      return timer(f'generate/{name}')

    if replay is not None:
      for start in range(0, len(rows), size):
        which = rows[start : start + size].reshape(-1)
        yield jax.tree.map(lambda x, which=which: x[which], replay)
    elif self.mesh.size == 1:
      yield from sampler.stream(
        self.policy,
        params,
        prompts,
        key,
        self.sampling,
        rows.reshape(-1),
        size,
        parts_timer,
      )
    else:
      for start in range(0, len(rows), size):
        which = np.arange(start, start + size)
        yield sample(
          self.policy,
          params,
          _chosen(prompts, which),
          key,
          self.sampling,
          self.mesh,
          rows[which].reshape(-1),
          parts_timer,
        )

  def _token_scores(self, params, rollout: Rollout, place, with_values=False):
    """Trainer's log-probs, entropies and, where asked for, values.

    f32[N, Tc] each, a micro-batch at a time; packed where there is a place.
    """
    s = self.settings
    rows = s.prompts_per_micro_batch * s.group_size
    parts = jax.tree.map(
      lambda x: x.reshape(-1, rows, *x.shape[1:]), (rollout, place)
    )

    def score(part):
      part, place = jax.tree.map(lambda x: sharding.constrain(x, 'rows'), part)
      packed = {}
      if place is not None:
        packed = {'place': place, 'line_tokens': s.pack_tokens}
      return self.policy.log_probs(
        params,
        part,
        group_size=s.group_size,
        temperature=s.temperature,
        with_values=with_values,
        **packed,
      )

    with sharding.use(self.mesh):
      scores = jax.lax.map(score, parts)
    return tuple(x.reshape(rollout.tokens.shape) for x in scores)

  def _resolve_in_time(
    self, params, rollout, place, totals, row_valid, ref_logp, coef
  ):
    """Advantages, returns and values, f32[N, Tc] each, by GAE.

    Args:
      totals: f32[N], the weighted sum of each row's rewards.
      coef: f32[], of the KL that each token pays.
    """
    s, mask = self.settings, rollout.mask & row_valid[:, None]
    _, entropy, values = self._token_scores(params, rollout, place, True)
    in_reward = ref_logp is not None and not s.kl_in_loss
    rewards = kl.token_rewards(
      totals,
      mask,
      rollout.logp if in_reward else None,
      ref_logp if in_reward else None,
      coef,
    )
    gamma, lam = s.gae_gamma, s.gae_lambda
    if s.gae_dynamic:
      gamma = gae.segmented_gamma(gamma, mask)
      lam = gae.dynamic_lambda(lam, entropy)
    advantages, returns = gae.gae(rewards, values, mask, gamma, lam)
    if s.whiten != 'none':
      advantages = gae.whiten_tokens(advantages, mask)
    return advantages, returns, values

  def _old_logp(self, params, rollout: Rollout, place) -> jax.Array:
    """The sampler's, unless the trainer's own are asked for and needed."""
    s = self.settings
    if s.importance_cap is None or s.updates_per_step == 1:
      return rollout.logp
    return self._score(params, rollout, place)[0]

  def _grouped(self, x):
    x = np.asarray(x)
    return x.reshape(-1, self.settings.group_size, *x.shape[1:])

  def finish(
    self,
    gathered: Gathered,
    params: Any,
    ref_params: Any,
    controllers: dict[str, Any],
    timer: Timer,
  ) -> Experience:
    """The batch that a step trains on.

    Args:
      params: of the policy that learns; the sampler's may be older.
    """
    with timer('advantages'):
      return self._finish(gathered, params, ref_params, controllers, timer)

  def _finish(self, gathered, params, ref_params, controllers, timer):
    s, groups, scores = self.settings, gathered.groups, gathered.scores

    def rows(x):
      return x.reshape(-1, *x.shape[2:])

    rollout = Rollout(
      prompt=np.repeat(groups.prompt, s.group_size, axis=0),
      prompt_mask=np.repeat(groups.prompt_mask, s.group_size, axis=0),
      tokens=rows(groups.tokens),
      mask=rows(groups.mask),
      logp=rows(groups.logp),
      ended=rows(groups.ended),
    )
    rollout, place = trimmed(rollout), None
    if s.pack_tokens:
      width = rollout.tokens.shape[1]
      place = packing.pack(groups.mask.sum(-1), width, s.pack_tokens)
    rollout, place = sharding.put_rows(self.mesh, (rollout, place))
    weights, coef = self._weights(controllers, scores[-1]), None
    ref_logp, nats = None, None
    if s.kl_coef:
      with timer('advantages/log_probs'):
        ref_logp, _ = jax.block_until_ready(
          self._score(ref_params, rollout, place)
        )
      nats = kl.sequence_kl(rollout.logp, ref_logp, rollout.mask)
      nats = self._grouped(sharding.to_host(nats))
      coef = controllers['kl'].coef
    if 'kl' in self.names:
      rewards, valid, weights = jax.device_get(
        kl.kl_as_reward(groups.rewards, groups.valid, weights, nats, coef)
      )
      groups = groups._replace(
        values=_append(groups.values, -nats),
        held=_append(groups.held, valid[..., -1]),
        conditioned=_append(groups.conditioned, rewards[..., -1]),
        rewards=rewards,
        valid=valid,
      )
    # A row that no reward could judge, and a filler, must not train.
    row_valid = (
      np.asarray(adv.scored(groups.valid, weights)) & gathered.counted[:, None]
    )
    if s.mask_truncated:
      row_valid &= groups.ended
    returns = values = None
    if s.has_value_head:
      totals = np.where(groups.valid, groups.rewards, 0) @ weights
      per_token, returns, values = self._resolve(
        params,
        rollout,
        place,
        *sharding.put_rows(
          self.mesh, (rows(totals.astype(np.float32)), rows(row_valid))
        ),
        ref_logp,
        coef,
      )
      count = np.maximum(groups.mask.sum(-1), 1)
      advantages = self._grouped(sharding.to_host(per_token)).sum(-1) / count
    else:
      advantages = np.asarray(
        self._combine(groups.rewards, groups.valid, weights, groups.mask)
      )
      per_token = sharding.put_rows(
        self.mesh,
        rows(np.where(row_valid, advantages, 0.0)).astype(np.float32),
      )
    own = None
    if self.policy.heads:
      k = self._declared
      own = subpolicies.advantages(
        s, groups.rewards[..., :k], groups.valid[..., :k], weights[:k]
      )
      own = np.where(row_valid[..., None], own, 0.0).astype(np.float32)
      own = sharding.put_rows(self.mesh, rows(own))
    batch = Batch(
      rollout=rollout,
      advantages=per_token,
      old_logp=self._old_logp(params, rollout, place),
      ref_logp=ref_logp,
      row_valid=sharding.put_rows(self.mesh, rows(row_valid)),
      old_values=values,
      returns=returns,
      head_advantages=own,
      place=place,
    )
    return Experience(
      batch=batch,
      groups=groups,
      names=self.names,
      weights=weights,
      advantages=advantages,
      counted=row_valid,
      kl_nats=nats,
      scores=scores,
      rounds=len(gathered.rollouts),
    )


def minibatches(batch: Batch, settings: Settings, key: jax.Array, mesh):
  """Yields `updates_per_step` mini-batches of whole groups.

  One pass and one update keep the order; otherwise each pass has its own
  permutation of the groups, drawn from `key`.
  """
  size, group = settings.prompts_per_update, settings.group_size
  if settings.updates_per_step == 1:
    yield batch
    return
  for epoch in range(settings.epochs_per_batch):
    order = np.asarray(
      jax.random.permutation(
        jax.random.fold_in(key, epoch), settings.prompts_per_step
      )
    )
    for start in range(0, settings.prompts_per_step, size):
      groups = order[start : start + size]
      rows = (groups[:, None] * group + np.arange(group)).reshape(-1)
      part = jax.tree.map(lambda x, rows=rows: x[rows], batch)
      yield jax.device_put(part, sharding.rows(mesh))


def _in_batch_order(parts, rows: np.ndarray) -> list[Scores]:
  """The same parts, whose failures name the rows of the batch.

  Counted from the first row of their part, as everywhere.

  Args:
    rows: i[N], number in the batch of each row, part after part.
  """
  out, start = [], 0
  for scores in parts:
    failures = [
      failure._replace(row=int(rows[start + failure.row]) - start)
      for failure in scores.failures
    ]
    out.append(scores._replace(failures=failures))
    start += len(scores.values)
  return out


def _chosen(prompts: Prompts, which: np.ndarray) -> Prompts:
  examples = [prompts.examples[i] for i in which]
  return Prompts(prompts.tokens[which], prompts.mask[which], examples)


def _join(a, b):
  return np.concatenate([a, b])


def _append(x: np.ndarray, column) -> np.ndarray:
  return np.concatenate([x, np.asarray(column)[..., None]], axis=-1)


def _objects(items) -> np.ndarray:
  """object[n], also where the items are sequences of equal length."""
  out = np.empty(len(items), object)
  for i, item in enumerate(items):
    out[i] = item
  return out
