"""Programs that pass their tests, are short, and do not crash.

  problems made here | HumanEval | records with tests --> Task with the rewards
    passed  share of the hidden tests that the program passes
    length  1.0 iff the completion has at most `limit_tokens`, EOS included;
            counts only where `passed` is 1
    no_bug  1.0 iff the program and its tests run without an error other than a
            wrong result
    style, speed, security  optional, see `rewards.code`

The first three are those of the GDPO paper's code experiment (arXiv:2601.05242).
Programs run in the sandbox of `rewards.code`; its docstring says what that does
not protect from.
"""

import ast
import hashlib
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.rewards import answers, code
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks import records
from gdpo_jax.tasks.base import (
  Layout,
  Task,
  chat_prompt,
  demonstrations,
  load,
  weighted,
)

HELDOUT_SHARE = 1 / 4
INSTRUCTION = 'Write the Python function. Answer with one python code block.'
EXTRAS = ('style', 'speed', 'security')


class Family(NamedTuple):
  """Functions that differ in a number: what is asked, a solution, inputs."""

  name: str  # of the function, `{k}` in it
  asked: str
  body: str  # after `return`
  arguments: str
  inputs: tuple[str, ...]  # arguments of a call, as source
  numbers: range = range(2, 10)


_LISTS = ('[]', '[3]', '[4, 1, 7, 12, 9]', '[-5, 2, 2, 30, -1]')
_WORDS = ("''", "'a'", "'banana'", "'Hello There'")
_NUMBERS = ('0', '1', '7', '-3', '100')
FAMILIES = (
  Family('add_{k}', 'adds {k} to the number x', 'x + {k}', 'x', _NUMBERS),
  Family('times_{k}', 'multiplies x by {k}', 'x * {k}', 'x', _NUMBERS),
  Family(
    'minus_{k}', 'subtracts {k} from the number x', 'x - {k}', 'x', _NUMBERS
  ),
  Family('power_{k}', 'raises x to the power {k}', 'x ** {k}', 'x', _NUMBERS),
  Family(
    'divisible_by_{k}',
    'says whether x is divisible by {k}',
    'x % {k} == 0',
    'x',
    _NUMBERS,
  ),
  Family(
    'above_{k}',
    'returns the items of the list xs that are above {k}',
    '[x for x in xs if x > {k}]',
    'xs',
    _LISTS,
  ),
  Family(
    'count_above_{k}',
    'counts the items of the list xs that are above {k}',
    'sum(x > {k} for x in xs)',
    'xs',
    _LISTS,
  ),
  Family(
    'sum_plus_{k}',
    'returns the sum of the list xs, plus {k}',
    'sum(xs) + {k}',
    'xs',
    _LISTS,
  ),
  Family(
    'first_{k}',
    'returns the first {k} items of the list xs',
    'xs[:{k}]',
    'xs',
    _LISTS,
  ),
  Family(
    'scale_{k}',
    'multiplies each item of the list xs by {k}',
    '[x * {k} for x in xs]',
    'xs',
    _LISTS,
  ),
  Family(
    'repeat_{k}', 'repeats the string s {k} times', 's * {k}', 's', _WORDS
  ),
  Family(
    'longer_than_{k}',
    'says whether the string s has more than {k} characters',
    'len(s) > {k}',
    's',
    _WORDS,
  ),
  Family(
    'last_{k}_upper',
    'returns the last {k} characters of s in upper case',
    's[-{k}:].upper()',
    's',
    _WORDS,
  ),
)
_WORKED = (
  ('halve(x) that divides x by 2', 'def halve(x):\n    return x / 2'),
  (
    'count_items(xs) that returns the number of items of the list xs',
    'def count_items(xs):\n    return len(xs)',
  ),
)


def fenced(program: str) -> str:
  return f'```python\n{program}\n```'


