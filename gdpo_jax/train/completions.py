"""Why a row got its advantage: every step from raw reward to final value.

  raw f32[P, G, K] --conditions--> shaped --group statistics--> normalized
      --weights--> weighted --sum, batch step--> final f32[P, G]

`samples.jsonl` has the first groups of a step in full, `completions/STEP.parquet`
all rows of it (where pyarrow is installed, extra `track`).
"""

import functools
import importlib.util
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from gdpo_jax.objectives import advantages as adv
from gdpo_jax.objectives import combine, masked


class Trace(NamedTuple):
  """One batch, step by step; NaN where a reward is missing."""

  raw: np.ndarray  # f32[P, G, K], as scored
  shaped: np.ndarray  # f32[P, G, K], after conditions
  normalized: np.ndarray  # f32[P, G, K], see sums_first
  weighted: np.ndarray  # f32[P, G, K], times the weights
  combined: np.ndarray  # f32[P, G], the sum of `weighted`
  final: np.ndarray  # f32[P, G], what the policy was trained with
  weights: np.ndarray  # f32[K]
  counted: np.ndarray  # bool[P, G], False: the row was left out of the loss


def sums_first(settings) -> bool:
  """Whether the method adds the rewards before it looks at the group.

  Its `normalized` values are then deviations from the mean of the group, in
  the unit of the reward; else z-scores.
  """
  return settings.has_value_head or settings.advantage in adv.SUM_FIRST


@functools.partial(jax.jit, static_argnames=('centred_only', 'eps', 'ddof'))
def _normalize(rewards, valid, weights, *, centred_only, eps, ddof):
  rewards, valid, _ = combine.prepare(rewards, valid, weights)
  if centred_only:
    return masked.moments(rewards, valid, axis=1).centred
  return combine.group_normalize(rewards, valid, eps=eps, ddof=ddof)


def trace(experience, settings) -> Trace:
  """From what a step knows anyway; one small device call."""
  groups = experience.groups
  weights = np.asarray(experience.weights, np.float32)
  normalized = np.asarray(
    _normalize(
      groups.rewards,
      groups.valid,
      weights,
      centred_only=sums_first(settings),
      eps=settings.advantage_eps,
      ddof=settings.advantage_ddof,
    )
  )
  valid = np.asarray(groups.valid)
  weighted = np.where(valid, normalized * weights, 0.0)
  return Trace(
    raw=np.asarray(groups.values),
    shaped=np.where(valid, groups.rewards, np.nan).astype(np.float32),
    normalized=np.where(valid, normalized, np.nan),
    weighted=np.where(valid, weighted, np.nan),
    combined=weighted.sum(-1),
    final=np.asarray(experience.advantages),
    weights=weights,
    counted=experience.counted,
  )


_PER_REWARD = ('raw', 'shaped', 'normalized', 'weighted')


def records(
  step: int, experience, trace: Trace, max_groups: int
) -> list[dict[str, Any]]:
  """The first groups of a step as records for `samples.jsonl`."""
  groups, names = experience.groups, experience.names
  failures = _failures(experience)
  size = groups.tokens.shape[1]
  out = []
  for p in range(min(max_groups, len(groups.tokens))):
    for g in range(size):
      record = {
        'step': step,
        'row': p * size + g,
        'group': p,
        'prompt': groups.examples[p]['prompt'],
        'completion': groups.texts[p, g],
        'tokens': int(groups.mask[p, g].sum()),
        'ended': bool(groups.ended[p, g]),
        'rewards': _by_name(names, trace.raw[p, g]),
      }
      for name in _PER_REWARD[1:]:
        record[name] = _by_name(names, getattr(trace, name)[p, g])
      record['combined'] = float(trace.combined[p, g])
      record['advantage'] = float(trace.final[p, g])
      record['counted'] = bool(trace.counted[p, g])
      if (p * size + g) in failures:
        record['failures'] = failures[p * size + g]
      out.append(record)
  return out


