"""Arithmetic problems made here: no download, any number of them.

  seed --draw--> Problem --split by hash--> train | held-out
       --in words, after worked examples--> prompt, answer

A problem is a start and one to three steps. The split looks at these alone, so
that no problem of the held-out side is ever trained on, whatever the seed, the
names and the objects.

`arithmetic` is for chat models. Its defaults were chosen with
SmolLM2-135M-Instruct (Q4_1), which imitates the two worked examples, one brief
and one that says everything twice, and is right in either style, so that it can
become shorter and better at once. The 200 held-out problems, 48 new tokens at
most, prompts of at most 116 tokens:

                        correct  <= 18 tokens  both   mixed groups
  greedy                   0.57          0.68  0.44
  temperature 1, 48 x 4    0.31          0.43  0.15   0.46 and 0.83

18 tokens with EOS hold the longest brief solution ('15 + 18 = 33', line break,
'Answer: 33'). On one-digit problems it starts higher (0.6 to 0.7 correct at
temperature 1); word problems (0.2), larger numbers (0.1) and two operations
(less) are hardly within its reach.

`tiny` is two-digit addition for a model of 1e5 parameters over single
characters, with demonstrations to start from.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

from gdpo_jax.tasks.base import Layout, chat_prompt

Style = Literal['expression', 'story', 'mixed']
Solution = Literal['brief', 'long']

HELDOUT_SHARE = 1 / 3  # of all canonical problems
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
      if i and operation == '*' != self.steps[i - 1][0]:
        text = f'({text})'
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
  """What a problem of this difficulty is made of."""

  operations: int
  largest: int  # number in a sum or difference; the factor of a product is <= 9
  limit: int  # no value on the way is larger


LEVELS = {
  1: Level(operations=1, largest=9, limit=99),
  2: Level(operations=1, largest=20, limit=99),
  3: Level(operations=1, largest=99, limit=198),
  4: Level(operations=2, largest=20, limit=99),
  5: Level(operations=3, largest=20, limit=99),
}


def held_out(problem: Problem) -> bool:
  """On which side of the split it lies: by a hash, so the same for ever."""
  key = problem.canonical.encode()
  digest = hashlib.blake2b(key, digest_size=8).digest()
  return int.from_bytes(digest) < HELDOUT_SHARE * 2**64


def draw(rng: random.Random, level: int) -> Problem:
  """A problem of that level: numbers from 2 on, no value below 0."""
  operations, largest, limit = LEVELS[level]
  while True:
    problem = Problem(
      rng.randint(2, largest),
      tuple(
        (op, rng.randint(2, 9 if op == '*' else largest))
        for op in rng.choices('+-*', k=operations)
      ),
    )
    if all(0 <= value <= limit for value in problem.values):
      return problem


# In words.

_NAMES = (
  'Ada', 'Ben', 'Chloe', 'Dario', 'Elif', 'Farah', 'Goran', 'Hana', 'Ivan',
  'Jun', 'Kofi', 'Lena', 'Mateo', 'Nadia', 'Omar', 'Priya', 'Quinn', 'Rosa',
  'Samir', 'Tove',
)  # fmt: skip
_OBJECTS = (
  'apples', 'books', 'buttons', 'candles', 'cards', 'coins', 'cups', 'eggs',
  'flowers', 'keys', 'lemons', 'marbles', 'pens', 'plums', 'seeds', 'shells',
  'stamps', 'stones', 'tickets', 'toys',
)  # fmt: skip
_FIRST = {
  '+': (
    '{name} has {a} {objects} and gets {b} more.',
    '{name} has {a} {objects} and finds {b} more.',
    '{name} has {a} {objects} and buys {b} more.',
  ),
  '-': (
    '{name} has {a} {objects} and gives away {b}.',
    '{name} has {a} {objects} and loses {b} of them.',
    '{name} has {a} {objects} and sells {b}.',
  ),
  '*': (
    '{name} has {b} bags with {a} {objects} in each.',
    '{name} fills {b} boxes with {a} {objects} each.',
  ),
}
_THEN = {
  '+': ('Then {name} gets {b} more.', 'A friend brings {b} more.'),
  '-': ('Then {name} gives away {b}.', 'Then {b} of them are sold.'),
  '*': ('Then {name} trades them for {b} times as many.',),
}


def _story(problem: Problem, rng: random.Random) -> str:
  words = {'name': rng.choice(_NAMES), 'objects': rng.choice(_OBJECTS)}
  told = [
    rng.choice((_THEN if i else _FIRST)[op]).format(
      a=problem.start, b=operand, **words
    )
    for i, (op, operand) in enumerate(problem.steps)
  ]
  question = 'How many {objects} does {name} have now?'.format(**words)
  return ' '.join([*told, question])


def _question(problem: Problem, style: str, rng: random.Random) -> str:
  if style == 'mixed':
    style = rng.choice(('expression', 'story'))
  if style == 'story':
    return _story(problem, rng)
  return f'What is {problem.expression}?'


def solution(problem: Problem, style: Solution) -> str:
  """A right answer: a line per step, and one that says it again if 'long'."""
  lines = []
  for (op, b), a, c in zip(problem.steps, problem.values, problem.values[1:]):
    lines.append(f'{a} {op} {b} = {c}')
    if style == 'long':
      lines.append(f'So {a} {op} {b} is equal to {c}.')
  return '\n'.join([*lines, f'Answer: {problem.answer}'])


# Asked in no example, as their answers can be read off the prompt.
_WORKED = {
  1: (Problem(4, (('+', 3),)), Problem(9, (('-', 4),))),
  2: (
    Problem(4, (('+', 3), ('*', 2))),
    Problem(9, (('-', 4), ('+', 6))),
  ),
  3: (
    Problem(4, (('+', 3), ('*', 2), ('-', 5))),
    Problem(9, (('-', 4), ('+', 6), ('*', 3))),
  ),
}


def _worked(operations: int, style: str, solutions: Sequence[Solution]):
  """(question, answer) pairs, the same in every prompt."""
  style = 'story' if style == 'story' else 'expression'
  return [
    (_question(problem, style, random.Random(i)), solution(problem, how))
    for i, (problem, how) in enumerate(zip(_WORKED[operations], solutions))
  ]


def arithmetic(
  level: int | Sequence[int] = (1, 2),
  num_train: int = 400,
  num_heldout: int = 200,
  seed: int = 0,
  style: Style = 'expression',
  worked: Sequence[Solution] = ('brief', 'long'),
  layout: Layout = 'turns',
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Makes problems for a chat model.

  Args:
    level: 1 to 5, or several, of which each problem gets one at random.
      One operation on numbers up to 9 (1), 20 (2), 99 (3); two (4) and three
      (5) operations on numbers up to 20.
    num_train: number of training examples.
    num_heldout: number of held-out examples.
    seed: of both.
    style: bare sums ('expression'), word problems ('story'), or half and half.
    worked: how each worked example before the question is solved; at most two.
    layout: worked examples as turns of the chat, or all in one user message.
  Returns:
    (train, heldout); an example has 'prompt' (chat messages), 'answer' (the
    number as text), 'problem' (the sum) and 'level'. No prompt comes twice;
    once an easy level has no more, the others fill up, so a small data set is
    easier than a large one. By default there are 444 and 228 bare sums at most.
  Raises:
    ValueError: an unknown level or style, or more examples than there are.
  """
  levels = (level,) if isinstance(level, int) else tuple(level)
  if not levels or not set(levels) <= set(LEVELS):
    raise ValueError(f'level must be among {sorted(LEVELS)}, got {level!r}.')
  if style not in ('expression', 'story', 'mixed'):
    raise ValueError(
      f"style must be 'expression', 'story' or 'mixed', got {style!r}."
    )
  worked = tuple(worked)
  if len(worked) > 2 or not set(worked) <= {'brief', 'long'}:
    raise ValueError(
      f"worked takes at most two of 'brief' and 'long', got {worked!r}."
    )
  shown = {problem.canonical for pair in _WORKED.values() for problem in pair}

  def make(rng: random.Random):
    chosen = rng.choice(levels)
    problem = draw(rng, chosen)
    if problem.canonical in shown:
      return None
    question = _question(problem, style, rng)
    examples = _worked(len(problem.steps), style, worked)
    return problem, {
      'prompt': chat_prompt(question, INSTRUCTION, examples, layout),
      'answer': str(problem.answer),
      'problem': problem.expression,
      'level': chosen,
    }

  what = f'style {style!r}, level {level}'
  return _split(make, num_train, num_heldout, seed, what)


