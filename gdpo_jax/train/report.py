"""What a person looks at when a run ends: a table and the curves."""

import math
import os
from collections.abc import Sequence
from typing import Any

import rich.table

from gdpo_jax.train import metrics

Row = dict[str, Any]


def table(history: Sequence[Row], names: Sequence[str]) -> rich.table.Table:
  """Each reward at start and end, in training and on held-out problems.

  Training values are means over the first and last tenth of the steps (at
  least one step); held-out values carry their standard error.
  """
  training, held_out = metrics.split_history(history)
  edge = max(1, len(training) // 10)
  out = rich.table.Table(title='start → end')
  for title in (
    'reward',
    'training, start',
    'training, end',
    'held-out, start',
    'held-out, end',
  ):
    out.add_column(title)

  def mean(rows, key):
    values = [row[key] for row in rows if key in row]
    return f'{sum(values) / len(values):.3f}' if values else '-'

  def held(row, key):
    if f'eval/{key}/mean' not in row:
      return '-'
    error = row.get(f'eval/{key}/stderr', math.nan)
    return f'{row[f"eval/{key}/mean"]:.3f} ± {error:.3f}'

  for name in names:
    key = f'rewards/{name}'
    out.add_row(
      name,
      mean(training[:edge], f'{key}/mean'),
      mean(training[-edge:], f'{key}/mean'),
      held(held_out[0], key) if held_out else '-',
      held(held_out[-1], key) if len(held_out) > 1 else '-',
    )
  key = 'completions/mean_length'
  first = held_out[0] if held_out else {}
  last = held_out[-1] if len(held_out) > 1 else {}
  out.add_row(
    'length, tokens',
    mean(training[:edge], key),
    mean(training[-edge:], key),
    *(f'{row["eval/" + key]:.1f}' if row else '-' for row in (first, last)),
  )
  return out


def curves(
  history: Sequence[Row], names: Sequence[str], path: str | os.PathLike
) -> None:
  """Writes a PNG: every reward over the steps, its spread, and the length."""
  import matplotlib.figure  # needs no display, keeps no global state

  training, held_out = metrics.split_history(history)
  steps = [row['step'] for row in training]
  figure = matplotlib.figure.Figure(figsize=(11, 3.4), layout='constrained')
  rewards, spread, length = figure.subplots(1, 3)
  for i, name in enumerate(names):
    color = f'C{i}'
    _line(rewards, training, steps, f'rewards/{name}/mean', color, name)
    _line(spread, training, steps, f'rewards/{name}/group_std', color, name)
    key = f'eval/rewards/{name}/mean'
    seen = [row for row in held_out if key in row]
    rewards.errorbar(
      [row['step'] for row in seen],
      [row[key] for row in seen],
      [row.get(key.replace('/mean', '/stderr'), 0.0) for row in seen],
      color=color,
      fmt='o',
      capsize=3,
    )
  _line(length, training, steps, 'completions/mean_length', 'C7', 'mean')
  rewards.set_title('mean reward (dots: held-out, greedy, ± standard error)')
  rewards.title.set_fontsize(9)
  spread.set_title('deviation within a group', fontsize=9)
  length.set_title('completion length, tokens', fontsize=9)
  for axis in (rewards, spread, length):
    axis.set_xlabel('step')
    axis.grid(alpha=0.3)
  rewards.legend()
  figure.savefig(path, dpi=120)


def _line(axis, rows, steps, key, color, label):
  axis.plot(
    steps, [row.get(key, math.nan) for row in rows], color=color, label=label
  )
