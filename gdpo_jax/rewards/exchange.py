"""Two processes that exchange plain values and call each other's functions.

  Link, Proxy <--JSON frames--> Link, kept objects

Arguments and results cross as values (numbers, strings, containers, arrays). An
object that is no plain value stays where it is, and is a `Proxy` on the other
side: equal to no plain value, whatever it says of itself. So a comparison on
one side compares data of that side, and code of the other side cannot reach it.

Imports the standard library only: it runs in the sandbox's fresh Python.
"""

import builtins
import collections
import importlib
import json
import operator
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from gdpo_jax.rewards import workers

_MAX_FRAME_BYTES = 16 << 20
_MAX_NESTING = 200
_MAX_MESSAGE_CHARS = 300


class SolutionDied(BaseException):
  """The solution's process is gone; `except Exception` must not hide it."""


class _Raised(Exception):
  """Marks exceptions that come from the other side."""


class Link:
  """Packs values for the other side, and serves its calls while waiting.

  What cannot be packed is kept here, and the other side knows it by number.
  """

  def __init__(self, sock: socket.socket, operations: Mapping[str, Callable]):
    """`operations`: what the other side may ask for here, besides calls."""
    self._sock = sock
    self._operations = {'call': _call, **operations}
    self._kept: list[Any] = []
    self.dead = False
    self.seconds = 0.0  # spent waiting for the other side

  def ask(self, operation: str, *parts: Any) -> Any:
    """Sends a request and returns its value, or raises what it raised."""
    if self.dead:
      raise SolutionDied('the solution has ended')
    start = time.monotonic()
    try:
      self._write([operation, *map(self.pack, parts)])
      while True:
        kind, *content = self._read()
        if kind == 'value':
          return self.unpack(content[0])
        if kind == 'raised':
          raise _exception(*content)
        if kind == 'changed':  # in place, so it is changed in place here too
          for at, packed in content[0].items():
            _overwrite(parts[int(at)], self.unpack(packed))
        else:
          self._answer(kind, content)
    except _Raised:
      raise
    except Exception as error:  # whatever it sent, it was no answer
      self.dead = True
      raise SolutionDied(f'the solution has ended: {error}') from None
    finally:
      self.seconds += time.monotonic() - start

  def serve(self):
    """Answers requests until the other side is gone."""
    while True:
      try:
        kind, *content = self._read()
      except (OSError, EOFError):
        return
      self._answer(kind, content)

  def _answer(self, operation: str, content: list):
    try:
      parts = [self.unpack(part) for part in content]
      value = self._operations[operation](*parts)
      reply = ['value', self.pack(value)]
      changed = {
        at: packed
        for at, part in enumerate(parts)
        if _is_mutable(part) and (packed := self.pack(part)) != content[at]
      }
      if changed:
        self._write(['changed', changed])
    except BaseException as error:  # SystemExit too
      reply = ['raised', *_describe(error)]
    self._write(reply)

  def _write(self, message: list):
    workers.send(self._sock, json.dumps(message).encode())

  def _read(self) -> list:
    return json.loads(workers.receive(self._sock, None, _MAX_FRAME_BYTES))

  def pack(self, value: Any) -> Any:
    """JSON for a value: containers and numbers by type, anything else kept."""
    try:
      return self._pack(value, 0)
    except (ValueError, RecursionError):  # it contains itself, or nearly so
      return self._keep(value)

  def _keep(self, value: Any) -> dict:
    if isinstance(value, Proxy):
      return {'yours': value._number}
    self._kept.append(value)
    return {'mine': len(self._kept) - 1}

  def _pack(self, value: Any, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
      return value
    if kind is int:
      return value if abs(value) < 1 << 53 else {'int': hex(value)}
    if depth > _MAX_NESTING:
      raise ValueError('nested too deeply')

    def many(items):
      return [self._pack(item, depth + 1) for item in items]

    if kind in _CONTAINERS:
      return {kind.__name__: many(value)}
    if isinstance(value, dict):  # Counter and its like are equal to it
      return {'dict': [many(item) for item in dict.items(value)]}
    if kind in _BY_PARTS:
      return {kind.__name__: _BY_PARTS[kind][0](value)}
    if kind is _loaded(kind.__name__):
      return {kind.__name__: _BY_TEXT[kind.__name__][1](value)}
    numpy = sys.modules.get('numpy')
    if numpy is not None and isinstance(value, numpy.generic):
      return self._pack(value.item(), depth)
    if (
      numpy is not None
      and kind is numpy.ndarray
      and value.dtype.kind in 'biufc'
    ):
      shape = list(value.shape)
      return {'ndarray': [value.dtype.str, shape, value.tobytes().hex()]}
    for base in (bool, int, float, str, list, tuple, set, frozenset):
      if isinstance(value, base):  # a subclass crosses as what it is built on
        return self._pack(base(value), depth)
    return self._keep(value)

  def unpack(self, packed: Any) -> Any:
    """Inverse of `pack`; raises on anything that `pack` does not write."""
    if not isinstance(packed, (dict, list)):
      return packed
    ((kind, content),) = packed.items()
    if kind == 'mine':
      return Proxy(self, int(content))
    if kind == 'yours':
      return self._kept[content]
    if kind == 'dict':
      return {self.unpack(key): self.unpack(item) for key, item in content}
    for made in _CONTAINERS:
      if kind == made.__name__:
        return made([self.unpack(item) for item in content])
    for made, (_, read) in _BY_PARTS.items():
      if kind == made.__name__:
        return read(content)
    if kind in _BY_TEXT:
      module, _, constructor = _BY_TEXT[kind]
      made = getattr(importlib.import_module(module), kind)
      return (getattr(made, constructor) if constructor else made)(content)
    if kind == 'int':
      return int(content, 16)
    if kind == 'ndarray':
      import numpy

      dtype, shape, data = content
      flat = numpy.frombuffer(bytes.fromhex(data), numpy.dtype(dtype))
      return flat.reshape(shape).copy()
    raise ValueError(f'no such kind of value: {kind!r:.40}')


_CONTAINERS = (list, tuple, set, frozenset, collections.deque)
_BY_PARTS: dict[type, tuple[Callable, Callable]] = {
  bytes: (bytes.hex, bytes.fromhex),
  bytearray: (bytearray.hex, bytearray.fromhex),
  complex: (lambda z: [z.real, z.imag], lambda parts: complex(*parts)),
  range: (lambda r: [r.start, r.stop, r.step], lambda parts: range(*parts)),
}
# Types of modules that are loaded only where somebody uses them.
_BY_TEXT: dict[str, tuple[str, Callable[[Any], str], str | None]] = {
  'Fraction': ('fractions', str, None),
  'Decimal': ('decimal', str, None),
  'datetime': ('datetime', lambda time: time.isoformat(), 'fromisoformat'),
  'date': ('datetime', lambda date: date.isoformat(), 'fromisoformat'),
}


def _loaded(name: str) -> type | None:
  """A type of the table above, where its module has been imported."""
  module = sys.modules.get(_BY_TEXT[name][0]) if name in _BY_TEXT else None
  return getattr(module, name, None)


def _call(target: Any, arguments: list, keywords: dict) -> Any:
  return target(*arguments, **keywords)


def _overwrite(old: Any, new: Any):
  """Gives a mutable container the content of another, nested ones in place."""
  if type(old) is not type(new):
    return
  if isinstance(old, list):
    for at, item in enumerate(new):
      if at < len(old) and _is_mutable(old[at]) and type(old[at]) is type(item):
        _overwrite(old[at], item)
      else:
        old[at : at + 1] = [item]
    del old[len(new) :]
  elif isinstance(old, dict):
    kept = {
      key: old[key]
      for key, item in new.items()
      if _is_mutable(old.get(key)) and type(old[key]) is type(item)
    }
    old.clear()
    old.update(new)
    for key, item in kept.items():
      _overwrite(item, new[key])
      old[key] = item
  elif isinstance(old, set):
    old.clear()
    old.update(new)
  elif isinstance(old, (bytearray, collections.deque)):
    old.clear()
    old.extend(new)


def _is_mutable(value: Any) -> bool:
  return isinstance(value, (list, dict, set, bytearray, collections.deque))


def _describe(error: BaseException) -> tuple[str, str, str]:
  """Name, nearest builtin base and message of an exception."""
  base = next(
    (
      base.__name__
      for base in type(error).__mro__
      if issubclass(base, Exception)
      and getattr(builtins, base.__name__, None) is base
    ),
    'Exception',
  )
  try:
    text = str(error)
  except BaseException:
    text = ''
  return type(error).__name__, base, text


def _exception(name: str, base: str, text: str) -> Exception:
  """An exception that the `except` clauses for its base will catch."""
  parent = getattr(builtins, base)
  if not issubclass(parent, Exception):
    raise ValueError(f'{base} is no exception')
  if issubclass(parent, UnicodeError):
    parent = UnicodeError  # the others' constructors want five arguments
  return type(name, (_Raised, parent), {})(text[:_MAX_MESSAGE_CHARS])


# Operators that a proxy sends to the other side.
_BINARY = {
  name: getattr(operator, name if hasattr(operator, name) else f'{name}_')
  for name in (
    *('add', 'sub', 'mul', 'truediv', 'floordiv', 'mod', 'pow', 'matmul'),
    *('and', 'or', 'xor', 'lshift', 'rshift'),
  )
}
_ORDER = {
  name: getattr(operator, name) for name in ('eq', 'lt', 'le', 'gt', 'ge')
}
_OTHERS = {
  name: getattr(operator, name)
  for name in (
    *('neg', 'pos', 'abs', 'invert', 'getitem', 'setitem', 'delitem'),
  )
}


class Proxy:
  """An object that stays on the other side.

  Calls, attributes, iteration and arithmetic go there. Comparisons only do
  between two such objects; compared with a plain value it is different.
  """

  __slots__ = ('_link', '_number')

  def __init__(self, link: Link, number: int):
    object.__setattr__(self, '_link', link)
    object.__setattr__(self, '_number', number)

  def __call__(self, *args, **kwargs):
    return self._link.ask('call', self, list(args), kwargs)

  def __getattr__(self, name):
    if name.startswith('__array'):  # would give numpy addresses in memory
      raise AttributeError(name)
    return self._link.ask('getattr', self, name)

  def __setattr__(self, name, value):
    self._link.ask('setattr', self, name, value)

  def __instancecheck__(self, instance):
    if not isinstance(instance, Proxy):
      return False
    return bool(self._link.ask('isinstance', instance, self))

  def __hash__(self):
    return self._number

  def __bool__(self):
    return bool(self._link.ask('bool', self))

  def __len__(self):
    return int(self._link.ask('len', self))

  def __str__(self):
    return str(self._link.ask('str', self))

  def __repr__(self):
    return str(self._link.ask('repr', self))

  def __float__(self):
    return float(self._link.ask('float', self))

  def __int__(self):
    return int(self._link.ask('int', self))

  def __iter__(self):
    return self._link.ask('iter', self)

  def __next__(self):
    done, item = self._link.ask('next', self)
    if done:
      raise StopIteration
    return item

  def __enter__(self):
    return self._link.ask('enter', self)

  def __exit__(self, *_):
    self._link.ask('exit', self)


def _forward(name: str, swapped: bool = False):
  def method(self, *others):
    operands = (*others, self) if swapped else (self, *others)
    return self._link.ask(name, *operands)

  return method


def _compare(name: str):
  def method(self, other):
    if not isinstance(other, Proxy):
      return NotImplemented
    return bool(self._link.ask(name, self, other))

  return method


for _name in (*_BINARY, *_OTHERS):
  setattr(Proxy, f'__{_name}__', _forward(_name))
for _name in _BINARY:
  setattr(Proxy, f'__r{_name}__', _forward(_name, swapped=True))
for _name in _ORDER:
  setattr(Proxy, f'__{_name}__', _compare(_name))


def _next(iterator: Any) -> tuple[bool, Any]:
  for item in iterator:
    return False, item
  return True, None


# What a side may allow the other to do with its objects.
OPERATIONS: dict[str, Callable] = {
  **_BINARY,
  **_ORDER,
  **_OTHERS,
  'getattr': getattr,
  'setattr': setattr,
  'isinstance': isinstance,
  'bool': bool,
  'len': len,
  'str': str,
  'repr': repr,
  'float': float,
  'int': int,
  'iter': iter,
  'next': _next,
  'enter': lambda manager: manager.__enter__(),
  'exit': lambda manager: manager.__exit__(None, None, None),
}
