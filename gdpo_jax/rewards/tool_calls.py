"""Tool calls: read them from a text, and compare them with the right ones.

  completion --parse--> calls --score(., gold)--> [-3, 3]

Two presets. 'paper': optimal matching, values compared with their types
(ToolRL, arXiv:2504.13958, section 3.3; GDPO, arXiv:2601.05242, uses it).
'rlla': the public scorer of that work, which reads one JSON object per line,
matches greedily, and takes any error as the lowest score.
"""

import collections
import json
import operator
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gdpo_jax.rewards import calls

Preset = Literal['paper', 'rlla']
_LOWEST, _HIGHEST = -3.0, 3.0
_OPEN, _CLOSE = '<tool_call>', '</tool_call>'


def parse(text: str) -> list[dict[str, Any]]:
  """All well-formed calls behind `<tool_call>` tags, in order.

  A call is a JSON object with a string `name` and an object `arguments` or
  `parameters` (or neither); arguments given as a string of JSON are decoded
  once. After a tag there may be several objects, or a list of them. The JSON
  decoder finds the end of each, so that a closing tag inside a string is part
  of the string. What is no JSON (single quotes, NaN) or says a key twice is
  passed over, and what follows is still seen.
  """
  found, at = [], 0
  while (at := text.find(_OPEN, at)) >= 0:
    at += len(_OPEN)
    while True:
      at = re.compile(r'[\s,]*').match(text, at).end()
      if not text.startswith(('{', '['), at):
        break
      try:
        value, at = _DECODER.raw_decode(text, at)
      except (ValueError, RecursionError):
        at = _next_line(text, at)
        continue
      found += value if isinstance(value, list) else [value]
  return [call for call in map(_well_formed, found) if call is not None]


def _next_line(text: str, at: int) -> int:
  """Start of the next line of the same block, or its end."""
  ends = [text.find(mark, at) for mark in ('\n', _CLOSE, _OPEN)]
  return min([end for end in ends if end >= 0], default=len(text))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) != len(pairs):
    raise ValueError('a key is given twice')
  return value


def _no_constant(name: str):
  raise ValueError(f'{name} is not JSON')


_DECODER = json.JSONDecoder(
  object_pairs_hook=_unique, parse_constant=_no_constant
)


def _well_formed(value: Any) -> dict[str, Any] | None:
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return None
  for key in ('arguments', 'parameters'):
    if isinstance(value.get(key), str):
      try:
        value = {**value, key: _DECODER.decode(value[key])}
      except (ValueError, RecursionError):
        return None
    if not isinstance(value.get(key, {}), dict):
      return None
  return value


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
  return call.get('arguments', call.get('parameters', {}))


def score(
  predicted: Sequence[Mapping[str, Any]],
  gold: Sequence[Mapping[str, Any]],
  preset: Preset = 'paper',
) -> float:
  """How well predicted calls match the gold ones, in [-3, 3].

  `6 s / (1 + sum over gold calls of (1 + number of parameters)) - 3`, where s
  is the multiset Jaccard index of the names plus, for every gold call that is
  matched to a predicted call of its name, the Jaccard index of the parameter
  names and the number of its parameters with the right value.

  Args:
    predicted: calls as `parse` returns them.
    gold: the right calls.
    preset: 'paper' takes the matching with the highest s, and compares values
      with their types (1, 1.0, True and "1" all differ); without gold calls,
      no call is 3 and any call -3. 'rlla' takes for each gold call in order the
      best of the calls that are left, ties to the first, and compares values as
      Python does (1 == 1.0 == True); without gold calls it is 0.
  """
  if preset == 'rlla':
    return _rlla_score(list(predicted), list(gold))
  if preset != 'paper':
    raise ValueError(f"preset must be 'paper' or 'rlla', got {preset!r}.")
  best = 1 + sum(1 + len(_arguments(call)) for call in gold)
  total = _jaccard(
    [call['name'] for call in gold], [call['name'] for call in predicted]
  )
  if gold and predicted:
    from scipy.optimize import linear_sum_assignment

    pairs = np.array(
      [[_pair_score(p, g, _same) for p in predicted] for g in gold]
    )
    total += pairs[linear_sum_assignment(pairs, maximize=True)].sum()
  return (_HIGHEST - _LOWEST) * float(total) / best + _LOWEST


