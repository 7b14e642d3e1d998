"""A run in words: what moved, what did not, what to change."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from gdpo_jax.train import pareto
from gdpo_jax.train.rule_book import RULES
from gdpo_jax.train.rules import RewardInfo, Row, values
from gdpo_jax.train.run_files import Run

# A change counts where it is this many standard errors; both ends are means of
# few steps, whose errors are themselves only known roughly.
CLEAR = 2.5


class Verdict(NamedTuple):
  """One sentence; `mood` is 'good', 'bad', 'flat' or 'note'."""

  mood: str
  text: str
  subject: str = ''
  advice: str = ''


class Change(NamedTuple):
  """Of a mean between two ends."""

  start: float
  end: float
  error: float  # standard error of the difference; NaN where not known

  @property
  def clear(self) -> int:
    """+1 or -1 where the change is beyond chance, else 0."""
    change = self.end - self.start
    if math.isnan(self.error):
      return 0
    if self.error == 0:
      return (change > 0) - (change < 0)
    return int(math.copysign(abs(change) / self.error >= CLEAR, change))

  @property
  def mark(self) -> str:
    return {1: '▲', -1: '▼', 0: '–'}[self.clear]


class End(NamedTuple):
  """A mean at one end of a run."""

  end: float
  end_error: float  # standard error; NaN where not known


def _edge(rows: Sequence[Row]) -> int:
  """Steps that make an end: a fifth, 3 to 10."""
  return min(10, max(3, len(rows) // 5))


def _reward_end(rows: Sequence[Row], name: str) -> End | None:
  means = values(rows, f'rewards/{name}/mean')
  if not means:
    return None
  noise = values(rows, f'rewards/{name}/stderr')
  if len(noise) == len(means):
    error = math.sqrt(sum(e * e for e in noise)) / len(noise)
  else:  # rows of an older run: the scatter of the steps themselves
    error = _scatter(means)
  return End(statistics.fmean(means), error)


def _scatter(means: Sequence[float]) -> float:
  if len(means) < 2:
    return math.nan
  return statistics.stdev(means) / math.sqrt(len(means))


def training_end(run: Run, name: str) -> End | None:
  """Mean of a reward over the last steps."""
  return _reward_end(run.training[-_edge(run.training) :], name)


def metric_end(run: Run, key: str) -> End | None:
  """Mean of any metric over the last steps."""
  found = values(run.training[-_edge(run.training) :], key)
  return End(statistics.fmean(found), _scatter(found)) if found else None


def held_out_end(run: Run, name: str) -> End | None:
  """The last evaluation of a reward."""
  key = f'eval/rewards/{name}/'
  rows = [row for row in run.held_out if row.get(key + 'mean') is not None]
  if not rows:
    return None
  return End(rows[-1][key + 'mean'], rows[-1].get(key + 'stderr', math.nan))


def change(rows: Sequence[Row], name: str) -> Change | None:
  """First against last steps of a reward in training."""
  edge = _edge(rows)
  if len(rows) < 2 * edge:
    return None
  first, last = (_reward_end(r, name) for r in (rows[:edge], rows[-edge:]))
  if first is None or last is None:
    return None
  return Change(
    first.end, last.end, math.hypot(first.end_error, last.end_error)
  )


def held_out_change(held_out: Sequence[Row], name: str) -> Change | None:
  """First against last evaluation.

  The error takes the two as independent, which is too large: the problems are
  the same (`experiments/seeds.py` pairs them).
  """
  key = f'eval/rewards/{name}/'
  rows = [row for row in held_out if row.get(key + 'mean') is not None]
  if len(rows) < 2:
    return None
  errors = [row.get(key + 'stderr') for row in (rows[0], rows[-1])]
  error = math.nan if None in errors else math.hypot(*errors)
  return Change(rows[0][key + 'mean'], rows[-1][key + 'mean'], error)


def _about_reward(run: Run, reward: RewardInfo) -> Verdict:
  train = change(run.training, reward.name)
  held = held_out_change(run.held_out, reward.name)
  sense = -1 if reward.weight < 0 else 1
  if train is None and held is None:
    return Verdict(
      'note', f'{reward.name}: too few steps to tell.', reward.name
    )
  parts = []
  for what, found in (('in training', train), ('held-out', held)):
    if found is not None:
      verb = {1: 'rose', -1: 'fell', 0: 'did not clearly move'}[found.clear]
      parts.append(
        f'{verb} {what} ({number(found.start)} → {number(found.end)})'
      )
  signs = [sense * c.clear for c in (train, held) if c is not None]
  if any(s < 0 for s in signs):
    mood = 'bad'
  elif any(s > 0 for s in signs):
    mood = 'good'
  else:
    mood = 'flat'
  if not reward.weight:
    mood = 'note'
    parts.append('weight 0, only logged')
  return Verdict(mood, f'{reward.name} {"; ".join(parts)}.', reward.name)


def number(x: float) -> str:
  """Three digits, no exponent for everyday sizes."""
  if x == 0 or 1e-3 <= abs(x) < 1e5:
    return f'{x:.3f}' if abs(x) < 10 else f'{x:.1f}'
  return f'{x:.2e}'


def open_alarms(run: Run) -> list[dict]:
  """Alarms that were raised and are not over, newest state of each."""
  on: dict[tuple[str, str], dict] = {}
  for event in run.events:
    key = (event['rule'], event['subject'])
    if event['kind'] in ('alarm', 'stop'):
      on[key] = event
    elif event['kind'] == 'over':
      on.pop(key, None)
  return list(on.values())


def verdicts(run: Run) -> list[Verdict]:
  """The whole story, most important first."""
  if not run.training:
    return [Verdict('note', 'No step is done yet.')]
  out = [
    Verdict(
      'bad', f'{e["text"]} (since step {e["step"]})', e['subject'], e['advice']
    )
    for e in open_alarms(run)
  ]
  out += [_about_reward(run, reward) for reward in run.about.rewards]
  out += _conflicts(run)
  out += _heard(run)
  out += _methods(run)
  out += _front(run)
  out += [
    Verdict('note', e['text'], e['subject'], e['advice'])
    for e in run.events
    if e['kind'] == 'advice'
  ]
  over = [e for e in run.events if e['kind'] == 'over']
  if over:
    names = ', '.join(sorted({e['rule'] for e in over}))
    out.append(Verdict('note', f'Alarms that came and went: {names}.'))
  return out


def _mean(rows, key, last=10) -> float | None:
  found = values(rows, key, last)
  return statistics.fmean(found) if found else None


def _conflicts(run: Run) -> list[Verdict]:
  out = []
  for key in run.training[-1]:
    if not key.startswith('conflict/'):
      continue
    now = _mean(run.training, key)
    if now is not None and now < -0.3:
      a, b = pair(key, run.names)
      out.append(
        Verdict(
          'note',
          f'{a} and {b} pull against each other (correlation of their '
          f'advantages {now:.2f} over the last steps): what pleases one '
          'displeases the other.',
        )
      )
  return out


def pair(key: str, names: Sequence[str]) -> tuple[str, str]:
  """('A', 'B') of 'conflict/A/B'; names may hold slashes."""
  rest = key.split('/', 1)[1]
  for a in names:
    for b in names:
      if rest == f'{a}/{b}':
        return a, b
  a, _, b = rest.partition('/')
  return a, b


def _heard(run: Run) -> list[Verdict]:
  shares = {
    name: _mean(run.training, f'advantage_share/{name}') for name in run.names
  }
  shares = {k: v for k, v in shares.items() if v is not None}
  if len(shares) < 2:
    return []
  most = max(shares, key=shares.get)
  text = ', '.join(f'{k} {v:.0%}' for k, v in sorted(shares.items()))
  lead = (
    f'{most} drives the update'
    if shares[most] > 0.6
    else 'No single reward dominates'
  )
  return [Verdict('note', f'{lead}: shares of the advantage are {text}.')]


def _methods(run: Run) -> list[Verdict]:
  flips = _mean(run.training, 'counterfactual/sign_flips/grpo/gdpo')
  cosine = _mean(run.training, 'counterfactual/cosine/grpo/gdpo')
  if flips is None or cosine is None:
    return []
  return [
    Verdict(
      'note',
      f'GRPO and GDPO would push {flips:.0%} of the rows in opposite '
      f'directions on these batches (cosine {cosine:.2f}).',
    )
  ]


def _front(run: Run) -> list[Verdict]:
  found = pareto.archive(
    run.held_out, {r.name: r.weight for r in run.about.rewards}
  )
  if found is None or len(found.steps) < 2:
    return []
  best = [str(s) for s, on in zip(found.steps, found.front) if on]
  lost = not found.front[-1]
  text = f'Best trade-offs on held-out problems: step {", ".join(best)}.'
  if lost:
    text += ' The last step is not among them: an earlier one beats it.'
  return [Verdict('bad' if lost else 'note', text)]


def advice(run: Run) -> list[str]:
  """What to change, from the alarms that were raised, each rule once."""
  raised = {
    e['rule'] for e in run.events if e['kind'] in ('alarm', 'stop', 'advice')
  }
  out = [f'{r.name}: {r.advice}' for r in RULES if r.name in raised]
  flat = [v.subject for v in verdicts(run) if v.mood == 'flat' and v.subject]
  if flat and not raised - {'batch_small'}:
    out.append(
      f'{", ".join(flat)} did not clearly move: run longer, or raise the '
      'learning rate while KL and entropy stay calm.'
    )
  return out
