"""Arithmetic problems made here: no download, any number of them.

  seed --draw--> Problem --split by hash--> train | held-out
       --tell--> question --with worked examples--> prompt, answer

A problem is a start and one to three steps; what it is called in words does
not count: the split looks at operands and operations alone, so that no problem
of the held-out side is ever trained on, whatever the seeds, names and objects.
"""

import functools
import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Example = dict[str, Any]

HELDOUT_SHARE = 0.2  # of all canonical problems

INSTRUCTION = 'Solve the problem. End with a line "Answer: " and the number.'


class Problem(NamedTuple):
  """`start`, then the steps from left to right: (5, (('+', 7), ('*', 2)))."""

  start: int
  steps: tuple[tuple[str, int], ...]

  @property
  def values(self) -> list[int]:
    """The start and the value after each step; the last one is the answer."""
    values = [self.start]
    for operation, operand in self.steps:
      values.append(_OPERATIONS[operation](values[-1], operand))
    return values

  @property
  def answer(self) -> int:
    return self.values[-1]

  @property
  def expression(self) -> str:
    """As text, with brackets where a product follows: '(5 + 7) * 2'."""
    text = str(self.start)
    for i, (operation, operand) in enumerate(self.steps):
      bracket = operation == '*' and any(o != '*' for o, _ in self.steps[:i])
      text = f'({text})' if bracket else text
      text = f'{text} {operation} {operand}'
    return text

  @property
  def canonical(self) -> str:
    """One name for all problems that ask the same: 7 + 5 is 5 + 7."""
    operation, operand = self.steps[0]
    if operation == '-':
      return self.expression
    low, high = sorted((self.start, operand))
    return Problem(low, ((operation, high), *self.steps[1:])).expression


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
  '+': lambda a, b: a + b,
  '-': lambda a, b: a - b,
  '*': lambda a, b: a * b,
}


class Level(NamedTuple):
  """What a problem of this difficulty may contain."""

  operations: int
  largest: int  # operand of a sum or difference, and the start
  limit: int  # no value on the way is larger


LEVELS = {
  1: Level(operations=1, largest=9, limit=99),
  2: Level(operations=1, largest=99, limit=99),
  3: Level(operations=2, largest=9, limit=99),
  4: Level(operations=2, largest=99, limit=199),
  5: Level(operations=3, largest=99, limit=199),
}


def held_out(canonical: str) -> bool:
  """On which side of the split a problem lies: a hash, so the same for ever."""
  digest = hashlib.blake2b(canonical.encode(), digest_size=8).digest()
  return int.from_bytes(digest) < HELDOUT_SHARE * 2**64


def draw(rng: random.Random, level: int) -> Problem:
  """A problem of that level: operands from 2 on, no value below 0."""
  operations, largest, limit = LEVELS[level]
  while True:
    problem = Problem(
      rng.randint(2, largest),
      tuple(
        (op, rng.randint(2, 9 if op == '*' else largest))
        for op in rng.choices('++--*', k=operations)
      ),
    )
    if all(0 <= value <= limit for value in problem.values):
      return problem


# ---- in words --------------------------------------------------------------

_NAMES = (
  'Ada Ben Chloe Dario Elif Farah Goran Hana Ivan Jun Kofi Lena Mateo Nadia '
  'Omar Priya Quinn Rosa Samir Tove'
).split()
_OBJECTS = (
  'apples books buttons candles cards coins cups eggs flowers keys lemons '
  'marbles pens plums seeds shells stamps stones tickets toys'
).split()
_STARTS = (
  '{name} has {n} {objects}.',
  'There are {n} {objects} on the table of {name}.',
  '{name} counts {n} {objects}.',
)
_BAGS = (  # a product that comes first
  '{name} has {m} bags with {n} {objects} in each.',
  '{name} fills {m} boxes, and {n} {objects} go into each.',
)
_STEPS = {
  '+': (
    '{name} gets {n} more.',
    'A friend brings {n} more {objects}.',
    '{name} finds {n} more {objects}.',
  ),
  '-': (
    '{name} gives away {n}.',
    '{name} loses {n} of them.',
    '{n} of the {objects} are sold.',
  ),
  '*': (
    'Then the number of {objects} grows to {n} times as many.',
    'Later there are {n} times as many {objects}.',
  ),
}
_QUESTIONS = (
  'How many {objects} are there now?',
  'How many {objects} are there in the end?',
)


def story(problem: Problem, rng: random.Random) -> str:
  """The problem in words; names, objects and phrases are drawn."""
  words = {'name': rng.choice(_NAMES), 'objects': rng.choice(_OBJECTS)}
  steps = problem.steps
  if steps[0][0] == '*':
    start = rng.choice(_BAGS).format(n=problem.start, m=steps[0][1], **words)
    steps = steps[1:]
  else:
    start = rng.choice(_STARTS).format(n=problem.start, **words)
  told = [rng.choice(_STEPS[op]).format(n=n, **words) for op, n in steps]
  question = rng.choice(_QUESTIONS).format(**words)
  return ' '.join([start, *told, question])


def expression(problem: Problem, rng: random.Random) -> str:
  """The bare sum: 'What is (5 + 7) * 2?'."""
  del rng  # there is one way to write it
  return f'What is {problem.expression}?'
