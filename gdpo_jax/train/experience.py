"""Turns prompts into a learner batch.

  Prompts [P] --generate--> Rollout [P*G] --score--> Scores [P*G, K]
          --shape--> rewards [P, G, K] --advantages--> [P, G] --> Batch

Groups are dropped whole or kept whole, so [P, G] survives every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import sampler, sharding
from gdpo_jax.objectives import advantages as adv
from gdpo_jax.objectives import shaping
from gdpo_jax.rewards.pipeline import Pending, Pipeline, Scores
from gdpo_jax.tasks.base import PromptIterator
from gdpo_jax.train.metrics import Timer
from gdpo_jax.train.settings import Settings, asked_for
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
  rewards: np.ndarray  # f32[P, G, K], after conditions
  valid: np.ndarray  # bool[P, G, K]
  informative: np.ndarray  # bool[P]: the aggregator tells its rows apart


class Experience(NamedTuple):
  """One learner batch with everything that is known about it."""

  batch: Batch
  groups: Groups
  weights: np.ndarray  # f32[K]
  advantages: np.ndarray  # f32[P, G]
  scores: tuple[Scores, ...]  # of every part that was sampled, in order
  rounds: int  # of sampling


def decode_completions(tokenizer, rollout: Rollout) -> list[str]:
  """N texts, special tokens and everything after the first EOS left out."""
  tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
  return [tokenizer.decode(t[m].tolist()) for t, m in zip(tokens, mask)]


def submit_rollout(
  pipeline: Pipeline, prompts: Prompts, rollout: Rollout, texts, step: int
) -> Pending:
  """Asks every reward about every row, in TRL's calling convention.

  Returns at once; `result()` waits for the scores.
  """
  group = len(texts) // len(prompts.examples)
  rows = [example for example in prompts.examples for _ in range(group)]
  columns = {
    name: [row.get(name) for row in rows]
    for name in rows[0]
    if name != 'prompt'
  }
  chat = not isinstance(rows[0]['prompt'], str)
  completions = (
    [[{'role': 'assistant', 'content': text}] for text in texts]
    if chat
    else texts
  )
  tokens, mask = np.asarray(rollout.tokens), np.asarray(rollout.mask)
  return pipeline.submit(
    [row['prompt'] for row in rows],
    completions,
    columns,
    completion_ids=[t[m].tolist() for t, m in zip(tokens, mask)],
    step=step,
  )


def combine(settings: Settings, rewards, valid, weights, mask, bounds):
  """f32[P, G] by the chosen aggregator; one trace for a whole run."""
  aggregate = adv.ADVANTAGES.get(settings.advantage, settings.advantage)
  return aggregate(
    rewards,
    valid,
    weights,
    **asked_for(
      aggregate,
      eps=settings.advantage_eps,
      ddof=settings.advantage_ddof,
      whiten=settings.whiten,
      mask=mask,
      bounds=bounds,
    ),
  )


def shape_rewards(settings: Settings, hierarchy, values, weights, mask, bounds):
  """Conditions, and which groups tell rows apart for the chosen aggregator.

  Returns:
    rewards f32[P, G, K], valid bool[P, G, K], informative bool[P].
  """
  rewards, valid, _ = shaping.apply_conditions(
    hierarchy, values, jnp.isfinite(values), mode=settings.condition_mode
  )
  aggregate = adv.ADVANTAGES.get(settings.advantage, settings.advantage)
  informative = adv.informative(
    rewards,
    valid,
    weights,
    aggregator=aggregate,
    **asked_for(aggregate, mask=mask, bounds=bounds),
  )
  return rewards, valid, informative


class Collector:
  """Steps 1 to 8 of a batch; holds what does not change between steps."""

  def __init__(
    self,
    policy,
    tokenizer,
    iterator: PromptIterator,
    pipeline: Pipeline,
    sampling: sampler.Sampling,
    settings: Settings,
    mesh,
  ):
    self.policy, self.tokenizer, self.iterator = policy, tokenizer, iterator
    self.pipeline, self.sampling = pipeline, sampling
    self.settings, self.mesh = settings, mesh
    self._rows = sharding.rows(mesh)
    hierarchy = shaping.make_hierarchy(
      [r.name for r in pipeline.rewards],
      [r.condition for r in pipeline.rewards],
    )
    undeclared = (np.nan, np.nan)
    bounds = np.float32([r.range or undeclared for r in pipeline.rewards])
    self._shape = jax.jit(
      lambda values, weights, mask: shape_rewards(
        settings, hierarchy, values, weights, mask, bounds
      )
    )
    self._combine = jax.jit(
      lambda rewards, valid, weights, mask: combine(
        settings, rewards, valid, weights, mask, bounds
      )
    )
    self._ref_logp = jax.jit(self._log_probs)

  def __call__(
    self, params: Any, ref_params: Any, key: jax.Array, step: int, timer: Timer
  ) -> Experience:
    """One batch of P groups.

    With `max_rounds` > 1 (dynamic sampling, DAPO) rounds go on until P groups
    carry signal for the chosen aggregator. If they run dry, the batch is filled
    up with groups that count for nothing (`when_dry='train'`), or the whole
    batch counts for nothing (`when_dry='skip'`).
    """
    s, size = self.settings, self.settings.prompts_per_step
    groups, scores = None, []
    for round_ in range(s.max_rounds):
      fresh, new_scores = self._round(
        params, jax.random.fold_in(key, round_), step, timer
      )
      scores += new_scores
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
      informative = informative[chosen]
    with timer('advantages'):
      return self._finish(ref_params, groups, counts, tuple(scores), round_ + 1)

  def _round(self, params, key, step, timer) -> tuple[Groups, list[Scores]]:
    """P fresh groups, sampled a part at a time.

    While one part is sampled, the rewards look at those before it.
    """
    s, prompts = self.settings, self.iterator.next()
    parts, pending = [], []
    for start in range(0, s.prompts_per_step, s.prompts_per_rollout):
      part = Prompts(
        *(x[start : start + s.prompts_per_rollout] for x in prompts)
      )
      # Row numbers of the whole batch: the parts do not change the samples.
      rows = np.arange(len(part.examples) * s.group_size) + start * s.group_size
      with timer('generate'):
        rollout = jax.device_get(
          sampler.generate(
            self.policy, params, part, key, self.sampling, row_ids=rows
          )
        )
      texts = decode_completions(self.tokenizer, rollout)
      pending.append(submit_rollout(self.pipeline, part, rollout, texts, step))
      parts.append((rollout, _objects(texts)))
    with timer('rewards'):
      scores = [p.result() for p in pending]
    rollout, texts = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
    values = self._grouped(np.concatenate([s.values for s in scores]))
    mask = self._grouped(rollout.mask)
    rewards, valid, informative = jax.device_get(
      self._shape(values, scores[-1].weights, mask)
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
      rewards=rewards,
      valid=valid,
      informative=informative,
    )
    return groups, scores

  def _log_probs(self, params, rollout: Rollout) -> jax.Array:
    """f32[N, Tc] under the trainer's distribution, a micro-batch at a time."""
    s = self.settings
    rows = s.prompts_per_micro_batch * s.group_size
    parts = jax.tree.map(lambda x: x.reshape(-1, rows, *x.shape[1:]), rollout)
    logp = jax.lax.map(
      lambda part: self.policy.log_probs(
        params, part, group_size=s.group_size, temperature=s.temperature
      )[0],
      parts,
    )
    return logp.reshape(rollout.tokens.shape)

  def _grouped(self, x):
    x = np.asarray(x)
    return x.reshape(-1, self.settings.group_size, *x.shape[1:])

  def _finish(self, ref_params, groups, counts, scores, rounds):
    s = self.settings
    weights = scores[-1].weights
    advantages = np.asarray(
      self._combine(groups.rewards, groups.valid, weights, groups.mask)
    )
    # A row that no reward could judge, and a filler, must not train.
    row_valid = np.asarray(adv.scored(groups.valid, weights)) & counts[:, None]
    if s.mask_truncated:
      row_valid &= groups.ended

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
    rollout = jax.device_put(rollout, self._rows)
    batch = Batch(
      rollout=rollout,
      advantages=jax.device_put(
        rows(np.where(row_valid, advantages, 0.0)).astype(np.float32),
        self._rows,
      ),
      old_logp=rollout.logp,
      ref_logp=self._ref_logp(ref_params, rollout) if s.kl_coef else None,
      row_valid=jax.device_put(rows(row_valid), self._rows),
    )
    return Experience(
      batch=batch,
      groups=groups,
      weights=weights,
      advantages=advantages,
      scores=scores,
      rounds=rounds,
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


def _join(a, b):
  return np.concatenate([a, b])


def _objects(items) -> np.ndarray:
  """object[n], also where the items are sequences of equal length."""
  out = np.empty(len(items), object)
  for i, item in enumerate(items):
    out[i] = item
  return out