def _split(make, num_train, num_heldout, seed, what):
  """Draws until both sides are full; a prompt that came before is skipped."""
  rng = random.Random(seed)
  sides: dict[bool, list] = {False: [], True: []}
  wanted = {False: num_train, True: num_heldout}
  seen: set[str] = set()
  since_new = 0
  while any(len(sides[side]) < wanted[side] for side in sides):
    # a new prompt in 20,000 draws or none: each of the few that are left
    # would have shown up by then
    since_new += 1
    if since_new > 20_000:
      lacking = ' and '.join(
        f'{len(sides[side])} of {wanted[side]} {name}'
        for side, name in ((False, 'training'), (True, 'held-out'))
        if len(sides[side]) < wanted[side]
      )
      raise ValueError(
        f'{what}: found only {lacking} problems; ask for fewer or add a level.'
      )
    made = make(rng)
    if made is None or str(made[1]['prompt']) in seen:
      continue
    problem, example = made
    side = held_out(problem)
    if len(sides[side]) == wanted[side]:
      continue
    seen.add(str(example['prompt']))
    sides[side].append(example)
    since_new = 0
  return sides[False], sides[True]


# For a model of single characters.

TINY_ALPHABET = '0123456789+:>;='
TINY_LIMIT_TOKENS = 11  # 'columns' with EOS: 6 + '=' + at most 3 digits + 1
_TINY_STYLES = {'direct': 0.2, 'columns': 0.3, 'full': 0.5}


