"""Checkpoints by Orbax: written in the background, never half-read.

A checkpoint holds the `TrainState` and a JSON record: the data cursor, muted
rewards, metrics, settings and versions. All processes write their own parts and
call the methods together.

  save     copies the arrays, returns, writes behind the next steps; a write
           that fails (a full disk) is reported and leaves the run and every
           earlier checkpoint as they were
  restore  the newest that can be read; what is partial, stale or truncated is
           named in a warning and put out of the way
  keep     old ones go only after a new one is complete, see `Retention`
"""

import logging
import math
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp

from gdpo_jax import processes
from gdpo_jax.types import TrainState

_log = logging.getLogger(__name__)
_UNREADABLE = '.unreadable'


class Retention(NamedTuple):
  """Which checkpoints stay; each rule keeps its own, all of them are kept."""

  last: int = 2  # the newest n
  every: int = 0  # and steps divisible by this; 0: none
  best: str | None = None  # and the highest value of this metric
  pareto: tuple[str, ...] = ()  # and those that no other is better than in all

  def keep(
    self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, float]]
  ) -> set[int]:
    """Of `steps`, those that stay; a step without a metric is never best.

    A step dominates another when it is at least as good in every metric of
    `pareto` and better in one; of equals, the first stays.
    """
    kept = set(sorted(steps)[-self.last :])
    if self.every:
      kept |= {step for step in steps if step % self.every == 0}
    if self.best:
      values = {s: _values(metrics.get(s), (self.best,)) for s in sorted(steps)}
      known = [s for s, value in values.items() if value is not None]
      if known:
        kept.add(max(known, key=lambda s: values[s]))
    if self.pareto:
      points = {s: _values(metrics.get(s), self.pareto) for s in sorted(steps)}
      points = {s: point for s, point in points.items() if point is not None}
      kept |= {
        step
        for step, mine in points.items()
        if not any(
          all(a >= b for a, b in zip(theirs, mine))
          and (theirs != mine or other < step)
          for other, theirs in points.items()
          if other != step
        )
      }
    return kept


def _values(metrics, names):
  values = tuple((metrics or {}).get(name, math.nan) for name in names)
  return values if all(map(math.isfinite, values)) else None


