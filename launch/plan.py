"""Compiles a run for a TPU slice that is not there, and says whether it fits.

  python -m launch.plan --topology=v5e:4x4 \\
    --config=experiments/configs/math_len.py:r1_1p5b --config.mesh_fsdp=16

The train step and the sampler are the run's own, with its own sharding table,
compiled by the TPU's compiler (libtpu, extra `[tpu]`) ahead of time: no weights
are read, nothing is computed, no accelerator is needed. Printed are, per device:
memory by part, FLOPs of the matrix products, what the collectives send, and the
largest micro-batch and rollout that fit (`--nosearch` leaves these out; each
size is a compilation, which takes minutes for a large model).

For a GPU there is no such compiler without the GPU. `--topology=gpu:8x80`,
eight of 80 GiB, estimates from shapes, and the output says so.
"""

import dataclasses
import math
import pathlib
import re
import sys
from collections.abc import Iterator
from typing import Any

# The launchers, and the config files, import their neighbours by name.
EXPERIMENTS = pathlib.Path(__file__).resolve().parents[1] / 'experiments'
sys.path += [str(EXPERIMENTS), str(EXPERIMENTS / 'configs')]

import jax
import jax.numpy as jnp
import launcher
import numpy as np
from absl import app, flags
from ml_collections import config_flags

from gdpo_jax import sampler, sharding
from gdpo_jax.policy import attention, lora
from gdpo_jax.train import policies
from gdpo_jax.train import state as state_lib
from gdpo_jax.train import step as step_lib
from gdpo_jax.train.settings import Settings
from launch import hlo
from launch.compiling import (
  GIB,
  HBM_GIB,
  Part,
  compiled,
  told,
  topology_devices,
)
from launch.search import divisors, largest


def placed(tree: Any, where: Any) -> Any:
  """Shapes that say where they live."""
  return jax.tree.map(
    lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, where
  )


def bytes_per_device(tree: Any) -> int:
  """Of placed shapes, by arithmetic; padding to tiles is not in it."""
  return sum(
    math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    for x in jax.tree.leaves(tree)
  )


