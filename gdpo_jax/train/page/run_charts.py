"""Charts of completions, the update, time and evaluations; see `figures`."""

from gdpo_jax.train import histograms, pareto
from gdpo_jax.train.page import figures
from gdpo_jax.train.rules import FIRST, entropy_key
from gdpo_jax.train.run_files import Run


def lengths(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [
      ('completions/mean_length', 'all'),
      ('completions/down/mean_length', 'pushed down'),
      ('completions/up/mean_length', 'pushed up'),
      ('completions/mean_terminated_length', 'ended by themselves'),
    ],
    yaxis={'title': {'text': 'tokens'}, 'rangemode': 'tozero'},
  )


def truncation(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [
      ('completions/clipped_ratio', 'all'),
      ('completions/down/clipped_ratio', 'pushed down'),
      ('completions/up/clipped_ratio', 'pushed up'),
    ],
    yaxis={'tickformat': '.0%', 'rangemode': 'tozero'},
  )


def entropy(run: Run) -> figures.Figure | None:
  """Entropy over that of the first steps, with the calm band."""
  if not run.training:
    return None
  key = entropy_key(run.training[-1])
  first = [r[key] for r in run.training[:FIRST] if r.get(key) is not None]
  if not first or not sum(first):
    return None
  start = sum(first) / len(first)
  trace = {
    'type': 'scatter',
    'mode': 'lines',
    'name': 'entropy, of the start',
    'x': [r['step'] for r in run.training],
    'y': [
      None if r.get(key) is None else figures.rounded(r[key] / start)
      for r in run.training
    ],
    'line': {'color': figures.color(0), 'width': 2},
    'text': [
      '' if r.get(key) is None else f'{r[key]:.3f} nats' for r in run.training
    ],
    'hovertemplate': '%{y:.2f} (%{text})',
  }
  distinct = figures.line(run, 'completions/distinct', 'distinct in a group', 2)
  return figures.figure(
    [trace, distinct] if distinct else [trace],
    yaxis={'rangemode': 'tozero'},
    hints={'bands': [[0.8, 1.2]], 'levels': [0.3]},
  )


def kl(run: Run) -> figures.Figure | None:
  out = figures.lines(
    run,
    [('kl/nats_per_sequence', 'nats per sequence'), ('kl', 'nats per token')],
    yaxis={'rangemode': 'tozero'},
  )
  if out and run.about.kl_target:
    out['hints']['levels'] = [run.about.kl_target, 2 * run.about.kl_target]
  return out


def kl_coef(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('kl/coef', 'KL'), ('entropy_coef', 'entropy')],
    yaxis={'rangemode': 'tozero', 'exponentformat': 'e'},
  )


def clipping(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [
      ('clip_ratio/region_mean', 'either'),
      ('clip_ratio/low_mean', 'low'),
      ('clip_ratio/high_mean', 'high'),
    ],
    yaxis={'tickformat': '.2%', 'rangemode': 'tozero'},
  )


def optimizer(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('grad_norm', 'gradient norm'), ('loss', 'loss')],
  )


def learning_rate(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('learning_rate', 'learning rate')],
    yaxis={'rangemode': 'tozero', 'exponentformat': 'e'},
  )


def mismatch(run: Run) -> figures.Figure | None:
  out = figures.lines(run, [('sampler_mismatch', 'sampler against trainer')])
  if out:
    out['layout']['yaxis'] = {
      'type': 'log', 'title': {'text': 'nats per token'}, 'exponentformat': 'e'
    }  # fmt: skip
  return out


def value_head(run: Run) -> figures.Figure | None:
  return figures.lines(
    run, figures.by_prefix(run, 'value/'), hints={'zero': True}
  )


def heads(run: Run) -> figures.Figure | None:
  return figures.lines(run, figures.by_prefix(run, 'heads/', '/grad_norm'))


def fusion(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    figures.by_prefix(run, 'fusion/', '/weight'),
    yaxis={'range': [0, 1]},
  )


