"""What a step reports, and the files it is written to.

Every name, with unit and definition, stands in `dictionary`.
"""

import contextlib
import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gdpo_jax import sharding
from gdpo_jax.objectives.masked import Mean
from gdpo_jax.train import accounting

JSONL = 'metrics.jsonl'
SAMPLES = 'samples.jsonl'
EVENTS = 'events.jsonl'
HISTOGRAMS = 'histograms.jsonl'


class Timer:
  """Seconds by name, added up over one step."""

  def __init__(self):
    self.seconds: dict[str, float] = {}
    self._start = time.perf_counter()

  @contextlib.contextmanager
  def __call__(self, name: str):
    start = time.perf_counter()
    try:
      yield
    finally:
      spent = time.perf_counter() - start
      self.seconds[name] = self.seconds.get(name, 0.0) + spent

  def total(self) -> float:
    return time.perf_counter() - self._start

  def summary(self) -> dict[str, float]:
    return {
      **{f'time/{name}': s for name, s in self.seconds.items()},
      'time/step': self.total(),
    }


def merge(a: Mapping[str, Mean], b: Mapping[str, Mean]) -> dict[str, Mean]:
  """Adds sums and counts, so that means over several updates stay exact."""
  keys = {**a, **b}
  return {
    k: jax.tree.map(lambda x, y: x + y, a[k], b[k])
    if k in a and k in b
    else a.get(k, b.get(k))
    for k in keys
  }


def to_host(metrics: Mapping[str, Mean]) -> dict[str, float]:
  """One transfer; a mean over nothing is left out."""
  return {
    k: float(m.total) / float(m.count)
    for k, m in jax.device_get(dict(metrics)).items()
    if float(m.count) > 0
  }


def reward_metrics(
  names, values: np.ndarray, weights: np.ndarray
) -> dict[str, float]:
  """Raw values f32[P, G, K] (NaN where missing) -> the `rewards/...` rows."""
  out: dict[str, float] = {}
  for k, name in enumerate(names):
    raw = values[..., k].astype(np.float64)
    seen = raw[~np.isnan(raw)]
    prefix = f'rewards/{name}/'
    out[prefix + 'missing'] = 1.0 - seen.size / raw.size
    out[prefix + 'weight'] = float(weights[k])
    if not seen.size:
      continue
    out[prefix + 'mean'] = float(seen.mean())
    out[prefix + 'std'] = float(seen.std(ddof=1)) if seen.size > 1 else 0.0
    groups = [g[~np.isnan(g)] for g in raw]
    means = np.array([g.mean() for g in groups if g.size])
    if means.size > 1:
      out[prefix + 'stderr'] = float(means.std(ddof=1) / np.sqrt(means.size))
    spread = [
      g.std(ddof=1) if g.max() > g.min() else 0.0 for g in groups if g.size > 1
    ]
    if spread:
      out[prefix + 'group_std'] = float(np.mean(spread))
      out[prefix + 'zero_variance'] = float(np.mean(np.asarray(spread) == 0))
  return out


def controller_metrics(settings, controllers) -> dict[str, float]:
  """The coefficients that this step used."""
  row = {}
  if settings.kl_coef:
    row['kl/coef'] = float(controllers['kl'].coef)
  if settings.entropy_coef:
    row['entropy_coef'] = float(controllers['entropy_coef'])
  if settings.subpolicy_rank:
    row['fusion/entropy_coef'] = float(controllers['fusion_entropy_coef'])
  return row


def experience_metrics(experience) -> dict[str, float]:
  """Everything that the host knows about one batch, before the update."""
  groups, weights = experience.groups, experience.weights
  lengths = groups.mask.sum(-1)
  total = np.where(
    (groups.valid & (weights != 0)).any(-1),
    np.einsum(
      'pgk,k->pg', np.where(groups.valid, groups.rewards, 0.0), weights
    ),
    np.nan,
  )
  row = {
    **reward_metrics(experience.names, groups.values, weights),
    'reward': _nanmean(total),
    'reward_std': _nanmean(_group_std(total)),
    'frac_reward_zero_std': float(np.mean(_group_std(total) == 0)),
    'completions/mean_length': float(lengths.mean()),
    'completions/min_length': float(lengths.min()),
    'completions/max_length': float(lengths.max()),
    'completions/clipped_ratio': float(1 - groups.ended.mean()),
    'groups/informative': float(groups.informative.mean()),
    'groups/rounds': float(experience.rounds),
    'rows/excluded': float((~experience.counted).sum()),
    'advantages/abs_mean': float(np.abs(experience.advantages).mean()),
    'num_tokens': float(lengths.sum()),
    'completions/distinct': distinct_share(groups.texts),
    # an estimate from every row; the trainer leaves out groups without signal
    'entropy/sampled': float(-groups.logp[groups.mask].mean()),
    **outcome_metrics(experience.advantages, lengths, groups.ended),
  }
  if experience.kl_nats is not None:
    row['kl/nats_per_sequence'] = float(experience.kl_nats.mean())
  if experience.batch.old_values is not None:
    row |= value_metrics(
      *sharding.to_host(
        (experience.batch.old_values, experience.batch.returns)
      ),
      groups.mask.reshape(-1, groups.mask.shape[-1]),
    )
  place = experience.batch.place
  if place is not None:
    row['packing/lines_per_row'] = place.shape[1] / lengths.shape[1]
  if groups.ended.any():
    row['completions/mean_terminated_length'] = float(
      lengths[groups.ended].mean()
    )
  for scores in experience.scores:
    for name, reasons in scores.reasons.items():
      for reason, count in reasons.items():
        key = f'rewards/{name}/missing/{reason}'
        row[key] = row.get(key, 0.0) + float(count)
    row.update({f'logged/{k}': float(v) for k, v in scores.metrics.items()})
    for name, spent in scores.seconds.items():
      key = f'time/rewards/{name}'
      row[key] = row.get(key, 0.0) + spent
    for name, rows in scores.fallbacks.items():
      key = f'rewards/{name}/fallback'
      sampled = sum(len(s.values) for s in experience.scores)
      row[key] = row.get(key, 0.0) + rows / sampled
  return row


