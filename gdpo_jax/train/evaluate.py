"""Greedy answers on held-out problems, scored by the same rewards."""

import json
import math
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from gdpo_jax import sampler
from gdpo_jax.tasks.base import evaluation_batches
from gdpo_jax.train import experience as experience_lib
from gdpo_jax.train.scoring import Scoring


class Evaluation(NamedTuple):
  """Raw rewards of every held-out problem, and the texts behind them."""

  names: tuple[str, ...]
  values: np.ndarray  # f32[n, K], NaN where missing
  lengths: np.ndarray  # i32[n], tokens, EOS included
  ended: np.ndarray  # bool[n]
  examples: list[dict[str, Any]]
  texts: list[str]

  def summary(self) -> dict[str, float]:
    """Mean and standard error of every reward, mean length, share cut off."""
    out = {
      'completions/mean_length': float(self.lengths.mean()),
      'completions/clipped_ratio': float(1 - self.ended.mean()),
    }
    for k, name in enumerate(self.names):
      seen = self.values[:, k][~np.isnan(self.values[:, k])].astype(np.float64)
      if seen.size:
        out[f'rewards/{name}/mean'] = float(seen.mean())
      if seen.size > 1:
        out[f'rewards/{name}/stderr'] = float(
          seen.std(ddof=1) / math.sqrt(seen.size)
        )
    return out

  def write(self, path: pathlib.Path) -> None:
    """One JSON line per problem: prompt, completion, tokens, raw rewards."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', encoding='utf-8') as file:
      for i, text in enumerate(self.texts):
        record = {
          'prompt': self.examples[i]['prompt'],
          'completion': text,
          'tokens': int(self.lengths[i]),
          'rewards': {
            name: None if np.isnan(value) else float(value)
            for name, value in zip(self.names, self.values[i])
          },
        }
        file.write(json.dumps(record, ensure_ascii=False) + '\n')


def evaluate(
  policy,
  params: Any,
  tokenizer,
  pipeline,
  examples: list[dict[str, Any]],
  sampling: sampler.Sampling,
  max_prompt_tokens: int,
  batch_size: int,
  mesh,
  step: int = 0,
  stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
  """Answers `examples` in batches of `batch_size`; one compilation.

  The last batch is filled up with copies that count for nothing. `sampling`
  has group size 1 and, as a rule, temperature 0. `stop` is asked before every
  batch; None is returned where it says so.
  """
  key = jax.random.key(0)
  values, lengths, ended, texts = [], [], [], []
  for prompts, real in evaluation_batches(
    examples, tokenizer, batch_size, max_prompt_tokens
  ):
    if stop():
      return None
    count = int(real.sum())
    rollout = experience_lib.sample(
      policy, params, prompts, key, sampling, mesh
    )
    rollout = jax.tree.map(lambda x, n=count: x[:n], rollout)
    prompts = prompts._replace(examples=prompts.examples[:count])
    decoded, scores = Scoring(
      pipeline, tokenizer, prompts, rollout, step
    ).result()
    values.append(scores.values)
    lengths.append(rollout.mask.sum(-1))
    ended.append(rollout.ended)
    texts += decoded
  return Evaluation(
    names=tuple(r.name for r in pipeline.rewards),
    values=np.concatenate(values),
    lengths=np.concatenate(lengths),
    ended=np.concatenate(ended),
    examples=list(examples),
    texts=texts,
  )
