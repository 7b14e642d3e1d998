"""The completions of a group, packed into fewer lines than there are rows.

  rows    aaaa....      line 0  aaaabbb.
          bbb.....  ->  line 1  cccccc..     place  row a 0  -1
          cccccc..                                  row b 4  -1
                                                    row c -1  0

What a pass over the layers costs then follows the tokens and not the longest
row. Lines have one width and every group as many, so that few shapes are
compiled.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from gdpo_jax.types import Array


def pack(
  lengths: np.ndarray, width: int, line_tokens: int
) -> np.ndarray | None:
  """Where rows go, first the longest of each group, into the first with room.

  Args:
    lengths: i[P, G], tokens of each row.
    width: Tc, of the rows; none is longer.
    line_tokens: of a line; at least `width`.
  Returns:
    i32[P * G, L]: where in line l of its group the row begins, -1 where it is
    not in it. L is a quarter, half, or three quarters of the lines that hold
    all rows at full width; None where none of these is enough.
  """
  num_groups, group = lengths.shape
  line_tokens = max(line_tokens, width)
  full = -(-group * width // line_tokens)
  place = np.full((num_groups, group, full), -1, np.int32)
  used = 0
  for p, row_lengths in enumerate(lengths):
    filled = np.zeros(full, int)
    for row in np.argsort(-row_lengths, kind='stable'):
      room = np.flatnonzero(filled + row_lengths[row] <= line_tokens)
      if not room.size:
        return None
      place[p, row, room[0]] = filled[room[0]]
      filled[room[0]] += row_lengths[row]
    used = max(used, np.count_nonzero(filled))
  sizes = sorted({-(-full * quarters // 4) for quarters in (1, 2, 3)})
  for size in sizes:
    if used <= size < full:
      return place[:, :, :size].reshape(num_groups * group, size)
  return None


class Lines(NamedTuple):
  """S slots of P groups, L lines of as many tokens one after the other."""

  source: Array  # i32[P, S], token of the group [G * Tc] that is in a slot
  segment: Array  # i32[P, S], its row in the group, -1 in a free slot
  step: Array  # i32[P, S], its number in the row
  slot: Array  # i32[P, G * Tc], where a token went; pads: anywhere
  num_lines: int  # L

  def take(self, x: Array) -> Array:
    """[P, G * Tc] -> [P, S]."""
    return jnp.take_along_axis(x, self.source, axis=1)

  def back(self, x: Array, shape: tuple[int, int]) -> Array:
    """[P, S] -> [N, Tc]."""
    return jnp.take_along_axis(x, self.slot, axis=1).reshape(shape)


def lines(
  place: Array, mask: Array, group_size: int, line_tokens: int
) -> Lines:
  """Both ways between rows and lines.

  Args:
    place: i32[N, L] of `pack`.
    mask: bool[N, Tc] of the rows.
    group_size: G.
    line_tokens: as in `pack`.
  """
  num_lines, (num_rows, width) = place.shape[1], mask.shape
  line_tokens = max(line_tokens, width)
  groups = (num_rows // group_size, group_size)
  offset = jnp.arange(num_lines, dtype=jnp.int32) * line_tokens
  begin = jnp.where(place < 0, -1, place + offset).max(axis=1)
  begin, length = begin.reshape(groups), mask.sum(axis=1).reshape(groups)
  slots = jnp.arange(num_lines * line_tokens, dtype=jnp.int32)
  inside = (slots >= begin[..., None]) & (slots < (begin + length)[..., None])
  taken, row = inside.any(axis=1), inside.argmax(axis=1).astype(jnp.int32)
  step = slots - jnp.take_along_axis(begin, row, axis=1)
  step = jnp.where(taken, step, 0)
  slot = begin[..., None] + jnp.arange(width, dtype=jnp.int32)
  return Lines(
    source=jnp.where(taken, row * width + step, 0),
    segment=jnp.where(taken, row, -1),
    step=step,
    slot=jnp.minimum(slot, len(slots) - 1).reshape(groups[0], -1),
    num_lines=num_lines,
  )
