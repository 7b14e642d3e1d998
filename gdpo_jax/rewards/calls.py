"""One call of one reward function: what it is given, what counts as a value.

  function, offered arguments --invoke--> Call(values f32[n], kinds, ...)

A call never raises. Whatever a function does wrong becomes NaN for the rows it
concerns, with the kind of fault beside it; a fault of the whole call (it
raised, or returned something that is not n numbers) concerns every row, and
nothing is broadcast or cut to fit. Threads and worker processes both end here.
"""

import asyncio
import inspect
import itertools
import math
import numbers
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Beyond this, statistics over a batch leave float32 behind and would say 0; the
# advantages have the same bound.
_LARGEST = 1e12
_MAX_MESSAGE_CHARS = 500


class WrongReturn(ValueError):
  """A function returned something that is not n numbers; `kind` says what."""

  def __init__(self, kind: str, message: str):
    super().__init__(message)
    self.kind = kind


class Call(NamedTuple):
  """What one call gave for its n rows."""

  values: np.ndarray  # f32[n], NaN = missing
  kinds: list[str | None]  # n kinds of fault, None where there is a value
  message: str = ''  # the first fault, in words
  failed: bool = False  # the call as a whole went wrong, not single rows
  metrics: tuple[tuple[str, float], ...] = ()  # log_metric calls, in order
  extra: tuple[tuple[str, list], ...] = ()  # log_extra calls, in order
  seconds: float = 0.0


def failed(kind: str, message: str, n: int, seconds: float = 0.0) -> Call:
  """A call that gave nothing: all n rows are missing for one reason."""
  return Call(
    values=np.full(n, np.nan, np.float32),
    kinds=[kind] * n,
    message=message[:_MAX_MESSAGE_CHARS],
    failed=True,
    seconds=seconds,
  )


def join(parts: Sequence[Call]) -> Call:
  """One call out of the calls that shared its rows, in order."""
  extra: dict[str, list] = {}
  for key, column in itertools.chain.from_iterable(p.extra for p in parts):
    extra.setdefault(key, []).extend(column)
  return Call(
    values=np.concatenate([part.values for part in parts]),
    kinds=list(itertools.chain.from_iterable(part.kinds for part in parts)),
    message=next((part.message for part in parts if part.message), ''),
    failed=all(part.failed for part in parts),
    metrics=tuple(itertools.chain.from_iterable(p.metrics for p in parts)),
    extra=tuple(extra.items()),
    seconds=max(part.seconds for part in parts),
  )


def wanted(fn: Callable) -> tuple[frozenset[str], bool]:
  """Names of the arguments `fn` asks for, and whether it takes **kwargs."""
  try:
    parameters = inspect.signature(fn).parameters.values()
  except (TypeError, ValueError):  # some callables written in C have none
    return frozenset(), True
  names = frozenset(
    p.name
    for p in parameters
    if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  )
  return names, any(p.kind is p.VAR_KEYWORD for p in parameters)


def required(fn: Callable) -> frozenset[str]:
  """Names of the arguments without which `fn` cannot be called."""
  try:
    parameters = inspect.signature(fn).parameters.values()
  except (TypeError, ValueError):
    return frozenset()
  return frozenset(
    p.name
    for p in parameters
    if p.default is p.empty
    and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
  )


def invoke(
  fn: Callable,
  offered: Mapping[str, Any],
  *,
  name: str,
  n: int,
  timeout_s: float | None = None,
  interruptible: bool = False,
) -> Call:
  """Calls `fn` with the offered arguments that it asks for; never raises.

  Args:
    fn: plain or `async`; gets keyword arguments only, as in TRL.
    offered: `prompts`, `completions`, columns, and the trainer's extras.
      `log_metric` and `log_extra` are added here.
    name: the reward's name, for messages.
    n: rows; `fn` must return this many numbers.
    timeout_s: cancels a coroutine. A plain function cannot be interrupted
      from inside; whoever calls `invoke` has to bound it.
    interruptible: a KeyboardInterrupt is let through: on the main thread it
      comes from the keyboard, and is meant for the run.
  """
  metrics: list[tuple[str, float]] = []
  extra: list[tuple[str, list]] = []
  offered = {
    **offered,
    'log_metric': lambda key, value: metrics.append((str(key), float(value))),
    'log_extra': lambda key, column: extra.append((str(key), list(column))),
  }
  names, takes_all = wanted(fn)
  arguments = {k: v for k, v in offered.items() if takes_all or k in names}
  start = time.monotonic()
  try:
    returned = fn(**arguments)
    if inspect.isawaitable(returned):
      returned, expired = asyncio.run(_await(returned, timeout_s))
      if expired:
        return failed(
          'timeout', f'{name}: no result within {timeout_s} s', n, timeout_s
        )
    call = collect(returned, name=name, n=n)
  except WrongReturn as error:
    call = failed(error.kind, f'{name}: {error}', n)
  except BaseException as error:  # SystemExit too: a reward cannot end the run
    if interruptible and isinstance(error, KeyboardInterrupt):
      raise
    message = f'{name}: {type(error).__name__}: {error}'
    call = failed('exception', message, n)
  return call._replace(
    metrics=tuple(metrics),
    extra=tuple(extra),
    seconds=time.monotonic() - start,
  )


