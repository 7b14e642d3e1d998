"""`report.html`: one file that opens from disk, with everything inside.

  run directory --load--> Run --sections--> figures --JSON--> page.js draws

Texts of models and data only ever reach the page as JSON that the script puts
into text nodes; a policy in the head of the page forbids everything that is
fetched from elsewhere.
"""

import functools
import html
import importlib.resources
import json
import pathlib
from typing import Any

from gdpo_jax.train import run_files, story
from gdpo_jax.train.page.sections import SECTIONS
from gdpo_jax.train.run_files import Run

REPORT = 'report.html'
_MAX_POINTS = 1000  # steps drawn in a curve
_MAX_SAMPLE_BYTES = 1_500_000
_MAX_TEXT_CHARS = 6_000  # of a prompt or completion

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; \
script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<main id="page"></main>
<script id="run" type="application/json">{data}</script>
<script>{plotly}</script>
<script>{js}</script>
</body>
</html>
"""


def write(directory: pathlib.Path) -> pathlib.Path:
  """Writes or replaces the report of a run directory."""
  path = directory / REPORT
  partial = path.with_suffix('.partial')
  partial.write_text(build(run_files.load(directory)), encoding='utf-8')
  partial.replace(path)
  return path


def build(run: Run) -> str:
  """The whole page."""
  data = json.dumps(content(run), ensure_ascii=False, allow_nan=False)
  return _PAGE.format(
    title=html.escape(f'{run.directory.name} – report'),
    css=_asset('page.css'),
    # '</script>' inside a completion must not end the element
    data=data.replace('<', '\\u003c'),
    plotly=_plotly(),
    js=_asset('page.js'),
  )


def content(run: Run) -> dict[str, Any]:
  """What page.js draws."""
  thin = run._replace(
    training=thinned(run.training, _MAX_POINTS),
    histograms=thinned(run.histograms, _MAX_POINTS // 2),
  )
  sections = []
  for section in SECTIONS:
    cards = []
    for card in section.cards(run):
      figure = card.make(thin)
      if figure is not None:
        cards.append({'title': card.title, 'caption': card.caption, **figure})
    if cards:
      sections.append(
        {'id': section.anchor, 'title': section.title, 'cards': cards}
      )
  return {
    'name': run.directory.name,
    'facts': facts(run),
    'verdicts': [v._asdict() for v in story.verdicts(run)],
    'rewards': _table(run),
    'events': [
      {'step': e['step'], 'rule': e['rule'], 'kind': e['kind']}
      for e in run.events
      if e['kind'] in ('alarm', 'stop')
    ],
    'log': run.events[-200:],
    'sections': sections,
    'samples': samples(run.samples),
    'names': list(run.names),
  }


def facts(run: Run) -> list[list[str]]:
  """The line under the title: (what, value)."""
  s, last = run.settings, run.training[-1] if run.training else {}
  steps = s.get('num_steps')
  out = [['step', f'{last.get("step", 0)}' + (f' of {steps}' if steps else '')]]
  if s.get('algorithm'):
    out.append(['algorithm', s['algorithm']])
  if s.get('group_size'):
    out.append(
      ['rows per step', f'{s["prompts_per_step"]} × {s["group_size"]}']
    )
  seconds = sum(r.get('time/step') or 0.0 for r in run.training)
  if seconds:
    out.append(['time in steps', duration(seconds)])
  tokens = sum(r.get('num_tokens') or 0.0 for r in run.training)
  if tokens:
    out.append(['tokens sampled', f'{tokens:,.0f}'])
  return out


def duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours} h {minutes:02d} min'
  return f'{minutes} min {rest:02d} s'


def _table(run: Run) -> list[dict[str, Any]]:
  """One row per reward for the overview."""
  out = []
  last = run.training[-1] if run.training else {}
  for i, reward in enumerate(run.about.rewards):
    row = {'name': reward.name, 'color': i, 'condition': reward.condition}
    for what, found in (
      ('training', story.change(run.training, reward.name)),
      ('held', story.held_out_change(run.held_out, reward.name)),
    ):
      if found is not None:
        row[what] = {
          'text': f'{story.number(found.start)} → {story.number(found.end)}',
          'mark': found.mark,
          'good': found.clear * (-1 if reward.weight < 0 else 1),
        }
    row['weight'] = last.get(f'rewards/{reward.name}/weight', reward.weight)
    row['share'] = last.get(f'advantage_share/{reward.name}')
    row['missing'] = last.get(f'rewards/{reward.name}/missing')
    out.append(row)
  return out


def thinned(rows: list, most: int) -> list:
  """At most about `most` rows, evenly, the last one always among them."""
  if len(rows) <= most:
    return rows
  every = -(-len(rows) // most)
  kept = rows[::-1][::every][::-1]
  return kept


def samples(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
  """Rows for the inspector: whole steps, thinned until they fit."""
  by_step: dict[int, list] = {}
  for record in records:
    record = dict(record)
    record['prompt'] = _cut(record['prompt'])
    record['completion'] = _cut(record['completion'])
    by_step.setdefault(record['step'], []).append(_short(record))
  sizes = {
    step: len(json.dumps(rows, ensure_ascii=False).encode())
    for step, rows in by_step.items()
  }
  steps = sorted(by_step)
  most = len(steps)
  while most > 1:
    kept = thinned(steps, most)
    if sum(sizes[s] for s in kept) <= _MAX_SAMPLE_BYTES:
      break
    most = max(1, min(most - 1, most * 3 // 4))
  kept = thinned(steps, most) if steps else []
  return [row for step in kept for row in by_step[step]]


def _cut(text):
  if isinstance(text, str):
    if len(text) <= _MAX_TEXT_CHARS:
      return text
    return text[:_MAX_TEXT_CHARS] + f' … ({len(text)} characters in all)'
  return [{**m, 'content': _cut(m['content'])} for m in text]


def _short(value):
  if isinstance(value, dict):
    return {k: _short(v) for k, v in value.items()}
  return float(f'{value:.4g}') if isinstance(value, float) else value


@functools.cache
def _asset(name: str) -> str:
  here = importlib.resources.files('gdpo_jax.train.page')
  return (here / name).read_text(encoding='utf-8')


@functools.cache
def _plotly() -> str:
  # the file alone: importing plotly's Python side would take a second
  file = importlib.resources.files('plotly') / 'package_data/plotly.min.js'
  return file.read_text(encoding='utf-8')