def histogram(run: Run, name: str) -> figures.Figure | None:
  """Logarithmic bins by step: colour is the share of the rows."""
  rows = [(r['step'], r[name]) for r in run.histograms if r.get(name)]
  if not rows:
    return None
  labels = sorted({k for _, bins in rows for k in bins}, key=histograms.order)
  totals = [sum(bins.values()) for _, bins in rows]
  z = [
    [figures.rounded(b.get(k, 0) / t) for (_, b), t in zip(rows, totals)]
    for k in labels
  ]
  trace = {
    'type': 'heatmap', 'x': [step for step, _ in rows],
    'y': [_bin_name(k) for k in labels],
    'z': z, 'zmin': 0, 'zmax': max(map(max, z)),
    'colorscale': figures.DENSITY,
    'colorbar': {'thickness': 10, 'outlinewidth': 0, 'tickformat': '.0%'},
    'hovertemplate': 'step %{x}, %{y}: %{z:.0%}<extra></extra>',
  }  # fmt: skip
  return figures.figure(
    [trace], yaxis={'type': 'category', 'nticks': 9}, hovermode='closest'
  )


def _bin_name(label: str) -> str:
  if label in ('nan', '0'):
    return {'nan': 'missing', '0': '0'}[label]
  low, high = histograms.edges(label)
  return f'{low:.2g} to {high:.2g}'


def time_parts(run: Run) -> list[tuple[str, str]]:
  """The parts of a step; calls of rewards overlap with them."""
  return [
    (key, name)
    for key, name in figures.by_prefix(run, 'time/')
    if name != 'step' and '/' not in name
  ]


def timing(run: Run) -> figures.Figure | None:
  out = figures.lines(
    run, time_parts(run), yaxis={'title': {'text': 'seconds'}}
  )
  for i, trace in enumerate(out['data'] if out else []):
    trace.update(
      stackgroup='all', fillcolor=figures.faint(figures.color(i), 0.55)
    )
  return out


def time_tree(run: Run) -> figures.Figure | None:
  """Mean seconds of a step by part; the first step compiles and is left out."""
  rows = run.training[1:] or run.training

  def mean(key):
    found = [r[key] for r in rows if r.get(key) is not None]
    return sum(found) / len(found) if found else 0.0

  whole = mean('time/step')
  if not whole:
    return None
  parts = {name: mean(key) for key, name in time_parts(run)}
  parts['rest'] = max(0.0, whole - sum(parts.values()))
  # sizes are what a part has beyond its own parts, so that none is too large
  labels, parents, sizes = ['step'], [''], [0.0]
  for name, seconds in parts.items():
    labels.append(name)
    parents.append('step')
    sizes.append(seconds)
  calls = {n: mean(f'time/rewards/{n}') for n in run.names}
  # calls overlap with sampling and with each other: only shown where they fit
  if 'rewards' in parts and sum(calls.values()) <= parts['rewards']:
    sizes[labels.index('rewards')] -= sum(calls.values())
    for name, seconds in calls.items():
      labels.append(f'reward {name}')
      parents.append('rewards')
      sizes.append(seconds)
  seconds = {'step': sum(parts.values()), **parts}
  seconds |= {f'reward {name}': spent for name, spent in calls.items()}
  for key, name in figures.by_prefix(run, 'time/'):
    part, _, inner = name.partition('/')
    if inner and part in parts and part != 'rewards':
      sizes[labels.index(part)] -= mean(key)
      labels.append(name)
      parents.append(part)
      sizes.append(mean(key))
      seconds[name] = mean(key)
  trace = {
    'type': 'icicle', 'labels': labels, 'parents': parents,
    'values': [figures.rounded(s) for s in sizes],
    'text': [f'{seconds[label]:.2f} s' for label in labels],
    'branchvalues': 'remainder', 'tiling': {'orientation': 'v'},
    'texttemplate': '%{label}<br>%{text}',
    'hovertemplate': '%{label}: %{text}, %{percentRoot:.1%}<extra></extra>',
    'marker': {'colors': ['#e6e9ee', *(figures.color(i) for i in range(len(labels)))]},
  }  # fmt: skip
  return figures.figure([trace], hints={'plain': True})


