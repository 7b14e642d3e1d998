"""Sympy's verdict on two expressions; runs in a worker process.

Exact, or where sympy finds no proof by forty agreeing significant digits; never
by an absolute tolerance. What would only keep sympy busy (9^9^9^9, the
factorial of a million) is refused by an estimate of its size, so that a batch
full of such answers does not cost a time-out each.
"""

import logging
import math
from typing import Any

import math_verify
import sympy
from sympy.core.relational import Relational

logging.getLogger('math_verify').setLevel(logging.ERROR)

_CONFIG = math_verify.LatexExtractionConfig(boxed_match_priority=-1)
_MAX_LOG10 = 1e5  # of any number met on the way
_PROOF_DIGITS = 40


def equal(answer: str, gold: str, decimals: int | None) -> bool:
  """Whether two LaTeX expressions are the same value.

  Args:
    answer, gold: symmetric, unless decimals are given.
    decimals: `answer` is a decimal with so many digits after the point, and may
      be `gold` rounded if no decimal can write that exactly; None: it may not.
  """
  a, b = _parse(answer), _parse(gold)
  if a is None or b is None or _too_large(a) or _too_large(b):
    return False
  return _same(a, b, decimals)


def _parse(text: str) -> Any:
  parsed = math_verify.parse(
    f'${text}$',
    [_CONFIG],
    fallback_mode='no_fallback',
    parsing_timeout=None,  # its own uses signals, which need the main thread
  )
  if not parsed or isinstance(parsed[0], str):
    return None
  expression = parsed[0]
  if isinstance(expression, sympy.MatrixBase):
    expression = expression.as_immutable()
  return expression.subs(
    {s: sympy.I for s in expression.free_symbols if s.name == 'i'}
  )


def _too_large(expression: Any) -> bool:
  try:
    return _log10(expression) > _MAX_LOG10
  except (OverflowError, RecursionError):
    return True


def _log10(node: Any) -> float:
  """Upper estimate of log10 of |node| and of all numbers inside it; >= 0."""
  if isinstance(node, sympy.Rational):
    return max(node.p.bit_length(), node.q.bit_length()) * math.log10(2)
  if isinstance(node, sympy.Float):
    return abs(math.log10(abs(float(node)) or 1.0))
  inner = max((_log10(arg) for arg in node.args), default=0.0)
  if isinstance(node, sympy.factorial):
    n = 10.0**inner
    return max(inner, n * math.log10(n + 1))
  if isinstance(node, sympy.Pow) and not node.free_symbols:
    exponent = abs(float(node.exp)) if node.exp.is_Rational else 10.0**inner
    return max(inner, _log10(node.base) * exponent)
  if isinstance(node, (sympy.Mul, sympy.Add)):
    return sum(_log10(arg) for arg in node.args)
  return inner


def _same(a: Any, b: Any, decimals: int | None) -> bool:
  if isinstance(a, sympy.MatrixBase) or isinstance(b, sympy.MatrixBase):
    return (
      isinstance(a, sympy.MatrixBase)
      and isinstance(b, sympy.MatrixBase)
      and a.shape == b.shape
      and all(_same(x, y, decimals) for x, y in zip(a, b))
    )
  a, b = (sympy.nsimplify(x.doit(), rational=True) for x in (a, b))
  if any(x.has(sympy.zoo, sympy.nan) for x in (a, b)):
    return False  # all nonsense is alike
  if a == b:
    return True
  if isinstance(a, Relational) or isinstance(b, Relational):
    return (
      isinstance(a, Relational)
      and isinstance(b, Relational)
      and a.canonical == b.canonical
    )
  if not (isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr)):
    return False
  difference = sympy.simplify(a - b)
  if difference == 0:
    return True
  if not difference.is_number:
    return bool(difference.equals(0))
  if decimals is not None and not _is_finite_decimal(b):
    return bool(abs(difference) * 2 <= sympy.Rational(1, 10**decimals))
  if difference.is_rational:
    return False
  # A symbolic proof is not always found; digits relative to the size decide.
  scale = max(abs(sympy.N(x, _PROOF_DIGITS + 10)) for x in (a, b))
  gap = abs(sympy.N(difference, _PROOF_DIGITS + 10))
  if gap > scale * sympy.Float(f'1e-{_PROOF_DIGITS}'):
    return False
  return difference.equals(0) is not False


def _is_finite_decimal(value: Any) -> bool:
  value = sympy.simplify(value)
  return value.is_Rational and set(sympy.factorint(value.q)) <= {2, 5}
