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

A run that has ended is not run again, one that was stopped goes on. Writes
OUT/compare.html (curves with intervals, table, paired differences with ppo,
Pareto front) and OUT/compare.json, as compare.py does; other settings are given
to all as --config.FIELD=VALUE.
"""

import argparse
import pathlib
import shutil
import sys

import compare

EXPERIMENT = 'math_len'
CONFIG = pathlib.Path(__file__).parent / 'configs' / 'math_len.py'
SUB = 'subpolicy_rank=8'
VARIANTS = {
  'ppo': compare.Variant('ppo'),
  'morl': compare.Variant('grpo', ('weight_schedule=sampled',)),
  'gdpo': compare.Variant('gdpo'),
  'gdpo_heads': compare.Variant(
    'gdpo', (SUB, 'subpolicy_isolation=1.0', 'subpolicy_every=1')
  ),
  'decoupled': compare.Variant(
    'gdpo', (SUB, 'subpolicy_cold_start=10', 'fusion_entropy_coef=0.001')
  ),
}


def share_start(out: pathlib.Path, seed: int) -> None:
  """Gives every run of the seed the supervised start that one of them made."""
  runs = [out / v.directory / str(seed) for v in VARIANTS.values()]
  made = [run / 'warm_start' for run in runs if (run / 'warm_start').is_dir()]
  for run in runs if made else []:
    if not (run / 'warm_start').exists():
      shutil.copytree(made[0], run / 'warm_start.copy', dirs_exist_ok=True)
      (run / 'warm_start.copy').rename(run / 'warm_start')


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--out', type=pathlib.Path, default='runs/conflict')
  parser.add_argument('--seeds', default='0,1,2,3,4')
  parser.add_argument(
    '--only', default=','.join(VARIANTS), help='some of the methods'
  )
  args, config = parser.parse_known_args(argv)
  wrong = [a for a in config if not a.startswith('--config.')]
  unknown = set(args.only.split(',')) - set(VARIANTS)
  if wrong or unknown:
    parser.error(f'cannot read {wrong or sorted(unknown)}.')
  variants = [VARIANTS[name] for name in args.only.split(',')]
  seeds = [int(seed) for seed in args.seeds.split(',')]
  given = [f'--config={CONFIG}:tiny_conflict', *config]
  failed = []
  for seed in seeds:
    for variant in variants:
      share_start(args.out, seed)
      failed += compare.run_all(EXPERIMENT, given, [variant], [seed], args.out)
  for directory in failed:
    print(f'failed: {directory}/log.txt', file=sys.stderr)
  compare.write(variants, seeds, args.out, 'Two rewards in conflict')
  print(f'{args.out}/compare.html')
  if failed:
    sys.exit(1)


if __name__ == '__main__':
  main()
