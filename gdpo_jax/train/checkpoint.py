"""Checkpoints by Orbax: written in the background, never half-read.

A checkpoint holds the `TrainState` and a JSON record: the data cursor, the
settings and versions. A directory that is not complete is skipped with a
warning that names it.
"""

import logging
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from gdpo_jax.types import TrainState

_log = logging.getLogger(__name__)


class Checkpointer:
  """`save` returns at once; `restore_latest` gives None where nothing is."""

  def __init__(self, directory: pathlib.Path, keep: int, every: int):
    self._every = every
    self._manager = ocp.CheckpointManager(
      directory.absolute(),
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=True
      ),
    )

  def due(self, step: int) -> bool:
    return bool(self._every) and step % self._every == 0

  def save(self, step: int, state: TrainState, record: dict[str, Any]) -> None:
    if step in self._manager.all_steps():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_storable(state)),
        record=ocp.args.JsonSave(record),
      ),
    )

  def restore_latest(
    self, like: TrainState
  ) -> tuple[TrainState, dict[str, Any]] | None:
    """The newest checkpoint that can be read, placed like `like`.

    Returns None where there is none at all.

    Raises:
      ValueError: there are checkpoints, and none can be read; a run must not
        start anew over them.
    """
    faults = []
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        got = self._manager.restore(
          step,
          args=ocp.args.Composite(
            state=ocp.args.StandardRestore(
              jax.tree.map(_abstract, _storable(like))
            ),
            record=ocp.args.JsonRestore(),
          ),
        )
      except (OSError, KeyError, ValueError) as error:
        faults.append(f'{step} ({str(error).splitlines()[0]})')
        _log.warning('checkpoint %s cannot be read, skipped: %s', step, error)
        continue
      state = TrainState(**got['state'])
      key = jax.device_put(
        jax.random.wrap_key_data(state.key), like.key.sharding
      )
      return state._replace(key=key), got['record']
    if faults:
      raise ValueError(
        f'no checkpoint in {self._manager.directory} can be read: '
        f'{", ".join(faults)}; restore one of them, or choose another '
        'directory.'
      )
    return None

  def wait(self) -> None:
    self._manager.wait_until_finished()

  def close(self) -> None:
    self._manager.close()


def _storable(state: TrainState) -> dict[str, Any]:
  """Typed keys are stored as their data; a dict reads back on any version."""
  return state._replace(key=jax.random.key_data(state.key))._asdict()


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
