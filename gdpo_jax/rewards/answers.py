"""Math answers: find the final one in a text, and rewards on that.

  completion --extract--> answer --equal(., gold)--> 1.0 or 0.0

`equal` is exact and safe against expressions that never end; see `equality`.
"""

import concurrent.futures
import itertools
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from gdpo_jax.rewards import calls, equality, latex

equal = equality.equal

_BUDGET_S = 30.0  # of one call of `correctness`

_ANNOUNCED = re.compile(
  r'(?:final\s+answer|answer)(?:\s+is\b|\s*:|\s+is\s*:|\s*=)\s*:?\s*(.+)',
  re.IGNORECASE,
)
_LAST_NUMBER = re.compile(
  rf"""(?<![\w.,:/])
  [-+\u2212]?\s?[$€£]?[-+\u2212]?
  (?: \\[dt]?frac\{{\d+\}}\{{\d+\}}
    | \d+\s+\d+/\d+ | \d+/\d+ | \d+:\d+
    | (?:{latex.PLAIN_NUMBER}) (?:[eE][-+]?\d+(?!\w))? )
  \s?%?""",
  re.VERBOSE,
)


def extract(text: str) -> str | None:
  r"""The final answer in a completion, or None where there is none.

  What comes after the last `</think>` counts; a text that opens `<think>` and
  does not close it has no answer. There, in this order: inside the last
  `<answer>` tags; the last `\boxed{...}` (braces balanced, nested boxes
  opened, `\boxed 7` is 7; an unclosed last box is no answer, an empty one the
  empty string); after the last `####`; after the last "answer is" or
  "answer:"; the last number.
  """
  before, closed, after = text.rpartition('</think>')
  if not closed and '<think>' in text:
    return None
  text = after if closed else text
  end = text.rfind('</answer>')
  start = text.rfind('<answer>', 0, max(end, 0))
  tagged = start >= 0
  if tagged:
    text = text[start + len('<answer>') : end]
  boxes = list(latex.BOX.finditer(text))
  if boxes:
    return latex.box_content(text, boxes)
  if '####' in text:
    line = text.rpartition('####')[2].strip().partition('\n')[0]
    return latex.trim(line) or None
  announced = list(_ANNOUNCED.finditer(text))
  if announced:
    return latex.trim(_first_sentence(announced[-1].group(1))) or None
  if tagged:
    return latex.trim(text.strip())
  numbers = _LAST_NUMBER.findall(text)
  return numbers[-1].strip() if numbers else None


def _first_sentence(text: str) -> str:
  """Up to a full stop that ends a sentence (not the one in 3.5)."""
  return re.split(r'[.;!?](?:\*\*)?(?:\s|$)|\n', text, maxsplit=1)[0]


def correctness(
  completions: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float | None]:
  """1.0 where the final answer equals the column `answer`, else 0.0.

  A gold text with `####` or a box in it is reduced to its own final answer; a
  row whose gold is None has no opinion (None). Nor have the rows whose turn
  would come after 30 s: a batch full of expressions that never end is missing
  in part, and not as a whole by the reward's time-out.
  """
  deadline = time.monotonic() + _BUDGET_S

  def compare(text, gold):
    if gold is None or time.monotonic() > deadline:
      return None
    return float(equal(extract(calls.text_of(text)), _gold(gold)))

  # What needs a worker waits for it; the others take no time.
  with concurrent.futures.ThreadPoolExecutor(equality.NUM_WORKERS) as pool:
    return list(pool.map(compare, completions, answer))


def _gold(answer: Any) -> str | None:
  text = str(answer)
  return extract(text) if '####' in text or latex.BOX.search(text) else text


def integer(completions: Sequence[Any], **_: Any) -> list[float]:
  """1.0 where the final answer is written as an integer, else 0.0.

  Sign and thousands separators are allowed; 42.0, 84/2 and units are not.
  """
  pattern = re.compile(r'[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)')
  return [
    float(
      answer is not None
      and pattern.fullmatch(latex.normalize(answer)) is not None
    )
    for answer in (extract(calls.text_of(text)) for text in completions)
  ]


def think_format(
  completions: Sequence[Any],
  prompts: Sequence[Any] | None = None,
  *,
  opened: bool = False,
  **_: Any,
) -> list[float]:
  """1.0 for `<think>...</think>` and an answer after it, else 0.0.

  Strict: exactly one tag of each kind, nothing before the first, some text
  after the last. Many chat templates put the opening tag at the end of the
  prompt: a string prompt is looked at; for message lists, whose template is not
  seen here, say `opened=True` (functools.partial).
  """
  return _format(completions, prompts, opened, r'<think>(.*)</think>\s*\S.*')


def think_answer_format(
  completions: Sequence[Any],
  prompts: Sequence[Any] | None = None,
  *,
  opened: bool = False,
  **_: Any,
) -> list[float]:
  """1.0 for `<think>...</think> <answer>...</answer>` and no more, else 0.0.

  Strict as `think_format`, with nothing but space between and after the blocks
  and an answer that is not empty.
  """
  pattern = r'<think>(.*)</think>\s*<answer>\s*\S.*</answer>\s*'
  return _format(completions, prompts, opened, pattern)


def _format(completions, prompts, opened, pattern) -> list[float]:
  regex = re.compile(pattern, re.DOTALL)
  tags = re.findall(r'</?[a-z]+>', pattern)
  values = []
  for text, prompt in itertools.zip_longest(
    map(calls.text_of, completions), prompts or ()
  ):
    if opened or (
      isinstance(prompt, str) and prompt.rstrip().endswith('<think>')
    ):
      text = '<think>' + text
    once = all(text.count(tag) == 1 for tag in tags)
    values.append(float(once and regex.fullmatch(text.lstrip()) is not None))
  return values


def length(limit_tokens: int) -> Callable[..., list[float]]:
  """A reward function: 1.0 iff a completion has at most `limit_tokens` tokens.

  It reads `completion_ids`, EOS included.
  """
  if limit_tokens < 1:
    raise ValueError(f'limit_tokens must be at least 1, got {limit_tokens}.')

  def length(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    return [float(len(ids) <= limit_tokens) for ids in completion_ids]

  return length
