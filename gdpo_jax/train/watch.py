"""All that is written, watched and shown about a run, in one place.

step(row, experience) --> metrics.jsonl, trackers
                      --> samples.jsonl, completions/*.parquet, histograms
                      --> rules --> events.jsonl, the terminal
                      --> report.html, now and then
"""

import dataclasses
import json
import logging
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from gdpo_jax import processes
from gdpo_jax.train import (
  completions,
  histograms,
  metrics,
  monitor,
  pareto,
  rules,
  subpolicies,
)
from gdpo_jax.train import state as state_lib
from gdpo_jax.train import trackers as trackers_lib
from gdpo_jax.train.monitor import FUSION_FLOOR, FUSION_START
from gdpo_jax.train.page import html
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import TrainState

_log = logging.getLogger(__name__)
# The report is written again when this many times the seconds of the last
# writing have passed: it never takes more than a part in 200 of a run.
_REPORT_SPACING = 200.0
_SAMPLED_ROWS = 32  # in samples.jsonl, of each step that is sampled


class Watch:
  """`step` once per training step, `held_out` per evaluation, then `close`."""

  def __init__(
    self,
    directory: pathlib.Path,
    rewards,
    names: tuple[str, ...],
    settings: Settings,
    progress: Progress,
    resume_step: int = -1,
  ):
    """Opens the files and goes through the rows that are already there.

    The first of several processes writes; the others watch the same rows, and
    come to the same adjustments.

    Args:
      rewards: the declared ones.
      names: of all rewards of the run; settings may add some.
      resume_step: of the checkpoint; -1 for a new run.
    """
    self._directory, self._settings = directory, settings
    self._progress = progress
    self._heads = [r.name for r in rewards] if settings.subpolicy_rank else []
    writes = processes.is_first()
    self._writer = metrics.NoWriter()
    if writes:
      self._writer = metrics.Writer(directory, resume_step)
    about = rules.About(
      rewards=monitor.describe_rewards(rewards, names),
      prompts_per_step=settings.prompts_per_step,
      group_size=settings.group_size,
      kl_target=settings.kl_target if settings.kl_coef else None,
    )
    self.monitor = monitor.Monitor(about, settings.monitor_actions)
    # A new run has none; the first process may still be cutting the file back.
    done = []
    if resume_step >= 0:
      done = metrics.read_jsonl(directory / metrics.JSONL)
    done, self._held_out = metrics.split_history(
      [row for row in done if row['step'] <= resume_step]
    )
    self.monitor.replay(done)
    config = dataclasses.asdict(settings)
    self._trackers = []
    if writes:
      monitor.write_about(directory, about)
      (directory / 'settings.json').write_text(
        json.dumps(config, indent=2, default=str)
      )
      self._trackers = [
        trackers_lib.TRACKERS[name](directory, config)
        for name in trackers_lib.parse(settings.trackers)
      ]
    self._seconds = 0.0  # spent here since the last row was made
    self._report_at = 0.0  # monotonic time of the next report

  @property
  def should_stop(self) -> bool:
    return self.monitor.should_stop

  def row(self, experience, timer: metrics.Timer) -> dict[str, Any]:
    """The host's part of a step's row."""
    start = time.perf_counter()
    row = metrics.experience_metrics(experience)
    spent = self._seconds + time.perf_counter() - start
    self._seconds = 0.0
    timer.seconds['metrics'] = spent
    return row

  def step(self, step: int, row: dict[str, Any], experience) -> None:
    """Everything that follows from the finished row of a step."""
    start = time.perf_counter()
    ratio = rules.entropy_ratio([*self.monitor.history, row])
    if ratio is not None:
      row['entropy/ratio'] = ratio
    self._writer.write(step, row)
    for tracker in self._trackers:
      tracker.write(step, row)
    self._writer.append(
      metrics.HISTOGRAMS,
      {'step': step, **histograms.step_histograms(experience)},
    )
    every = self._settings.samples_every
    last = step == self._settings.num_steps
    due = every and ((step - 1) % every == 0 or last)
    if due and processes.is_first():
      self._sample(step, experience)
    self._progress.step(step, row)
    for event in self.monitor.check(step, row):
      self._writer.append(metrics.EVENTS, event._asdict())
      if processes.is_first():
        self._progress.event(event)
    self._seconds += time.perf_counter() - start
    self._report()

  def _sample(self, step: int, experience) -> None:
    made = completions.trace(experience, self._settings)
    groups = max(1, _SAMPLED_ROWS // self._settings.group_size)
    for record in completions.records(step, experience, made, groups):
      self._writer.append(metrics.SAMPLES, record)
    if completions.can_write_table():
      completions.write_table(self._directory, step, experience, made)

  def held_out(self, step: int, summary: Mapping[str, float]) -> None:
    """The summary of an evaluation."""
    row = {f'eval/{name}': value for name, value in summary.items()}
    self._held_out.append({'step': step, **row})
    weights = {r.name: r.weight for r in self.monitor.about.rewards}
    found = pareto.archive(self._held_out, weights)
    if found:
      row['eval/hypervolume'] = float(found.hypervolume[-1])
    self._writer.write(step, row)
    self._report_at = 0.0  # the next report has it
    for tracker in self._trackers:
      tracker.write(step, row)

  def adjust(self, state: TrainState) -> TrainState:
    """The state with what the rules multiply at the moment.

    Absolute values, not products of products: a continued run, whose checkpoint
    has them already, comes to the same.
    """
    factors = self.monitor.factors
    state = state_lib.with_rate_factor(state, factors.get('learning_rate', 1.0))
    coef = self._settings.entropy_coef * factors.get('entropy_coef', 1.0)
    state = state_lib.with_entropy_coef(state, coef)
    coef = self._settings.fusion_entropy_coef
    if 'fusion_entropy_coef' in factors:
      coef = max(coef, FUSION_START) * factors['fusion_entropy_coef']
    if 'fusion_entropy_floor' in factors:
      coef = max(coef, FUSION_FLOOR)
    rates = [factors.get(f'head_rate/{name}', 1.0) for name in self._heads]
    return subpolicies.adjusted(state, coef, rates)

  def _report(self, finished: bool = False) -> None:
    """Never the reason for a run to end."""
    if not processes.is_first() or (
      not finished and time.monotonic() < self._report_at
    ):
      return
    start = time.monotonic()
    try:
      html.write(self._directory)
    except Exception:
      _log.warning('report.html could not be written', exc_info=True)
    spent = time.monotonic() - start
    self._seconds += spent
    self._report_at = time.monotonic() + _REPORT_SPACING * spent

  def close(self) -> None:
    """The last report; files and trackers are closed."""
    self._report(finished=True)
    self._writer.close()
    for tracker in self._trackers:
      tracker.close()
