"""Worker processes that can be killed with all their children.

  Worker --socket--> worker process: target(*args, **kwargs), one at a time
     |                    ^ fork
     +----stdin----> supervisor process: waits; kills every descendant

Each worker is a fresh Python that never saw jax, started by `subprocess` and
not by forking this process (jax has threads, and a fork of them can deadlock).
The fresh Python forks once, before it has loaded anything: the parent half
stays behind as supervisor. It is a subreaper, so whatever the worker starts
remains its descendant, daemons included. It ends the whole tree when the worker
exits, when it is told to, and when the training process dies and its end of the
pipe closes.

This file is also the program that the fresh Python runs, so its top level
imports the standard library only.
"""

import contextlib
import ctypes
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_START_TIMEOUT_S = 120.0  # importing what the target needs, on a loaded machine
_MAX_REPLY_BYTES = 1 << 28
_LENGTH = struct.Struct('>Q')
_PR_SET_CHILD_SUBREAPER = 36


class WorkerError(Exception):
  """The target raised, or its result could not be sent back."""


class WorkerDied(Exception):
  """The worker process ended by itself (os._exit, a crash, out of memory)."""


class Process:
  """A fresh Python that runs one file of this package, with a socket to it.

  The program gets the socket's number as its argument and must end, with
  everything it started, when its standard input closes.
  """

  def __init__(self, program: str, env: dict[str, str], *, quiet: bool = False):
    ours, theirs = socket.socketpair()
    with theirs:
      self._process = subprocess.Popen(
        [sys.executable, '-I', '-S', program, str(theirs.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=env,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
      )
    self._socket = ours

  def send(self, data: bytes, deadline: float):
    """Writes one frame before `deadline` (monotonic seconds)."""
    self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))
    send(self._socket, data)

  def receive(self, deadline: float) -> bytes:
    """Reads one frame, or raises TimeoutError or EOFError."""
    return receive(self._socket, deadline)

  def kill(self):
    """Ends the program and all it started; returns when they are gone."""
    with contextlib.suppress(OSError):
      self._process.stdin.close()  # the sign
    try:
      self._process.wait(timeout=15)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()
    with contextlib.suppress(OSError):
      self._socket.shutdown(socket.SHUT_RDWR)  # wakes a call in flight
    self._socket.close()


class Worker:
  """One worker process around one target; replaced whenever it is killed.

  Not for several threads at once: one call at a time.
  """

  def __init__(self, target: Callable, *, memory_bytes: int | None = None):
    """Starts the process; `target` may be a lambda or a closure.

    Args:
      target: called in the worker. Functions of installed packages are imported
        there; a function of the user's own script or notebook is sent as it is,
        with what it refers to, so that its file (and jax with it) is not
        imported again.
      memory_bytes: bound on the worker's address space.
    Raises:
      ValueError: the target refers to something that cannot be sent.
    """
    self._setup = pickle.dumps(
      {
        'path': [entry for entry in sys.path if entry] + [os.getcwd()],
        'memory_bytes': memory_bytes,
        'target': _serialize(target),
      }
    )
    self._lock = threading.Lock()  # of replacing and closing the process
    self._closed = False
    self._start()

  def call(self, *args: Any, timeout_s: float, **kwargs: Any) -> Any:
    """target(*args, **kwargs), within `timeout_s` (start-up not counted).

    Raises:
      TimeoutError: time was up; the process and its children are gone and a
        fresh one is on its way.
      WorkerDied: the process ended; a fresh one is on its way.
      WorkerError: the target raised; the process lives on.
    """
    self.begin(args, kwargs, timeout_s)
    return self.finish()

  def begin(self, args: tuple, kwargs: dict[str, Any], timeout_s: float):
    """First half of `call`: returns when the worker has its arguments."""
    self._timeout_s, self._problem = timeout_s, None
    request = pickle.dumps((args, kwargs), protocol=5)
    try:
      if not self._ready:
        self._process.receive(time.monotonic() + _START_TIMEOUT_S)
        self._ready = True
      self._deadline = time.monotonic() + timeout_s
      self._process.send(request, self._deadline)
    except (EOFError, OSError) as error:  # TimeoutError is an OSError
      self._problem = error

  def finish(self) -> Any:
    """Second half of `call`: waits for the result and raises what it raises."""
    try:
      if self._problem is not None:
        raise self._problem
      reply = self._process.receive(self._deadline)
    except TimeoutError:
      self._restart()
      raise TimeoutError(f'no result within {self._timeout_s} s') from None
    except (EOFError, OSError) as error:
      self._restart()
      raise WorkerDied(f'worker process ended ({error})') from None
    succeeded, result = pickle.loads(reply)
    if not succeeded:
      raise WorkerError(result)
    return result

  def close(self):
    """Kills the process and all its children; returns when they are gone."""
    with self._lock:
      self._closed = True
      self._process.kill()

  def _start(self):
    # Should a reward import jax after all, it must not take the device.
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu'}
    self._process = Process(__file__, env)
    self._ready = False
    with contextlib.suppress(OSError):  # the next call will tell
      self._process.send(self._setup, time.monotonic() + _START_TIMEOUT_S)

  def _restart(self):
    with self._lock:
      if not self._closed:
        self._process.kill()
        self._start()


