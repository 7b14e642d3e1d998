"""In which order examples are drawn: shuffled, in shares, or by success.

  examples, seed --Curriculum.order--> Order --take(n)--> n indices
                                         ^--observe-- rewards of what was drawn

An order is a small state machine: what it draws next depends on its arguments
and on its cursor alone, and the cursor is plain JSON, so a run that was stopped
goes on with the draws that the uninterrupted one would have made.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

Cursor = dict[str, Any]


class Order(Protocol):
  """Draws indices of examples; `cursor` says how far it is.

  A cursor has at least 'epoch' and 'position': as many draws as there are
  examples make an epoch.
  """

  @property
  def cursor(self) -> Cursor: ...

  def restore(self, cursor: Mapping[str, Any]) -> None: ...

  def take(self, n: int) -> list[int]: ...

  def observe(
    self, indices: Sequence[int], values: Mapping[str, np.ndarray]
  ) -> None:
    """What became of examples: f32[P, G] raw values by name of the reward."""


class Curriculum(Protocol):
  """How a task wants its examples drawn."""

  def order(
    self, examples: Sequence[Mapping[str, Any]], seed: int
  ) -> Order: ...


class Shuffled:
  """Each example once per epoch, in a permutation drawn from (seed, epoch)."""

  def __init__(self, num_examples: int, seed: tuple[int, ...]):
    self._num, self._seed = num_examples, seed
    self._epoch = self._position = 0

  def take(self, n: int) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < n:
      rng = np.random.default_rng([*self._seed, self._epoch])
      order = rng.permutation(self._num)
      taken = order[self._position : self._position + n - len(chosen)]
      chosen.extend(int(i) for i in taken)
      self._position += len(taken)
      if self._position == self._num:
        self._epoch, self._position = self._epoch + 1, 0
    return chosen

  def observe(self, indices, values) -> None:
    """Draws do not depend on what was scored."""

  @property
  def cursor(self) -> Cursor:
    return {'epoch': self._epoch, 'position': self._position}

  def restore(self, cursor: Mapping[str, Any]) -> None:
    self._epoch, self._position = _place(cursor, self._num)


@dataclasses.dataclass(frozen=True)
class Shares:
  """Every batch holds fixed shares of several kinds of examples.

  Each kind is shuffled on its own, and the next draw is of the kind that is
  furthest behind its share: ten draws at 7:2:1 are seven, two and one.

  Attributes:
    column: what tells the kinds apart.
    shares: by value of the column, for instance {'math': 1, 'tools': 1}; or a
      list, easy first, of a numeric column: its distinct values where they are
      as many as the shares, or else parts with equally many examples.
  """

  column: str
  shares: Mapping[Any, float] | Sequence[float] = (7, 2, 1)

  def order(self, examples, seed: int) -> '_Pools':
    values = [_column(e, self.column) for e in examples]
    if isinstance(self.shares, Mapping):
      unknown = sorted({str(v) for v in values if v not in self.shares})
      if unknown:
        raise ValueError(
          f'no share for {self.column} {", ".join(unknown)}; shares are given '
          f'for {sorted(map(str, self.shares))}.'
        )
      kinds = list(self.shares)
      kind = [kinds.index(value) for value in values]
      shares = list(self.shares.values())
    else:
      shares = list(self.shares)
      kind = _by_size(values, len(shares), self.column)
    if not shares or any(not s > 0 for s in shares):
      raise ValueError(f'shares must be positive numbers, got {self.shares}.')
    pools = [np.flatnonzero(np.equal(kind, k)) for k in range(len(shares))]
    empty = [k for k, pool in enumerate(pools) if not len(pool)]
    if empty:
      raise ValueError(
        f'of the {len(shares)} kinds of {self.column!r}, number '
        f'{", ".join(str(k + 1) for k in empty)} has no example; give fewer '
        'shares or other data.'
      )
    return _Pools(pools, np.asarray(shares, float) / sum(shares), seed)


class _Pools:
  """One `Shuffled` for each kind."""

  def __init__(self, pools, shares, seed):
    self._pools, self._shares = pools, shares
    self._num = sum(map(len, pools))
    self._orders = [
      Shuffled(len(pool), (seed, k)) for k, pool in enumerate(pools)
    ]
    self._taken = np.zeros(len(pools), int)

  def take(self, n: int) -> list[int]:
    chosen = []
    for _ in range(n):
      # the small number keeps ties from hanging on rounding
      behind = self._shares * (self._taken.sum() + 1) - self._taken
      k = int(np.argmax(np.round(behind, 9)))
      [i] = self._orders[k].take(1)
      chosen.append(int(self._pools[k][i]))
      self._taken[k] += 1
    return chosen

  def observe(self, indices, values) -> None:
    """Draws do not depend on what was scored."""

  @property
  def cursor(self) -> Cursor:
    epoch, position = divmod(int(self._taken.sum()), self._num)
    return {
      'epoch': epoch,
      'position': position,
      'taken': self._taken.tolist(),
      'kinds': [order.cursor for order in self._orders],
    }

  def restore(self, cursor: Mapping[str, Any]) -> None:
    _place(cursor, self._num)
    if len(cursor['taken']) != len(self._orders):
      raise ValueError(
        f'the cursor is of {len(cursor["taken"])} kinds of examples, here are '
        f'{len(self._orders)}; resume with the shares of that run.'
      )
    self._taken = np.asarray(cursor['taken'], int)
    for order, each in zip(self._orders, cursor['kinds']):
      order.restore(each)


@dataclasses.dataclass(frozen=True)
class BySuccess:
  """Examples that are solved now and then come up most often.

  The chance of an example is proportional to `4 p (1 - p) + floor`, with p the
  moving share of its rows that reach `solved`: a group that is all right or all
  wrong says nothing about the reward. Examples that were never drawn count as
  p = 0.5, so that they come up early. No example comes twice in a batch, unless
  there are fewer than the batch has places.

  Attributes:
    reward: whose raw values are watched.
    solved: the value from which a row counts as solved.
    floor: keeps examples that are always or never solved in the draw.
    memory: weight of the old p when a new group is seen, in [0, 1).
  """

  reward: str
  solved: float = 1.0
  floor: float = 0.05
  memory: float = 0.5

  def __post_init__(self):
    if not self.floor > 0 or not 0 <= self.memory < 1:
      raise ValueError(
        f'floor must be above 0 and memory in [0, 1), got {self.floor} and '
        f'{self.memory}.'
      )

  def order(self, examples, seed: int) -> '_BySuccess':
    return _BySuccess(self, len(examples), seed)


class _BySuccess:
  """Moving success rates; -1 for an example that was never seen."""

  def __init__(self, settings: BySuccess, num_examples: int, seed: int):
    self._settings, self._num, self._seed = settings, num_examples, seed
    self._rates = np.full(num_examples, -1.0)
    self._drawn = 0

  def take(self, n: int) -> list[int]:
    chosen: list[int] = []
    p = np.where(self._rates < 0, 0.5, self._rates)
    weights = 4 * p * (1 - p) + self._settings.floor
    rng = np.random.default_rng([self._seed, self._drawn])
    while len(chosen) < n:
      # Gumbel top-k: a draw without replacement, by weight
      keys = np.log(weights) + rng.gumbel(size=self._num)
      chosen.extend(np.argsort(-keys)[: n - len(chosen)].tolist())
    self._drawn += n
    return chosen

  def observe(self, indices, values) -> None:
    if self._settings.reward not in values:
      raise ValueError(
        f'the curriculum watches the reward {self._settings.reward!r}, but '
        f'there are {sorted(values)}.'
      )
    for i, group in zip(indices, values[self._settings.reward]):
      seen = group[~np.isnan(group)]
      if seen.size:
        rate = float(np.mean(seen >= self._settings.solved))
        old, keep = self._rates[i], self._settings.memory
        self._rates[i] = rate if old < 0 else keep * old + (1 - keep) * rate

  @property
  def cursor(self) -> Cursor:
    epoch, position = divmod(self._drawn, self._num)
    return {
      'epoch': epoch,
      'position': position,
      'rates': self._rates.tolist(),
    }

  def restore(self, cursor: Mapping[str, Any]) -> None:
    epoch, position = _place(cursor, self._num)
    self._drawn = epoch * self._num + position
    self._rates = np.asarray(cursor['rates'], float)


def _place(cursor: Mapping[str, Any], num: int) -> tuple[int, int]:
  epoch, position = int(cursor['epoch']), int(cursor['position'])
  if epoch < 0 or not 0 <= position < num:
    raise ValueError(
      f'cursor at epoch {epoch}, position {position} lies outside the '
      f'{num} examples of an epoch.'
    )
  return epoch, position


def _column(example: Mapping[str, Any], column: str) -> Any:
  if column not in example:
    raise ValueError(
      f'an example has no column {column!r}, only {sorted(example)}.'
    )
  return example[column]


def _by_size(values: list[Any], parts: int, column: str) -> list[int]:
  """Which of `parts` parts each value belongs to, small values first."""
  try:
    numbers = [float(value) for value in values]
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{column!r} is not a number everywhere ({error}); give shares by value.'
    ) from error
  distinct = sorted(set(numbers))
  if len(distinct) == parts:
    return [distinct.index(number) for number in numbers]
  ranked = sorted(numbers)
  edges = [
    ranked[math.ceil(len(ranked) * k / parts) - 1] for k in range(1, parts)
  ]
  return [int(np.searchsorted(edges, number)) for number in numbers]
