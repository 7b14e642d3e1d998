"""The story of a run: what moved, what did not, what to change.

  python experiments/inspect_run.py RUN
  python experiments/inspect_run.py RUN OTHER           compares the two
  python experiments/inspect_run.py RUN --contribution  leaves out each reward
  python experiments/inspect_run.py RUN --report        writes report.html again

A run may still be going on. `--contribution` opens the last checkpoint, samples
groups of answers to held-out problems, and computes their advantages without
one reward at a time: the cosine to the advantage of all, and the share of pairs
of answers whose order changes. RUN/contributions.json keeps it for the report.
Declared rewards and weights only: no schedules, no running normalizers, no KL
or overlong term.
"""

import argparse
import json
import math
import pathlib
import sys

import rich.console
import rich.table

from gdpo_jax.train import run_files, story
from gdpo_jax.train.page import html
from gdpo_jax.train.run_files import Run

_MOODS = {
  'good': ('▲', 'green'),
  'bad': ('!', 'red'),
  'flat': ('–', 'yellow'),
  'note': ('·', 'cyan'),
}


def tell(run: Run, console: rich.console.Console) -> None:
  """Facts, verdicts, advice."""
  facts = '   '.join(f'{what} {value}' for what, value in html.facts(run))
  console.print(f'{run.directory.name}   {facts}', style='bold', markup=False)
  said = story.verdicts(run)
  for title, moods in (
    ('What moved', ('good', 'bad')),
    ('What did not', ('flat',)),
    ('What else', ('note',)),
  ):
    found = [v for v in said if v.mood in moods]
    if found:
      console.print(f'\n{title}', style='bold')
    for verdict in found:
      mark, color = _MOODS[verdict.mood]
      console.print(f'[{color}]{mark}[/] ', end='')
      console.print(verdict.text, markup=False, highlight=False)
  advice = story.advice(run)
  console.print('\nWhat to change', style='bold')
  for text in advice or ['Nothing: no rule has a complaint.']:
    console.print(f'- {text}', markup=False, highlight=False)


def compare(a: Run, b: Run) -> tuple[list[str], rich.table.Table]:
  """Settings that differ, and every reward at the end of both.

  The error of a difference is that of independent means: of the last steps in
  training, and over problems where both were evaluated.
  """
  names = sorted({*a.settings, *b.settings})
  differ = [
    f'{name}: {a.settings.get(name)!r} → {b.settings.get(name)!r}'
    for name in names
    if a.settings.get(name) != b.settings.get(name)
  ]
  table = rich.table.Table(title='at the end')
  for title in ('', a.directory.name, b.directory.name, 'difference'):
    table.add_column(title, justify='left' if not title else 'right')

  def add(label, x, y):
    change = story.Change(x.end, y.end, math.hypot(x.end_error, y.end_error))
    error = '' if math.isnan(change.error) else f' ± {change.error:.3f}'
    table.add_row(
      label,
      story.number(x.end),
      story.number(y.end),
      f'{change.end - change.start:+.3f}{error} {change.mark}',
    )

  for name in [n for n in a.names if n in b.names]:
    for label, of in (
      (f'{name}, training', lambda r, n=name: story.training_end(r, n)),
      (f'{name}, held-out', lambda r, n=name: story.held_out_end(r, n)),
    ):
      ends = of(a), of(b)
      if None not in ends:
        add(label, *ends)
  for label, key in (
    ('length, tokens', 'completions/mean_length'),
    ('entropy, nats', 'entropy/sampled'),
    ('seconds per step', 'time/step'),
    ('tokens/s', 'throughput/tokens_per_second'),
  ):
    ends = [story.metric_end(run, key) for run in (a, b)]
    if None not in ends:
      add(label, *ends)
  return differ, table


def contribution(directory: pathlib.Path, problems: int, seed: int) -> dict:
  """Samples groups on held-out problems; see the module's docstring."""
  # jax, launchers and weights only where they are asked for
  import jax.numpy as jnp
  import launcher
  import numpy as np
  import run as run_command

  from gdpo_jax.objectives import shaping
  from gdpo_jax.rewards.pipeline import Pipeline
  from gdpo_jax.train import advantage, completions

  launcher.use_compilation_cache()
  opened = run_command.open_run(directory)
  settings = opened.settings
  task = launcher.task_function(opened.config.experiment)(opened.config)
  examples = list(task.heldout)[:problems]
  if not examples or settings.has_value_head:
    raise ValueError(
      'contributions need held-out problems and a method that compares the '
      'answers to one prompt.'
    )
  with Pipeline(task.rewards) as pipeline:
    drawn = run_command.draw(
      opened, pipeline, examples, settings.group_size, settings.temperature,
      seed,
    )  # fmt: skip
  hierarchy = shaping.make_hierarchy(
    drawn.names, [r.condition for r in task.rewards]
  )
  bounds = np.float32([r.range or (np.nan, np.nan) for r in task.rewards])
  # lengths in tokens stand for a mask: only how many count is asked for
  mask = np.arange(drawn.tokens.max()) < drawn.tokens[..., None]
  values = drawn.values.astype(np.float32)
  shaped = advantage.shape_rewards(
    settings, hierarchy, values, jnp.ones(len(drawn.names)), mask, bounds
  )
  found = completions.contributions(
    lambda w: advantage.combine(
      settings, shaped.rewards, shaped.valid, w, mask, bounds
    ),
    np.float32([r.weight for r in task.rewards]),
    drawn.names,
  )
  return {
    'step': opened.step,
    'problems': len(examples),
    'group_size': settings.group_size,
    'rewards': {name: c._asdict() for name, c in found.items()},
  }


def contribution_table(made: dict) -> rich.table.Table:
  table = rich.table.Table(
    title=f'without one reward: {made["problems"]} held-out problems x '
    f'{made["group_size"]}, step {made["step"]}'
  )
  for title in ('without', 'cosine to the whole', 'pairs that change'):
    table.add_column(title, justify='left' if title == 'without' else 'right')
  for name, row in made['rewards'].items():
    table.add_row(name, f'{row["cosine"]:.3f}', f'{row["rank_changes"]:.1%}')
  return table


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('run', type=pathlib.Path)
  parser.add_argument('other', type=pathlib.Path, nargs='?')
  parser.add_argument('--contribution', action='store_true')
  parser.add_argument('--problems', type=int, default=32, help='held-out ones')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--report', action='store_true')
  args = parser.parse_args(argv)
  console = rich.console.Console()
  try:
    run = run_files.load(args.run)
    if args.contribution:
      made = contribution(args.run, args.problems, args.seed)
      (args.run / run_files.CONTRIBUTIONS).write_text(
        json.dumps(made, indent=2), encoding='utf-8'
      )
      console.print(contribution_table(made))
    elif args.other:
      differ, table = compare(run, run_files.load(args.other))
      for text in differ or ['The settings are the same.']:
        console.print(text, markup=False, highlight=False)
      console.print(table)
    else:
      tell(run, console)
    if args.report or args.contribution:
      console.print(f'report: {html.write(args.run)}', soft_wrap=True)
  except (ValueError, FileNotFoundError) as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  main()