class Checkpointer:
  """`save` returns at once; `restore_latest` gives None where nothing is."""

  def __init__(
    self,
    directory: pathlib.Path,
    keep: int | Retention,
    every: int,
  ):
    self._every = every
    self._directory = directory.absolute()
    self._keep = keep if isinstance(keep, Retention) else Retention(last=keep)
    self._metrics: dict[int, Mapping[str, float]] = {}
    self._saving: int | None = None
    self._manager = self._open()
    for step in self._manager.all_steps():
      self._metrics[step] = self._read_metrics(step)

  def _open(self):
    return ocp.CheckpointManager(
      self._directory,
      options=ocp.CheckpointManagerOptions(
        preservation_policy=self, enable_async_checkpointing=True
      ),
    )

  def should_preserve(self, checkpoints, *, context) -> list[bool]:
    """Orbax asks which of `checkpoints` stay, the one being written included."""
    del context
    steps = [info.step for info in checkpoints]
    kept = self._keep.keep(steps, self._metrics)
    return [step in kept for step in steps]

  @property
  def steps(self) -> list[int]:
    """Steps of which there is a complete checkpoint, oldest first."""
    return sorted(self._manager.all_steps())

  def due(self, step: int) -> bool:
    return bool(self._every) and step % self._every == 0

  def save(
    self,
    step: int,
    state: TrainState,
    record: dict[str, Any],
    flight: dict[str, Any] | None = None,
  ) -> None:
    """Starts to write; first waits for the write before.

    Args:
      record: plain JSON; its 'metrics' are what `Retention` compares.
      flight: arrays on the host, of a batch that is not trained on yet, the
        same on every process; `record['flight']` says what they are.
    """
    self.wait()
    if step in self._manager.all_steps():
      return
    self._metrics[step] = record.get('metrics', {})
    error = None
    try:
      items = {
        'state': ocp.args.StandardSave(_storable(state)),
        'record': ocp.args.JsonSave(record),
      }
      if flight is not None:
        items['flight'] = ocp.args.StandardSave(flight)
      self._manager.save(step, args=ocp.args.Composite(**items))
      self._saving = step
    except Exception as caught:  # of many kinds: the run is worth more
      error = caught
    self._settle(step, error)

  def wait(self) -> None:
    """Until the write in the background is complete, or has failed."""
    if self._saving is None:
      return
    step, self._saving, error = self._saving, None, None
    try:
      self._manager.wait_until_finished()
    except Exception as caught:
      error = caught
    self._settle(step, error)

  def _settle(self, step: int, error: Exception | None) -> None:
    """Clears up after a write that failed on any process."""
    if not processes.any_of(error is not None):
      return
    reason = 'another process could not write its part'
    if error is not None:
      reason = str(error).strip().splitlines()[0]
    self._saving = None
    self._metrics.pop(step, None)
    # A new manager: the old one counts steps that it was about to delete as
    # gone, though they are still there.
    self._manager.close()
    if processes.is_first():
      for partial in self._directory.glob(f'{step}.orbax-checkpoint-tmp*'):
        shutil.rmtree(partial, ignore_errors=True)
    self._manager = self._open()
    _log.error(
      'checkpoint %s was not written: %s. The run goes on; what can be '
      'continued from is %s. Is the disk full?',
      step,
      reason,
      f'step {self.steps[-1]}' if self.steps else 'nothing yet',
    )

  def restore_latest(
    self, like: TrainState
  ) -> tuple[TrainState, dict[str, Any], dict[str, Any] | None] | None:
    """State, record and flight of the newest checkpoint that can be read.

    The state is placed like `like`.

    Newer ones that cannot be read are renamed to `STEP.unreadable`, so that
    they neither count as kept nor stand in the way of a new one.

    Returns None where there is none at all.

    Raises:
      ValueError: there are checkpoints, and none can be read; a run must not
        start anew over them.
    """
    self._warn_of_strays()
    faults = []
    for step in reversed(self.steps):
      got, error = None, None
      try:
        got = self._read(step, like)
      except Exception as caught:  # whatever damaged files make of a reader
        error = caught
      if processes.any_of(error is not None):
        reason = 'another process could not read its part'
        if error is not None:
          reason = str(error).strip().splitlines()[0]
        faults.append((step, reason))
        _log.warning('checkpoint %s cannot be read, skipped: %s', step, reason)
        continue
      self._set_aside([step for step, _ in faults])
      state = TrainState(**got['state'])
      key = jax.device_put(
        jax.random.wrap_key_data(state.key), like.key.sharding
      )
      return state._replace(key=key), got['record'], got.get('flight')
    if faults:
      listed = ', '.join(f'{step} ({reason})' for step, reason in faults)
      raise ValueError(
        f'no checkpoint in {self._directory} can be read: {listed}; restore '
        'one of them, or choose another directory.'
      )
    return None

  def _read(self, step: int, like: TrainState) -> dict[str, Any]:
    target = jax.tree.map(_abstract, _storable(like))
    got = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(target), record=ocp.args.JsonRestore()
      ),
    )
    items = {'state': got['state'], 'record': got['record']}
    if items['record'].get('flight'):
      # as it was written: its shapes follow from what was sampled
      more = ocp.args.Composite(flight=ocp.args.StandardRestore())
      items['flight'] = self._manager.restore(step, args=more)['flight']
    return items

  def _warn_of_strays(self):
    """Names what lies there and is no complete checkpoint."""
    strays = sorted(
      path.name for path in self._directory.iterdir() if not path.name.isdigit()
    )
    if strays:
      _log.warning(
        'in %s these are no complete checkpoints, skipped: %s',
        self._directory,
        ', '.join(strays),
      )

  def _set_aside(self, steps):
    if not steps:
      return
    if processes.is_first():
      for step in steps:
        aside = self._directory / f'{step}{_UNREADABLE}'
        shutil.rmtree(aside, ignore_errors=True)
        (self._directory / str(step)).rename(aside)
    processes.barrier('unreadable checkpoints are out of the way')
    self._manager.reload()

  def _read_metrics(self, step: int) -> Mapping[str, float]:
    try:
      record = self._manager.restore(
        step, args=ocp.args.Composite(record=ocp.args.JsonRestore())
      )['record']
      return dict(record.get('metrics', {}))
    except Exception:  # damaged; `restore_latest` will say so
      return {}

  def close(self) -> None:
    """Ends the background threads; `wait` first, to hear of a failure."""
    self._manager.close()


def read_state(
  directory: pathlib.Path, step: int | None = None
) -> tuple[int, dict[str, Any]]:
  """(step, state) of a complete checkpoint, the newest by default.

  Arrays on the host, whole, whatever devices wrote them; tuples come back as
  lists.

  Raises:
    ValueError: there is none.
  """
  if not directory.is_dir():
    raise ValueError(f'{directory} is not there: the run saved no checkpoint.')
  # of all items; Orbax warns of one that it could not read
  handlers = {
    'state': ocp.PyTreeCheckpointHandler(),
    'record': ocp.JsonCheckpointHandler(),
    'flight': ocp.StandardCheckpointHandler(),
  }
  with ocp.CheckpointManager(
    directory.absolute(), item_handlers=handlers
  ) as manager:
    step = manager.latest_step() if step is None else step
    if step not in manager.all_steps():
      raise ValueError(f'{directory} holds no finished checkpoint.')
    # Without it Orbax wants the devices of those who wrote.
    on_host = jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray),
      manager.item_metadata(step)['state'].tree,
    )
    got = manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.PyTreeRestore(restore_args=on_host)
      ),
    )
  return step, got['state']


def _storable(state: TrainState) -> dict[str, Any]:
  """Typed keys are stored as their data; a dict reads back on any version."""
  return state._replace(key=jax.random.key_data(state.key))._asdict()


def _abstract(x):
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def changed_fields(
  saved: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ''
) -> dict[str, tuple[Any, Any]]:
  """{'section.field': (saved, now)} for every field of two nested records.

  A field that only one of them has is compared with 'not there'.
  """
  changed = {}
  for name in sorted({*saved, *now}):
    old, new = saved.get(name, 'not there'), now.get(name, 'not there')
    if isinstance(old, Mapping) and isinstance(new, Mapping):
      changed |= changed_fields(old, new, f'{prefix}{name}.')
    elif old != new:
      changed[prefix + name] = (old, new)
  return changed
