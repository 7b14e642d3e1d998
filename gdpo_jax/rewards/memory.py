"""What a pipeline remembers between calls: known values, and who is muted."""

import collections
import hashlib
import pickle
from collections.abc import Mapping
from typing import NamedTuple


class Mute(NamedTuple):
  """Failed calls of one reward, and how long it still rests."""

  failed_in_a_row: int = 0
  steps_until_retry: int = 0  # > 0: muted


def next_mute(
  state: Mute,
  num_calls: int,
  num_failed: int,
  *,
  mute_after: int | None,
  retry_after: int,
) -> Mute:
  """Mute state after a step, from counts alone.

  With several processes the counts are sums over all of them, so that every
  process decides the same. A step in which at least one call went well ends the
  row of failures; a reward that is tried again and fails is muted at once.

  Args:
    state: before the step.
    num_calls: calls in this step; 0 while muted.
    num_failed: of them, how many gave no value at all (single missing rows,
      such as `None` for a row that the reward has no opinion on, do not count).
    mute_after: failed calls in a row that mute; None never does.
    retry_after: steps until a muted reward is tried again.
  """
  if state.steps_until_retry:
    return state._replace(steps_until_retry=state.steps_until_retry - 1)
  if not num_calls:
    return state
  if num_failed < num_calls:
    return Mute()
  in_a_row = state.failed_in_a_row + num_failed
  if mute_after is not None and in_a_row >= mute_after:
    return Mute(in_a_row, retry_after)
  return Mute(in_a_row)


class Cache:
  """Least recently used values, by row key; None = not known."""

  def __init__(self, size: int):
    self._size = size
    self._values: collections.OrderedDict[bytes, float] = (
      collections.OrderedDict()
    )

  def get(self, key: bytes) -> float | None:
    if key in self._values:
      self._values.move_to_end(key)
    return self._values.get(key)

  def put(self, key: bytes, value: float):
    self._values[key] = value
    self._values.move_to_end(key)
    while len(self._values) > self._size:
      self._values.popitem(last=False)


def row_keys(name: str, rows: Mapping[str, list], n: int) -> list[bytes]:
  """A digest of all that a pure function can see of a row."""
  ordered = sorted(rows.items())
  return [
    hashlib.blake2b(
      pickle.dumps([name, *((key, column[row]) for key, column in ordered)]),
      digest_size=16,
    ).digest()
    for row in range(n)
  ]
