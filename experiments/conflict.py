"""Two rewards in conflict: does it pay to decouple the policy?

  python experiments/conflict.py --out=runs/conflict --seeds=0,1,2,3,4

On `math_len.py:tiny_conflict` (correct, and short whatever it says), from the
same supervised start per seed:

  ppo         PPO with a value head, weighted sum of the rewards
  morl        GRPO, linear scalarization over weights sampled at every step
  gdpo        GDPO on a plain policy
  gdpo_heads  GDPO with a head per reward, trained together with the trunk
  decoupled   independent sub-policies: a quarter of their gradient reaches the
              trunk, every third update, after a cold start; dynamic fusion
  correct_alone, short_alone  GRPO on one of the rewards
  distilled   one policy that learns from these two (see distill.py)

A run that has ended is not run again, one that was stopped goes on. Writes
OUT/compare.html (curves with intervals, table, paired differences with ppo,
Pareto front) and OUT/compare.json, as compare.py does; other settings are given
to all as --config.FIELD=VALUE, some of the methods as --algorithms=ppo,gdpo.
"""

import pathlib

import compare

CONFIG = pathlib.Path(__file__).parent / 'configs' / 'math_len.py'
SUB = 'subpolicy_rank=8'
_ALONE = (
  compare.Variant('grpo', ('task.weights.length=0.0',), 'correct_alone'),
  compare.Variant('grpo', ('task.weights.correct=0.0',), 'short_alone'),
)
_VARIANTS = (
  compare.Variant('ppo'),
  compare.Variant('grpo', ('weight_schedule=sampled',), 'morl'),
  compare.Variant('gdpo'),
  compare.Variant(
    'gdpo', (SUB, 'subpolicy_isolation=1.0', 'subpolicy_every=1'), 'gdpo_heads'
  ),
  compare.Variant(
    'gdpo',
    (SUB, 'subpolicy_cold_start=10', 'fusion_entropy_coef=0.001'),
    'decoupled',
  ),
  *_ALONE,
  compare.Variant('', label='distilled', teachers=_ALONE),
)
VARIANTS = {variant.name: variant for variant in _VARIANTS}


def variants_of(names: str) -> list[compare.Variant]:
  """'ppo,gdpo' -> what is run.

  Raises:
    ValueError: on a name that is not above.
  """
  asked = names.split(',')
  if unknown := sorted(set(asked) - set(VARIANTS)):
    raise ValueError(
      f'unknown methods {unknown}; choose from {", ".join(VARIANTS)}.'
    )
  return [VARIANTS[name] for name in asked]


if __name__ == '__main__':
  compare.main(
    variants_of,
    ','.join(VARIANTS),
    f'{CONFIG}:tiny_conflict',
    'Two rewards in conflict',
    'runs/conflict',
  )
