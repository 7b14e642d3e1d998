"""Charts of rewards and advantages; see `figures`."""

from gdpo_jax.train import story
from gdpo_jax.train.page import figures
from gdpo_jax.train.rules import failed_share
from gdpo_jax.train.run_files import Run


def reward_curve(run: Run, index: int) -> figures.Figure | None:
  """Mean with the 95% interval over groups, and held-out points."""
  name = run.names[index]
  main = figures.line(run, f'rewards/{name}/mean', 'training, sampled', index)
  data = []
  if main:
    errors = [row.get(f'rewards/{name}/stderr') for row in run.training]
    if any(errors):
      y = main['y']
      low, high = (
        [
          None if m is None else figures.rounded(m + sign * 1.96 * (e or 0.0))
          for m, e in zip(y, errors)
        ]
        for sign in (-1, 1)
      )
      shape = {'color': figures.faint(figures.color(index)), 'width': 0}
      common = {
        'type': 'scatter', 'mode': 'lines', 'x': main['x'], 'line': shape,
        'hoverinfo': 'skip', 'showlegend': False,
      }  # fmt: skip
      data.append({**common, 'y': low})
      data.append(
        {**common, 'y': high, 'fill': 'tonexty', 'name': '95% over groups',
         'fillcolor': figures.faint(figures.color(index)), 'showlegend': True}
      )  # fmt: skip
    data.append(main)
  key = f'eval/rewards/{name}/'
  held = [r for r in run.held_out if r.get(key + 'mean') is not None]
  if held:
    data.append(
      {
        'type': 'scatter',
        'mode': 'markers',
        'name': 'held-out, greedy',
        'x': [row['step'] for row in held],
        'y': [figures.rounded(row[key + 'mean']) for row in held],
        'error_y': {
          'type': 'data',
          'array': [
            figures.rounded(1.96 * (row.get(key + 'stderr') or 0.0))
            for row in held
          ],
          'thickness': 1.5,
        },
        'marker': {'color': '#1c2430', 'size': 8, 'symbol': 'diamond'},
      }
    )
  if not data:
    return None
  return figures.figure(data, yaxis={'title': {'text': 'mean reward'}})


def spread(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [(f'rewards/{n}/group_std', n) for n in run.names],
    yaxis={'title': {'text': 'deviation'}, 'rangemode': 'tozero'},
  )


def silent(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [(f'rewards/{n}/zero_variance', n) for n in run.names]
    + [('frac_reward_zero_std', 'weighted sum')],
    yaxis={'tickformat': '.0%', 'range': [-0.02, 1.02]},
  )


def shares(run: Run) -> figures.Figure | None:
  out = figures.lines(
    run,
    [(f'advantage_share/{n}', n) for n in run.names],
    yaxis={'tickformat': '.0%', 'range': [0, 1.001]},
  )
  for i, trace in enumerate(out['data'] if out else []):
    trace.update(
      stackgroup='all', fillcolor=figures.faint(figures.color(i), 0.55)
    )
  return out


def _matrix(run: Run, prefix: str) -> figures.Figure | None:
  """Mean of the last ten steps of a symmetric K x K metric."""
  names = run.names
  at = {name: i for i, name in enumerate(names)}
  z = [[1.0 if a == b else None for b in names] for a in names]
  for key, _ in figures.by_prefix(run, prefix):
    a, b = story.pair(key, names)
    found = [r.get(key) for r in run.training[-10:] if r.get(key) is not None]
    if found and a in at and b in at:
      value = figures.rounded(sum(found) / len(found))
      z[at[a]][at[b]] = z[at[b]][at[a]] = value
  if all(z[i][j] is None for i in at.values() for j in at.values() if i != j):
    return None
  text = [['' if v is None else f'{v:.2f}' for v in row] for row in z]
  trace = {
    'type': 'heatmap', 'x': list(names), 'y': list(names), 'z': z,
    'text': text, 'texttemplate': '%{text}', 'zmin': -1, 'zmax': 1,
    'colorscale': figures.DIVERGING, 'xgap': 2, 'ygap': 2,
    'colorbar': {'thickness': 10, 'outlinewidth': 0},
    'hovertemplate': '%{y} and %{x}: %{text}<extra></extra>',
  }  # fmt: skip
  return figures.figure(
    [trace],
    yaxis={'autorange': 'reversed'},
    hovermode='closest',
    hints={'plain': True},
  )


