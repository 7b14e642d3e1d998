"""Held-out change of several finished runs, with paired standard errors.

  python experiments/seeds.py runs/demo0 runs/demo1 runs/demo2 [--out=FILE]

Every run answered the same held-out problems before and after training, so the
standard error is that of the difference per problem. Prints a Markdown table:
one row per run, then one over the runs (mean change; the problems are the same
in all of them, so its error is taken over the mean change of each problem).
"""

import argparse
import math
import pathlib

import numpy as np

from gdpo_jax.train.metrics import read_jsonl


def load(run: pathlib.Path) -> tuple[list[str], np.ndarray, np.ndarray]:
  """Names of the rewards, f[n, K] before and f[n, K] after training."""
  steps = sorted(int(file.stem) for file in (run / 'heldout').glob('*.jsonl'))
  if len(steps) < 2:
    raise SystemExit(f'{run} has fewer than two held-out evaluations.')
  first, last = (
    read_jsonl(run / 'heldout' / f'{step}.jsonl')
    for step in (steps[0], steps[-1])
  )
  names = list(first[0]['rewards'])

  def values(rows):
    return np.array([[row['rewards'][n] for n in names] for row in rows], float)

  return names, values(first), values(last)


def cells(before: np.ndarray, after: np.ndarray) -> list[str]:
  """'before -> after (change in standard errors)' of each reward and the sum."""
  out = []
  pairs = [*zip(before.T, after.T), (before.sum(1), after.sum(1))]
  for b, a in pairs:
    change = a - b
    error = change.std(ddof=1) / math.sqrt(len(change))
    ratio = f'{change.mean() / error:+.1f} SE' if error else 'no change'
    out.append(f'{b.mean():.3f} → {a.mean():.3f} ({ratio})')
  return out


def table(runs: list[pathlib.Path]) -> str:
  loaded = [load(run) for run in runs]
  names = loaded[0][0]
  problems = {len(before) for _, before, _ in loaded}
  if len(problems) > 1 or any(n != names for n, _, _ in loaded):
    raise SystemExit('the runs differ in rewards or number of problems.')
  lines = [
    '| run | ' + ' | '.join(names) + ' | sum |',
    '|---' * (len(names) + 2) + '|',
  ]
  for run, (_, before, after) in zip(runs, loaded):
    lines.append(f'| {run.name} | ' + ' | '.join(cells(before, after)) + ' |')
  if len(runs) > 1:
    before = np.mean([b for _, b, _ in loaded], axis=0)
    after = np.mean([a for _, _, a in loaded], axis=0)
    lines.append('| mean | ' + ' | '.join(cells(before, after)) + ' |')
  return '\n'.join(lines) + '\n'


def main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('runs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, help='also write it here')
  args = parser.parse_args()
  text = table(args.runs)
  print(text)
  if args.out:
    args.out.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  main()