async def _await(awaitable, timeout_s: float | None):
  try:
    async with asyncio.timeout(timeout_s) as scope:
      return await awaitable, False
  except TimeoutError:
    if scope.expired():
      return None, True
    raise  # the function's own time-out is an exception like any other


def sequence(returned: Any, n: int) -> list[Any]:
  """The n entries of what a reward function returned, whatever they are.

  Lists, tuples and one-dimensional arrays (numpy, jax, torch; also [n, 1])
  are sequences of numbers; strings, mappings, scalars and iterators are not.

  Raises:
    WrongReturn: no such sequence, or another number of entries.
  """
  if isinstance(returned, (list, tuple)):
    items = list(returned)
  elif hasattr(returned, '__array__') and not isinstance(returned, np.generic):
    if hasattr(returned, 'detach'):  # torch converts neither with gradients
      returned = returned.detach().cpu()
      if returned.is_floating_point():  # nor bfloat16
        returned = returned.double()
    if np.ma.isMaskedArray(returned):  # asarray would unmask it
      returned = returned.astype(np.float64).filled(np.nan)
    array = np.asarray(returned)
    if array.ndim == 2 and array.shape[1] == 1:
      array = array[:, 0]
    if array.ndim != 1:
      raise WrongReturn(
        'length' if array.ndim else 'type',
        f'expected {n} values, got shape {array.shape}'
        + (', which is not a sequence of numbers' if not array.ndim else ''),
      )
    items = list(array)
  else:
    raise WrongReturn(
      'type',
      f'expected {n} values, got {type(returned).__name__}, which is not a '
      'sequence of numbers',
    )
  if len(items) != n:
    raise WrongReturn('length', f'expected {n} values, got {len(items)}')
  return items


def collect(returned: Any, *, name: str, n: int) -> Call:
  """Reads n numbers out of what a reward function returned; see `sequence`."""
  try:
    items = sequence(returned, n)
  except WrongReturn as error:
    return failed(error.kind, f'{name}: {error}', n)
  values = np.full(n, np.nan, np.float32)
  kinds: list[str | None] = []
  message = ''
  for row, item in enumerate(items):
    value, kind = _number(item)
    kinds.append(kind)
    if kind is None:
      values[row] = value
    elif not message:
      message = (
        f'{name}: row {row} is {item!r:.80}, expected a finite int or float '
        f'of at most {_LARGEST:g} in size'
      )
  return Call(values, kinds, message)


def _number(item: Any) -> tuple[float, str | None]:
  """A value and None, or NaN and the kind of fault."""
  if item is None:
    return math.nan, 'none'
  is_scalar = isinstance(item, numbers.Real) or (
    getattr(item, 'shape', None) == ()
    and getattr(getattr(item, 'dtype', None), 'kind', 'f') not in 'cmMOSU'
  )
  if not is_scalar or isinstance(item, (str, bytes)):
    return math.nan, 'type'
  try:
    value = float(item)
  except OverflowError:
    return math.nan, 'inf'
  except (TypeError, ValueError):
    return math.nan, 'type'
  if math.isnan(value):
    return math.nan, 'nan'
  if abs(value) > _LARGEST:
    return math.nan, 'inf'
  return value, None


def text_of(messages: str | Sequence[Mapping[str, Any]]) -> str:
  """The text of a prompt or completion, whether string or message list."""
  if isinstance(messages, str):
    return messages
  if isinstance(messages, Mapping):  # a single message
    messages = [messages]
  if not isinstance(messages, Sequence):
    return str(messages)
  parts = (
    message.get('content') or '' if isinstance(message, Mapping) else message
    for message in messages
  )
  return '\n'.join(
    part if isinstance(part, str) else str(part) for part in parts
  )
