"""Writes OBJECTIVES.md: one batch, and what every method makes of it.

python -m experiments.objectives_table
"""

import pathlib

import jax
import numpy as np

from gdpo_jax.objectives import advantages, diagnose, presets

OUT = pathlib.Path(__file__).with_name('OBJECTIVES.md')
NAN = float('nan')

# two prompts, four samples each, two rewards
WORKED = np.array(
  [
    [[1, 1], [1, 0], [0, 0.5], [0, 0.5]],
    [[1, 1], [0, 1], [0, 1], [0, 0.5]],
  ],
  np.float32,
)
# the same, where the second reward missed one row and both missed another
GAPS = WORKED.copy()
GAPS[0, 3, 1] = NAN
GAPS[1, 3] = NAN

# three rewards; in the first prompt every row has total 1
HIDDEN = np.array(
  [
    [[1, 0, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]],
    [[1, 1, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]],
  ],
  np.float32,
)

LENGTHS = np.array([2, 4, 3, 3, 3, 2, 4, 3])
# what a method needs or may be told beside the rewards: (method, settings)
VARIANTS = [
  ('grpo', {}),
  ('grpo', {'scale': 'batch'}),
  ('grpo', {'whiten': 'sequence'}),
  ('dr_grpo', {}),
  ('rloo', {}),
  ('reinforce_pp', {}),
  ('reinforce_pp_baseline', {}),
  ('dvao', {'ddof': 0}),
  ('corr_grpo', {}),
  ('corr_grpo', {'on': 'gdpo'}),
  ('ddca', {}),
  ('mo_grpo', {}),
  ('gdpo', {}),
  ('gdpo', {'whiten': 'token'}),
  ('sa_mrpo', {'ddof': 0, 'gamma': 0.5}),
  ('sa_mrpo', {'ddof': 0, 'gamma': 1.0}),
  ('saw', {}),
  ('saw', {'on': 'grpo', 'whiten': 'none'}),
  ('gd2po', {}),
  ('gd2po', {'query_weight': 'after'}),
  ('dara', {}),
  ('rvpo', {}),
  ('rvpo', {'whiten': 'none'}),
  ('paper', {}),
  ('trl', {}),
  ('verl', {}),
  ('nemo_rl', {}),
  ('nemo_rl', {'leave_one_out': True}),
]
TEXT = """# One batch, all methods

Written by `python -m experiments.objectives_table`; not edited by hand.

Two prompts of four samples with two rewards of weight 1. Prompt A has rewards
(1, 1), (1, 0), (0, 0.5), (0, 0.5), so totals 2, 1, 0.5, 0.5; prompt B has
(1, 1), (0, 1), (0, 1), (0, 0.5), so totals 2, 1, 1, 0.5. The completions have
{lengths} tokens.

The methods run with eps 0 and ddof 1 where nothing else is said, the presets as
they are. "Distinct" counts the different advantages in A and in B: A has three
different rows, B has three. The cosine is that with `gdpo`.

{worked}
`gdpo_clustered` is `gdpo` up to five rewards. `dara` equals `gdpo` here because
both rewards are active in both groups.

## Where totals hide what happened

Three rewards. In A the rows are (1, 0, 0), (0, 1, 0), (0, 1, 0), (0, 0, 1):
every total is 1. In B they are (1, 1, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1).
Methods that sum first give A nothing and count three different rows of B as
one.

{hidden}
## Where rewards are missing

The first batch, but A4 has no second reward and B4 has neither (a reward
function failed, or its condition did not hold).

{gaps}
`verl` and `nemo_rl` read what is missing as 0. Elsewhere it is nothing:
the entry leaves the statistics of its reward, and B4 leaves the batch.
"""


def compute(batches: np.ndarray) -> list[np.ndarray]:
  """f32[B, P, G] per variant; batches f32[B, P, G, K], NaN is missing."""
  methods = advantages.ADVANTAGES | presets.PRESETS
  weights = np.ones(batches.shape[-1], np.float32)
  bounds = np.tile(np.array([0, 1], np.float32), (weights.size, 1))
  mask = np.arange(max(LENGTHS)) < LENGTHS[:, None]

  @jax.jit
  @jax.vmap
  def run(rewards, valid):
    out = []
    for name, settings in VARIANTS:
      if name in advantages.ADVANTAGES:
        settings = {'eps': 0.0} | settings
      if name in ('sa_mrpo', 'saw'):
        settings = {'bounds': bounds} | settings
      out.append(methods[name](rewards, valid, weights, mask=mask, **settings))
    return out

  return [np.asarray(x) for x in run(batches, ~np.isnan(batches))]


def row(name: str, settings: dict, values: np.ndarray, gdpo: np.ndarray) -> str:
  told = ', '.join(f'{key} {value}' for key, value in settings.items())
  label = f'`{name}`' + (f' ({told})' if told else '')
  # adding 0 turns -0.000 into 0.000
  numbers = [f'{np.round(value, 3) + 0.0:.3f}' for value in values.ravel()]
  distinct = diagnose.distinct_per_group(values)
  norm = np.linalg.norm(values) * np.linalg.norm(gdpo)
  cells = [
    label,
    *numbers,
    '/'.join(str(count) for count in np.asarray(distinct)),
    f'{np.sum(values * gdpo) / norm:.3f}' if norm else '-',
  ]
  return '| ' + ' | '.join(cells) + ' |'


def table(made: list[np.ndarray]) -> str:
  samples = [f'{prompt}{i}' for prompt in 'AB' for i in (1, 2, 3, 4)]
  header = ['method', *samples, 'distinct', 'cosine']
  lines = [
    '| ' + ' | '.join(header) + ' |',
    '|' + '---|' + '---:|' * (len(header) - 1),
  ]
  gdpo = made[VARIANTS.index(('gdpo', {}))]
  for (name, settings), values in zip(VARIANTS, made, strict=True):
    lines.append(row(name, settings, values, gdpo))
  return '\n'.join(lines) + '\n'


def document() -> str:
  # a third reward that is missing throughout makes one shape of all batches
  batches = np.full((3, 2, 4, 3), NAN, np.float32)
  for batch, rewards in zip(batches, (WORKED, HIDDEN, GAPS), strict=True):
    batch[..., : rewards.shape[-1]] = rewards
  made = compute(batches)
  worked, hidden, gaps = (table([x[i] for x in made]) for i in range(3))
  lengths = ', '.join(str(length) for length in LENGTHS)
  return TEXT.format(lengths=lengths, worked=worked, hidden=hidden, gaps=gaps)


if __name__ == '__main__':
  OUT.write_text(document(), encoding='utf-8')
  print(f'wrote {OUT}')
