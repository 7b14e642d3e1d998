"""Reads what a run has written so far, finished or not."""

import json
import pathlib
import re
from typing import Any, NamedTuple

from gdpo_jax.train import metrics, monitor
from gdpo_jax.train.rules import About, RewardInfo, Row

CONTRIBUTIONS = 'contributions.json'


class Run(NamedTuple):
  """The files of one run directory, as records."""

  directory: pathlib.Path
  training: list[Row]  # one per step
  held_out: list[Row]  # one per evaluation
  events: list[dict[str, Any]]
  samples: list[dict[str, Any]]
  histograms: list[dict[str, Any]]
  settings: dict[str, Any]
  about: About
  contributions: dict[str, Any]  # empty, where nobody asked for them

  @property
  def names(self) -> tuple[str, ...]:
    return tuple(reward.name for reward in self.about.rewards)


def load(directory: pathlib.Path) -> Run:
  """Everything that is there; what is not is empty.

  Raises:
    FileNotFoundError: the directory has no metrics.
  """
  path = directory / metrics.JSONL
  if not path.exists():
    raise FileNotFoundError(
      f'{directory} has no {metrics.JSONL}; give the directory of a run.'
    )
  history = lines(path)
  training, held_out = metrics.split_history(history)
  settings = _json(directory / 'settings.json')
  return Run(
    directory=directory,
    training=training,
    held_out=held_out,
    events=lines(directory / metrics.EVENTS),
    samples=lines(directory / metrics.SAMPLES),
    histograms=lines(directory / metrics.HISTOGRAMS),
    settings=settings,
    about=monitor.read_about(directory) or _guess(training, settings),
    contributions=_json(directory / CONTRIBUTIONS),
  )


def lines(path: pathlib.Path) -> list[dict[str, Any]]:
  """Records of a file that may be in the middle of being written."""
  out = []
  if path.exists():
    with path.open(encoding='utf-8') as file:
      for line in file:
        if not line.endswith('\n'):
          break
        out.append(json.loads(line))
  return out


def _json(path: pathlib.Path) -> dict[str, Any]:
  if not path.exists():
    return {}
  return json.loads(path.read_text(encoding='utf-8'))


_MEAN = re.compile(r'rewards/(.+)/weight')


def _guess(training: list[Row], settings: dict[str, Any]) -> About:
  """From the rows alone: runs that are older than rewards.json."""
  names = {}
  for row in training:
    for key in row:
      if match := _MEAN.fullmatch(key):
        names[match[1]] = max(names.get(match[1], 0.0), row[key])
  return About(
    rewards=tuple(RewardInfo(name, weight) for name, weight in names.items()),
    prompts_per_step=settings.get('prompts_per_step', 1),
    group_size=settings.get('group_size', 1),
  )
