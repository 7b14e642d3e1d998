"""Compiles a run for a TPU slice that is not there, and says whether it fits.

  python launch/plan.py --topology=v5e:4x4 \\
    --config=experiments/configs/math_len.py:r1_1p5b --config.mesh_fsdp=16

The train step and the sampler are the run's own, with its own sharding table,
compiled by the TPU's compiler (libtpu, extra `[tpu]`) ahead of time: no weights
are read, nothing is computed, no accelerator is needed. For each program it
prints memory per device by part, matrix FLOPs and what the collectives send;
then the same for smaller or larger parts of a batch until one fits and the next
does not (`--search=false` leaves that out).

For a GPU there is no such compiler without the GPU: `--topology=gpu:8x80` (eight
of 80 GiB) estimates from shapes, and the output says so.
"""

import dataclasses
import os
import pathlib
import re
import sys
import time

# The host compiles for devices that it does not have.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')  # no cloud to ask
os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / 'experiments')]

import jax
import jax.numpy as jnp
import launcher
from absl import app, flags
from jax.experimental import topologies
from ml_collections import config_flags

from gdpo_jax import sampler, sharding
from gdpo_jax.train import state as state_lib
from gdpo_jax.train import step as step_lib
from launch import hlo

GIB = 2**30
# Memory per device in GiB, by `device_kind`; the runtime keeps a part of it,
# which the compiler's own limit takes into account.
HBM_GIB = {
  'TPU v4': 32,
  'TPU v5 lite': 16,
  'TPU v5': 95,
  'TPU v6 lite': 32,
}


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program, per device. Bytes; None where it does not fit."""

  name: str
  rows: int  # of the part of the batch that is computed at once
  arguments: int
  temporary: int | None
  outputs: int  # not counting those that reuse an argument's memory
  counts: hlo.Counts | None
  seconds: float  # to compile
  refusal: str = ''  # the compiler's words where the program does not fit

  @property
  def fits(self) -> bool:
    return self.temporary is not None


def topology_devices(name: str):
  """Devices of a TPU slice such as 'v5e:4x4'; nothing is attached.

  Raises:
    ValueError: libtpu is not installed, or does not know the name.
  """
  try:
    return topologies.get_topology_desc(name, platform='tpu').devices
  except RuntimeError as error:
    raise ValueError(
      f'no topology {name!r}: {str(error).splitlines()[0]} Needed is libtpu '
      "(pip install 'gdpo_jax[tpu]') and a name such as v5e:4x4 or v5p:2x2x4."
    ) from error


def abstract(tree, placed):
  """Shapes that say where they live, to lower a program with."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
    tree,
    placed,
  )


def lower_train_step(shape, settings, mesh):
  """The launcher's train step, lowered for the devices of `mesh`."""
  policy = launcher.policy_of(shape, settings)
  optimizer = state_lib.make_optimizer(settings)
  state = state_lib.abstract_state(policy, optimizer)
  rows = settings.prompts_per_update * settings.group_size
  batch = launcher.abstract_batch(settings, rows)
  placed = jax.tree.map(lambda _: sharding.rows(mesh), batch)
  return step_lib.make_train_step(policy, optimizer, settings, mesh).lower(
    abstract(state, state_lib.state_shardings(mesh, state)),
    abstract(batch, placed),
  )


def lower_sampler(shape, settings, mesh):
  """The launcher's sampler for one part of a step's prompts, lowered."""
  policy = launcher.policy_of(shape, settings)
  params = jax.eval_shape(policy.init, jax.random.key(0))
  prompts = settings.prompts_per_rollout
  width = settings.max_prompt_tokens
  whole, rows = sharding.replicated(mesh), sharding.rows(mesh)

  def array(shape, dtype, placed):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed)

  key = jax.eval_shape(lambda: jax.random.key(0))
  return sampler.generate_rows.lower(
    policy,
    abstract(params, sharding.shardings(mesh, params)),
    array((prompts, width), jnp.int32, rows),
    array((prompts, width), jnp.bool_, rows),
    array(key.shape, key.dtype, whole),
    launcher.sampling_of(settings, shape.eos_ids, shape.pad_id),
    array((prompts * settings.group_size,), jnp.int32, rows),
  )


def compile_program(name, rows, lowered, unknown_trips=1) -> Program:
  """Compiles, or reports the compiler's refusal for want of memory."""
  arguments = bytes_per_device(lowered.args_info)
  began = time.perf_counter()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Program(
      name,
      rows,
      arguments,
      None,
      0,
      None,
      time.perf_counter() - began,
      _refusal(str(error)),
    )
  spent = time.perf_counter() - began
  memory = compiled.memory_analysis()
  return Program(
    name,
    rows,
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    memory.output_size_in_bytes - memory.alias_size_in_bytes,
    hlo.count(compiled.as_text(), unknown_trips),
    spent,
  )