def tiny(
  num_train: int = 4096, num_heldout: int = 512, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Two-digit additions for a model of single characters: '12+34:'.

  The final answer is the last number of the completion.

  Returns:
    (train, heldout); an example has 'prompt', 'answer' and 'problem'.
  """

  def make(rng: random.Random):
    problem = _tiny_problem(rng)
    return problem, {
      'prompt': _tiny_prompt(problem),
      'answer': str(problem.answer),
      'problem': problem.expression,
    }

  return _split(make, num_train, num_heldout, seed, 'two-digit additions')


def tiny_demonstrations(
  seed: int, n: int, wrong: float = 0.2
) -> list[tuple[str, str]]:
  """Where the tiny model starts from: n pairs of prompt and completion.

  Of training problems only, in three styles: the sum alone ('=46', 20%),
  after the totals of the columns from the right ('06;04;=46', 30%), after how
  the totals come about ('2+4+0>06;1+3+0>04;=46', 50%). A share `wrong` ends in
  a number that is off by 1, 10 or 100.

  The longest style is learned first, the sum alone hardly ever, and the middle
  one is both right and within TINY_LIMIT_TOKENS, if it is learned: a model of 2
  layers of width 64 after 500 steps of 128 pairs (Adam, 5e-3 with a cosine to a
  tenth) was right on 0.43 of held-out problems at temperature 1, within the
  limit on 0.54, both on 0.16 (greedy 0.88, 0.20, 0.20). With half as many
  demonstrations of the middle style and 30% wrong ones, both were 0.01.

  Returns:
    n pairs; completions come without EOS.
  """
  rng = random.Random(seed)
  pairs = []
  while len(pairs) < n:
    problem = _tiny_problem(rng)
    if held_out(problem):
      continue
    style = rng.choices(*zip(*_TINY_STYLES.items()))[0]
    result = problem.answer
    if rng.random() < wrong:
      result = abs(result + rng.choice((-10, -1, 1, 10, 100)))
    working = ''.join(_columns(problem, style)) if style != 'direct' else ''
    pairs.append((_tiny_prompt(problem), f'{working}={result}'))
  return pairs


def _tiny_problem(rng: random.Random) -> Problem:
  return Problem(rng.randrange(100), (('+', rng.randrange(100)),))


def _tiny_prompt(problem: Problem) -> str:
  return f'{problem.start:02d}+{problem.steps[0][1]:02d}:'


def _columns(problem: Problem, style: str) -> Iterator[str]:
  """Column additions with carry, units first."""
  a, b, carry = problem.start, problem.steps[0][1], 0
  for _ in range(2):
    total = a % 10 + b % 10 + carry
    shown = f'{a % 10}+{b % 10}+{carry}>' if style == 'full' else ''
    yield f'{shown}{total:02d};'
    a, b, carry = a // 10, b // 10, total // 10