class Plan:
  """The programs of a run on a mesh, as the launcher would make them."""

  def __init__(self, shape, settings: Settings, mesh):
    self.settings, self.mesh = settings, mesh
    self.policy = policies.adapted(
      launcher.policy_of(shape, settings), settings, launcher.NAMES
    )
    self.optimizer = state_lib.make_optimizer(settings, self.policy.heads)
    state = state_lib.abstract_state(self.policy, self.optimizer, settings)
    self.state = placed(state, state_lib.state_shardings(mesh, state))
    params = jax.eval_shape(self.policy.init, jax.random.key(0))
    self.params = placed(params, sharding.shardings(mesh, params))
    _, self.frozen = lora.split(self.params)

  @property
  def reference_bytes(self) -> int:
    """Of a reference policy that is neither in the state nor the frozen base."""
    s = self.settings
    apart = (
      s.kl_coef
      and not self.frozen
      and 'reference' not in self.state.controllers
    )
    return bytes_per_device(self.params) if apart else 0

  def lower_train_step(self) -> tuple[jax.stages.Lowered, int]:
    """Lowered for the mesh, and the bytes of its arguments on a device."""
    s = self.settings
    batch = launcher.abstract_batch(s, s.prompts_per_update * s.group_size)
    rows = jax.tree.map(lambda _: sharding.rows(self.mesh), batch)
    train_step = step_lib.make_train_step(
      self.policy, self.optimizer, s, self.mesh
    )
    frozen = [self.frozen] if self.frozen else []
    args = (self.state, placed(batch, rows), *frozen)
    return train_step.lower(*args), bytes_per_device(args)

  def lower_decode_step(self) -> tuple[jax.stages.Lowered, int]:
    """One token of every row of a rollout, with the cache at its largest.

    Together with the weights of the rollout, which are made of the parameters
    once for all its tokens, as in `sampler.generate_arrays`. Its loops hold
    this step once for each size of the cache, which would be slow to compile.
    """
    s, policy = self.settings, self.policy
    num_rows = s.prompts_per_rollout * s.group_size
    slots = sampler.bucket_sizes(s.max_new_tokens)[-1]

    def weights_of(params):
      return policy.rollout_params(params, s.rollout_dtype)

    def full_cache(params):
      tokens = jnp.zeros(
        (s.prompts_per_rollout, s.max_prompt_tokens), jnp.int32
      )
      _, level = policy.prefill(weights_of(params), tokens, tokens == 0)
      return policy.new_cache((level,), num_rows, slots)

    def decode(params, cache, token, position, slot):
      with sharding.use(self.mesh):
        logits, cache = policy.decode(
          weights_of(params), cache, token, position, slot
        )
        greedy = sampler.Sampling(1, 1, temperature=s.temperature)
        uniform = jnp.zeros(num_rows, jnp.float32)
        return sampler.sample(logits, uniform, greedy), cache

    cache = jax.eval_shape(full_cache, self.params)
    cache = placed(cache, jax.tree.map(self._cache_sharding, cache))
    rows, whole = sharding.rows(self.mesh), sharding.replicated(self.mesh)
    integers = jax.ShapeDtypeStruct((num_rows,), np.int32, sharding=rows)
    slot = jax.ShapeDtypeStruct((), np.int32, sharding=whole)
    args = (self.params, cache, integers, integers, slot)
    lowered = jax.jit(decode, donate_argnums=1).lower(*args)
    return lowered, bytes_per_device(args)

  def _cache_sharding(self, x):
    """Rows, and key heads where the tensor axis divides them."""
    split = x.ndim == 4 and x.shape[1] % self.mesh.shape['tensor'] == 0
    axes = (*sharding.ROWS, *(('tensor',) if split else ()))
    return jax.sharding.NamedSharding(
      self.mesh, jax.sharding.PartitionSpec(*axes)
    )


def table(rows: list[tuple[str, ...]]) -> str:
  """Markdown; the first row is the head."""
  head, *rest = rows
  lines = [head, ('---',) * len(head), *rest]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def gib(num_bytes: float | None) -> str:
  return '' if num_bytes is None else f'{num_bytes / GIB:.2f}'


def memory_table(plan: Plan, train: Part, decode: Part, limit: int) -> str:
  """GiB on one device, by part, against what it has."""
  params = bytes_per_device(plan.params)
  opt = bytes_per_device(plan.state.opt)
  state = bytes_per_device(plan.state)
  reference = plan.reference_bytes

  def column(part: Part, of_state: int, beside: int):
    other = part.arguments - of_state
    total = None if part.total is None else part.total + beside
    said = part.refusal or ('fits' if total <= limit else 'does not fit')
    return (
      gib(other),
      gib(part.temporary),
      gib(part.outputs),
      gib(beside),
      gib(total),
      said,
    )

  names = (
    'its other arguments (batch; cache)',
    'its temporary values',
    'its results',
    'what lies beside it',
    'in all',
    f'of {gib(limit)}',
  )
  # The optimizer's state waits while the sampler runs.
  waiting = state - params + reference
  columns = zip(
    names,
    column(train, state + bytes_per_device(plan.frozen), reference),
    column(decode, params, waiting),
  )
  return table(
    [
      ('GiB on one device', 'train step', 'decode step'),
      ('parameters', gib(params), gib(params)),
      ('optimizer', gib(opt), gib(opt)),
      ('reference policy', gib(reference), gib(reference)),
      *columns,
    ]
  )


