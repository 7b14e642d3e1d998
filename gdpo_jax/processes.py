"""Several processes of one run: how they meet, agree, and end together.

The contract of every launch script is three environment variables, the same
for a laptop, SLURM, a TPU pod and GKE:

  GDPO_COORDINATOR    host:port at which process 0 listens
  GDPO_NUM_PROCESSES  how many there are
  GDPO_PROCESS_ID     0 .. n - 1, a different one for each

None of them: one process. GDPO_COORDINATOR=auto leaves all three to JAX, which
knows them on a TPU pod. GDPO_HEARTBEAT_S is the time limit in seconds (60 by
default) after which a process that went silent counts as dead.

A process that dies takes the run with it: a collective without one of its
members would wait for ever, or be wrong. The others stop within the time limit
and say so, with exit status 75 (`EX_TEMPFAIL`: try again); the job, started
again, continues from its last checkpoint.
"""

import contextlib
import json
import os
import re
import sys
import traceback
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

LOST_A_PROCESS = 75
_NAMES = ('GDPO_COORDINATOR', 'GDPO_NUM_PROCESSES', 'GDPO_PROCESS_ID')


class Membership(NamedTuple):
  """What the environment says about this process."""

  coordinator: str  # host:port, or 'auto'
  num_processes: int | None  # None with 'auto'
  process_id: int | None
  heartbeat_s: int


def membership(environment: Mapping[str, str]) -> Membership | None:
  """Reads the contract; None for a run of one process.

  Raises:
    ValueError: a part of it is missing, or out of range.
  """
  given = {name: environment[name] for name in _NAMES if environment.get(name)}
  if not given:
    return None
  heartbeat = _number('GDPO_HEARTBEAT_S', environment, '60', least=1)
  if given.get('GDPO_COORDINATOR') == 'auto':
    return Membership('auto', None, None, heartbeat)
  if len(given) < len(_NAMES):
    missing = [name for name in _NAMES if name not in given]
    raise ValueError(
      f'{", ".join(given)} is set but {", ".join(missing)} is not; set all '
      'three, none for a single process, or GDPO_COORDINATOR=auto on a TPU pod.'
    )
  total = _number('GDPO_NUM_PROCESSES', environment, '', least=1)
  index = _number('GDPO_PROCESS_ID', environment, '', least=0)
  if index >= total:
    raise ValueError(
      f'GDPO_PROCESS_ID is {index}, but GDPO_NUM_PROCESSES is {total}: ids run '
      f'from 0 to {total - 1}.'
    )
  return Membership(given['GDPO_COORDINATOR'], total, index, heartbeat)


def _number(name, environment, default, least):
  text = environment.get(name) or default
  if not text.isdecimal() or int(text) < least:
    raise ValueError(f'{name} is {text!r}, expected a whole number >= {least}.')
  return int(text)


def room_for_collectives(environment: MutableMapping[str, str]) -> None:
  """Where several CPU devices are forced, asks for more threads than devices.

  XLA:CPU has one thread for each. A device that waits in a collective holds
  one, and collectives that do not depend on each other (those of two loops, one
  of them under a condition) begin in another order on every device: four
  devices then wait with four threads for what none is left to begin, and the
  process is aborted after 40 s. To be called before the first use of JAX.
  """
  forced = re.search(
    r'xla_force_host_platform_device_count=(\d+)',
    environment.get('XLA_FLAGS', ''),
  )
  if forced and int(forced[1]) > 1:
    threads = max(os.cpu_count() or 1, 4 * int(forced[1]))
    environment.setdefault('PJRT_NPROC', str(threads))


@contextlib.contextmanager
def together():
  """Joins the processes of the run, and leaves no one waiting at the end.

  Call it before the first use of JAX. Inside, an error of this process ends it
  at once, without the farewell for which the dead could not come.
  """
  room_for_collectives(os.environ)
  member = membership(os.environ)
  if member is None:
    yield
    return
  # For CPU devices; accelerators bring their own collectives. One that waits
  # for a machine that is slow to compile is not stuck.
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  os.environ['XLA_FLAGS'] = (
    f'{os.environ.get("XLA_FLAGS", "")}'
    ' --xla_cpu_collective_timeout_seconds=1800'
    ' --xla_cpu_collective_call_terminate_timeout_seconds=1800'
  )
  # It would take SIGTERM, on which the loop saves and ends.
  jax.config.update('jax_enable_preemption_service', False)
  limits = {
    'heartbeat_timeout_seconds': member.heartbeat_s,
    'shutdown_timeout_seconds': member.heartbeat_s,
  }
  if member.coordinator == 'auto':
    jax.distributed.initialize(**limits)
  else:
    jax.distributed.initialize(
      member.coordinator,
      member.num_processes,
      member.process_id,
      # Inside a SLURM job JAX would otherwise take one GPU of each node.
      cluster_detection_method='deactivate',
      **limits,
    )
  try:
    _meet()
    yield
  except BaseException as error:
    _leave(error)
  jax.distributed.shutdown()


