"""One mesh, one table from parameter path to `PartitionSpec`.

The mesh has three axes: `data` (replicas), `fsdp` (parameters, gradients and
optimizer split, rows split as well) and `tensor` (heads, mlp and vocabulary
split). The same table serves parameters and optimizer state, because the path
of a moment ends in the path of its parameter. A leaf that no rule matches, that
an axis does not divide, or that two rules would split differently is an error
with its name and shape: nothing is replicated by accident.

With several processes every process holds a block of rows, in their order, and
all of them call the functions below together.
"""

import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')
ROWS = PartitionSpec(('data', 'fsdp'))  # how rows of a batch are split

# Paths are 'layers/attn/q/kernel'; L is the leading axis.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r'(embed|head)/embedding$', PartitionSpec('tensor', 'fsdp')),
  (r'attn/[qkv]/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'attn/[qkv]/bias$', PartitionSpec(None, 'tensor')),
  (r'attn/o/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
  (r'mlp/(gate|up)/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'mlp/down/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
  (r'attn/[qkv]/a$|mlp/(gate|up)/a$', PartitionSpec(None, 'fsdp', None)),
  (r'attn/[qkv]/b$|mlp/(gate|up)/b$', PartitionSpec(None, None, 'tensor')),
  (r'(attn/o|mlp/down)/a$', PartitionSpec(None, 'tensor', None)),
  (r'(attn/o|mlp/down)/b$', PartitionSpec(None, None, 'fsdp')),
  (r'heads/down$', PartitionSpec(None, 'fsdp', None)),
  (r'heads/up$', PartitionSpec(None, None, 'fsdp')),
  (r'fusion/(query|key|tag|value)$|head_factor$', PartitionSpec()),
  (r'norm/scale$', PartitionSpec()),
  (r'value/kernel$', PartitionSpec()),
)


def make_mesh(
  data: int = -1, fsdp: int = 1, tensor: int = 1, devices=None
) -> Mesh:
  """A `Mesh(data, fsdp, tensor)`; one size may be -1 for "what is left".

  Raises:
    ValueError: the sizes do not multiply to the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  sizes = [data, fsdp, tensor]
  if sizes.count(-1) > 1 or any(s != -1 and s < 1 for s in sizes):
    raise ValueError(
      f'mesh sizes must be positive, at most one of them -1; got data={data}, '
      f'fsdp={fsdp}, tensor={tensor}.'
    )
  if -1 in sizes:
    rest = int(np.prod([s for s in sizes if s != -1]))
    sizes[sizes.index(-1)] = len(devices) // rest
  if int(np.prod(sizes)) != len(devices):
    raise ValueError(
      f'mesh data={data} x fsdp={fsdp} x tensor={tensor} does not use exactly '
      f'the {len(devices)} devices; set one of them to -1, or choose sizes '
      'whose product is the number of devices.'
    )
  # Auto: pure maths stays free of the mesh (jax 0.10 would default to Explicit).
  return Mesh(
    np.asarray(devices).reshape(sizes), AXES, axis_types=(AxisType.Auto,) * 3
  )


def path_name(path) -> str:
  """'layers/attn/q/kernel' for a key path of `jax.tree_util`."""
  return '/'.join(
    str(getattr(k, 'key', getattr(k, 'name', getattr(k, 'idx', k))))
    for k in path
  )


def shardings(mesh: Mesh, tree: Any) -> Any:
  """A `NamedSharding` for every leaf of `tree` (arrays or shapes).

  Raises:
    ValueError: no rule matches a leaf, two rules contradict each other, or an
      axis does not divide it.
  """

  def one(path, leaf):
    name, shape = path_name(path), tuple(leaf.shape)
    spec = PartitionSpec() if not shape else _spec(name, shape)
    for size, axis in zip(shape, spec):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
          f'{name!r} of shape {shape} cannot be split: {size} is not a multiple '
          f'of mesh axis {axis!r} of size {mesh.shape[axis]}; make the axis '
          'smaller, or pad the model.'
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(one, tree)


def _spec(name, shape) -> PartitionSpec:
  """The one rule that a leaf matches, checked against its shape."""
  found = [(p, spec) for p, spec in RULES if re.search(p, name)]
  if not found:
    raise ValueError(
      f'no sharding rule matches {name!r} of shape {shape}; add one to '
      'gdpo_jax.sharding.RULES.'
    )
  (pattern, spec), *others = found
  for other, other_spec in others:
    if other_spec != spec:
      raise ValueError(
        f'two sharding rules collide on {name!r} of shape {shape}: {pattern!r} '
        f'says {spec}, {other!r} says {other_spec}; make their patterns '
        'exclude each other.'
      )
  if len(spec) > len(shape):
    raise ValueError(
      f'the rule {pattern!r} splits {len(spec)} axes ({spec}), but {name!r} of '
      f'shape {shape} has {len(shape)}.'
    )
  for (i, a), (j, b) in itertools.combinations(enumerate(spec), 2):
    if a is not None and a == b:
      raise ValueError(
        f'the rule {pattern!r} puts mesh axis {a!r} on axis {i} and on axis '
        f'{j} of {name!r}, shape {shape}; an axis can split one of them.'
      )
  return spec


def born_sharded(mesh: Mesh, init: Callable[[jax.Array], Any], key) -> Any:
  """`init(key)` with every leaf made where it stays; none is whole anywhere."""
  placed = shardings(mesh, jax.eval_shape(init, key))
  return jax.jit(init, out_shardings=placed)(key)


def use(mesh: Mesh):
  """A context, inside or outside of `jit`, in which `constrain` has an effect."""
  return jax.sharding.use_abstract_mesh(mesh.abstract_mesh)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
  """Says how an intermediate value is split over the mesh of `use`, if any.

  Left to itself the partitioner splits products along whatever the weights are
  split along, and keeps every row on every device.

  Args:
    axes: of the leading axes of x: 'rows' (all devices that split a batch), a
      mesh axis, or None. An axis that does not divide x is left out.
  """
  if num_devices() == 1:
    return x
  mesh, spec = jax.sharding.get_abstract_mesh(), []
  for size, axis in zip(x.shape, axes):
    names = ROWS[0] if axis == 'rows' else (axis,) if axis else ()
    while names and size % int(np.prod([mesh.shape[n] for n in names])):
      names = names[1:]
    spec.append(names or None)
  return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def num_devices() -> int:
  """Of the mesh of `use`; 1 without one."""
  mesh = jax.sharding.get_abstract_mesh()
  return 1 if mesh.empty else mesh.size


def rows_per_device(num_rows: int) -> int:
  """Of `num_rows`, those on one device of the mesh of `use`; all without one.

  All of them as well where the devices do not divide them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return num_rows
  shards = mesh.shape['data'] * mesh.shape['fsdp']
  return num_rows if num_rows % shards else num_rows // shards


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
  """Leading axis (rows, or groups of rows) split over `data` and `fsdp`."""
  return NamedSharding(mesh, ROWS)


def num_row_shards(mesh: Mesh) -> int:
  return mesh.shape['data'] * mesh.shape['fsdp']


def num_processes(mesh: Mesh) -> int:
  """Processes that own devices of the mesh."""
  return len({device.process_index for device in mesh.devices.flat})


def local_rows(mesh: Mesh, num_rows: int) -> slice:
  """The block of `num_rows` rows that lives on this process's devices.

  Raises:
    ValueError: the rows of a process are not a block of their own, or the
      shards do not divide them.
  """
  shards, processes = num_row_shards(mesh), num_processes(mesh)
  if shards % processes:
    raise ValueError(
      f'{processes} processes cannot share {shards} shards of rows; make '
      'data * fsdp of the mesh a multiple of the number of processes, so that '
      'the tensor axis stays inside a process.'
    )
  if num_rows % shards:
    raise ValueError(
      f'{num_rows} rows cannot be split over {shards} devices; make them a '
      'multiple.'
    )
  if processes == 1:
    return slice(0, num_rows)
  blocks = rows(mesh).addressable_devices_indices_map((num_rows,)).values()
  starts, stops = zip(*(block[0].indices(num_rows)[:2] for block in blocks))
  start, stop = min(starts), max(stops)
  if stop - start != num_rows // processes:
    raise ValueError(
      f'rows {start} to {stop} of {num_rows} are spread over the devices of '
      f'this process, expected a block of {num_rows // processes}; order the '
      'devices of the mesh by process.'
    )
  return slice(start, stop)


def put_rows(mesh: Mesh, tree: Any) -> Any:
  """Host arrays [n, ...], whole on every process, as arrays split by rows."""
  place = rows(mesh)

  def one(x):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, place, lambda index: x[index])

  return jax.tree.map(one, tree)


def place(mesh: Mesh, params: Any) -> Any:
  """Parameters, from the host or from devices, where the table wants them."""

  def one(x, placed):
    if isinstance(x, jax.Array) and x.sharding.device_set == placed.device_set:
      return jax.device_put(x, placed)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, placed, lambda index: x[index])

  return jax.tree.map(one, params, shardings(mesh, params))


def to_host(tree: Any) -> Any:
  """The whole of every array, as numpy, on every process."""

  def one(x):
    if isinstance(x, jax.Array) and not (
      x.is_fully_addressable or x.is_fully_replicated
    ):
      return multihost_utils.process_allgather(x, tiled=True)
    return jax.device_get(x)

  return jax.tree.map(one, tree)