def counts_table(train: Part, decode: Part) -> str:
  """FLOPs of products, and what collectives send, on one device."""
  rows = [('on one device', 'train step', 'decode step')]
  parts = [p.counts or hlo.Counts() for p in (train, decode)]
  rows.append(('TFLOP of products', *(f'{c.flops / 1e12:.3f}' for c in parts)))
  if any(c.kernel_calls for c in parts):
    rows.append(
      (
        'calls of attention kernels, their products not counted',
        *(f'{c.kernel_calls:.0f}' for c in parts),
      )
    )
  kinds = sorted({kind for c in parts for kind in c.collective_bytes})
  for kind in kinds:
    rows.append(
      (
        f'{kind}, MiB sent (calls)',
        *(
          f'{c.collective_bytes.get(kind, 0) / 2**20:.1f} '
          f'({c.collective_calls.get(kind, 0):.0f})'
          for c in parts
        ),
      )
    )
  once = decode.counts.once_bytes if decode.counts else 0
  rows.append(('once per rollout, MiB sent', '', f'{once / 2**20:.1f}'))
  rows.append(
    ('compilation, s', f'{train.seconds:.0f}', f'{decode.seconds:.0f}')
  )
  return table(rows)


def estimate(shape, settings: Settings, num: int, gib_each: float) -> str:
  """A table of the same parts for GPUs, from shapes alone."""
  sizes = [settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor]
  known = math.prod(size for size in sizes if size > 0)
  sizes = [num // known if size < 0 else size for size in sizes]
  if math.prod(sizes) != num:
    raise ValueError(f'a mesh of {sizes} does not use exactly {num} devices.')
  mesh = jax.sharding.AbstractMesh(
    tuple(sizes),
    sharding.AXES,
    axis_types=(jax.sharding.AxisType.Auto,) * 3,
  )
  plan = Plan(shape, settings, mesh)
  s, config = settings, shape
  shards = sizes[0] * sizes[1]
  rows = -(-s.prompts_per_micro_batch * s.group_size // shards)
  tokens = rows * (
    s.max_prompt_tokens / min(s.group_size, rows) + s.max_new_tokens
  )
  layers = 1 if s.remat == 'block' else config.num_layers
  wide = (
    4 * config.width
    + (3 * config.mlp_width + 3 * config.num_heads * config.head_dim) / sizes[2]
  )
  kept = tokens * config.width * config.num_layers * (s.remat == 'block')
  scores = (
    rows
    * config.num_heads
    / sizes[2]
    * max(attention.BLOCK, s.max_new_tokens / attention.MAX_BLOCKS)
    * s.max_new_tokens
  )
  activations = 4 * (kept + layers * tokens * wide + 4 * scores)
  gradients = bytes_per_device(plan.params)
  state = bytes_per_device(plan.state)
  total = state + gradients + activations + plan.reference_bytes
  sampled = -(-s.prompts_per_rollout * s.group_size // shards)
  length = s.max_prompt_tokens + s.max_new_tokens
  heads = config.num_kv_heads / (
    1 if config.num_kv_heads % sizes[2] else sizes[2]
  )
  cache = 8 * config.num_layers * heads * config.head_dim * sampled * length
  weights = 4 * config.num_params / sizes[2]
  sampling = state + plan.reference_bytes + cache + weights
  limit = gib_each * GIB
  return table(
    [
      ('GiB on one device, ESTIMATED from shapes', 'update', 'rollout'),
      ('parameters', *[gib(bytes_per_device(plan.params))] * 2),
      ('optimizer', *[gib(bytes_per_device(plan.state.opt))] * 2),
      ('reference policy', *[gib(plan.reference_bytes)] * 2),
      ('gradients; weights of the rollout', gib(gradients), gib(weights)),
      ('activations; cache', gib(activations), gib(cache)),
      ('in all', gib(total), gib(sampling)),
      (
        f'of {gib_each:.0f}',
        *('fits' if x <= limit else 'does not fit' for x in (total, sampling)),
      ),
    ]
  )


def plan_tpu(
  shape, settings: Settings, topology: str, search: bool
) -> Iterator[str]:
  """The report for a TPU topology, as Markdown, part by part as it is known."""
  devices = topology_devices(topology)
  mesh = sharding.make_mesh(
    settings.mesh_data,
    settings.mesh_fsdp,
    settings.mesh_tensor,
    devices=devices,
  )
  kind = devices[0].device_kind
  limit = int(HBM_GIB[kind] * GIB)

  def with_size(name: str, size: int) -> Plan:
    changed = dataclasses.replace(settings, **{name: size})
    return Plan(shape, changed, mesh)

  def train_part(size: int) -> Part:
    plan = with_size('prompts_per_micro_batch', size)
    trips = settings.prompts_per_update // size
    part = compiled(*plan.lower_train_step(), trips)
    told(f'{size} prompts per micro-batch', part)
    return part

  def decode_part(size: int) -> Part:
    plan = with_size('prompts_per_rollout', size)
    part = compiled(*plan.lower_decode_step())
    told(f'{size} prompts per rollout', part)
    return part

  plan = Plan(shape, settings, mesh)
  train = {settings.prompts_per_micro_batch: None}
  decode = {settings.prompts_per_rollout: None}
  for made, part in ((train, train_part), (decode, decode_part)):
    for size in made:
      made[size] = part(size)
  (first_train,), (first_decode,) = train, decode
  yield (
    f'{topology}: {len(devices)} x {kind}, mesh data={mesh.shape["data"]} '
    f'fsdp={mesh.shape["fsdp"]} tensor={mesh.shape["tensor"]}; '
    f'{shape.num_params / 1e9:.2f}e9 parameters; '
    f'{first_train} prompts x {settings.group_size} per micro-batch, '
    f'{first_decode} x {settings.group_size} per rollout, '
    f'{settings.max_prompt_tokens} + {settings.max_new_tokens} tokens.'
  )
  yield memory_table(plan, train[first_train], decode[first_decode], limit)
  yield counts_table(train[first_train], decode[first_decode])
  if not search:
    return
  waiting = bytes_per_device(plan.state) - bytes_per_device(plan.params)
  # A size that the devices do not divide would be computed whole on each.
  shards = sharding.num_row_shards(mesh)
  for name, made, part, whole, rows, beside in (
    (
      'prompts_per_micro_batch',
      train,
      train_part,
      settings.prompts_per_update,
      settings.group_size,
      plan.reference_bytes,
    ),
    (
      'prompts_per_rollout',
      decode,
      decode_part,
      settings.prompts_per_step,
      1,
      plan.reference_bytes + waiting,
    ),
  ):

    def memory(size, made=made, part=part, beside=beside):
      if size not in made:
        made[size] = part(size)
      return made[size].needed + beside

    (first,) = made
    possible = [n for n in divisors(whole) if n * rows % shards == 0]
    best = largest(first, sorted({first, *possible}), memory, limit)
    asked = ', '.join(
      f'{size}: {gib(memory(size)) if memory(size) < sys.maxsize else "?"}'
      for size in sorted(made)
    )
    yield (
      f'The largest {name} that fits: {best or "none"} (GiB by size: {asked}).'
    )


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  # The programs are for other devices; this machine only traces.
  jax.config.update('jax_platforms', 'cpu')
  settings = launcher.settings_of(_CONFIG.value)
  shape = launcher.model_config(_CONFIG.value)
  if shape is None:
    raise ValueError('this config has no `shape`; name a variant that has one.')
  topology = _TOPOLOGY.value
  if gpu := re.fullmatch(r'gpu:(\d+)x(\d+)', topology):
    print(estimate(shape, settings, int(gpu[1]), float(gpu[2])))
  else:
    for paragraph in plan_tpu(shape, settings, topology, _SEARCH.value):
      print(paragraph, end='\n\n', flush=True)


if __name__ == '__main__':
  _CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'FILE[:VARIANT], such as experiments/configs/math_len.py:x.'
  )
  _TOPOLOGY = flags.DEFINE_string('topology', None, 'v5e:4x4, or gpu:8x80.')
  _SEARCH = flags.DEFINE_bool('search', True, 'Also find the largest batch.')
  flags.mark_flags_as_required(['config', 'topology'])
  launcher.start(main)
