"""Right answers that are short: the task on which GDPO is usually shown.

  arithmetic | gsm8k | tiny --> Task with the rewards
    correct  1.0 iff the final answer equals the gold one
    length   1.0 iff the completion has at most `limit_tokens`, EOS included
    format   1.0 iff the final answer stands where it was asked for (optional)

The final answer is what `rewards.answers.extract` finds: after the last
"Answer:", or else the last number. So `correct` does not depend on the format.

`conditioned` makes `length` count only where `correct` is 1 (arXiv:2601.05242,
eq. 8): without it, short and wrong earns as much as long and right, and a
policy that seldom is right learns to be short.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.rewards import answers, calls
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.arithmetic import arithmetic, tiny, tiny_demonstrations
from gdpo_jax.tasks.base import Task, load, weighted
from gdpo_jax.tasks.gsm8k import gsm8k

_ANSWER_LINE = re.compile(r'Answer: [-+]?[\d,]*\.?\d+')
_AFTER_EQUALS = re.compile(r'[^=]*=\d+')


def answer_line(completions: Sequence[Any], **_: Any) -> list[float]:
  """1.0 where the last line is 'Answer: ' and a number, and no other is."""
  values = []
  for completion in completions:
    lines = calls.text_of(completion).strip().split('\n')
    marked = [line.startswith('Answer:') for line in lines]
    last = _ANSWER_LINE.fullmatch(lines[-1].rstrip())
    values.append(float(last is not None and sum(marked) == 1))
  return values


def after_equals(completions: Sequence[Any], **_: Any) -> list[float]:
  """1.0 where the completion ends in its only '=' and digits."""
  return [
    float(_AFTER_EQUALS.fullmatch(calls.text_of(completion)) is not None)
    for completion in completions
  ]


class Source(NamedTuple):
  """Where problems come from."""

  load: Callable[..., tuple[list, list]]  # settings -> (train, heldout)
  form: Callable[..., list[float]]  # the reward `format`
  demonstrate: Callable[[int, int], list] | None = None


SOURCES = {
  'arithmetic': Source(arithmetic, answer_line),
  'gsm8k': Source(gsm8k, answer_line),
  'tiny': Source(tiny, after_equals, tiny_demonstrations),
}


def load_math(
  source: str, settings: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """(train, heldout) of one of SOURCES; refuses settings it does not have."""
  return load({k: v.load for k, v in SOURCES.items()}, source, settings)


def math_len(
  source: str = 'arithmetic',
  *,
  limit_tokens: int,
  conditioned: bool = False,
  with_format: bool = False,
  weights: Mapping[str, float] | None = None,
  **settings: Any,
) -> Task:
  """Makes the task; settings beyond these go to the source.

  Args:
    source: 'arithmetic' for a chat model, 'gsm8k', or 'tiny' for a model of
      single characters (`arithmetic.TINY_ALPHABET`).
    limit_tokens: of the reward `length`, EOS counted; 18 suits the default
      `arithmetic` (see there), `arithmetic.TINY_LIMIT_TOKENS` the tiny one.
    conditioned: `length` counts only where `correct` is 1.
    with_format: a third reward, `format`.
    weights: by name of the reward; those not named have weight 1.
    **settings: arguments of `arithmetic`, `gsm8k` or `tiny`.
  Raises:
    ValueError: an unknown source, setting or reward, or a limit below 1.
  """
  if 'format' in (weights or {}) and not with_format:
    raise ValueError('a weight for format needs with_format=True.')
  train, heldout = load_math(source, settings)
  reward = functools.partial(Reward, range=(0.0, 1.0))
  rewards = [
    reward(answers.correctness, name='correct'),
    reward(
      answers.length(limit_tokens),
      name='length',
      condition='correct>=1' if conditioned else None,
    ),
  ]
  if with_format:
    rewards.append(reward(SOURCES[source].form, name='format'))
  return Task(
    name=f'math_len/{source}',
    train=train,
    heldout=heldout,
    rewards=weighted(rewards, weights),
    demonstrate=SOURCES[source].demonstrate,
  )
