"""One mesh, one table from parameter path to `PartitionSpec`.

The mesh has three axes: `data` (replicas), `fsdp` (parameters, gradients and
optimizer split, rows split as well) and `tensor` (heads, mlp and vocabulary
split). The same table serves parameters and optimizer state, because the path
of a moment ends in the path of its parameter. A leaf that no rule matches, or
that an axis does not divide, is an error with its name and shape: nothing is
replicated by accident.
"""

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ('data', 'fsdp', 'tensor')
ROWS = PartitionSpec(('data', 'fsdp'))  # how rows of a batch are split

# First match wins; paths are 'layers/attn/q/kernel', L is the leading axis.
RULES: tuple[tuple[str, PartitionSpec], ...] = (
  (r'(embed|head)/embedding$', PartitionSpec('tensor', 'fsdp')),
  (r'attn/[qkv]/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'attn/[qkv]/bias$', PartitionSpec(None, 'tensor')),
  (r'attn/o/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
  (r'mlp/(gate|up)/kernel$', PartitionSpec(None, 'fsdp', 'tensor')),
  (r'mlp/down/kernel$', PartitionSpec(None, 'tensor', 'fsdp')),
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
    ValueError: no rule matches a leaf, or an axis does not divide it.
  """

  def one(path, leaf):
    name, shape = path_name(path), tuple(leaf.shape)
    if not shape:
      return NamedSharding(mesh, PartitionSpec())
    found = [spec for pattern, spec in RULES if re.search(pattern, name)]
    if not found:
      raise ValueError(
        f'no sharding rule matches {name!r} of shape {shape}; add one to '
        'gdpo_jax.sharding.RULES.'
      )
    for size, axis in zip(shape, found[0]):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
          f'{name!r} of shape {shape} cannot be split: {size} is not a multiple '
          f'of mesh axis {axis!r} of size {mesh.shape[axis]}; make the axis '
          'smaller, or pad the model.'
        )
    return NamedSharding(mesh, found[0])

  return jax.tree_util.tree_map_with_path(one, tree)


def replicated(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def rows(mesh: Mesh) -> NamedSharding:
  """Leading axis (rows, or groups of rows) split over `data` and `fsdp`."""
  return NamedSharding(mesh, ROWS)


def num_row_shards(mesh: Mesh) -> int:
  return mesh.shape['data'] * mesh.shape['fsdp']