class Pool:
  """Workers around one target that are made when they are first needed."""

  def __init__(self, target: Callable, size: int, **options):
    self._target, self._options = target, options
    self._free: list[Worker | None] = [None] * size
    self._condition = threading.Condition()
    self._workers: set[Worker] = set()

  def call(self, *args, timeout_s: float, **kwargs) -> Any:
    """As `Worker.call`, from any number of threads."""
    with self._condition:
      self._condition.wait_for(lambda: self._free)
      worker = self._free.pop()  # a running one first, they are put back last
    try:
      if worker is None:
        worker = Worker(self._target, **self._options)
        self._workers.add(worker)
      return worker.call(*args, timeout_s=timeout_s, **kwargs)
    finally:
      with self._condition:
        self._free.append(worker)
        self._condition.notify()

  def close(self):
    """Kills the workers; a later call starts new ones."""
    with self._condition:
      self._free = [None] * len(self._free)
      for worker in self._workers:
        worker.close()
      self._workers.clear()


def _serialize(target: Callable) -> bytes:
  """Pickles a callable by value where its module belongs to the user."""
  import cloudpickle  # not at the top: the fresh Python has no path to it yet

  inner = target
  while hasattr(inner, 'func'):  # functools.partial
    inner = (
      inner.args[0] if inner.args and callable(inner.args[0]) else inner.func
    )
  module = sys.modules.get(getattr(inner, '__module__', None) or '')
  errors = []
  for by_value in (True, False):
    registered = by_value and module is not None and _is_users(module)
    if registered:
      cloudpickle.register_pickle_by_value(module)
    try:
      return cloudpickle.dumps(target)
    except Exception as error:
      errors.append(f'{type(error).__name__}: {error}')
    finally:
      if registered:
        cloudpickle.unregister_pickle_by_value(module)
  raise ValueError(
    f'{target!r} cannot be sent to a worker process ({errors[0]}); make what '
    "it refers to picklable or use isolation='thread'."
  )


def _is_users(module) -> bool:
  """Whether a module is the user's own file rather than an installed one."""
  file = getattr(module, '__file__', None)
  if file is None or module.__name__.partition('.')[0] == 'gdpo_jax':
    return False
  installed = ('site-packages', 'dist-packages', 'lib/python')
  return not any(part in file.replace(os.sep, '/') for part in installed)


def send(sock: socket.socket, data: bytes):
  """Writes one frame: its length, then the data."""
  sock.sendall(_LENGTH.pack(len(data)) + data)


