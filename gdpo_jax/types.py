"""The records that cross floors, and the letters that every docstring uses.

  P   prompts per step             Tp  prompt tokens (left-padded)
  G   samples per prompt (group)   Tc  completion tokens (right-padded)
  N   rows, P * G; row p * G + g   V   vocabulary
  K   rewards                      D   width,  L layers

`reward` is one named raw value; `advantage` multiplies the log-probability;
`logp` / `old_logp` / `ref_logp` belong to the current, the behaviour (sampler)
and the reference policy; `mask` says which completion tokens count (EOS is
inside); `valid` says which rewards exist; a reward has a `weight`, a loss term
a `coef`.
"""

from typing import Any, NamedTuple

import jax
import numpy as np

Array = jax.Array


class Prompts(NamedTuple):
  """P prompts on the host, and what the rewards need to know about them."""

  tokens: np.ndarray  # i32[P, Tp], left-padded
  mask: np.ndarray  # bool[P, Tp], True on real tokens
  examples: list[dict[str, Any]]  # P records: 'prompt' and the task's columns


class Rollout(NamedTuple):
  """N = P * G sampled completions; row p * G + g answers prompt p."""

  prompt: Array  # i32[N, Tp], left-padded
  prompt_mask: Array  # bool[N, Tp]
  tokens: Array  # i32[N, Tc], right-padded
  mask: Array  # bool[N, Tc], True up to and including the first EOS
  logp: Array  # f32[N, Tc], log-prob under the distribution sampled from; 0 off mask
  ended: Array  # bool[N], False where the completion ran into the length limit


class Batch(NamedTuple):
  """All that the learner needs for one update; can be saved and replayed."""

  rollout: Rollout
  advantages: Array  # f32[N], or f32[N, Tc] where they are resolved in time
  # f32[N, Tc], of what the ratio is to: the sampler, or the trainer at that time
  old_logp: Array
  ref_logp: Array | None  # f32[N, Tc], None where KL is off
  row_valid: Array  # bool[N], False: the row counts for nothing
  old_values: Array | None = None  # f32[N, Tc], where there is a value head
  returns: Array | None = None  # f32[N, Tc], what it is trained towards
  head_advantages: Array | None = (
    None  # f32[N, K], where there are sub-policies
  )
  # i32[N, L], where rows begin in the lines they are packed into (policy/packing)
  place: Array | None = None


class TrainState(NamedTuple):
  """What a checkpoint holds; `step` counts rollouts, `updates` optimizer steps."""

  step: Array  # i32[]
  updates: Array  # i32[]
  params: Any
  opt: Any
  controllers: Any
  key: Array  # a base key; each step uses fold_in(key, step)
