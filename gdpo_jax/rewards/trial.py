"""A program and its tests, in two processes.

  judge (the tests, none of the solution's code) <--exchange--> solution

The tests call the solution's functions through proxies and compare plain values
on their own side: an object with its own `__eq__`, a patched builtin, a printed
marker or a look into the caller's frame cannot reach them.

Imports the standard library only: it runs in the sandbox's fresh Python.
"""

import ast
import builtins
import importlib
import io
import os
import signal
import socket
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gdpo_jax.rewards import exchange

_MAX_MESSAGE_CHARS = 300


class Solution:
  """Loads a program and does what the judge asks of it."""

  def __init__(self, program: str, scratch: str):
    self._program, self._scratch = program, scratch
    self._namespace: dict[str, Any] = {}

  def operations(self) -> dict[str, Callable]:
    return {
      **exchange.OPERATIONS,
      'load': self.load,
      'run': self.run,
    }

  def load(self) -> dict[str, dict[str, Any]]:
    """Runs the program as a module; its names, and which are modules."""
    self._execute('solution')
    names = {
      name: value
      for name, value in self._namespace.items()
      if not name.startswith('__')
    }
    modules = {
      name: value.__name__
      for name, value in names.items()
      if isinstance(value, types.ModuleType)
    }
    for name in modules:
      del names[name]
    return {'names': names, 'modules': modules}

  def run(self, stdin: str) -> tuple[int, str]:
    """Runs the program as a script; exit code and standard output."""
    paths = [
      os.path.join(self._scratch, name) for name in ('.stdin', '.stdout')
    ]
    with open(paths[0], 'w', encoding='utf-8') as file:
      file.write(stdin)
    child = os.fork()
    if not child:
      self._run_child(*paths)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with open(paths[1], encoding='utf-8', errors='replace') as file:
      return code, file.read()

  def _run_child(self, stdin: str, stdout: str):
    code = 1
    try:
      os.closerange(3, 64)
      for number, path, flags in ((0, stdin, os.O_RDONLY), (1, stdout, _WRITE)):
        file = os.open(path, flags, 0o600)
        os.dup2(file, number)
        os.close(file)
      sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), 'utf-8')
      sys.stdout = io.TextIOWrapper(io.FileIO(1, 'w', closefd=False), 'utf-8')
      self._execute('__main__')
      code = 0
    except SystemExit as error:
      code = (
        error.code if isinstance(error.code, int) else int(bool(error.code))
      )
    except BaseException:
      import traceback  # 3 ms that the other runs save

      traceback.print_exc()
    finally:
      try:
        sys.stdout.flush()
      except OSError:  # more output than the limit on files allows
        code = code or 1
      os._exit(code & 0xFF)

  def _execute(self, name: str):
    module = types.ModuleType(name)
    sys.modules[name] = module  # dataclasses and pickle look it up
    self._namespace = module.__dict__
    exec(compile(self._program, 'solution.py', 'exec'), self._namespace)


_WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


def judge(
  sock: socket.socket,
  solution_pid: int,
  tests: Sequence[str | Mapping[str, str]],
  report: Callable[[dict], None],
) -> float:
  """Runs the tests and reports on each; returns seconds spent in the solution.

  A test is a piece of Python that must run to its end, or a mapping with
  `stdin` and the `stdout` that the program must print, ending with exit code 0
  (space at line ends does not count).
  """

  def on_child(*_):
    # The socket may live on in the solution's own children.
    try:
      while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
        if pid == solution_pid:
          sock.shutdown(socket.SHUT_RDWR)
    except (ChildProcessError, OSError):
      pass

  signal.signal(signal.SIGCHLD, on_child)
  on_child()
  link = exchange.Link(sock, {})
  namespace: dict[str, Any] = {'__name__': '__tests__'}
  loaded = False
  sources = [test for test in tests if isinstance(test, str)]
  if sources or not tests:
    problem, loaded = None, True
    try:
      namespace.update(_names(link.ask('load'), sources))
    except BaseException as error:
      problem, loaded = _in_words(error), False
    report({'loaded': loaded, 'died': link.dead, 'message': problem})
  for test in tests:
    try:
      if not isinstance(test, str):
        code, printed = link.ask('run', test['stdin'])
        if code != 0:
          raise RuntimeError(f'exit code {code}')
        if _lines(printed) != _lines(test['stdout']):
          raise AssertionError(f'printed {printed!r:.100}')
      elif loaded:
        exec(compile(test, '<test>', 'exec'), namespace)
      passed = not link.dead and (loaded or not isinstance(test, str))
      message = 'the solution has ended' if link.dead else None
    except BaseException as error:
      passed, message = False, _in_words(error)
    report({'passed': passed, 'died': link.dead, 'message': message})
  return link.seconds


def _names(found: Any, sources: Sequence[str]) -> dict[str, Any]:
  """What the tests see of the program's names; `found` may be anything.

  A program that calls a function `abs` or a class `math` would decide what the
  tests compare with. Such names are the program's only where the tests use no
  other name of it (`assert sum(10, 15) == 6`). Modules are imported afresh.
  """
  names, modules = found['names'], found['modules']
  for table in (names, modules):
    if type(table) is not dict or not all(type(name) is str for name in table):
      raise TypeError('the names of the program are not as they should be')
  names = {name: value for name, value in names.items() if name[:2] != '__'}
  reserved = {*dir(builtins), *sys.stdlib_module_names}
  used = {
    node.id
    for source in sources
    for node in ast.walk(ast.parse(source))
    if isinstance(node, ast.Name)
  }
  if used & names.keys() - reserved:
    names = {k: value for k, value in names.items() if k not in reserved}
  for name, module in modules.items():
    if name in used and (name == module or name not in reserved):
      names[name] = importlib.import_module(module)
  return names


def _lines(text: str) -> list[str]:
  return [line.rstrip() for line in text.rstrip().splitlines()]


def _in_words(error: BaseException) -> str:
  try:
    return f'{type(error).__name__}: {error}'[:_MAX_MESSAGE_CHARS]
  except BaseException:  # a message that cannot be built
    return type(error).__name__