def value_metrics(values, returns, mask) -> dict[str, float]:
  """How far the value head is off, over the tokens of the mask.

  Args:
    values, returns: f32[N, Tc], or without last columns that are pads in every
      row, as `step.trimmed` leaves them.
    mask: bool[N, Tc].
  """
  mask = mask[:, : values.shape[1]]
  values, returns = values[mask], returns[mask]
  if not values.size or not values.std():
    return {}
  out = {'value/bias': float((returns.mean() - values.mean()) / values.std())}
  if values.mean():
    out['value/ratio'] = float(returns.mean() / values.mean())
  return out


def throughput_metrics(
  row: Mapping[str, float], experience, config, settings
) -> dict[str, float]:
  """Tokens per second of sampling, FLOPs and their share of the peak, memory.

  Args:
    row: of the step, with `time/...`, `num_tokens` and `groups_in_loss`.
    config: of the policy.
  """
  groups, rounds = experience.groups, int(row['groups/rounds'])
  work = accounting.step_work(
    config,
    settings,
    np.maximum(groups.prompt_mask.sum(-1), 1),
    groups.mask.sum(-1),
    rounds,
    row.get('groups_in_loss', 1.0),
  )
  seconds = {
    name: row[f'time/{name}'] for name in ('step', 'generate', 'update')
  }
  sampled = row['num_tokens'] * rounds
  return {
    'throughput/tokens_per_second': sampled / seconds['generate'],
    **accounting.utilisation(config, settings, work, seconds),
    **accounting.peak_memory(),
  }


def distinct_share(texts: np.ndarray) -> float:
  """object[P, G] -> mean over groups of distinct texts / G."""
  return float(np.mean([len(set(group)) / len(group) for group in texts]))


def outcome_metrics(advantages, lengths, ended) -> dict[str, float]:
  """Length and truncation of rows that were pushed up, and down; all [P, G]."""
  out = {}
  for name, rows in (('up', advantages > 0), ('down', advantages < 0)):
    if rows.any():
      out[f'completions/{name}/mean_length'] = float(lengths[rows].mean())
      out[f'completions/{name}/clipped_ratio'] = float(1 - ended[rows].mean())
  return out


def _nanmean(x: np.ndarray) -> float:
  return float(np.nanmean(x)) if np.isfinite(x).any() else 0.0


def _group_std(x: np.ndarray) -> np.ndarray:
  """f[P]: ddof 1 over the values that exist, exactly 0 where they are equal."""
  out = np.zeros(len(x))
  for p, group in enumerate(x):
    seen = group[np.isfinite(group)]
    if seen.size > 1 and seen.max() > seen.min():
      out[p] = seen.std(ddof=1)
  return out


class Writer:
  """Appends rows to `metrics.jsonl` and records to the files beside it.

  A resumed run first cuts the files back to the step of its checkpoint, so
  that no step stands there twice and none is missing.
  """

  def __init__(self, directory: pathlib.Path, resume_step: int = 0):
    directory.mkdir(parents=True, exist_ok=True)
    self._files = {}
    for name in (JSONL, SAMPLES, EVENTS, HISTOGRAMS):
      path = directory / name
      if path.exists():
        _cut_back(path, resume_step)
      self._files[name] = path.open('a', encoding='utf-8')

  def write(self, step: int, row: Mapping[str, Any], prefix: str = '') -> None:
    values = {prefix + k: v for k, v in sorted(row.items())}
    self.append(JSONL, {'step': step, **values})

  def append(self, name: str, record: Mapping[str, Any]) -> None:
    """One record, with its `step`, to one of the files named above."""
    line = json.dumps(_strict(record), ensure_ascii=False, allow_nan=False)
    self._files[name].write(line + '\n')
    self._files[name].flush()

  def close(self) -> None:
    for file in self._files.values():
      file.close()


class NoWriter:
  """For the processes that do not write."""

  def write(self, step: int, row: Mapping[str, Any], prefix: str = '') -> None:
    pass

  def append(self, name: str, record: Mapping[str, Any]) -> None:
    pass

  def close(self) -> None:
    pass


def _strict(value):
  """JSON has no NaN: what is not finite is written as null."""
  if isinstance(value, Mapping):
    return {k: _strict(v) for k, v in value.items()}
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float) and not np.isfinite(value):
    return None
  return value


def _cut_back(path: pathlib.Path, step: int) -> None:
  kept = []
  for line in path.read_text(encoding='utf-8').splitlines():
    try:
      record = json.loads(line)
    except json.JSONDecodeError:
      break  # a half-written last line of a killed run
    if record['step'] <= step:
      kept.append(line)
  partial = path.with_suffix('.partial')
  partial.write_text(''.join(line + '\n' for line in kept), encoding='utf-8')
  os.replace(partial, path)


def read_jsonl(path: str | os.PathLike) -> list[dict[str, Any]]:
  with open(path, encoding='utf-8') as file:
    return [json.loads(line) for line in file if line.strip()]


def split_history(
  history: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """The rows of training steps, and those of held-out evaluations."""
  training = [row for row in history if 'completions/mean_length' in row]
  held_out = [row for row in history if 'eval/completions/mean_length' in row]
  return training, held_out