def receive(
  sock: socket.socket,
  deadline: float | None = None,
  max_bytes: int = _MAX_REPLY_BYTES,
) -> bytes:
  """Reads one frame, or raises TimeoutError or EOFError."""

  def read(size):
    chunks = []
    while size:
      if deadline is not None:
        sock.settimeout(max(deadline - time.monotonic(), 1e-3))
      chunk = sock.recv(min(size, 1 << 20))
      if not chunk:
        raise EOFError('connection closed')
      chunks.append(chunk)
      size -= len(chunk)
    return b''.join(chunks)

  (size,) = _LENGTH.unpack(read(_LENGTH.size))
  if size > max_bytes:
    raise EOFError(f'a frame of {size} bytes is over the limit')
  return read(size)


# What follows runs in the fresh Python.


def become_subreaper():
  """Makes orphaned descendants children of this process (Linux)."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(root: int) -> list[int]:
  """Living processes below `root`, from /proc; zombies are not living."""
  children: dict[int, list[int]] = {}
  for entry in os.listdir('/proc') if os.path.isdir('/proc') else ():
    if not entry.isdigit():
      continue
    try:
      with open(f'/proc/{entry}/stat', 'rb') as file:
        # pid (name) state ppid ...; the name may hold spaces and brackets
        state, parent = file.read().rpartition(b') ')[2].split()[:2]
    except OSError:
      continue
    pid = int(entry)
    children.setdefault(int(parent), []).append(-pid if state == b'Z' else pid)
  found, queue = [], [root]
  while queue:
    for pid in children.get(queue.pop(), ()):
      queue.append(abs(pid))
      if pid > 0:
        found.append(pid)
  return found


def kill_descendants(limit_s: float = 10.0):
  """Kills everything below this process, however fast it multiplies."""
  me, deadline = os.getpid(), time.monotonic() + limit_s
  stopped: set[int] = set()
  while time.monotonic() < deadline:
    # Stopped first, so that none can fork while others are being killed.
    fresh = [pid for pid in descendants(me) if pid not in stopped]
    if not fresh:
      break
    for pid in fresh:
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGSTOP)
    stopped.update(fresh)
  while time.monotonic() < deadline:
    for pid in descendants(me):
      with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    try:
      while os.waitpid(-1, os.WNOHANG)[0]:
        pass
    except ChildProcessError:
      return
    time.sleep(0.001)


def supervise(child: int):
  """Waits until the child ends or stdin closes, clears up, and exits."""
  watched = [0]
  with contextlib.suppress(AttributeError, OSError):  # Linux 5.3
    watched.append(os.pidfd_open(child))
  while not select.select(watched, [], [], None if watched[1:] else 0.05)[0]:
    if os.waitpid(child, os.WNOHANG)[0]:
      break
  if sys.platform != 'linux':  # no /proc to walk: the child's group at least
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(child, signal.SIGKILL)
  kill_descendants()
  os._exit(0)


def _serve(sock: socket.socket):
  """The worker: loads its target, then answers calls until the end."""
  setup = pickle.loads(receive(sock))
  sys.path[:] = setup['path']
  if setup['memory_bytes']:
    import resource

    limit = setup['memory_bytes']
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
  target, problem = None, None
  try:
    target = pickle.loads(setup['target'])
  except BaseException as error:  # told to whoever calls, instead of dying
    problem = f'cannot be loaded: {type(error).__name__}: {error}'
  send(sock, b'ready')
  while True:
    try:
      args, kwargs = pickle.loads(receive(sock))
      if problem:
        raise ImportError(problem)
      reply = pickle.dumps((True, target(*args, **kwargs)), protocol=5)
    except EOFError:
      return
    except BaseException as error:
      reply = pickle.dumps((False, f'{type(error).__name__}: {error}'))
    send(sock, reply)


def _main():
  sock = socket.socket(fileno=int(sys.argv[1]))
  become_subreaper()
  pid = os.fork()  # nothing is loaded yet and there is one thread
  if pid:
    sock.close()
    supervise(pid)
  os.setsid()
  null = os.open('/dev/null', os.O_RDONLY)
  os.dup2(null, 0)
  os.close(null)
  _serve(sock)


if __name__ == '__main__':
  _main()
