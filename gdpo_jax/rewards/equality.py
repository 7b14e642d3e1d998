"""Whether two math answers are the same value; exact.

  answer, gold --normalize--> numbers | sets, tuples, intervals | expressions

Numbers are compared as fractions; sets, tuples and intervals by their members;
anything else by `math-verify`'s parser and sympy (`symbolic`). There is no
absolute tolerance, so 2^-99 and 2^-98 differ. One side written as a decimal
equals a value that no decimal can write (2/3, pi) if it has at least four
significant digits and is that value rounded at its last digit: 0.6667 is 2/3,
0.67 and 0.6666 are not.

A policy soon writes expressions that keep sympy busy for ever (9^9^9^9). They
are compared in worker processes that are killed when time is up, from whichever
thread `equal` is called; such an answer is wrong, not missing.
"""

import functools
import re
import threading
import time
from fractions import Fraction
from typing import NamedTuple

from gdpo_jax.rewards import latex, workers

NUM_WORKERS = 2  # for expressions; started when first needed
_COMPARE_TIMEOUT_S = 3.0
_COMPARE_MEMORY_BYTES = 2 << 30
_MAX_CHARS = 400  # of an answer; longer ones are equal only if identical
_MAX_EXPONENT = 400
_MIN_ROUNDED_DIGITS = 4


def equal(answer: str | None, gold: str | None) -> bool:
  """Whether two final answers are the same value; symmetric.

  Units, currency and a percent sign are ignored where one side has none
  (50% equals 50 and 0.5), but 5 cm is not 5 m. Several answers are compared as
  a set, pairs and intervals in order. None and the empty string equal nothing.
  Works from any thread and takes at most about three seconds.
  """
  if answer is None or gold is None:
    return False
  _THREAD.deadline = time.monotonic() + _COMPARE_TIMEOUT_S
  return _equal(latex.normalize(answer), latex.normalize(gold))


class _Number(NamedTuple):
  value: Fraction
  decimals: int | None  # digits after the point; None where not a plain decimal
  digits: int  # significant digits as written
  unit: str
  percent: bool


class _Members(NamedTuple):
  kind: str  # 'list', 'set', 'union', or the brackets of a tuple or interval
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
      members or _Members('list', (answer,)),
      members_gold or _Members('list', (gold,)),
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
  rf'(?P<body>{latex.PLAIN_NUMBER}|\d+\.)'
)
_POWER_OF_TEN = re.compile(
  r'\s*(?:[eE]|(?:\\times|\\cdot|\*)\s*10\s*(?:\^|\*\*))\s*\{?\s*'
  r'(?P<exponent>[-+]?\d{1,4})\s*\}?'
)
_UNIT = re.compile(
  r'(?P<space>\s*)(?P<word>[A-Za-z]+)\.?(?:[\s/-]+[A-Za-z.]+|\^\{?[23]\}?)*'
)
_CURRENCY = dict(zip('$€£¥₹', ('dollar', 'euro', 'pound', 'yen', 'rupee')))
# Only units of this table can contradict each other; other words are prose.
_MEASURES = {
  alias: name
  for name, aliases in {
    'metre': 'm meter metre', 'centimetre': 'cm centimeter centimetre',
    'millimetre': 'mm millimeter millimetre',
    'kilometre': 'km kilometer kilometre', 'mile': 'mi mile',
    'inch': 'in inch inche', 'foot': 'ft foot feet', 'yard': 'yd yard',
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
  unit = currency
  if rest:
    match = _UNIT.fullmatch(text[end:] if not percent else f' {rest}')
    if match is None:
      return None
    unit = unit or _measure(match.group('word'), rest)
    # Glued letters are a product (2xy), and so may be short words (2 xy).
    word = match.group('word')
    is_prose = match.group('space') and len(word) > 2 and word not in _FUNCTIONS
    if not (_measure(word, rest) or is_prose):
      return None
  return _Number(value, decimals, digits, unit, bool(percent))


def _measure(word: str, rest: str) -> str:
  """The unit of measurement, in one spelling, or '' for prose."""
  word = word.lower()
  singular = word[:-1] if len(word) > 2 and word.endswith('s') else word
  name = _MEASURES.get(word) or _MEASURES.get(singular, '')
  power = ''.join(re.findall(r'\^\{?([23])', rest))
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
  if text.count(r'\pm') == 1:
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
    return _Members('list', tuple(item for item in items if item))
  return None


def _members_equal(a: _Members, b: _Members) -> bool:
  kinds = {a.kind, b.kind}
  if kinds <= {'list', 'set'} or kinds == {'union'}:
    return all(
      any(_equal(x, y) for y in second)
      for first, second in ((a.items, b.items), (b.items, a.items))
      for x in first
    )
  if len(kinds) > 1 and kinds != {'list', '()'}:  # "1, 2" for the pair (1, 2)
    return False
  return len(a.items) == len(b.items) and all(map(_equal, a.items, b.items))


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
  if not re.search(r'[A-Za-z0-9]', text) or re.search(r'[:$?"]|!!', text):
    return False
  return not re.search(r'\d\s+[\d.]', text)


_POOL: workers.Pool | None = None
_POOL_LOCK = threading.Lock()
_THREAD = threading.local()  # .deadline of the comparison in progress


def _compare(answer: str, gold: str, decimals: int | None) -> bool:
  global _POOL
  asked = time.monotonic()
  with _POOL_LOCK:
    if _POOL is None:
      from gdpo_jax.rewards import symbolic  # sympy: half a second, if at all

      _POOL = workers.Pool(
        symbolic.equal, NUM_WORKERS, memory_bytes=_COMPARE_MEMORY_BYTES
      )
  # Making the pool takes seconds on a busy machine, and is no part of the
  # comparison: an honest answer must not be wrong for it.
  _THREAD.deadline += time.monotonic() - asked
  # One budget for all the pairs of two long lists.
  remaining = max(_THREAD.deadline - time.monotonic(), 0.01)
  try:
    return _POOL.call(answer, gold, decimals, timeout_s=remaining)
  except (TimeoutError, workers.WorkerDied, workers.WorkerError):
    return False
