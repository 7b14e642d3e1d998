"""Tasks of the study: one tiny model, rewards in different relations.

  additions, supervised start --> the same for every task and method
  rewards                     --> differ in scale, rarity, correlation, ...

The problems are the two-digit additions of `tasks.arithmetic.tiny`, where a
completion is the sum alone ('=46'), after the totals of the columns
('06;04;=46'), or after how these come about ('2+4+0>06;1+3+0>04;=46'); with
EOS they take 4 or 5, 10 or 11, and 22 or 23 tokens. The longer ones are more
often right.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from gdpo_jax.rewards import answers
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.arithmetic import tiny, tiny_demonstrations
from gdpo_jax.tasks.base import Task
from gdpo_jax.tasks.math_len import after_equals

MAX_NEW_TOKENS = 26
MIDDLE_TOKENS = 11  # the totals of the columns and a sum of three digits
DIRECT_TOKENS = 5  # a sum of three digits alone
_RESULT = re.compile(r'=(\d+)$')
_MIDDLE = re.compile(r'\d\d;\d\d;=\d+')
_FULL = re.compile(r'(\d\+\d\+\d>\d\d;){2}=\d+')


def _result(text: str) -> str:
  """Digits after the last '=', '' where it does not end so."""
  found = _RESULT.search(text)
  return found[1] if found else ''


def _digits_right(text: str, answer: str) -> float:
  """Share of the places of the sum, from the right, that agree."""
  result = _result(text)
  places = max(len(result), len(answer))
  same = sum(a == b for a, b in zip(reversed(result), reversed(answer)))
  return same / places if result else 0.0


def graded(completions, answer, **_) -> list[float]:
  """-3 to 3, linear in the share of digits that are right."""
  return [6 * _digits_right(c, a) - 3 for c, a in zip(completions, answer)]


def graded_unit(completions, answer, **_) -> list[float]:
  """The same in [0, 1]."""
  return [_digits_right(c, a) for c, a in zip(completions, answer)]


def last_digit(completions, answer, **_) -> list[float]:
  """1.0 where the last digit is right: implied by a right answer."""
  return [float(_result(c)[-1:] == a[-1]) for c, a in zip(completions, answer)]


def right_and_direct(completions, completion_ids, answer, **_) -> list[float]:
  """1.0 for a right sum without any working, which hardly ever comes."""
  return [
    float(_result(c) == a and len(ids) <= DIRECT_TOKENS)
    for c, ids, a in zip(completions, completion_ids, answer)
  ]


def right_eighth(completions, answer, **_) -> list[float]:
  """1.0 for a right sum that 8 divides: 7 of 8 prompts can earn nothing."""
  return [
    float(_result(c) == a and int(a) % 8 == 0)
    for c, a in zip(completions, answer)
  ]


def brevity(completion_ids, **_) -> list[float]:
  """1 - tokens / limit: differs in nearly every group."""
  return [1 - len(ids) / MAX_NEW_TOKENS for ids in completion_ids]


def _matches(pattern: re.Pattern) -> Callable[..., list[float]]:
  def form(completions: Sequence[Any], **_: Any) -> list[float]:
    return [float(pattern.fullmatch(c) is not None) for c in completions]

  return form


def _correct() -> Reward:
  return Reward(answers.correctness, 'correct', range=(0.0, 1.0))


def _length(limit: int, conditioned: bool = False) -> Reward:
  return Reward(
    answers.length(limit),
    'length',
    range=(0.0, 1.0),
    condition='correct>=1' if conditioned else None,
  )


def _unit(fn, name: str, condition: str | None = None) -> Reward:
  return Reward(fn, name, range=(0.0, 1.0), condition=condition)


class Kind(NamedTuple):
  """What a task is for, and its rewards."""

  what: str
  rewards: tuple[Reward, ...]


_middle = _matches(_MIDDLE)
TINY: dict[str, Kind] = {
  'scale': Kind(
    'graded correctness in [-3, 3] beside a 0/1 form',
    (
      Reward(graded, 'graded', range=(-3.0, 3.0)),
      _unit(_middle, 'form'),
    ),
  ),
  'unit': Kind(
    'the same, graded correctness in [0, 1]',
    (_unit(graded_unit, 'graded'), _unit(_middle, 'form')),
  ),
  'conflict': Kind(
    'correct against a limit that only the sum alone meets, plain',
    (_correct(), _length(DIRECT_TOKENS)),
  ),
  'conflict_if': Kind(
    'the same, the limit counts where correct',
    (_correct(), _length(DIRECT_TOKENS, True)),
  ),
  'agree': Kind(
    'correct and a limit that a right style meets, plain',
    (_correct(), _length(MIDDLE_TOKENS)),
  ),
  'agree_if': Kind(
    'the same, the limit counts where correct',
    (_correct(), _length(MIDDLE_TOKENS, True)),
  ),
  'three': Kind(
    'correct, limit and the form that meets it',
    (_correct(), _length(MIDDLE_TOKENS), _unit(_middle, 'form')),
  ),
  'three_if': Kind(
    'the same, limit and form count where correct',
    (
      _correct(),
      _length(MIDDLE_TOKENS, True),
      _unit(_middle, 'form', 'correct>=1'),
    ),
  ),
  'three_conflict': Kind(
    'correct, limit, and a form that breaks it',
    (
      _correct(),
      _length(MIDDLE_TOKENS),
      _unit(_matches(_FULL), 'form'),
    ),
  ),
  'rare': Kind(
    'right without working, beside a limit that half of the answers meet',
    (_unit(right_and_direct, 'rare'), _length(MIDDLE_TOKENS)),
  ),
  'correlated': Kind(
    'correct and last digit, nearly the same thing, against a limit',
    (_correct(), _unit(last_digit, 'last_digit'), _length(DIRECT_TOKENS)),
  ),
  'saturated': Kind(
    'correct beside a form that nearly every answer has',
    (_correct(), _unit(after_equals, 'form')),
  ),
  'sparse': Kind(
    'right on an eighth of the prompts, beside a graded length',
    (_unit(right_eighth, 'sparse'), _unit(brevity, 'brevity')),
  ),
}


def tiny_task(
  name: str, num_train: int, num_heldout: int, weights: Sequence[float]
) -> Task:
  """The task of that name; the problems are the same in all of them."""
  train, heldout = tiny(num_train, num_heldout)
  rewards = TINY[name].rewards
  if len(weights) != len(rewards):
    raise ValueError(
      f'task {name!r} has {len(rewards)} rewards, got {len(weights)} weights.'
    )
  return Task(
    f'study/{name}',
    train,
    heldout,
    [dataclasses.replace(r, weight=w) for r, w in zip(rewards, weights)],
    demonstrate=tiny_demonstrations,
  )
