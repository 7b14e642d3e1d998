"""TensorBoard and Weights & Biases beside `metrics.jsonl` (extra `track`).

A tracker is an object with `write(step, row)` and `close()`. Both libraries
are loaded only where a run asks for them.
"""

import importlib.util
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol


class Tracker(Protocol):
  def write(self, step: int, row: Mapping[str, Any]) -> None: ...

  def close(self) -> None: ...


class TensorBoard:
  """Event files in `RUN/tensorboard`; needs neither TensorFlow nor torch."""

  def __init__(self, directory: pathlib.Path, config: Mapping[str, Any]):
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    del config
    self._event, self._summary = event_pb2.Event, summary_pb2.Summary
    self._file = EventFileWriter(str(directory / 'tensorboard'))

  def write(self, step: int, row: Mapping[str, Any]) -> None:
    values = [
      self._summary.Value(tag=name, simple_value=value)
      for name, value in _numbers(row).items()
    ]
    self._file.add_event(
      self._event(
        step=step, wall_time=time.time(), summary=self._summary(value=values)
      )
    )

  def close(self) -> None:
    self._file.close()


class WeightsAndBiases:
  """One W&B run per run directory; WANDB_MODE=offline needs no account."""

  def __init__(self, directory: pathlib.Path, config: Mapping[str, Any]):
    import wandb

    kept = directory / 'wandb_id'
    if not kept.exists():
      kept.write_text(uuid.uuid4().hex[:12], encoding='utf-8')
    self._run = wandb.init(
      project='gdpo_jax',
      name=directory.name,
      dir=str(directory),
      id=kept.read_text(encoding='utf-8'),
      resume='allow',  # a continued run goes on in the same chart
      config=dict(config),
    )

  def write(self, step: int, row: Mapping[str, Any]) -> None:
    self._run.log(_numbers(row), step=step)

  def close(self) -> None:
    self._run.finish()


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
  return {
    k: float(v)
    for k, v in row.items()
    if k != 'step' and isinstance(v, (int, float))
  }


TRACKERS = {'tensorboard': TensorBoard, 'wandb': WeightsAndBiases}


def parse(text: str) -> tuple[str, ...]:
  """`'tensorboard,wandb'` -> names; '' for none.

  Raises:
    ValueError: an unknown tracker, or one whose library is not installed.
  """
  names = tuple(filter(None, (name.strip() for name in text.split(','))))
  for name in names:
    if name not in TRACKERS:
      raise ValueError(
        f'trackers names {name!r}; choose from {", ".join(TRACKERS)}.'
      )
    if importlib.util.find_spec(name) is None:
      raise ValueError(
        f'the tracker {name!r} is not installed; '
        "run pip install 'gdpo_jax[track]', or leave trackers empty."
      )
  return names
