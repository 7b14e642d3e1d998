"""Programs for TPUs that are not there: compiled, measured, counted."""

import dataclasses
import os
import re
import sys
import time
from typing import Any

import jax
from jax.experimental import topologies

from launch import hlo

GIB = 2**30
# GiB of memory of one device, by `device_kind`; of v5e and v5p what the compiler
# gives to a program (16 and 96 less a share for the runtime).
HBM_GIB = {
  'TPU v4': 32.0,
  'TPU v5 lite': 15.75,
  'TPU v5': 95.74,
  'TPU v6 lite': 32.0,
}

# Names of the operations that make them; the decode step is a `jit` inside.
WEIGHTS_OF_A_ROLLOUT = r'jit\(unstack\)|jit\(decode\)/sharding_constraint'


@dataclasses.dataclass(frozen=True)
class Part:
  """One program on one device; bytes."""

  arguments: int
  outputs: int  # beyond those that take an argument's place
  temporary: int | None  # None: it does not fit
  counts: hlo.Counts | None
  seconds: float = 0.0  # of compilation
  refusal: str = ''  # the compiler's words

  @property
  def total(self) -> int | None:
    if self.temporary is None:
      return None
    return self.arguments + self.outputs + self.temporary

  @property
  def needed(self) -> int:
    """`total`; of a program that was refused what the compiler says of it."""
    if self.total is not None:
      return self.total
    said = re.match(r'needs ([\d.]+)([MG])', self.refusal)
    units = {'M': 2**20, 'G': GIB}
    return int(float(said[1]) * units[said[2]]) if said else sys.maxsize


def topology_devices(name: str) -> list[Any]:
  """Devices of a TPU slice such as 'v5e:4x4'; nothing is attached.

  Raises:
    ValueError: libtpu is not installed, or does not know the name.
  """
  # There is no TPU here and no cloud to ask about it.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  try:
    return topologies.get_topology_desc(name, platform='tpu').devices
  except RuntimeError as error:
    raise ValueError(
      f'no topology {name!r}: {str(error).splitlines()[0]} Needed are libtpu '
      "(pip install 'gdpo_jax[tpu]') and a name such as v5e:4x4 or v5p:2x2x4."
    ) from error


def compiled(lowered: jax.stages.Lowered, arguments: int, trips=1) -> Part:
  """Compiles; a program that does not fit is a `Part` that says so.

  Args:
    trips: of loops whose length is not in the program (micro-batches).
  """
  began = time.perf_counter()
  try:
    done = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    spent = time.perf_counter() - began
    return Part(arguments, 0, None, None, spent, refusal(str(error)))
  spent = time.perf_counter() - began
  memory = done.memory_analysis()
  outputs = memory.output_size_in_bytes - memory.alias_size_in_bytes
  # `temp_size_in_bytes` adds up what is never alive together.
  temporary = (
    memory.peak_memory_in_bytes - memory.argument_size_in_bytes - outputs
  )
  return Part(
    memory.argument_size_in_bytes,
    outputs,
    max(0, temporary),
    hlo.count(done.as_text(), trips, once=WEIGHTS_OF_A_ROLLOUT),
    spent,
  )


def refusal(message: str) -> str:
  """'needs 61.2G of 15.75G' from what the compiler says of memory."""
  found = re.search(
    r'temporaries \(([\d.]+\w)\) exceeds available HBM \(([\d.]+\w)\)'
    r'|Used ([\d.]+\w) of ([\d.]+\w) hbm',
    message,
  )
  if found:
    needed, available = (g for g in found.groups() if g)
    return f'needs {needed} of {available}'
  return message.strip().splitlines()[0][:200]


def told(what: str, part: Part) -> None:
  """Progress on stderr: a compilation takes minutes."""
  result = part.refusal or f'{part.total / GIB:.2f} GiB'
  print(f'{what}: {result} ({part.seconds:.0f} s)', file=sys.stderr, flush=True)