def generated(
  num_train: int = 80,
  num_heldout: int = 20,
  seed: int = 0,
  worked: int = 2,
  layout: Layout = 'turns',
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Makes small functions to write, for a chat model: no download.

  Args:
    num_train, num_heldout: at most 81 and 23.
    seed: of the choice and the order.
    worked: examples, 0 to 2, before the question.
    layout: see `base.chat_prompt`.
  Returns:
    (train, heldout); an example has 'prompt', 'tests' (assertions, hidden from
    the model), 'reference' (a right program) and 'program_prefix' ('').
  Raises:
    ValueError: a number out of range, or more functions than there are.
  """
  if not 0 <= worked <= len(_WORKED):
    raise ValueError(f'worked must be 0 to {len(_WORKED)}, got {worked}.')
  shown = [
    (f'Function {asked}.', fenced(right)) for asked, right in _WORKED[:worked]
  ]
  sides: tuple[list, list] = [], []
  for family in FAMILIES:
    for k in family.numbers:
      name = family.name.format(k=k)
      call = f'{name}({family.arguments})'
      program = f'def {call}:\n    return {family.body.format(k=k)}'
      question = f'Function {call} that {family.asked.format(k=k)}.'
      sides[_held_out(name)].append(
        {
          'prompt': chat_prompt(question, INSTRUCTION, shown, layout),
          'tests': _tests(program, name, family.inputs),
          'reference': program,
          'program_prefix': '',
        }
      )
  for side, wanted in zip(sides, (num_train, num_heldout)):
    if not 0 < wanted <= len(side):
      raise ValueError(
        f'there are {len(sides[0])} training and {len(sides[1])} held-out '
        f'functions, asked for {num_train} and {num_heldout}.'
      )
    random.Random(seed).shuffle(side)
  return sides[0][:num_train], sides[1][:num_heldout]


def _tests(program: str, name: str, inputs: Sequence[str]) -> list[str]:
  """An assertion per input; the value is what our own program returns."""
  namespace: dict[str, Any] = {}
  exec(program, namespace)
  return [
    f'assert {name}({each}) == {eval(f"{name}({each})", namespace)!r}'
    for each in inputs
  ]


def _held_out(key: str) -> bool:
  digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
  return int.from_bytes(digest) < HELDOUT_SHARE * 2**64


def public(
  train: str | os.PathLike,
  heldout: str | os.PathLike | None = None,
  num_train: int | None = None,
  num_heldout: int | None = None,
  max_prompt_chars: int | None = None,
  seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Reads HumanEval, Eurus-2-RL, or records with 'prompt' and 'tests'.

  HumanEval's assertions become tests of their own. Of Eurus-2-RL (verl's
  parquet) the rows with 'ability' code are taken: inputs and outputs of a
  program, or arguments and results of the function `fn_name`.

  Args:
    train: file, or id of a hub data set.
    heldout: the same; by default a quarter of the prompts of `train`.
    num_train, num_heldout: the first so many.
    max_prompt_chars: longer prompts are left out.
    seed: of the choice of what is held out.
  Raises:
    ValueError: as `records.read`, or a record of another form.
  """
  found = _read(train, 'train', max_prompt_chars)
  if heldout is None:
    found, held = records.split_off(found, HELDOUT_SHARE, seed)
  else:
    held = _read(heldout, 'test', max_prompt_chars)
  return found[:num_train], held[:num_heldout]


def _read(source, split, max_prompt_chars) -> list[dict[str, Any]]:
  advice = (
    'Download HumanEval.jsonl.gz from github.com/openai/human-eval (data/) and '
    'give the path.'
  )
  rows = records.examples(records.read(source, split, advice=advice))
  rows = [row for row in rows if row.get('ability', 'code') == 'code']
  if not rows:
    raise ValueError(f"{source} has no row with 'ability' code.")
  made = [_problem(row, f'{source}, record {i}') for i, row in enumerate(rows)]
  return records.at_most_chars(made, max_prompt_chars)


def _problem(row: Mapping[str, Any], where: str) -> dict[str, Any]:
  prompt, prefix = row['prompt'], ''
  reference = row.get('reference')
  if 'entry_point' in row and 'test' in row:  # HumanEval
    header = row['prompt']
    tests = _assertions(row['test'], row['entry_point'], where)
    reference = header + row['canonical_solution']
    question = f'{fenced(header.rstrip())}\n\nWrite the whole function.'
    prompt = chat_prompt(question, INSTRUCTION)
    # a completion may leave the header's imports out
    prefix = ''.join(
      f'{line}\n'
      for line in header.splitlines()
      if line.startswith(('import ', 'from '))
    )
  elif 'tests' in row:
    tests = list(row['tests'])
  else:
    tests = _inputs_and_outputs(row.get('answer'), where)
  if isinstance(prompt, str):
    prompt = chat_prompt(prompt, INSTRUCTION)
  return {
    'prompt': prompt,
    'tests': tests,
    'reference': reference,
    'program_prefix': prefix,
  }


def _assertions(source: str, entry_point: str, where: str) -> list[str]:
  """HumanEval's `check(candidate)`, a test per assertion.

  What stands before an assertion belongs to it, so that names that one defines
  are there for the next: the tests of a run share their names.
  """
  tree = ast.parse(source)
  checks = [
    node
    for node in tree.body
    if isinstance(node, ast.FunctionDef) and node.name == 'check'
  ]
  if len(checks) != 1:
    raise ValueError(f"{where}: 'test' should define check(candidate) once.")
  [check] = checks
  before = [node for node in tree.body if node is not check]
  candidate = check.args.args[0].arg
  before.append(ast.parse(f'{candidate} = {entry_point}').body[0])
  tests, pending = [], before
  for node in check.body:
    pending.append(node)
    if any(map(_tests_something, ast.walk(node))):
      tests.append('\n'.join(map(ast.unparse, pending)))
      pending = []
  return tests


def _tests_something(node: ast.AST) -> bool:
  """Not `assert True, '...'`, which some of the data has as a comment."""
  return isinstance(node, ast.Assert) and not isinstance(
    node.test, ast.Constant
  )


def _inputs_and_outputs(answer: Any, where: str) -> list[Any]:
  try:
    graded = json.loads(answer) if isinstance(answer, str) else answer
    inputs, outputs = graded['inputs'], graded['outputs']
  except (TypeError, ValueError, KeyError) as error:
    raise ValueError(
      f"{where} should have 'tests', or HumanEval's 'test' and 'entry_point', "
      f'or inputs and outputs as the ground truth ({error}).'
    ) from error
  if name := graded.get('fn_name'):
    return [
      f'assert {name}(*{given!r}) == {expected!r}'
      for given, expected in zip(inputs, outputs)
    ]
  return [{'stdin': i, 'stdout': o} for i, o in zip(inputs, outputs)]


SOURCES: dict[str, Callable] = {'generated': generated, 'public': public}


def code_task(
  source: str = 'generated',
  *,
  limit_tokens: int,
  conditioned: bool = True,
  extras: Sequence[str] = (),
  wall_s: float = 5.0,
  weights: Mapping[str, float] | None = None,
  **settings: Any,
) -> Task:
  """Makes the task; settings beyond these go to `generated` or `public`.

  Args:
    source: 'generated' or 'public'.
    limit_tokens: of the reward `length`, EOS counted.
    conditioned: `length` counts only where `passed` is 1.
    extras: further rewards, of 'style', 'speed' and 'security'; style and
      security need the `[code]` extra, speed a reference in every record.
    wall_s: seconds that a program and its tests may take.
    weights: by name of the reward; those not named have weight 1.
  Raises:
    ValueError: an unknown source, setting or reward.
  """
  if set(extras) - set(EXTRAS):
    raise ValueError(f'extras are of {EXTRAS}, got {tuple(extras)}.')
  train, heldout = load(SOURCES, source, settings)
  if 'speed' in extras and not all(e['reference'] for e in (*train, *heldout)):
    raise ValueError('speed needs a reference program in every record.')
  limits = code.Limits(wall_s=wall_s)

  def reward(fn, name, **options):
    return Reward(fn, name=name, range=(0.0, 1.0), timeout_s=300.0, **options)

  def passed(completions, tests, program_prefix, **_):
    return code.tests_passed(completions, tests, program_prefix, limits=limits)

  def no_bug(completions, tests, program_prefix, **_):
    return code.no_bug(completions, tests, program_prefix, limits=limits)

  def speed(completions, reference, tests, program_prefix, **_):
    return code.speed(
      completions, reference, tests, program_prefix, limits=limits
    )

  optional = {'style': code.style, 'speed': speed, 'security': code.security}
  rewards = (
    reward(passed, 'passed'),
    reward(
      answers.length(limit_tokens),
      'length',
      condition='passed>=1' if conditioned else None,
    ),
    reward(no_bug, 'no_bug'),
    *(reward(optional[name], name) for name in extras),
  )
  demonstrate = None
  if all(example['reference'] for example in train):
    demonstrate = demonstrations(train, lambda e: fenced(e['reference']))
  return Task(
    name=f'code/{source}',
    train=train,
    heldout=heldout,
    rewards=weighted(rewards, weights),
    demonstrate=demonstrate,
  )
