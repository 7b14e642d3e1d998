"""One reward for rows of several tasks: each is asked in its own way.

Lives here and not with the tasks, because worker processes load it, and they
never load jax.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_jax.rewards import calls


class ByTask:
  """Asks, for each row, the function of its task; None where there is none.

  Reads the column `task`. All columns that hold a value per row are cut to the
  rows of the task, so that a function sees what it would see on its own.
  """

  def __init__(self, name: str, by_task: Mapping[str, Callable]):
    self.__name__, self._by_task = name, dict(by_task)

  def __call__(self, task: Sequence[str], **offered: Any) -> list:
    values: list[float | None] = [None] * len(task)
    for name, fn in self._by_task.items():
      rows = [row for row, each in enumerate(task) if each == name]
      if not rows:
        continue
      returned = fn(**_for_rows(fn, offered, rows, len(task)))
      if inspect.isawaitable(returned):
        returned = asyncio.run(_result(returned))
      try:
        returned = calls.sequence(returned, len(rows))
      except calls.WrongReturn as error:
        message = f'task {name!r}: {error}'
        raise calls.WrongReturn(error.kind, message) from None
      for row, value in zip(rows, returned):
        values[row] = value
    return values


async def _result(awaitable):
  return await awaitable


def _for_rows(fn, offered, rows, total) -> dict[str, Any]:
  """The arguments `fn` asks for; what holds a value per row is cut to `rows`."""
  names, takes_all = calls.wanted(fn)
  return {
    key: [value[row] for row in rows]
    if isinstance(value, (list, tuple)) and len(value) == total
    else value
    for key, value in offered.items()
    if takes_all or key in names
  }