def conflict(run: Run) -> figures.Figure | None:
  return _matrix(run, 'conflict/')


def gradient_conflict(run: Run) -> figures.Figure | None:
  return _matrix(run, 'gradient_cosine/')


def conflict_lines(run: Run) -> figures.Figure | None:
  keys = [
    (key, ' / '.join(story.pair(key, run.names)))
    for prefix in ('conflict/', 'gradient_cosine/')
    for key, _ in figures.by_prefix(run, prefix)
  ]
  labelled = [
    (key, label + (', gradients' if key.startswith('grad') else ''))
    for key, label in keys
  ]
  return figures.lines(
    run, labelled, yaxis={'range': [-1.05, 1.05]}, hints={'zero': True}
  )


def collapse(run: Run) -> figures.Figure | None:
  return figures.lines(
    run,
    [('collapse/distinct_rewards', 'rewards')]
    + [
      (key, f'advantages of {name}')
      for key, name in figures.by_prefix(run, 'collapse/distinct_advantages/')
    ],
    yaxis={'title': {'text': 'distinct per group'}, 'rangemode': 'tozero'},
  )


def counterfactual(run: Run) -> figures.Figure | None:
  out = figures.lines(
    run,
    [
      (key, f'cosine {name}')
      for key, name in figures.by_prefix(run, 'counterfactual/cosine/')
    ]
    + [
      (key, f'opposite {name}')
      for key, name in figures.by_prefix(run, 'counterfactual/sign_flips/')
    ],
    yaxis={'rangemode': 'tozero'},
  )
  for trace in out['data'] if out else []:
    # the pair that the method is about; the others at a click
    if not trace['name'].endswith(' grpo/gdpo'):
      trace['visible'] = 'legendonly'
  return out


def weights(run: Run) -> figures.Figure | None:
  out = figures.lines(
    run,
    [(f'rewards/{n}/weight', n) for n in run.names],
    yaxis={'rangemode': 'tozero'},
  )
  for trace in out['data'] if out else []:
    trace['line']['shape'] = 'hv'
  return out


def conditions(run: Run) -> figures.Figure | None:
  waiting = [r for r in run.about.rewards if r.condition]
  return figures.lines(
    run,
    [
      (f'condition/{r.name}/held', f'{r.name} if {r.condition}')
      for r in waiting
    ],
    yaxis={'tickformat': '.0%', 'range': [-0.02, 1.02]},
  )


def missing(run: Run) -> figures.Figure | None:
  """Function by step; hovering names the reasons."""
  if not run.training:
    return None
  z, text = [], []
  for name in run.names:
    z.append(
      [figures.rounded(failed_share(r, name, run.about)) for r in run.training]
    )
    prefix = f'rewards/{name}/missing/'
    text.append(
      [
        ', '.join(
          f'{k[len(prefix) :]} {v:.0f}'
          for k, v in row.items()
          if k.startswith(prefix)
        )
        or 'all there'
        for row in run.training
      ]
    )
  if all(v is None for row in z for v in row):
    return None
  trace = {
    'type': 'heatmap', 'x': [r['step'] for r in run.training],
    'y': list(run.names), 'z': z, 'text': text, 'zmin': 0, 'zmax': 1,
    'colorscale': figures.HEAT, 'ygap': 3,
    'colorbar': {'thickness': 10, 'outlinewidth': 0, 'tickformat': '.0%'},
    'hovertemplate': 'step %{x}, %{y}: %{z:.0%} failed<br>%{text}<extra></extra>',
  }  # fmt: skip
  return figures.figure(
    [trace], yaxis={'autorange': 'reversed'}, hovermode='closest'
  )
