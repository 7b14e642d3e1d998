"""Scores completions with several reward functions, any of which may fail.

  prompts, completions, columns [N]
      --submit--> one lane per reward, all side by side
      --result--> those that must run on the caller's thread, in order
      --result--> fallback, mute --> Scores(values f32[N, K], NaN = missing)

A reward that raises, hangs, or returns something other than N finite numbers is
missing for the rows concerned, is counted by reason and leaves a record; it
never stops the run, never becomes a zero and never holds up another reward.
Only what the user configured wrongly raises (`ValueError`).

`Pipeline` keeps threads, worker processes, cached values and mute states from
step to step; `score` is the one-shot form.
"""

import collections
import dataclasses
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from gdpo_jax.rewards import calls, lanes, memory

_LOG = logging.getLogger(__name__)
_MAX_FAILURES = 1000  # records that a pipeline keeps
_MAX_FAILURES_PER_CALL = 16  # of them, from one call of one reward
_MAX_TEXT_CHARS = 1000
_PER_STEP = frozenset({'trainer_state', 'step', 'log_metric', 'log_extra'})


@dataclasses.dataclass(frozen=True)
class Reward:
  """A named reward function and how it is to be run.

  The function is called as TRL calls it: `fn(prompts, completions, **columns)`
  by keyword, returning N numbers or `None`s; it may be `async`, and may ask by
  name for `completion_ids`, `trainer_state`, `step`, `log_metric(name, value)`
  and `log_extra(column, values)`. It gets what its signature names, or
  everything where it takes `**kwargs`.

  Attributes:
    fn: the function.
    name: unique in a list of rewards; the function's own name by default.
    weight: of the normalized advantage; 0 makes the reward eval-only: it is
      scored and logged, and has no influence.
    range: declared (lowest, highest) value. Used as bounds by the advantages
      that need them; values outside are not altered.
    timeout_s: seconds that one call may take, waiting for a lane not counted.
    isolation: 'thread' runs in this process: cheap, but a hung call can only be
      left behind (its thread lives on until the function returns). 'process'
      runs in a worker process without jax, which is killed with all its
      children when the time is up; use it for whatever may hang for ever.
      'main' runs in `result()`, on the caller's thread, after the other lanes
      have started and in the order of the rewards: for functions that use the
      training devices (`gdpo_jax.judge`), which every process of a run has to
      call in the same order. `timeout_s` cannot cut such a call short (it only
      ends a coroutine): if it hangs, the run hangs. Exceptions are isolated as
      everywhere, but Ctrl-C ends the run.
    pure: the value depends on the row's prompt, completion and columns alone.
      Values are then cached, and equal rows are scored once.
    fallback: name of another reward in the list, whose value stands in on the
      rows where this one is missing.
    condition: when this reward counts (text or thresholds). Only declared here;
      objectives/shaping carries it out.
    mute_after: calls failed in a row after which the weight becomes 0 and the
      function is no longer called. None: never.
    retry_after: steps after which a muted reward is tried again.
    workers: processes that share the rows of one call; more than 1 needs
      isolation='process' and pure=True.
  """

  fn: Callable[..., Any]
  name: str = ''
  weight: float = 1.0
  range: tuple[float, float] | None = None
  timeout_s: float = 60.0
  isolation: Literal['thread', 'process', 'main'] = 'thread'
  pure: bool = False
  fallback: str | None = None
  condition: Any = None
  mute_after: int | None = None
  retry_after: int = 50
  workers: int = 1

  def __post_init__(self):
    if not callable(self.fn):
      raise ValueError(f'a reward needs a function, got {self.fn!r}.')
    if not self.name:
      inner = getattr(self.fn, 'func', self.fn)  # functools.partial has none
      own = getattr(inner, '__name__', type(inner).__name__)
      object.__setattr__(self, 'name', own)

    def refuse(what):
      raise ValueError(f'reward {self.name!r}: {what}.')

    if not math.isfinite(self.weight):
      refuse(f'weight must be a finite number, got {self.weight}')
    if self.range is not None and not self.range[0] < self.range[1]:
      refuse(f'range must be (lowest, highest), got {self.range}')
    if not 0 < self.timeout_s < math.inf:
      refuse(f'timeout_s must be a positive number, got {self.timeout_s}')
    if self.isolation not in ('thread', 'process', 'main'):
      refuse(
        "isolation must be 'thread', 'process' or 'main', "
        f'got {self.isolation!r}'
      )
    if self.mute_after is not None and self.mute_after < 1:
      refuse(f'mute_after must be at least 1 or None, got {self.mute_after}')
    if self.retry_after < 1:
      refuse(f'retry_after must be at least 1, got {self.retry_after}')
    if self.workers < 1:
      refuse(f'workers must be at least 1, got {self.workers}')
    if self.workers > 1 and not (self.pure and self.isolation == 'process'):
      refuse(
        "workers > 1 splits the rows of a call; it needs isolation='process' "
        'and pure=True'
      )
    if self.pure and self.isolation == 'main':
      refuse(
        "isolation='main' with pure=True would call the function on some "
        'processes and not on others, as their caches have it; drop one'
      )
    asks = calls.wanted(self.fn)[0] & _PER_STEP
    if self.pure and asks:
      refuse(
        f'pure=True, but the function asks for {sorted(asks)}, which changes '
        'from step to step; drop one of the two'
      )


