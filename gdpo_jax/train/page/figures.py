"""Charts of a run as plain Plotly figures: `Run` in, `{data, layout}` out.

A chart whose metrics a run does not have is None and is left out of the page.
Numbers are rounded to four digits: the page is to stay small.
"""

import math
from collections.abc import Sequence
from typing import Any

from gdpo_jax.train.run_files import Run

Figure = dict[str, Any]

# Okabe and Ito's colours, told apart by colour-blind eyes; yellow left out.
COLORS = (
  '#0072b2', '#d55e00', '#009e73', '#cc79a7', '#56b4e9', '#e69f00', '#5f6b7a',
)  # fmt: skip
DIVERGING = [[0, '#d55e00'], [0.5, '#f7f7f4'], [1, '#0072b2']]
HEAT = [[0, '#f7f7f4'], [0.5, '#e69f00'], [1, '#a51900']]
DENSITY = [[0, '#f7f7f4'], [0.15, '#b9d9ec'], [1, '#0a3d62']]


def figure(data: list[dict], hints: dict | None = None, **layout) -> Figure:
  """`hints` are for page.js: bands, levels, zero (lines), plain (no steps)."""
  return {'data': data, 'layout': layout, 'hints': hints or {}}


def color(index: int) -> str:
  return COLORS[index % len(COLORS)]


def faint(hex_color: str, alpha: float = 0.18) -> str:
  r, g, b = (int(hex_color[i : i + 2], 16) for i in (1, 3, 5))
  return f'rgba({r},{g},{b},{alpha})'


def rounded(x):
  """Four significant digits; None for what is missing or not finite."""
  if x is None or not math.isfinite(x):
    return None
  return float(f'{x:.4g}')


def line(run: Run, key: str, name: str, index: int, **more) -> dict | None:
  """A trace over the training steps; None where no row has the metric."""
  y = [rounded(row.get(key)) for row in run.training]
  if all(v is None for v in y):
    return None
  return {
    'type': 'scatter',
    'mode': 'lines' if len(y) > 1 else 'markers',
    'name': name,
    'x': [row['step'] for row in run.training],
    'y': y,
    'line': {'color': color(index), 'width': 2, **more.pop('line', {})},
    **more,
  }


def lines(run: Run, keys: Sequence[tuple[str, str]], **layout) -> Figure | None:
  """`keys` are (metric, label); None where the run has none of them."""
  found = [line(run, key, label, i) for i, (key, label) in enumerate(keys)]
  data = [trace for trace in found if trace]
  return figure(data, **layout) if data else None


def by_prefix(run: Run, prefix: str, suffix: str = '') -> list[tuple[str, str]]:
  """(metric, what stands between), sorted, of all rows."""
  keys = {
    key
    for row in (run.training[:1] + run.training[-5:])
    for key in row
    if key.startswith(prefix) and key.endswith(suffix)
  }
  end = -len(suffix) or None
  return [(key, key[len(prefix) : end]) for key in sorted(keys)]
