"""Writes METRICS.md: every metric, and what to do when a rule speaks.

python -m experiments.metrics_table
"""

import pathlib

from gdpo_jax.train import dictionary
from gdpo_jax.train.monitor import ACTIONS, PATIENCE
from gdpo_jax.train.rule_book import RULES, Rule

OUT = pathlib.Path(__file__).with_name('METRICS.md')


def document() -> str:
  lines = [
    '# Metrics, and what to do when',
    '',
    'Made from the code by `python -m experiments.metrics_table`.',
    '',
    'A run writes one line per step to `metrics.jsonl`. In a name, `NAME`, `A` '
    'and `B` stand for rewards. ✓: TRL has the same thing under this name.',
  ]
  for section in dictionary.SECTIONS:
    lines += [
      '',
      f'## {section.title}',
      '',
      '| metric | unit | what it is | TRL |',
      '|---|---|---|---|',
    ]
    lines += [
      f'| `{m.name}` | {m.unit} | {m.definition} | {"✓" if m.trl else ""} |'
      for m in section.metrics
    ]
  lines += [
    '',
    '# What to do when',
    '',
    'Rules look at the rows of a run and say what is wrong, once, in the '
    'terminal, in `events.jsonl` and in `report.html`. What a rule does is '
    'chosen by `--config.monitor_actions=RULE=ACTION,...`, with an action of '
    + ', '.join(f'`{a}`' for a in ACTIONS)
    + '; all rules `warn` unless told otherwise. An adjustment is repeated '
    f'every {PATIENCE} steps while the alarm lasts, and is taken back when it '
    'is over.',
  ]
  for rule in RULES:
    lines += ['', f'## `{rule.name}`', '', _summary(rule), '']
    lines.append(f'- Threshold: {rule.threshold:g} {rule.unit}.')
    if rule.release is not None:
      lines.append(f'- Over at: {rule.release:g}.')
    if rule.once:
      lines.append('- Said once at the start; not an alarm.')
    if rule.adjustment:
      a = rule.adjustment
      lines.append(
        f'- `adjust`: `{a.what}` × {a.factor:g}, at most {a.repeats} times.'
      )
    lines.append(f'- What to do: {rule.advice}')
  return '\n'.join(lines) + '\n'


def _summary(rule: Rule) -> str:
  """The first sentence of the docstring of the function behind it."""
  return rule.find.__doc__.strip().split('\n\n')[0]


def main():
  OUT.write_text(document(), encoding='utf-8')
  print(OUT)


if __name__ == '__main__':
  main()