def _rlla_score(predicted: list, gold: list, arguments=_arguments) -> float:
  if predicted == gold:
    return _HIGHEST if gold else 0.0
  total = _jaccard(
    [call['name'] for call in gold], [call['name'] for call in predicted]
  )
  best = 1 + sum(1 + len(arguments(call)) for call in gold)
  left = list(predicted)
  for right in gold:
    values = [_pair_score(call, right, operator.eq, arguments) for call in left]
    if any(values):
      at = values.index(max(values))
      total += values[at]
      del left[at]
  return (_HIGHEST - _LOWEST) * total / best + _LOWEST if gold else 0.0


def _pair_score(predicted, gold, compare, arguments=_arguments) -> float:
  """Parameter names and values of one pair; 0 where the tools differ."""
  if predicted['name'] != gold['name']:
    return 0.0
  given, right = arguments(predicted), arguments(gold)
  hits = sum(key in given and compare(given[key], right[key]) for key in right)
  return _jaccard(list(right.keys()), list(given.keys())) + hits


def _jaccard(first: list[Hashable], second: list[Hashable]) -> float:
  """Multiset Jaccard index; 1 where both are empty."""
  one, other = collections.Counter(first), collections.Counter(second)
  union = (one | other).total()
  return (one & other).total() / union if union else 1.0


def _same(a: Any, b: Any) -> bool:
  """Equal with equal types all the way down."""
  if type(a) is not type(b):
    return False
  if isinstance(a, dict):
    return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
  if isinstance(a, list):
    return len(a) == len(b) and all(map(_same, a, b))
  return a == b


def reward(completion: str, gold_text: str, preset: Preset = 'paper') -> float:
  """`score` of the calls in two texts.

  With 'rlla' the calls are the lines between the first `<tool_call>` and the
  next closing tag, each a JSON object with `name` and `parameters`; any error
  gives -3, and a gold text without a call gives 0.
  """
  if preset != 'rlla':
    return score(parse(completion), parse(gold_text), preset)
  if _OPEN not in gold_text:
    return 0.0
  try:
    gold = _lines(gold_text)
    return _rlla_score(
      _lines(completion), gold, operator.itemgetter('parameters')
    )
  except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
    return _LOWEST


def _lines(text: str) -> list[dict[str, Any]]:
  """Calls as the public scorer reads them; raises ValueError on no JSON."""
  if _OPEN not in text or _CLOSE not in text:
    raise ValueError(f'no {_OPEN} block in {text!r:.80}')
  block = text.split(_OPEN)[1].split(_CLOSE)[0].strip()
  return [json.loads(line) for line in block.split('\n')]


def format_reward(completion: str, gold_text: str) -> float:
  """1.0 where the completion has the blocks of the gold text, else 0.0.

  `<think>...</think>`, then a `<tool_call>` block, a `<response>` block or both
  in this order, as in the gold text; nothing before, between (but one newline)
  or after them; each tag opened and closed exactly once, the lines of the tool
  calls on lines of their own.
  """
  blocks = {'think': '<think>.*?</think>'}
  if _OPEN in gold_text:
    blocks['tool_call'] = '<tool_call>\n.*?\n</tool_call>'
  if '<response>' in gold_text:
    blocks['response'] = '<response>.*?</response>'
  once = all(
    completion.count(mark) == 1
    for tag in blocks
    for mark in (f'<{tag}>', f'</{tag}>')
  )
  pattern = '^' + '\n'.join(blocks.values()) + '$'
  return float(once and bool(re.search(pattern, completion, re.DOTALL)))


def correct_calls(
  completions: Sequence[Any],
  answer: Sequence[str],
  *,
  preset: Preset = 'paper',
  **_: Any,
) -> list[float]:
  """Reward function: `reward` against the column `answer` of gold texts."""
  return [
    reward(calls.text_of(text), gold, preset)
    for text, gold in zip(completions, answer)
  ]


def correct_format(
  completions: Sequence[Any], answer: Sequence[str], **_: Any
) -> list[float]:
  """Reward function: `format_reward` against the column `answer`."""
  return [
    format_reward(calls.text_of(text), gold)
    for text, gold in zip(completions, answer)
  ]