def _meet() -> None:
  """First joint computations, while all have just begun.

  Gloo waits 30 s for the others when it connects devices for the first time;
  later, one process may compile for longer than that.
  """
  barrier('all are here')
  everywhere = jax.sharding.Mesh(np.asarray(jax.devices()), ('all',))
  split = jax.sharding.NamedSharding(
    everywhere, jax.sharding.PartitionSpec('all')
  )
  ones = jax.make_array_from_callback(
    (jax.device_count(),), split, lambda index: np.ones(1, np.float32)
  )
  if int(jax.jit(jnp.sum)(ones)) != jax.device_count():
    raise RuntimeError('the sum over all devices is wrong; is one missing?')


def _leave(error: BaseException) -> None:
  """Says why, then ends the process without its exit handlers.

  The handler of `jax.distributed` waits for every process, and that of Orbax
  for its own threads, which may wait for a process that is gone.
  """
  who = f'process {jax.process_index()} of {jax.process_count()}'
  if isinstance(error, SystemExit):
    status = (
      error.code if isinstance(error.code, int) else int(bool(error.code))
    )
  elif isinstance(error, jax.errors.JaxRuntimeError):
    status = LOST_A_PROCESS
    traceback.print_exception(error)
    print(
      f'{who}: a joint computation failed, most likely because another process '
      'died or hangs (its own output says why). Start the job again: it '
      'continues from its last checkpoint.',
      file=sys.stderr,
    )
  elif isinstance(error, ValueError) and not os.environ.get('GDPO_TRACEBACK'):
    status = 2
    print(f'error: {error}', file=sys.stderr)
  else:
    status = 1
    traceback.print_exception(error)
  print(f'{who} stops with status {status}.', file=sys.stderr)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)


def is_first() -> bool:
  """True in the one process that writes logs."""
  return jax.process_index() == 0


def count() -> int:
  return jax.process_count()


def share(num: int, of: int | None = None, which: int | None = None) -> slice:
  """The block of `num` things that belongs to this process.

  As even as can be: the first `num % of` blocks have one more, and where there
  are fewer things than processes the last blocks are empty.

  Args:
    of, which: processes, and the one meant; this one of this run by default.
  """
  of = jax.process_count() if of is None else of
  which = jax.process_index() if which is None else which
  size, more = divmod(num, of)
  start = which * size + min(which, more)
  return slice(start, start + size + (which < more))


def say(text: str) -> None:
  """Prints, in the process that writes logs."""
  if is_first():
    print(text, flush=True)


def gather_shares(local: np.ndarray, num: int) -> np.ndarray:
  """[num, ...] on all, from the rows that each process has of its `share`.

  Shares that differ in length are filled up for the exchange, and cut again.
  """
  of = jax.process_count()
  if of == 1:
    return np.asarray(local)
  blocks = [share(num, of, i) for i in range(of)]
  longest = max(block.stop - block.start for block in blocks)
  filled = np.zeros((longest, *local.shape[1:]), local.dtype)
  filled[: len(local)] = local
  everyones = np.asarray(multihost_utils.process_allgather(filled))
  return np.concatenate(
    [x[: b.stop - b.start] for x, b in zip(everyones, blocks)]
  )


def gather_json(value: Any) -> list[Any]:
  """The values of all processes, in their order; plain JSON, for records."""
  if jax.process_count() == 1:
    return [value]
  text = np.frombuffer(json.dumps(value, default=str).encode(), np.uint8)
  sizes = multihost_utils.process_allgather(np.int32(text.size))
  filled = np.zeros(int(np.max(sizes)), np.uint8)
  filled[: text.size] = text
  everyones = np.asarray(multihost_utils.process_allgather(filled))
  return [
    json.loads(row[: int(size)].tobytes().decode())
    for row, size in zip(everyones, np.asarray(sizes).reshape(-1))
  ]


def total(counts: np.ndarray) -> np.ndarray:
  """The sum over all processes, the same on each."""
  counts = np.asarray(counts)
  if jax.process_count() == 1:
    return counts
  return np.asarray(multihost_utils.process_allgather(counts)).sum(axis=0)


def any_of(flag: bool) -> bool:
  """True on every process where it is true on one."""
  return bool(total(np.int32(flag)))


def barrier(what: str) -> None:
  """Waits until every process is here."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(what)
