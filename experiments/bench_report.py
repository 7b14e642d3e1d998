"""The page that `experiments.benchmark` writes, from its results alone.

python -m experiments.bench_report experiments/results  # write it again
"""

import importlib.metadata
import json
import pathlib
import statistics
import sys

from experiments.bench_sides import Shape

SHAPE, MANY = Shape(), Shape(prompts=16)
SPEEDS = {
  'update': ('rows/s', SHAPE.rows),
  'packing': ('rows/s', SHAPE.rows),
  'step': ('steps/min', 60),
  'ragged': ('new tokens/s', int(SHAPE.ragged().sum())),
  'refill': ('new tokens/s', int(MANY.ragged().sum())),
}


def page(results) -> str:
  """Medians, spread, and how many times as fast ours is, dtype by dtype."""
  versions = ', '.join(
    f'{name} {importlib.metadata.version(name)}'
    for name in ('jax', 'torch', 'transformers', 'trl')
  )
  lines = [
    '# Measured speed',
    '',
    f'{results["weights"]}, {SHAPE.prompts} prompts x {SHAPE.group}, '
    f'{SHAPE.prompt_tokens} + {SHAPE.new_tokens} tokens where nothing else is '
    f'said; {results["cores"]} cores ({results["processor"]}); {versions}. By '
    '`python -m experiments.benchmark`, whose docstring says what is measured. '
    'Medians after a warm-up; sides of a part take turns. Load when a part began '
    '(0 is a machine with nothing else to do): '
    + ', '.join(f'{what} {load}' for what, load in results['load'].items())
    + '.',
  ]
  for what, sides in results['seconds'].items():
    lines += _table(what, sides)
  if peaks := results.get('peak_gib_of_step'):
    lines += ['', '| peak of a step | GiB |', '|---|---|']
    lines += [f'| {name} | {peak:.1f} |' for name, peak in peaks.items()]
  if shares := results.get('share_of_peak'):
    lines += [
      '',
      '| | TFLOP/s at the matrix peak | share of it |',
      '|---|---|---|',
    ]
    lines += [
      f'| {name} | {peak:.3f} | {share:.2f} |'
      for name, (peak, share) in shares.items()
    ]
  if sizes := results.get('rollout_megabytes'):
    lines += ['', '| weights of a rollout | MB | of float32 |', '|---|---|---|']
    lines += [
      f'| {dtype} | {size:.0f} | {size / sizes["float32"]:.2f} |'
      for dtype, size in sizes.items()
    ]
  if memory := results.get('memory'):
    lines += [
      '',
      '## Memory of the log-prob step',
      '',
      '| vocabulary | MiB beside the parameters | in sizes of one table |',
      '|---|---|---|',
    ]
    lines += [
      f'| {size} | {row["MiB"]:.0f} | {row["tables"]:.2f} |'
      for size, row in memory.items()
    ]
  if scaling := results.get('scaling'):
    lines += _scaling(scaling)
  return '\n'.join(lines) + '\n'


def _table(what, sides):
  unit, amount = SPEEDS.get(
    what, ('new tokens/s', SHAPE.rows * SHAPE.new_tokens)
  )
  middle = {name: statistics.median(values) for name, values in sides.items()}
  own = [name for name in sides if name.startswith('gdpo_jax')]
  heads = ''.join(f' {name} is times as fast |' for name in own)
  turns = max(map(len, sides.values()))
  lines = [
    '',
    f'## {what[0].upper()}{what[1:]}',
    '',
    f'| | seconds | spread of {turns} | {unit} |{heads}',
    '|---|---|---|---|' + '---|' * len(own),
  ]
  for name, values in sides.items():
    ratios = ''.join(f' {middle[name] / middle[ours]:.2f} |' for ours in own)
    lines.append(
      f'| {name} | {middle[name]:.2f} | {min(values):.2f} to {max(values):.2f} '
      f'| {amount / middle[name]:.3g} |{ratios}'
    )
  return lines


def efficiency(row, part) -> float:
  """Share of the matrix peak, by counted FLOPs."""
  return row[part]['flops'] / row[part]['seconds'] / row['peak']


def _scaling(rows):
  """Seconds against what the FLOPs predict at the median share of the peak."""
  lines = [
    '',
    '## What a FLOP costs, by size',
    '',
    'A model of 4 layers and width 288 unless said, 64 prompt tokens. Predicted: '
    'counted FLOPs at the median share of the matrix peak over all rows of the '
    'curve.',
    '',
    '![curves](benchmark.svg)',
    '',
    '| rows x new tokens | rollout s | measured / predicted | update s | '
    'measured / predicted | step: measured / predicted |',
    '|---|---|---|---|---|---|',
  ]
  curve = [row for row in rows if row['curve'] == 'rows x tokens']
  usual = {
    part: statistics.median(efficiency(row, part) for row in curve)
    for part in ('rollout', 'update')
  }
  for row in rows:
    predicted = {
      part: row[part]['flops'] / usual[part] / row['peak'] for part in usual
    }
    spent = {part: row[part]['seconds'] for part in usual}
    cells = ' | '.join(
      f'{spent[part]:.2f} | {spent[part] / predicted[part]:.2f}'
      for part in usual
    )
    name = f'{row["rows"]} x {row["new_tokens"]}'
    if row['curve'] == 'width':
      name = f'width {row["width"]}, {name}'
    whole = sum(spent.values()) / sum(predicted.values())
    lines.append(f'| {name} | {cells} | {whole:.2f} |')
  return lines


def draw(rows, path: pathlib.Path) -> None:
  """Share of the matrix peak over new tokens, a line for each number of rows."""
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(
    1, 2, figsize=(9, 3.4), sharex=True, layout='constrained'
  )
  curve = [row for row in rows if row['curve'] == 'rows x tokens']
  for axis, part in zip(axes, ('rollout', 'update')):
    for count in sorted({row['rows'] for row in curve}):
      line = [row for row in curve if row['rows'] == count]
      axis.plot(
        [row['new_tokens'] for row in line],
        [efficiency(row, part) for row in line],
        marker='o',
        label=f'{count} rows',
      )
    axis.set_title(f'{part}: share of the matrix peak')
    axis.set_xscale('log', base=2)
    axis.set_xlabel('new tokens')
    axis.set_ylim(0)
    axis.grid(alpha=0.3)
  axes[0].legend()
  figure.savefig(path)
  plt.close(figure)


def write(out: pathlib.Path, results) -> None:
  out.mkdir(parents=True, exist_ok=True)
  (out / 'benchmark.json').write_text(json.dumps(results, indent=2) + '\n')
  (out / 'benchmark.md').write_text(page(results))
  if 'scaling' in results:
    draw(results['scaling'], out / 'benchmark.svg')


if __name__ == '__main__':
  where = pathlib.Path(sys.argv[1])
  write(where, json.loads((where / 'benchmark.json').read_text()))