def _failures(experience) -> dict[int, dict[str, str]]:
  """Row -> reward -> why it has no value.

  Only where the rows of the scores are the rows of the batch: one round, or
  parts of one (dynamic sampling reorders groups).
  """
  if experience.rounds != 1:
    return {}
  out: dict[int, dict[str, str]] = {}
  start = 0
  for scores in experience.scores:
    for failure in scores.failures:
      row = out.setdefault(start + failure.row, {})
      row[failure.reward] = f'{failure.kind}: {failure.reason}'[:300]
    start += len(scores.values)
  return out


def _by_name(names, numbers) -> dict[str, float | None]:
  return {
    name: None if np.isnan(value) else float(value)
    for name, value in zip(names, numbers)
  }


def can_write_table() -> bool:
  return importlib.util.find_spec('pyarrow') is not None


def write_table(
  directory: pathlib.Path,
  step: int,
  experience,
  trace: Trace,
) -> pathlib.Path:
  """All rows of a step as `completions/STEP.parquet`; needs pyarrow.

  Columns: step, group, row, prompt, completion, tokens, ended, counted,
  `raw/NAME`, `shaped/NAME`, `normalized/NAME`, `weighted/NAME`, combined, final.
  """
  import pyarrow
  from pyarrow import parquet

  groups = experience.groups
  num_prompts, size = groups.tokens.shape[:2]
  prompts = [_text(example['prompt']) for example in groups.examples]
  n = num_prompts * size
  columns = {
    'step': np.full(n, step),
    'group': np.repeat(np.arange(num_prompts), size),
    'row': np.arange(n),
    'prompt': [prompt for prompt in prompts for _ in range(size)],
    'completion': list(groups.texts.reshape(-1)),
    'tokens': groups.mask.sum(-1).reshape(-1),
    'ended': groups.ended.reshape(-1),
    'counted': trace.counted.reshape(-1),
  }
  for what in _PER_REWARD:
    for k, name in enumerate(experience.names):
      columns[f'{what}/{name}'] = getattr(trace, what)[..., k].reshape(-1)
  columns['combined'] = trace.combined.reshape(-1)
  columns['final'] = trace.final.reshape(-1)
  path = directory / 'completions' / f'{step}.parquet'
  path.parent.mkdir(parents=True, exist_ok=True)
  partial = path.with_suffix('.partial')
  parquet.write_table(pyarrow.table(columns), partial, compression='zstd')
  partial.replace(path)
  return path


def _text(prompt) -> str:
  """Chat messages as one text."""
  if isinstance(prompt, str):
    return prompt
  return '\n'.join(f'{m["role"]}: {m["content"]}' for m in prompt)


class Contribution(NamedTuple):
  """What the advantage would have been without one reward."""

  cosine: float  # between the advantages with and without it
  rank_changes: float  # share of pairs within groups whose order changes


def contributions(
  advantages_of: Callable[[np.ndarray], Any],
  weights: np.ndarray,
  names: Sequence[str],
) -> dict[str, Contribution]:
  """Leaves out one reward at a time and computes the advantages again.

  Args:
    advantages_of: f32[K] weights -> f32[P, G] advantages of the same batch.
    weights: f32[K].
  Returns:
    by reward. Cosine 1 and no rank changes: the reward is not heard. A pair
    counts as changed where its order turns round, or a tie comes or goes.
  """
  weights = np.asarray(weights, np.float32)
  full = np.asarray(advantages_of(weights), np.float64)
  out = {}
  for k, name in enumerate(names):
    without = weights.copy()
    without[k] = 0.0
    other = np.asarray(advantages_of(without), np.float64)
    norm = np.linalg.norm(full) * np.linalg.norm(other)
    out[name] = Contribution(
      cosine=float((full * other).sum() / norm) if norm else 0.0,
      rank_changes=_rank_changes(full, other),
    )
  return out


def _rank_changes(a: np.ndarray, b: np.ndarray) -> float:
  """Share of the pairs within groups, f64[P, G] both."""

  def order(x):
    apart = x[:, :, None] - x[:, None, :]
    return np.sign(np.where(np.abs(apart) > 1e-5 * np.abs(x).max(), apart, 0))

  pairs = np.triu(np.ones(a.shape[1:] * 2, bool), 1)
  return float((order(a) != order(b))[:, pairs].mean())