def throughput(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('throughput/tokens_per_second', 'tokens/s while sampling')],
    yaxis={'rangemode': 'tozero', 'title': {'text': 'tokens/s'}},
  )


def arithmetic(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('throughput/tflops', 'TFLOP/s of the whole step')],
    yaxis={'rangemode': 'tozero', 'title': {'text': 'TFLOP/s'}},
  )


def utilisation(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('throughput/mfu', 'of the peak of the devices')],
    yaxis={'tickformat': '.1%', 'rangemode': 'tozero'},
  )


def pareto_front(run: Run) -> figures.Figure | None:
  """Held-out means of the first two weighted rewards, by step."""
  found = pareto.archive(
    run.held_out, {r.name: r.weight for r in run.about.rewards}
  )
  if found is None or len(found.names) < 2:
    return None
  x, y = found.means[:, 0], found.means[:, 1]
  on = found.front
  steps = list(found.steps)
  front = sorted((i for i in range(len(steps)) if on[i]), key=lambda i: x[i])
  data = [
    {
      'type': 'scatter', 'mode': 'lines', 'name': 'front',
      'x': [figures.rounded(x[i]) for i in front], 'y': [figures.rounded(y[i]) for i in front],
      'line': {'color': '#5f6b7a', 'dash': 'dot'}, 'hoverinfo': 'skip',
    },
    {
      'type': 'scatter', 'mode': 'markers+text', 'name': 'evaluation',
      'x': [figures.rounded(v) for v in x], 'y': [figures.rounded(v) for v in y],
      'text': [f'step {s}' for s in steps],
      'textposition': [
        'middle left' if v > (x.min() + x.max()) / 2 else 'middle right'
        for v in x
      ],
      'marker': {
        'size': [13 if o else 8 for o in on],
        'color': steps, 'colorscale': figures.DENSITY,
        'line': {'color': '#1c2430', 'width': 1},
      },
      'hovertemplate': '%{text}: %{x:.3f}, %{y:.3f}<extra></extra>',
    },
  ]  # fmt: skip
  return figures.figure(
    data,
    xaxis={'title': {'text': f'{found.names[0]}, held-out'}},
    yaxis={'title': {'text': f'{found.names[1]}, held-out'}},
    hovermode='closest',
    hints={'plain': True},
  )


def hypervolume(run: Run) -> figures.Figure | None:
  found = pareto.archive(
    run.held_out, {r.name: r.weight for r in run.about.rewards}
  )
  if found is None or len(found.steps) < 2:
    return None
  trace = {
    'type': 'scatter', 'mode': 'lines+markers', 'name': 'hypervolume',
    'x': list(found.steps), 'y': [figures.rounded(v) for v in found.hypervolume],
    'line': {'color': figures.color(2), 'shape': 'hv'},
  }  # fmt: skip
  return figures.figure([trace], yaxis={'rangemode': 'tozero'})


def contributions(run: Run) -> figures.Figure | None:
  """Made by `experiments/inspect_run.py --contribution`."""
  made = run.contributions.get('rewards')
  if not made:
    return None
  names = list(made)
  data = [
    {
      'type': 'bar', 'name': label, 'x': names,
      'y': [figures.rounded(made[n][key]) for n in names],
      'marker': {'color': figures.color(i)},
    }
    for i, (key, label) in enumerate(
      [('cosine', 'cosine to the full advantage'),
       ('rank_changes', 'pairs whose order changes')]
    )
  ]  # fmt: skip
  return figures.figure(
    data, barmode='group', hovermode='closest', hints={'plain': True}
  )
