"""The live view: one progress bar, one line per reward with its trend.

On a terminal the view redraws itself; in a log file it becomes one plain line
per step, so that both read well. What the rules say is printed above it, once.
With `as_json` every step and event is one JSON object per line, for programs.
"""

import collections
import json
import math
import statistics
import time

import rich.console
import rich.live
import rich.table
import rich.text

_SPARKS = '▁▂▃▄▅▆▇█'


# How an event of the rules is marked: word, colour.
_EVENTS = {
  'advice': ('note', 'cyan'),
  'alarm': ('warning', 'yellow'),
  'adjusted': ('adjusted', 'magenta'),
  'over': ('over', 'green'),
  'stop': ('stopped', 'red'),
}
_TREND = 10  # steps on each side of a trend mark


class Progress:
  """`start`, then `step` for each step, then `stop`.

  `quiet` shows nothing but alarms; `as_json` one object per line and no table.
  """

  def __init__(
    self,
    console: rich.console.Console | None = None,
    quiet: bool = False,
    as_json: bool = False,
  ):
    self._console = console or rich.console.Console()
    self._quiet, self._json = quiet, as_json
    self._live = None
    self._note = ''

  def start(self, num_steps: int, first_step: int, names) -> None:
    self._num_steps, self._first, self._names = num_steps, first_step, names
    self._began = time.perf_counter()
    self._step, self._row = first_step, {}
    self._history = collections.defaultdict(list)
    if self._console.is_terminal and not (self._quiet or self._json):
      self._live = rich.live.Live(
        self._view(), console=self._console, refresh_per_second=4
      )
      self._live.start()

  def note(self, text: str) -> None:
    """What goes on now, when it is not a training step."""
    self._note = text
    if self._live:
      self._live.update(self._view())
    elif not (self._quiet or self._json):
      self._console.print(text, soft_wrap=True)

  def event(self, event) -> None:
    """What a rule has to say (a `monitor.Event`), in plain words."""
    if self._json:
      self._print_json({'event': event.kind, **event._asdict()})
    elif event.loud or not self._quiet:
      word, color = _EVENTS[event.kind]
      text = rich.text.Text(f'{word}: ', style=f'bold {color}')
      text.append(f'step {event.step}: {event.text}', style='default')
      if event.advice:
        text.append(f' {event.advice}', style='dim')
      # above the live view, or between the lines of a log
      self._console.print(text, soft_wrap=not self._console.is_terminal)

  def step(self, step: int, row: dict[str, float]) -> None:
    self._step, self._row, self._note = step, row, ''
    for name in self._names:
      self._history[name].append(row.get(f'rewards/{name}/mean', math.nan))
    if self._json:
      self._print_json({'event': 'step', 'step': step, **row})
    elif self._live:
      self._live.update(self._view())
    elif not self._quiet:
      rewards = '  '.join(
        f'{n} {self._history[n][-1]:.3f}{trend(self._history[n])}'
        for n in self._names
      )
      self._console.print(
        f'step {step}/{self._num_steps}  {rewards}  '
        f'tokens {row["completions/mean_length"]:.1f}  '
        f'{row["throughput/tokens_per_second"]:.0f} tokens/s  '
        f'{self._time_left()} left',
        soft_wrap=True,
      )

  def stop(self) -> None:
    if self._live:
      self._live.update(self._view())
      self._live.stop()
      self._live = None

  def finish(self, table, directory) -> None:
    """After the run: the table of start and end, and where everything is."""
    if self._json:
      self._print_json({'event': 'end', 'directory': str(directory)})
      return
    if not self._quiet:
      self._console.print(table)
    self._console.print(f'run directory: {directory}', soft_wrap=True)
    self._console.print(f'report: {directory / "report.html"}', soft_wrap=True)

  def _print_json(self, record) -> None:
    record = {k: v for k, v in record.items() if _is_plain(v)}
    # past rich, which would wrap and colour it
    self._console.file.write(json.dumps(record, ensure_ascii=False) + '\n')
    self._console.file.flush()

  def _time_left(self) -> str:
    done = self._step - self._first
    if not done:
      return '--:--'
    spent = time.perf_counter() - self._began
    seconds = int(spent / done * (self._num_steps - self._step))
    return f'{seconds // 60}:{seconds % 60:02d}'

  def _view(self):
    row, width = self._row, 30
    share = self._step / self._num_steps
    bar = '━' * round(width * share) + ' ' * (width - round(width * share))
    head = rich.text.Text(
      f'step {self._step}/{self._num_steps} {bar} {self._time_left()} left'
    )
    if row:
      head.append(
        f'   {row["throughput/tokens_per_second"]:.0f} tokens/s'
        f'   tokens {row["completions/mean_length"]:.1f}'
        f'   grad {row.get("grad_norm", 0.0):.2f}'
      )
    table = rich.table.Table(box=None, pad_edge=False)
    for title in ('reward', 'mean', 'spread in group', 'missing', 'trend'):
      table.add_column(title)
    for name in self._names:
      prefix = f'rewards/{name}/'
      table.add_row(
        name,
        f'{row.get(prefix + "mean", math.nan):.3f}',
        f'{row.get(prefix + "group_std", math.nan):.3f}',
        f'{row.get(prefix + "missing", 0.0):.0%}',
        f'{trend(self._history[name]) or " "} {sparkline(self._history[name])}',
      )
    lines = [head, table]
    if self._note:
      lines.append(rich.text.Text(self._note, style='dim'))
    return rich.console.Group(*lines)


def sparkline(values, width: int = 40) -> str:
  """The last `width` values as block characters, scaled to their own range."""
  values = [v for v in values[-width:] if not math.isnan(v)]
  if not values:
    return ''
  low, high = min(values), max(values)
  span = (high - low) or 1.0
  return ''.join(_SPARKS[int((v - low) / span * 7)] for v in values)


def trend(values) -> str:
  """'↑' or '↓' where the last ten values differ clearly from the ten before.

  Clearly: by two standard errors of the difference of the two means.
  """
  values = [v for v in values if not math.isnan(v)][-2 * _TREND :]
  half = len(values) // 2
  if half < 3:
    return ''
  old, new = values[:half], values[-half:]
  change = sum(new) / half - sum(old) / half
  error = math.sqrt(
    (statistics.variance(old) + statistics.variance(new)) / half
  )
  if abs(change) <= 2 * error or not change:
    return ''
  return '↑' if change > 0 else '↓'


def _is_plain(value) -> bool:
  return not isinstance(value, float) or math.isfinite(value)
