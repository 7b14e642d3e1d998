"""The rewards of a run as a picture: who waits for whom, who stands in, weights."""

from gdpo_jax.objectives import shaping
from gdpo_jax.train.page import figures
from gdpo_jax.train.rules import RewardInfo
from gdpo_jax.train.run_files import Run


def depths(rewards: tuple[RewardInfo, ...]) -> list[int]:
  """0 for rewards without a condition, else one more than what they wait for."""
  hierarchy = shaping.make_hierarchy(
    [r.name for r in rewards], [r.condition for r in rewards]
  )
  out = [0] * len(rewards)
  for k in hierarchy.order:
    waits = [hierarchy.names.index(c.name) for c in hierarchy.comparisons[k]]
    out[k] = max((out[j] + 1 for j in waits), default=0)
  return out


def reward_graph(run: Run) -> figures.Figure | None:
  """Boxes and arrows, as annotations of an empty figure."""
  rewards = run.about.rewards
  if not rewards:
    return None
  column = depths(rewards)
  at = {r.name: (column[i], -i) for i, r in enumerate(rewards)}
  last = (max(column) + 1.15, -(len(rewards) - 1) / 2)
  row = run.training[-1] if run.training else {}
  arrows, boxes = [], [_box(last, '<b>advantage</b>', '#1c2430')]
  for i, reward in enumerate(rewards):
    here = at[reward.name]
    weight = row.get(f'rewards/{reward.name}/weight', reward.weight)
    share = row.get(f'advantage_share/{reward.name}')
    text = f'<b>{reward.name}</b><br>weight {weight:g}'
    if share is not None:
      text += f'<br>share {share:.0%}'
    if reward.condition:
      text += f'<br><i>only if {reward.condition}</i>'
    boxes.append(_box(here, text, figures.color(i)))
    if weight:
      arrows.append(
        _arrow(here, last, figures.color(i), 1.0 + 2.0 * min(1.0, abs(weight)))
      )
    for comparison in shaping.parse_condition(reward.condition):
      arrows.append(_arrow(at[comparison.name], here, '#5f6b7a', 1.2))
    if reward.fallback in at:
      arrows.append(_arrow(at[reward.fallback], here, '#c9a400', 1.2))
      boxes[-1]['text'] += f'<br><i>else {reward.fallback}</i>'
  axis = {'visible': False, 'fixedrange': True}
  points = [*at.values(), last]
  invisible = {
    'type': 'scatter', 'mode': 'markers', 'hoverinfo': 'skip',
    'x': [x for x, _ in points], 'y': [y for _, y in points],
    'marker': {'opacity': 0},
  }  # fmt: skip
  return figures.figure(
    [invisible],
    hints={'plain': True, 'height': max(290, 80 * len(rewards))},
    annotations=arrows + boxes,
    xaxis={**axis, 'range': [-0.55, last[0] + 0.45]},
    yaxis={**axis, 'range': [-len(rewards) + 0.4, 0.6]},
    showlegend=False,
  )


def _box(at, text, color) -> dict:
  return {
    'x': at[0], 'y': at[1], 'text': text, 'showarrow': False,
    'bordercolor': color, 'borderwidth': 1.5, 'borderpad': 6,
    'bgcolor': '#ffffff', 'font': {'size': 11, 'color': '#1c2430'},
  }  # fmt: skip


def _arrow(start, end, color, width) -> dict:
  return {
    'x': end[0], 'y': end[1], 'ax': start[0], 'ay': start[1],
    'xref': 'x', 'yref': 'y', 'axref': 'x', 'ayref': 'y', 'text': '',
    'showarrow': True, 'arrowhead': 2, 'arrowsize': 1.1,
    'arrowwidth': width, 'arrowcolor': color,
    'standoff': 42, 'startstandoff': 42,
  }  # fmt: skip
