"""Rewards are computed where the rows are; every process learns all of them.

  rollout, whole on every process --share--> the groups of this process
      --decode, submit--> one pipeline per process, beside the next rollout
      --result, gather--> texts [N], Scores(values f32[N, K]) of all rows

A share is whole groups, so that a reward may compare the answers to a prompt.
"""

from typing import Any

import numpy as np

from gdpo_jax import processes
from gdpo_jax.rewards.pipeline import Failure, Pending, Pipeline, Scores
from gdpo_jax.types import Prompts, Rollout


class Scoring:
  """Scores on their way; `result` is called in the order of submission."""

  def __init__(
    self,
    pipeline: Pipeline,
    tokenizer,
    prompts: Prompts,
    rollout: Rollout,
    step: int,
  ):
    """Hands this process's rows to the rewards, and returns at once.

    Args:
      prompts: P, the same on every process.
      rollout: N = P * G rows on the host, likewise.
    """
    self._num_prompts = len(prompts.examples)
    self._group = group = len(rollout.tokens) // self._num_prompts
    share = processes.share(self._num_prompts)
    self._share = slice(share.start * group, share.stop * group)
    if share.start == share.stop:
      # More processes than prompts: rewards that use the mesh are joint calls,
      # so this process scores a copy, and its scores are dropped.
      share = slice(0, 1)
    rows = slice(share.start * group, share.stop * group)
    mine = Rollout(*(np.asarray(x)[rows] for x in rollout))
    self._texts = decode_completions(tokenizer, mine)
    mine_asked = prompts._replace(examples=prompts.examples[share])
    self._pending = submit_rollout(
      pipeline, mine_asked, mine, self._texts, step
    )

  def result(self) -> tuple[list[str], Scores]:
    """Texts and scores of all N rows, the same on every process."""
    scores = self._pending.result()
    if processes.count() == 1:
      return self._texts, scores
    count = self._share.stop - self._share.start
    grouped = scores.values.reshape(-1, self._group, scores.values.shape[1])
    values = processes.gather_shares(
      grouped[: count // self._group], self._num_prompts
    )
    values = values.reshape(-1, values.shape[-1])
    own = _told(scores, self._texts, self._share) if count else None
    told = [part for part in processes.gather_json(own) if part is not None]
    return _merged(scores, values, told)


def _told(scores: Scores, texts, share) -> dict[str, Any]:
  """What the other processes are told beside the values; plain JSON."""
  return {
    'rows': share.stop - share.start,
    'texts': texts,
    'reasons': scores.reasons,
    'fallbacks': scores.fallbacks,
    'metrics': scores.metrics,
    'seconds': scores.seconds,
    'extra': scores.extra,
    'failures': [
      failure._replace(row=failure.row + share.start)
      for failure in scores.failures
    ],
  }


def _merged(scores: Scores, values, told) -> tuple[list[str], Scores]:
  reasons: dict[str, dict[str, int]] = {}
  fallbacks: dict[str, int] = {}
  metrics: dict[str, list[tuple[float, int]]] = {}
  seconds: dict[str, float] = {}
  texts, failures = [], []
  for part in told:
    texts += part['texts']
    failures += [Failure(*failure) for failure in part['failures']]
    for name, kinds in part['reasons'].items():
      mine = reasons.setdefault(name, {})
      for kind, rows in kinds.items():
        mine[kind] = mine.get(kind, 0) + rows
    for name, rows in part['fallbacks'].items():
      fallbacks[name] = fallbacks.get(name, 0) + rows
    for name, value in part['metrics'].items():
      metrics.setdefault(name, []).append((value, part['rows']))
    for name, spent in part['seconds'].items():
      seconds[name] = max(seconds.get(name, 0.0), spent)
  return texts, scores._replace(
    values=values,
    reasons=reasons,
    fallbacks=fallbacks,
    failures=failures,
    # each process gave a mean over its rows
    metrics={
      name: sum(v * n for v, n in pairs) / sum(n for _, n in pairs)
      for name, pairs in metrics.items()
    },
    seconds=seconds,
    # columns that every process filled, row by row
    extra={
      name: [x for part in told for x in part['extra'][name]]
      for name in told[0]['extra']
      if all(len(p['extra'].get(name, ())) == p['rows'] for p in told)
    },
  )


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
