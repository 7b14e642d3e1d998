"""A bounded store of past policies in 8 bits, in the run's directory.

  snapshots/STEP.safetensors, of which the newest `snapshot_keep` are used
                              (a few more stay, for a return to a checkpoint)

What is trained is kept (under LoRA the small tree). A past policy is used in one
of two ways: 'sampling', where a share of the steps is sampled from one of them
instead of the current policy (the importance ratio is then against what was
sampled from, 8 bits included), or 'reference', where the KL term is to the
newest. Which one is used follows from the seed and the step, so that a resumed
run uses what the uninterrupted one would have.
"""

import os
import pathlib
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from gdpo_jax import sharding
from gdpo_jax.policy import eight_bit
from gdpo_jax.train.settings import Settings


class Snapshots:
  """See the module; without `snapshot_every` it keeps nothing."""

  def __init__(self, directory: pathlib.Path, settings: Settings, mesh):
    self._directory, self._settings = directory / 'snapshots', settings
    self._mesh, self._age = mesh, 0
    # A run that goes back to a checkpoint must find what it had then.
    again = settings.save_every * (settings.keep_checkpoints + 1)
    more = -(-again // max(1, settings.snapshot_every))
    self._bound = settings.snapshot_keep + more

    def pack(params):
      kept = eight_bit.quantize(params, settings.snapshot_format)
      return kept, eight_bit.relative_error(params, kept)

    self._pack = jax.jit(pack)

  def rewind(self, step: int) -> None:
    """Forgets what a resumed run will keep again: snapshots after `step`."""
    for at, path in self._all():
      if at > step and jax.process_index() == 0:
        path.unlink()

  def after(self, step: int, params: Any) -> dict[str, float]:
    """Keeps `params` where step is due; returns the step's row of metrics."""
    every, row = self._settings.snapshot_every, {}
    if every and self._settings.snapshot_use == 'sampling':
      row = {'snapshots/age': float(self._age)}
    if not every or step % every:
      return row
    kept, error = self._pack(params)
    tensors = _flat(sharding.to_host(kept))
    if jax.process_index() == 0:
      self._directory.mkdir(parents=True, exist_ok=True)
      partial = self._directory / f'{step}.partial'
      safetensors.numpy.save_file(tensors, partial)
      os.replace(partial, self._directory / f'{step}.safetensors')
      for _, path in self._all()[: -self._bound]:
        path.unlink()
    return row | {'snapshots/relative_error': float(error)}

  def behaviour(self, step: int, key: jax.Array, params: Any) -> Any:
    """What the step samples from: `params`, or a past policy like them."""
    self._age = 0
    if self._settings.snapshot_use != 'sampling':
      return params
    kept = self._kept(step)
    # a key that nothing else of the step folds in
    draw, which = jax.random.uniform(jax.random.fold_in(key, 2**31 - 1), (2,))
    if not kept or draw >= self._settings.snapshot_share:
      return params
    at, path = kept[int(which * len(kept))]
    self._age = step - at
    return self._load(path, params)

  def reference(self, step: int, params: Any, otherwise: Any) -> Any:
    """The newest past policy as reference, or `otherwise`."""
    kept = self._kept(step)
    if self._settings.snapshot_use != 'reference' or not kept:
      return otherwise
    return self._load(kept[-1][1], params)

  def _all(self) -> list[tuple[int, pathlib.Path]]:
    """(step, file), oldest first."""
    return sorted(
      (int(path.stem), path)
      for path in self._directory.glob('*.safetensors')
      if path.stem.isdigit()
    )

  def _kept(self, step: int) -> list[tuple[int, pathlib.Path]]:
    """The newest `snapshot_keep` of those that there were after `step` steps."""
    past = [kept for kept in self._all() if kept[0] <= step]
    return past[-self._settings.snapshot_keep :]

  def _load(self, path: pathlib.Path, like: Any) -> Any:
    """Parameters placed like `like`."""
    kind = self._settings.snapshot_format
    shapes = jax.eval_shape(lambda x: eight_bit.quantize(x, kind), like)
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    with safetensors.safe_open(str(path), framework='numpy') as file:
      found = []
      for where, shape in leaves:
        name = jax.tree_util.keystr(where)
        values = file.get_tensor(name)
        if values.dtype == np.uint8:
          values = values.view(shape.dtype)
        if values.shape != shape.shape or values.dtype != shape.dtype:
          raise ValueError(
            f'{path}: {name} is {values.dtype}{list(values.shape)}, expected '
            f'{shape.dtype}{list(shape.shape)}; remove the file.'
          )
        found.append(values)
    restored = eight_bit.restore(jax.tree.unflatten(tree, found))
    return jax.device_put(restored, sharding.shardings(self._mesh, like))


def _flat(tree: Any) -> dict[str, np.ndarray]:
  """By path; what safetensors has no name for is written as bytes."""
  flat = {}
  for where, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
    x = np.ascontiguousarray(x)
    plain = x.dtype in (np.float32, np.int8)
    flat[jax.tree_util.keystr(where)] = x if plain else x.view(np.uint8)
  return flat
