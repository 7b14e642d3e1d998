"""Watches a run by the rules, and does what was chosen for each of them.

  row --append--> history --rules--> findings --actions--> events
                                              --adjust--> factors in force

An alarm is raised once when a rule finds something new, and is over when the
rule finds nothing at its release threshold. Everything follows from the rows
alone: a resumed run replays them and stands where it was.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.train.rule_book import RULES, Rule
from gdpo_jax.train.rules import About, Finding, RewardInfo, Row

ACTIONS = ('off', 'warn', 'adjust', 'stop')
# Steps between two adjustments for the same alarm: the first must get a chance
# to work.
PATIENCE = 5
# What an entropy bonus on the fusion weights is raised to when they collapse,
# and what it starts from where it was 0 and they oscillate.
FUSION_FLOOR, FUSION_START = 0.01, 1e-3


class Event(NamedTuple):
  """Something to tell: an alarm, its end, an adjustment or its end."""

  step: int
  rule: str
  subject: str
  kind: str  # 'advice', 'alarm', 'adjusted', 'over', 'stop'
  text: str
  advice: str = ''

  @property
  def loud(self) -> bool:
    return self.kind in ('alarm', 'stop')


@dataclasses.dataclass
class _Alarm:
  """One that is on."""

  finding: Finding
  since: int
  adjusted: int = 0  # times
  last_adjusted: int = 0  # step


def parse_actions(text: str) -> dict[str, str]:
  """`'kl_high=adjust,not_finite=stop'` -> by rule; the others only warn.

  `'all=off'` at the front changes what the others do.

  Raises:
    ValueError: a rule or an action that does not exist, or an adjustment for a
      rule that has none.
  """
  actions = {rule.name: 'warn' for rule in RULES}
  by_name = {rule.name: rule for rule in RULES}
  for part in filter(None, (part.strip() for part in text.split(','))):
    name, equals, action = (x.strip() for x in part.partition('='))
    if not equals or action not in ACTIONS:
      raise ValueError(
        f'monitor_actions has {part!r}; write RULE=ACTION, with an action of '
        f'{", ".join(ACTIONS)}.'
      )
    if name == 'all' and action != 'adjust':
      actions = dict.fromkeys(actions, action)
      continue
    if name not in by_name:
      raise ValueError(
        f'monitor_actions names the rule {name!r}; there are '
        f'{", ".join(by_name)}.'
      )
    if action == 'adjust' and by_name[name].adjustment is None:
      can = ', '.join(r.name for r in RULES if r.adjustment)
      raise ValueError(
        f'rule {name!r} has nothing to adjust; these have: {can}.'
      )
    actions[name] = action
  return actions


class Monitor:
  """`check` once per training step."""

  def __init__(
    self,
    about: About,
    actions: str = '',
    rules: Sequence[Rule] = RULES,
  ):
    self.about, self.rules = about, rules
    self.actions = parse_actions(actions)
    self.history: list[Row] = []
    self._alarms: dict[tuple[str, str], _Alarm] = {}
    self.should_stop = False

  def replay(self, rows: Iterable[Row]) -> None:
    """Goes through the rows of a run that is continued, without a word."""
    for row in rows:
      self.check(row['step'], row)

  @property
  def factors(self) -> dict[str, float]:
    """What adjustments multiply at the moment; empty where all is as set.

    Keys are those of `Adjustment.what`; 'head_rate/NAME' for a head.
    """
    out: dict[str, float] = {}
    for (name, subject), alarm in self._alarms.items():
      change = _rule(self.rules, name).adjustment
      if alarm.adjusted and change:
        factor, what = change.factor**alarm.adjusted, change.what
        if what == 'head_rate':
          what = f'{what}/{subject}'
        out[what] = out.get(what, 1.0) * factor
    return out

  @property
  def alarms(self) -> list[tuple[str, Finding, int]]:
    """(rule, finding, step since when) of every alarm that is on."""
    return [
      (name, alarm.finding, alarm.since)
      for (name, _), alarm in self._alarms.items()
    ]

  def check(self, step: int, row: Mapping[str, Any]) -> list[Event]:
    """Judges the history with this row at its end."""
    self.history.append({'step': step, **row})
    events: list[Event] = []
    for rule in self.rules:
      action = self.actions.get(rule.name, 'warn')
      if action == 'off' or (rule.once and len(self.history) > 1):
        continue
      found = rule.find(self.history, self.about, rule.threshold)
      if rule.once:
        events += [
          Event(step, rule.name, f.subject, 'advice', f.sentence, rule.advice)
          for f in found
        ]
        continue
      events += self._update(step, rule, action, found)
    return events

  def _update(self, step, rule: Rule, action, found) -> list[Event]:
    events = []
    still = {f.subject: f for f in found}
    on = [key for key in self._alarms if key[0] == rule.name]
    if on and rule.release is not None:
      released = rule.find(self.history, self.about, rule.release)
      still = {f.subject: f for f in released} | still
    for key in on:
      alarm = self._alarms[key]
      if key[1] in still:
        alarm.finding = still[key[1]]
        if action == 'adjust':
          firing = any(f.subject == key[1] for f in found)
          events += self._adjust(step, rule, alarm) if firing else []
        continue
      text = f'{rule.name} ({key[1]}) is over.'
      if alarm.adjusted:
        text += f' {rule.adjustment.what} is back to what was set.'
      events.append(Event(step, rule.name, key[1], 'over', text))
      del self._alarms[key]
    for finding in found:
      key = (rule.name, finding.subject)
      if key in self._alarms:
        continue
      alarm = self._alarms[key] = _Alarm(finding, step)
      text, kind = finding.sentence, 'alarm'
      if action == 'stop':
        self.should_stop, kind = True, 'stop'
        text += ' The run ends here, as monitor_actions asks.'
      events.append(
        Event(step, rule.name, finding.subject, kind, text, rule.advice)
      )
      if action == 'adjust':
        events += self._adjust(step, rule, alarm)
    return events

  def _adjust(self, step, rule, alarm: _Alarm) -> list[Event]:
    change = rule.adjustment
    waiting = alarm.adjusted and step - alarm.last_adjusted < PATIENCE
    if waiting or alarm.adjusted >= change.repeats:
      return []
    alarm.adjusted += 1
    alarm.last_adjusted = step
    text = (
      f'{rule.name}: {change.what} is now '
      f'{change.factor**alarm.adjusted:.3g} times what was set, until the '
      'alarm is over.'
    )
    if change.what == 'fusion_entropy_floor':
      text = (
        f'{rule.name}: fusion_entropy_coef is at least {FUSION_FLOOR} until the '
        'alarm is over.'
      )
    return [Event(step, rule.name, alarm.finding.subject, 'adjusted', text)]


def _rule(rules: Sequence[Rule], name: str) -> Rule:
  return next(rule for rule in rules if rule.name == name)


REWARDS_FILE = 'rewards.json'


def describe_rewards(rewards, names=()) -> tuple[RewardInfo, ...]:
  """What `rewards.pipeline.Reward`s were declared with.

  Args:
    names: of all rewards of the run; those beyond the declared ones are made by
      a setting.
  """
  declared = tuple(
    RewardInfo(
      name=r.name,
      weight=float(r.weight),
      range=None if r.range is None else tuple(map(float, r.range)),
      condition=_condition_text(r.condition),
      fallback=r.fallback,
    )
    for r in rewards
  )
  return declared + tuple(
    RewardInfo(name, declared=False) for name in names[len(declared) :]
  )


def _condition_text(condition) -> str | None:
  if condition is None or isinstance(condition, str):
    return condition
  pairs = condition.items() if isinstance(condition, Mapping) else [condition]
  return ' and '.join(f'{name}>={at:g}' for name, at in pairs)


def write_about(directory: pathlib.Path, about: About) -> None:
  """Kept beside the metrics, so that reports can be made later."""
  record = about._asdict() | {'rewards': [r._asdict() for r in about.rewards]}
  path = directory / REWARDS_FILE
  path.write_text(json.dumps(record, indent=2), encoding='utf-8')


def read_about(directory: pathlib.Path) -> About | None:
  """None where the run is older than this file."""
  path = directory / REWARDS_FILE
  if not path.exists():
    return None
  record = json.loads(path.read_text(encoding='utf-8'))
  rewards = tuple(
    RewardInfo(**{**r, 'range': r['range'] and tuple(r['range'])})
    for r in record['rewards']
  )
  return About(**{**record, 'rewards': rewards})
