"""Looks for the largest batch that fits, with few compilations."""

import math
from collections.abc import Callable


def largest(
  first: int,
  possible: list[int],
  memory: Callable[[int], int],
  limit: int,
) -> int | None:
  """The largest of `possible` (ascending) whose memory is within the limit.

  Memory grows with the size, nearly along a line: the first two answers say
  where to look, and what is returned has been asked about. Three or four
  questions are the rule. None where not even the smallest is expected to fit.
  """
  at = possible.index(first)
  known = {first: memory(first)}
  while True:
    low = max((s for s, m in known.items() if m <= limit), default=0)
    high = min((s for s, m in known.items() if m > limit), default=math.inf)
    between = [s for s in possible if low < s < high]
    if not between:
      return low or None
    if len(known) == 1:
      at += 1 if low else -1
      guess = possible[at]
    else:
      nearest = sorted(known.items(), key=lambda item: abs(item[0] - low))
      (a, x), (b, y) = nearest[:2]
      slope = (y - x) / (b - a)
      guess = max(
        (s for s in between if x + slope * (s - a) <= limit), default=0
      )
    if not guess:
      return low or None
    known[guess] = memory(guess)


def divisors(n: int) -> list[int]:
  return [d for d in range(1, n + 1) if n % d == 0]
