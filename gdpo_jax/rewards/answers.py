"""Math answers: find the final answer in a text, and decide equality.

  completion --extract--> answer --equal(., gold)--> 1.0 or 0.0

Equality is exact. Numbers are compared as fractions; sets, tuples and intervals
by their members; anything else by `math-verify`'s parser and sympy. There is no
absolute tolerance, so 2^-99 and 2^-98 differ. One side written as a decimal
equals a value that no decimal can write (2/3, pi) if it has at least four
significant digits and is that value rounded at its last digit: 0.6667 is 2/3,
0.67 and 0.6666 are not.

A policy soon writes expressions that keep sympy busy for ever (9^9^9^9). They
are compared in worker processes that are killed when time is up, from whichever
thread `equal` is called; such an answer is wrong, not missing.
"""

import functools
import itertools
import re
import threading
import unicodedata
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from gdpo_jax.rewards import calls, workers

_COMPARE_TIMEOUT_S = 3.0
_COMPARE_MEMORY_BYTES = 2 << 30
_MAX_CHARS = 400  # of an answer; longer ones are equal only if identical
_MAX_EXPONENT = 400
_MIN_ROUNDED_DIGITS = 4

# Finding the answer.

_BOX = re.compile(r'\\(?:boxed|fbox|framebox)(?![a-zA-Z])')
_ANSWER_TAG = re.compile(r'<answer>(.*?)</answer>', re.DOTALL)
_ANNOUNCED = re.compile(
  r'(?:final\s+answer|answer)(?:\s+is\b|\s*:|\s+is\s*:|\s*=)\s*:?\s*(.+)',
  re.IGNORECASE,
)
_PLAIN_NUMBER = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+'
_LAST_NUMBER = re.compile(
  rf"""(?<![\w.,:/])
  [-+\u2212]?\s?[$€£]?[-+\u2212]?
  (?: \\[dt]?frac\{{\d+\}}\{{\d+\}}
    | \d+\s+\d+/\d+ | \d+/\d+ | \d+:\d+
    | {_PLAIN_NUMBER} )
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
  tagged = _ANSWER_TAG.findall(text)
  if tagged:
    text = tagged[-1]
  boxes = list(_BOX.finditer(text))
  if boxes:
    return _box_content(text, boxes)
  if '####' in text:
    line = text.rpartition('####')[2].strip().partition('\n')[0]
    return _trim(line) or None
  announced = list(_ANNOUNCED.finditer(text))
  if announced:
    return _trim(_first_sentence(announced[-1].group(1))) or None
  if tagged:
    return _trim(text.strip())
  numbers = _LAST_NUMBER.findall(text)
  return numbers[-1].strip() if numbers else None


def _box_content(text: str, boxes: list[re.Match]) -> str | None:
  """Content of the last outermost box; nested boxes are opened."""
  content, end = None, -1
  for box in boxes:
    if box.start() < end:
      continue  # inside the box before
    rest = text[box.end() :].lstrip()
    if rest.startswith('{'):
      content = _balanced(rest)
      end = (
        len(text) if content is None else len(text) - len(rest) + len(content)
      )
    else:
      bare = re.match(r'[^\s$.,;]+', rest)
      content = bare.group() if bare else ''
  if content is None:
    return None
  inner = list(_BOX.finditer(content))
  if inner:
    return _box_content(content, inner)
  return _trim(content)


def _balanced(text: str) -> str | None:
  r"""What is between the `{` at the start and its `}`; `\{` is no brace."""
  depth = 0
  for match in re.finditer(r'\\.|[{}]', text, re.DOTALL):
    depth += {'{': 1, '}': -1}.get(match.group(), 0)
    if depth == 0 and match.group() == '}':
      return text[1 : match.start()]
  return None


def _first_sentence(text: str) -> str:
  """Up to a full stop that ends a sentence (not the one in 3.5)."""
  return re.split(r'[.;!?](?:\*\*)?(?:\s|$)|\n', text, maxsplit=1)[0]


def _trim(text: str) -> str:
  r"""Takes off Markdown and math marks, and \text{} around the whole."""
  text = text.strip().strip('*`').strip()
  for opening, closing in (
    (r'\(', r'\)'),
    (r'\[', r'\]'),
    ('$$', '$$'),
    ('$', '$'),
  ):
    inner = text[len(opening) : -len(closing)]
    if (
      text.startswith(opening)
      and text.endswith(closing)
      and len(text) > len(opening)
      and opening not in inner
    ):
      text = inner.strip()
  wrapped = re.match(
    r'\\(?:text|textbf|mathrm|mathbf)\s*(\{.*)', text, re.DOTALL
  )
  if wrapped:
    content = _balanced(wrapped.group(1))
    if content is not None and len(content) + 2 == len(wrapped.group(1)):
      return content.strip()
  return text


# Deciding equality.


def equal(answer: str | None, gold: str | None) -> bool:
  """Whether two final answers are the same value; symmetric.

  Units, currency and a percent sign are ignored where one side has none
  (50% equals 50 and 0.5), but 5 cm is not 5 m. Several answers are compared as
  a set, pairs and intervals in order. None and the empty string equal nothing.
  Works from any thread and takes at most about three seconds.
  """
  if answer is None or gold is None:
    return False
  return _equal(_normalize(answer), _normalize(gold))


class _Number(NamedTuple):
  value: Fraction
  decimals: int | None  # digits after the point; None where not a plain decimal
  digits: int  # significant digits as written
  unit: str
  percent: bool


class _Members(NamedTuple):
  kind: str  # 'set', or the brackets of a tuple or interval, or 'union'
  items: tuple[str, ...]


@functools.lru_cache(65536)
def _equal(answer: str, gold: str) -> bool:
  if not answer or not gold:
    return False
  if answer == gold or _words(answer) == _words(gold):
    return True
  if max(len(answer), len(gold)) > _MAX_CHARS:
    return False
  assigned, assigned_gold = _assignment(answer), _assignment(gold)
  if assigned or assigned_gold:
    if assigned and assigned_gold and assigned[0] != assigned_gold[0]:
      return False
    return _equal(
      assigned[1] if assigned else answer,
      assigned_gold[1] if assigned_gold else gold,
    )
  number, number_gold = _number(answer), _number(gold)
  if number and number_gold:
    return _numbers_equal(number, number_gold)
  members, members_gold = _members(answer), _members(gold)
  if members or members_gold:
    return _members_equal(
      members or _Members('set', (answer,)),
      members_gold or _Members('set', (gold,)),
    )
  if not (_is_symbolic(answer) and _is_symbolic(gold)):
    return False
  for rounded, one, other in (
    (number, answer, gold),
    (number_gold, gold, answer),
  ):
    if rounded and rounded.decimals and rounded.digits >= _MIN_ROUNDED_DIGITS:
      return _compare(one, other, rounded.decimals)
  return _compare(answer, gold, None)


_SPACE_COMMANDS = re.compile(
  r'\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|quad|qquad)(?![a-zA-Z])'
  r'|\\[!,;: ]|~'
)
_TEXT_COMMANDS = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox)\s*'
  r'\{([^{}]*)\}'
)
_CHARACTERS = str.maketrans({
  **dict.fromkeys('\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d', '-'),
  **dict.fromkeys('\u00a0\u2007\u2009\u202f', ' '),
  '\u00d7': r'\times ', '\u00b7': r'\cdot ', '\u00f7': '/', '\u2044': '/',
  '\u03c0': r'\pi ', '\u221e': r'\infty ', '\u222a': r'\cup ',
  '\u00b1': r'\pm ', '\u2264': r'\le ', '\u2265': r'\ge ',
  '\u00b0': ' degrees', '\u221a': r'\sqrt ',
})  # fmt: skip


def _normalize(text: str) -> str:
  """One spelling for marks, spaces, dashes and fractions."""
  text = ''.join(
    f' {unicodedata.normalize("NFKC", c)}' if _is_vulgar(c) else c for c in text
  )
  text = _trim(text.translate(_CHARACTERS))
  if (match := _BOX.match(text)) is not None:
    text = _box_content(text, [match]) or ''
  text = text.replace('{,}', ',').replace(r'\$', '$').replace(r'\%', '%')
  text = re.sub(r'(?<=\d)\\[,!;:](?=\d{3})', ',', text)  # 1\,234
  text = re.sub(  # 1 234 567, but not 1 234/567
    r'(?<![\d/.,])\d{1,3}(?: \d{3})+(?![\d/])',
    lambda match: match.group().replace(' ', ''),
    text,
  )
  text = re.sub(r'\\[dtc]frac', r'\\frac', text)
  text = re.sub(r'\^\s*\{?\s*\\circ\s*\}?|\\degree', ' degrees', text)
  text = _SPACE_COMMANDS.sub(' ', text)
  text = _TEXT_COMMANDS.sub(r' \1 ', text)
  text = text.strip().rstrip('.').strip('*`')
  text = re.sub(r'\s+', ' ', text).strip()
  if re.fullmatch(r'\(\s*[A-Za-z]\s*\)', text):  # a choice: (B) is B
    text = text.strip('() ')
  return text


def _is_vulgar(character: str) -> bool:
  return '\u2044' in unicodedata.normalize('NFKC', character) and (
    character != '\u2044'
  )


def _words(text: str) -> str:
  """For comparing words: spaces collapsed, case ignored beyond one letter."""
  return text.casefold() if re.search(r'[A-Za-z]{2}', text) else text


def _assignment(text: str) -> tuple[str, str] | None:
  r"""('x', '5') for 'x = 5', 'f(x) = 5' and 'x \in 5'."""
  match = re.fullmatch(
    r'([A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?)\s*(?:=|\\in\b)\s*([^=<>]+)', text
  )
  return (match.group(1).replace(' ', ''), match.group(2)) if match else None


_FRACTION = re.compile(
  r'(?P<sign>[-+]?)\s*(?:(?P<whole>\d+)\s*(?=\\frac|\s\d))?\s*'
  r'(?:\\frac\s*(?:\{\s*(?P<n1>-?[\d.]+)\s*\}|(?P<n2>\d))\s*'
  r'(?:\{\s*(?P<d1>-?[\d.]+)\s*\}|(?P<d2>\d))'
  r'|(?P<n3>[\d.]+)\s*/\s*(?P<d3>[\d.]+))'
)
_DECIMAL = re.compile(
  rf'(?P<sign>[-+]?)\s*(?P<currency>[$€£¥₹]?)\s*(?P<sign2>[-+]?)'
  rf'(?P<body>{_PLAIN_NUMBER}|\d+\.)'
)
_POWER_OF_TEN = re.compile(
  r'\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*))\s*\{?\s*'
  r'(?P<exponent>[-+]?\d{1,4})\s*\}?'
)
_UNIT = re.compile(
  r'\s*(?:[A-Za-z]{2,}\.?|(?<=\s)[A-Za-z]\b)(?:[\s/-]+[A-Za-z.]+|\^\{?[23]\}?)*'
)
_CURRENCY = {'$': 'dollar', '€': 'euro', '£': 'pound', '¥': 'yen', '₹': 'rupee'}
# Only units of this table can contradict each other; other words are prose.
_MEASURES = {
  alias: name
  for name, aliases in {
    'metre': 'm meter metre', 'centimetre': 'cm centimeter centimetre',
    'millimetre': 'mm millimeter millimetre', 'kilometre': 'km kilometer kilometre',
    'mile': 'mi mile', 'inch': 'in inch inche', 'foot': 'ft foot feet', 'yard': 'yd yard',
    'gram': 'g gram', 'kilogram': 'kg kilogram', 'milligram': 'mg milligram',
    'pound': 'lb pound', 'ounce': 'oz ounce', 'ton': 'ton tonne',
    'second': 's sec second', 'minute': 'min minute', 'hour': 'h hr hour',
    'day': 'day', 'week': 'week', 'month': 'month', 'year': 'yr year',
    'litre': 'l liter litre', 'millilitre': 'ml milliliter millilitre',
    'gallon': 'gal gallon', 'degree': 'degree deg', 'radian': 'rad radian',
    'dollar': 'dollar usd', 'euro': 'euro eur', 'cent': 'cent',
  }.items()
  for alias in aliases.split()
}  # fmt: skip


def _number(text: str) -> _Number | None:
  """A number with or without a unit, exactly; None for anything else."""
  decimals, digits, currency = None, 0, ''
  if match := _FRACTION.match(text):
    part = match.groupdict()
    try:
      value = Fraction(part['n1'] or part['n2'] or part['n3']) / Fraction(
        part['d1'] or part['d2'] or part['d3']
      )
    except (ValueError, ZeroDivisionError):
      return None
    if part['whole']:
      value += int(part['whole'])
    value = -value if part['sign'] == '-' else value
  elif match := _DECIMAL.match(text):
    body = match.group('body').replace(',', '').rstrip('.')
    try:
      value = Fraction(body)
    except ValueError:  # more digits than Python converts
      return None
    if '-' in match.group('sign') + match.group('sign2'):
      value = -value
    currency = _CURRENCY.get(match.group('currency'), '')
    decimals = len(body.partition('.')[2])
    digits = len(body.replace('.', '').lstrip('0'))
  else:
    return None
  end = match.end()
  if decimals is not None and (power := _POWER_OF_TEN.match(text, end)):
    exponent = int(power.group('exponent'))
    if abs(exponent) > _MAX_EXPONENT:
      return None
    value *= Fraction(10) ** exponent
    decimals, end = max(decimals - exponent, 0), power.end()
  rest = text[end:].strip()
  percent = re.match(r'%|percent(?:age)?\b', rest)
  if percent:
    rest = rest[percent.end() :].strip()
  if rest and not _UNIT.fullmatch(text[end:] if not percent else f' {rest}'):
    return None
  return _Number(
    value, decimals, digits, currency or _measure(rest), bool(percent)
  )


def _measure(words: str) -> str:
  """The unit of measurement, in one spelling, or '' for prose."""
  first = words.split(' ')[0].rstrip('.').lower()
  power = ''.join(re.findall(r'\^\{?([23])', words))
  singular = first[:-1] if len(first) > 2 and first.endswith('s') else first
  name = _MEASURES.get(first) or _MEASURES.get(singular, '')
  return name + power if name else ''


def _numbers_equal(a: _Number, b: _Number) -> bool:
  if a.unit and b.unit and a.unit != b.unit:
    return False
  if _close(a, b):
    return True
  if a.percent == b.percent:
    return False
  percent, other = (a, b) if a.percent else (b, a)
  decimals = None if percent.decimals is None else percent.decimals + 2
  return _close(
    percent._replace(value=percent.value / 100, decimals=decimals), other
  )


def _close(a: _Number, b: _Number) -> bool:
  """Equal, or one the rounding of what the other writes exactly."""
  if a.value == b.value:
    return True
  for rounded, exact in ((a, b), (b, a)):
    if (
      rounded.decimals
      and rounded.digits >= _MIN_ROUNDED_DIGITS
      and exact.decimals is None
      and not _is_finite_decimal(exact.value)
      and abs(rounded.value - exact.value) * 2
      <= Fraction(1, 10**rounded.decimals)
    ):
      return True
  return False


def _is_finite_decimal(value: Fraction) -> bool:
  denominator = value.denominator
  for prime in (2, 5):
    while denominator % prime == 0:
      denominator //= prime
  return denominator == 1


def _split(text: str, separator: str) -> list[str]:
  """Splits where no bracket is open."""
  parts, depth, start = [], 0, 0
  for match in re.finditer(rf'\\[{{}}]|[()\[\]{{}}]|{separator}', text):
    mark = match.group()
    if mark in ('(', '[', '{', r'\{'):
      depth += 1
    elif mark in (')', ']', '}', r'\}'):
      depth -= 1
    elif depth == 0:
      parts.append(text[start : match.start()])
      start = match.end()
  return [part.strip() for part in [*parts, text[start:]]]


def _members(text: str) -> _Members | None:
  """Reads a set, list, plus-minus, tuple, interval or union."""
  union = _split(text, r'\\cup(?![a-z])')
  if len(union) > 1:
    return _Members('union', tuple(union))
  if r'\pm' in text:
    left, _, right = text.partition(r'\pm')
    left, right = left.strip(), right.strip()
    if left:
      return _Members('set', (f'{left}+{right}', f'{left}-{right}'))
    return _Members('set', (right, f'-{right}'))
  if text.startswith(r'\{') and text.endswith(r'\}'):
    return _Members('set', tuple(_split(text[2:-2], ',')))
  for opening in '([':
    if text[0] == opening and text[-1] in ')]' and len(_split(text, ',')) == 1:
      items = _split(text[1:-1], ',')
      if len(items) > 1:
        return _Members(opening + text[-1], tuple(items))
  if _number(text):  # 1,234 is a number
    return None
  items = _split(text, r',|\band\b|\bor\b|;')
  if len(items) > 1:
    return _Members('set', tuple(item for item in items if item))
  return None


def _members_equal(a: _Members, b: _Members) -> bool:
  kinds = {a.kind, b.kind}
  if len(kinds) == 1 and a.kind not in ('set', 'union'):
    return len(a.items) == len(b.items) and all(map(_equal, a.items, b.items))
  if kinds == {'set', '()'}:  # "1, 2" for the pair (1, 2)
    return len(a.items) == len(b.items) and all(map(_equal, a.items, b.items))
  if len(kinds) > 1:
    return False
  return all(
    any(_equal(x, y) for y in second)
    for first, second in ((a.items, b.items), (b.items, a.items))
    for x in first
  )


_FUNCTIONS = frozenset({
  'sin', 'cos', 'tan', 'cot', 'sec', 'csc', 'arcsin', 'arccos', 'arctan',
  'sinh', 'cosh', 'tanh', 'log', 'exp', 'sqrt', 'max', 'min', 'gcd', 'lcm',
})  # fmt: skip


def _is_symbolic(text: str) -> bool:
  """Whether a parser may be trusted with it: no prose, times, or 3 4."""
  text = re.sub(r'\\(?:begin|end)\{[a-z]*matrix\}', ' ', text)
  runs = re.findall(r'(?<![\\A-Za-z])[A-Za-z]{3,}', text)
  if any(run not in _FUNCTIONS for run in runs):
    return False
  if not re.search(r'[A-Za-z0-9]', text) or re.search(
    r'[:$?!]{2}|[:$?"]', text
  ):
    return False
  return not re.search(r'\d\s+[\d.]', text)


# Symbolic comparison, in worker processes.

_POOL: workers.Pool | None = None
_POOL_LOCK = threading.Lock()


def _compare(answer: str, gold: str, decimals: int | None) -> bool:
  global _POOL
  with _POOL_LOCK:
    if _POOL is None:
      from gdpo_jax.rewards import symbolic  # sympy: half a second, if at all

      _POOL = workers.Pool(
        symbolic.equal, 2, memory_bytes=_COMPARE_MEMORY_BYTES
      )
  try:
    return _POOL.call(answer, gold, decimals, timeout_s=_COMPARE_TIMEOUT_S)
  except (TimeoutError, workers.WorkerDied, workers.WorkerError):
    return False


# Reward functions.


def correctness(
  completions: Sequence[Any], answer: Sequence[Any], **_: Any
) -> list[float | None]:
  """1.0 where the final answer equals the column `answer`, else 0.0.

  A gold text with `####` or a box in it is reduced to its own final answer; a
  row whose gold is None has no opinion (None).
  """
  return [
    None
    if gold is None
    else float(equal(extract(calls.text_of(text)), _gold(gold)))
    for text, gold in zip(completions, answer)
  ]


def _gold(answer: Any) -> str | None:
  text = str(answer)
  return extract(text) if '####' in text or _BOX.search(text) else text


def integer(completions: Sequence[Any], **_: Any) -> list[float]:
  """1.0 where the final answer is written as an integer, else 0.0.

  Sign and thousands separators are allowed; 42.0, 84/2 and units are not.
  """
  pattern = re.compile(r'[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)')
  return [
    float(
      answer is not None and pattern.fullmatch(_normalize(answer)) is not None
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
