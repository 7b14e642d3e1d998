"""Lanes: each runs the calls of one reward in order, beside the others.

Lane (own thread, waits) --> thread that may be left behind
                        \\-> worker processes that may be killed
CallersLane (no thread)  --> whoever asks for the result makes the call
"""

import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gdpo_jax.rewards import calls, workers

if TYPE_CHECKING:
  from gdpo_jax.rewards.pipeline import Reward

_MAX_STUCK_THREADS = 4  # a thread cannot be killed, only left behind


class Lane:
  """Runs the calls of one reward in order, each within its time-out.

  The lane's own thread only waits, so it never hangs; what may hang is a runner
  that it can leave behind (thread) or kill (process).
  """

  def __init__(self, reward: 'Reward'):
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    in_process = reward.isolation == 'process'
    self._runner = (_ProcessRunner if in_process else _ThreadRunner)(reward)
    self._thread = threading.Thread(
      target=self._loop, name=f'reward-{reward.name}', daemon=True
    )
    self._thread.start()

  def submit(
    self, offered: Mapping[str, Any], n: int
  ) -> Callable[[], calls.Call]:
    """Queues a call with n rows; the returned function waits for it."""
    box: queue.SimpleQueue = queue.SimpleQueue()
    self._inbox.put((offered, n, box))
    return box.get

  def close(self):
    """Gives up calls in flight; a hung thread is left, a process is killed."""
    self._inbox.put(None)
    self._runner.close()
    self._thread.join()

  def _loop(self):
    while (item := self._inbox.get()) is not None:
      offered, n, box = item
      box.put(self._runner.call(offered, n))


class CallersLane:
  """Calls the function where the result is asked for, in that thread.

  Nothing bounds such a call. An exception is isolated as in any other lane; a
  KeyboardInterrupt is not.
  """

  def __init__(self, reward: 'Reward'):
    self._reward = reward
    self._closed = False

  def submit(
    self, offered: Mapping[str, Any], n: int
  ) -> Callable[[], calls.Call]:
    """Keeps the arguments; the returned function makes the call."""
    reward = self._reward

    def call() -> calls.Call:
      if self._closed:
        return _closed(reward.name, n)
      return calls.invoke(
        reward.fn,
        offered,
        name=reward.name,
        n=n,
        timeout_s=reward.timeout_s,
        interruptible=True,
      )

    return call

  def close(self):
    self._closed = True


class _ThreadRunner:
  """Calls a function in a thread that is left behind when time is up."""

  def __init__(self, reward: 'Reward'):
    self._reward = reward
    self._stuck: list[threading.Thread] = []
    self._box: queue.SimpleQueue | None = None  # of the call in flight
    self._closed = False
    self._start()

  def _start(self):
    self._inbox: queue.SimpleQueue = queue.SimpleQueue()
    self._thread = threading.Thread(
      target=self._loop,
      args=(self._inbox,),
      name=f'reward-{self._reward.name}-call',
      daemon=True,
    )
    self._thread.start()

  def _loop(self, inbox):
    while (item := inbox.get()) is not None:
      offered, n, box = item
      reward = self._reward
      box.put(
        calls.invoke(
          reward.fn, offered, name=reward.name, n=n, timeout_s=reward.timeout_s
        )
      )

  def call(self, offered: Mapping[str, Any], n: int) -> calls.Call:
    name, timeout_s = self._reward.name, self._reward.timeout_s
    box = self._box = queue.SimpleQueue()
    if self._closed:
      return _closed(name, n)
    self._stuck = [thread for thread in self._stuck if thread.is_alive()]
    if len(self._stuck) >= _MAX_STUCK_THREADS:
      message = (
        f'{name}: not called, {len(self._stuck)} earlier calls still hang; '
        "use isolation='process'"
      )
      return calls.failed('stuck', message, n)
    self._inbox.put((offered, n, box))
    try:
      call = box.get(timeout=_with_grace(timeout_s))
    except queue.Empty:
      self._inbox.put(None)  # the thread ends when the function returns
      self._stuck.append(self._thread)
      self._start()
      return _timed_out(name, n, timeout_s)
    return _closed(name, n) if call is None else call

  def close(self):
    self._closed = True
    self._inbox.put(None)
    if self._box is not None:
      self._box.put(None)  # wakes a lane that waits for a hung call


class _ProcessRunner:
  """Calls a function in worker processes, killed when time is up."""

  def __init__(self, reward: 'Reward'):
    self._reward = reward
    self._closed = False
    self._workers: list[workers.Worker] = []
    try:
      for _ in range(reward.workers):
        target = functools.partial(
          calls.invoke,
          reward.fn,
          name=reward.name,
          timeout_s=reward.timeout_s,
        )
        self._workers.append(workers.Worker(target))
    except ValueError as error:
      self.close()
      raise ValueError(f'reward {reward.name!r}: {error}') from None

  def call(self, offered: Mapping[str, Any], n: int) -> calls.Call:
    bounds = np.linspace(0, n, min(len(self._workers), n) + 1).astype(int)
    parts = list(zip(self._workers, bounds, bounds[1:]))
    if len(parts) == 1:
      shares = [offered]
    else:  # a pure function, so everything offered has n rows
      shares = [
        {key: column[low:high] for key, column in offered.items()}
        for _, low, high in parts
      ]
    return calls.join(
      [
        finish()
        for finish in [
          self._begin(worker, share, int(high - low))
          for (worker, low, high), share in zip(parts, shares)
        ]
      ]
    )

  def _begin(self, worker, offered, n) -> Callable[[], calls.Call]:
    name, timeout_s = self._reward.name, self._reward.timeout_s
    try:
      worker.begin((offered,), {'n': n}, _with_grace(timeout_s))
    except Exception as error:  # pickling: nothing was sent
      message = f'{name}: {type(error).__name__}: {error}'
      return functools.partial(calls.failed, 'exception', message, n)

    def finish() -> calls.Call:
      try:
        return worker.finish()
      except TimeoutError:
        return _timed_out(name, n, timeout_s)
      except workers.WorkerDied as error:
        if self._closed:
          return _closed(name, n)
        return calls.failed('died', f'{name}: {error}', n)
      except Exception as error:  # loading the function, reading the result
        return calls.failed('exception', f'{name}: {error}', n)

    return finish

  def close(self):
    self._closed = True
    for worker in self._workers:
      worker.close()


def _with_grace(timeout_s: float) -> float:
  """A coroutine cancels itself at the time-out; this gives it the chance."""
  return timeout_s * 1.05 + 0.05


def _timed_out(name: str, n: int, timeout_s: float) -> calls.Call:
  message = f'{name}: no result within {timeout_s} s'
  return calls.failed('timeout', message, n, timeout_s)


def _closed(name: str, n: int) -> calls.Call:
  return calls.failed('closed', f'{name}: the pipeline was closed', n)