class Failure(NamedTuple):
  """One row that one reward could not score."""

  reward: str
  row: int
  kind: str  # exception, timeout, died, none, nan, inf, length, type, ...
  reason: str  # the fault in words, the reward's name in it
  text: str  # the completion, cut to a bound
  step: int | None


class Scores(NamedTuple):
  """N completions under K rewards."""

  names: tuple[str, ...]  # K
  values: np.ndarray  # f32[N, K], NaN = missing, fallbacks filled in
  weights: np.ndarray  # f32[K], as declared; 0 where muted
  reasons: dict[str, dict[str, int]]  # reward -> kind of fault -> rows
  fallbacks: dict[str, int]  # reward -> rows that its fallback answered
  failures: list[Failure]  # a bounded number of rows per reward
  metrics: dict[str, float]  # mean of what was given to log_metric
  extra: dict[str, list]  # what was given to log_extra, for sample tables
  seconds: dict[str, float]  # reward -> duration of its call
  alerts: tuple[str, ...] = ()  # muted and unmuted rewards, in words

  def grouped(self, group_size: int) -> np.ndarray:
    """Values as f32[P, G, K]; row p * G + g is sample g of prompt p."""
    n, k = self.values.shape
    if group_size < 1 or n % group_size:
      raise ValueError(
        f'{n} rows cannot be split into groups of {group_size}; score whole '
        'groups, prompts * group_size rows.'
      )
    return self.values.reshape(n // group_size, group_size, k)

  def summary(self) -> dict[str, float]:
    """Flat figures for a log: missing rates by reason, seconds, log_metric."""
    n = max(len(self.values), 1)
    row = dict(self.metrics)
    for k, name in enumerate(self.names):
      missing = np.isnan(self.values[:, k]).sum()
      row[f'rewards/{name}/missing'] = float(missing) / n
      for kind, count in self.reasons.get(name, {}).items():
        row[f'rewards/{name}/missing/{kind}'] = count / n
      if name in self.fallbacks:
        row[f'rewards/{name}/fallback'] = self.fallbacks[name] / n
      row[f'rewards/{name}/seconds'] = self.seconds.get(name, 0.0)
    return row


def reward_weights(
  rewards: Sequence[Reward], weights: Sequence[float] | None = None
) -> np.ndarray:
  """f32[K]: the given weights, or else the declared ones."""
  if weights is None:
    weights = [reward.weight for reward in rewards]
  if len(weights) != len(rewards):
    names = ', '.join(reward.name for reward in rewards)
    raise ValueError(
      f'{len(weights)} weights were given for {len(rewards)} rewards '
      f'({names}); give one weight per reward.'
    )
  array = np.asarray(weights, np.float32)
  if not np.isfinite(array).all():
    raise ValueError(f'weights must be finite numbers, got {list(weights)}.')
  return array


class Pipeline:
  """Keeps what a list of rewards needs from step to step.

  Use it as a context manager, or call `close()`. Method calls must come from
  one thread at a time; the rewards themselves run beside it, or in `result()`
  on that thread where they ask for isolation='main'.
  """

  def __init__(
    self,
    rewards: Sequence[Reward],
    *,
    sum_counts: Callable[[np.ndarray], np.ndarray] | None = None,
    cache_rows: int = 65536,
  ):
    """Checks the rewards and starts their lanes.

    Args:
      rewards: K rewards with names of their own.
      sum_counts: with several training processes, a function that sums an
        i64[K, 2] array over them. Called once per `result()` where any reward
        has `mute_after`, from the caller's thread, in the order of the calls.
      cache_rows: values kept for rewards that are `pure`, least recently used
        dropped first.
    """
    self.rewards = tuple(rewards)
    self._fallback_order = _check(self.rewards)
    self.failures: collections.deque[Failure] = collections.deque(
      maxlen=_MAX_FAILURES
    )
    self._sum_counts = sum_counts
    self._mutes = [memory.Mute() for _ in self.rewards]
    self._cache = memory.Cache(cache_rows)
    self._lanes: list[lanes.Lane | lanes.CallersLane] = []
    try:
      for reward in self.rewards:
        on_caller = reward.isolation == 'main'
        make = lanes.CallersLane if on_caller else lanes.Lane
        self._lanes.append(make(reward))
    except BaseException:
      self.close()
      raise

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()

  def close(self):
    """Ends threads and worker processes; calls in flight are given up."""
    for lane in self._lanes:
      lane.close()
    self._lanes = []

  @property
  def muted(self) -> tuple[str, ...]:
    """Names of the rewards that rest at the moment."""
    return tuple(
      reward.name
      for reward, mute in zip(self.rewards, self._mutes)
      if mute.steps_until_retry
    )

  @property
  def mutes(self) -> dict[str, list[int]]:
    """Who is muted, as plain JSON for a checkpoint; by name of the reward."""
    return {
      reward.name: list(mute) for reward, mute in zip(self.rewards, self._mutes)
    }

  def restore_mutes(self, mutes: Mapping[str, Sequence[int]]):
    """Takes back what `mutes` gave.

    Raises:
      ValueError: the names are not those of the rewards.
    """
    names = [reward.name for reward in self.rewards]
    if sorted(mutes) != sorted(names):
      raise ValueError(
        f'mutes of the rewards {sorted(mutes)} cannot be restored: the rewards '
        f'are {sorted(names)}.'
      )
    self._mutes = [memory.Mute(*map(int, mutes[name])) for name in names]

  def check_columns(self, columns: Sequence[str]):
    """Raises if a reward needs a column that the data do not have.

    `score` itself would only record the failed call; ask here before a run.
    """
    offered = {
      *columns, *_PER_STEP, 'prompts', 'completions', 'completion_ids'
    }  # fmt: skip
    for reward in self.rewards:
      lacking = calls.required(reward.fn) - offered
      if lacking:
        raise ValueError(
          f'reward {reward.name!r} needs {sorted(lacking)}, but the data have '
          f'the columns {sorted(columns)}; rename a column or give the '
          'argument a default.'
        )

  def score(
    self,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    **extras,
  ) -> Scores:
    """`submit(...).result()`."""
    return self.submit(prompts, completions, columns, **extras).result()

  def submit(
    self,
    prompts: Sequence[Any],
    completions: Sequence[Any],
    columns: Mapping[str, Sequence[Any]] | None = None,
    *,
    completion_ids: Sequence[Sequence[int]] | None = None,
    step: int | None = None,
    trainer_state: Any = None,
  ) -> 'Pending':
    """Starts scoring N rows and returns at once.

    Generation of the next micro-batch can go on meanwhile. Calls of one reward
    keep their order; take the results in the order of submission.

    Args:
      prompts: N strings or message lists.
      completions: N strings or message lists.
      columns: further columns of the data, N values each.
      completion_ids: N lists of token ids, EOS included.
      step: for the records, and for functions that ask for it.
      trainer_state: handed to functions that ask for it.
    """
    if len(self._lanes) != len(self.rewards):
      raise RuntimeError('this pipeline is closed; make a new one.')
    rows = {'prompts': list(prompts), 'completions': list(completions)}
    rows |= {key: list(column) for key, column in (columns or {}).items()}
    if completion_ids is not None:
      rows['completion_ids'] = [list(ids) for ids in completion_ids]
    n = len(rows['completions'])
    uneven = {
      key: len(column) for key, column in rows.items() if len(column) != n
    }
    if uneven:
      raise ValueError(
        f'{n} completions were given, but {uneven} differ in length; repeat '
        'each prompt and column once per completion.'
      )
    constants = {'step': step, 'trainer_state': trainer_state}
    muted = [mute.steps_until_retry > 0 for mute in self._mutes]
    parts = [
      None if rests or not n else self._start(reward, lane, rows, constants)
      for reward, lane, rests in zip(self.rewards, self._lanes, muted)
    ]
    return Pending(
      lambda: self._finish(rows['completions'], step, parts, muted)
    )

  def _start(self, reward, lane, rows, constants) -> Callable[[], calls.Call]:
    """Hands the rows of one reward to its lane; the result waits for it."""
    n = len(rows['completions'])
    names, takes_all = calls.wanted(reward.fn)
    rows = {k: v for k, v in rows.items() if takes_all or k in names}
    if not reward.pure:
      return lane.submit({**rows, **constants}, n)
    try:
      keys = memory.row_keys(reward.name, rows, n)
    except Exception:  # a column that cannot be pickled cannot be looked up
      return lane.submit(rows, n)
    known = {key: self._cache.get(key) for key in set(keys)}
    fresh: dict[bytes, int] = {}  # key -> the row that stands for it
    for row, key in enumerate(keys):
      if known[key] is None:
        fresh.setdefault(key, row)
    picked = list(fresh.values())
    waiting = None
    if picked:
      part = {k: [v[row] for row in picked] for k, v in rows.items()}
      waiting = lane.submit(part, len(picked))

    def wait() -> calls.Call:
      call = calls.Call(np.zeros(0, np.float32), [])
      if waiting is not None:
        call = waiting()
      place = {key: at for at, key in enumerate(fresh)}
      for key, at in place.items():
        if call.kinds[at] is None:
          self._cache.put(key, float(call.values[at]))
      values = [
        call.values[place[key]] if key in place else known[key] for key in keys
      ]
      kinds = [call.kinds[place[key]] if key in place else None for key in keys]
      return call._replace(values=np.asarray(values, np.float32), kinds=kinds)

    return wait

  def _finish(self, completions, step, parts, muted) -> Scores:
    n, k = len(completions), len(self.rewards)
    values = np.full((n, k), np.nan, np.float32)
    reasons, seconds, extra, failures = {}, {}, {}, []
    logged = collections.defaultdict(list)
    counts = np.zeros((k, 2), np.int64)  # calls, failed calls
    messages = [''] * k
    # First those that run here and now, so that they overlap with the others
    # and their order does not depend on who is slow.
    here = {
      i: part()
      for i, (reward, part) in enumerate(zip(self.rewards, parts))
      if part is not None and reward.isolation == 'main'
    }
    for i, (reward, part) in enumerate(zip(self.rewards, parts)):
      if part is None:
        if muted[i] and n:
          reasons[reward.name] = {'muted': n}
        continue
      call = here[i] if i in here else part()
      values[:, i] = call.values
      counts[i] = 1, call.failed
      messages[i] = call.message
      seconds[reward.name] = call.seconds
      for key, value in call.metrics:
        logged[key].append(value)
      extra.update(call.extra)
      faults = [(row, kind) for row, kind in enumerate(call.kinds) if kind]
      if faults:
        reasons[reward.name] = dict(
          collections.Counter(kind for _, kind in faults)
        )
      for row, kind in faults[:_MAX_FAILURES_PER_CALL]:
        text = calls.text_of(completions[row])[:_MAX_TEXT_CHARS]
        failures.append(
          Failure(reward.name, row, kind, call.message, text, step)
        )
    self.failures.extend(failures)
    weights = reward_weights(self.rewards)
    weights[muted] = 0.0
    return Scores(
      names=tuple(reward.name for reward in self.rewards),
      values=values,
      weights=weights,
      reasons=reasons,
      fallbacks=self._fall_back(values),
      failures=failures,
      metrics={key: float(np.mean(v)) for key, v in logged.items()},
      extra=extra,
      seconds=seconds,
      alerts=self._update_mutes(counts, messages, step),
    )

  def _fall_back(self, values: np.ndarray) -> dict[str, int]:
    """Fills missing values in place; a chain is filled from its end."""
    filled = {}
    for i, source in self._fallback_order:
      rows = np.isnan(values[:, i]) & ~np.isnan(values[:, source])
      if rows.any():
        values[rows, i] = values[rows, source]
        filled[self.rewards[i].name] = int(rows.sum())
    return filled

  def _update_mutes(self, counts, messages, step) -> tuple[str, ...]:
    if all(reward.mute_after is None for reward in self.rewards):
      return ()
    if self._sum_counts is not None:
      counts = np.asarray(self._sum_counts(counts))
    alerts = []
    for i, reward in enumerate(self.rewards):
      before = self._mutes[i]
      after = memory.next_mute(
        before,
        int(counts[i, 0]),
        int(counts[i, 1]),
        mute_after=reward.mute_after,
        retry_after=reward.retry_after,
      )
      self._mutes[i] = after
      if after.steps_until_retry and not before.steps_until_retry:
        alerts.append(
          f'step {step}: reward {reward.name!r} is muted (weight 0) after '
          f'{after.failed_in_a_row} failed calls in a row; it is tried again '
          f'in {reward.retry_after} steps. Last: {messages[i]}'
        )
      elif before.steps_until_retry and not after.steps_until_retry:
        alerts.append(f'step {step}: reward {reward.name!r} is tried again.')
    for alert in alerts:
      _LOG.warning(alert)
    return tuple(alerts)


class Pending:
  """Scores that are on their way."""

  def __init__(self, finish: Callable[[], Scores]):
    self._finish = finish
    self._scores: Scores | None = None

  def result(self) -> Scores:
    """Waits; bounded by the rewards' time-outs, save for isolation='main'."""
    if self._scores is None:
      self._scores = self._finish()
    return self._scores


def score(
  prompts: Sequence[Any],
  completions: Sequence[Any],
  columns: Mapping[str, Sequence[Any]] | None,
  rewards: Sequence[Reward],
  **extras,
) -> Scores:
  """One-shot form of `Pipeline.score`; nothing is kept between calls."""
  with Pipeline(rewards) as pipeline:
    return pipeline.score(prompts, completions, columns, **extras)


def _check(rewards: Sequence[Reward]) -> list[tuple[int, int]]:
  """Refuses a wrong list; pairs (reward, fallback), ends of chains first."""
  if not rewards:
    raise ValueError('at least one reward is needed.')
  index: dict[str, int] = {}
  for i, reward in enumerate(rewards):
    if not isinstance(reward, Reward):
      raise ValueError(
        f'reward {i} is {reward!r}; wrap the function: Reward(fn, name=...).'
      )
    if reward.name in index:
      raise ValueError(
        f'two rewards are called {reward.name!r}; give one another name.'
      )
    index[reward.name] = i
  depth = {}
  for i, reward in enumerate(rewards):
    chain = [reward.name]
    while (following := rewards[index[chain[-1]]].fallback) is not None:
      if following not in index:
        raise ValueError(
          f'reward {chain[-1]!r} falls back on {following!r}, which is not '
          f'among the rewards: {sorted(index)}.'
        )
      if following in chain:
        circle = ' -> '.join([*chain, following])
        raise ValueError(f'fallbacks go round in a circle: {circle}.')
      chain.append(following)
    depth[i] = len(chain)
  return [
    (i, index[rewards[i].fallback])
    for i in sorted(depth, key=depth.get)
    if depth[i] > 1
  ]
