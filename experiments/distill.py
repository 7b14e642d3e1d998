"""Finished runs as teachers, one policy as their student.

  python experiments/distill.py runs/correct runs/short --shares=1,1 \\
    --out=runs/student --steps=100

The student starts where the first teacher started, and answers that teacher's
problems; see gdpo_jax/train/distill.py. Teachers that know one reward each are
runs with the others' weights at 0 (--config.task.weights.length=0). Writes a
directory for transformers, and beside it what a run leaves: metrics.jsonl and
the answers to held-out problems before and after, heldout/STEP.jsonl.
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import launcher
import run as runs

from gdpo_jax.policy import hf
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.sampling import Sampling
from gdpo_jax.train.distill import distill
from gdpo_jax.train.evaluate import evaluate
from gdpo_jax.train.metrics import JSONL


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('teachers', nargs='+', type=pathlib.Path)
  parser.add_argument(
    '--shares', help='one for each teacher; equal if left out'
  )
  parser.add_argument('--out', type=pathlib.Path, default='runs/student')
  parser.add_argument('--steps', type=int, default=100)
  parser.add_argument('--learning_rate', type=float, default=1e-4)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  launcher.use_compilation_cache()
  try:
    _distill(args)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


def _distill(args) -> None:
  found = [runs.open_run(directory) for directory in args.teachers]
  first = found[0]
  student = launcher.load_model(first.config)
  kept = first.directory / 'warm_start'
  if kept.is_dir():
    student = student._replace(params=hf.load(kept)[1])
  settings = dataclasses.replace(
    first.settings,
    num_steps=args.steps,
    learning_rate=args.learning_rate,
    seed=args.seed,
  )
  task = launcher.task_function(first.config.experiment)(first.config)
  shares = [1.0] * len(found)
  if args.shares:
    shares = [float(share) for share in args.shares.split(',')]
  policy = launcher.policy_of(student.config, settings)
  args.out.mkdir(parents=True, exist_ok=True)
  (args.out / 'settings.json').write_text(
    json.dumps(dataclasses.asdict(settings), indent=2)
  )
  with (args.out / JSONL).open('w', encoding='utf-8') as log:

    def write(step, row):
      log.write(json.dumps({'step': step, **row}) + '\n')

    def report(step, row):
      write(step, row)
      if step % 10 == 0 or step == args.steps:
        print(f'{step}/{args.steps}  gap {row["distill/gap"]:.3f} nats/token')

    def held_out(step, params):
      result = _evaluate(first.config, settings, task, student, policy, params)
      if result:
        result.write(args.out / 'heldout' / f'{step}.jsonl')
        summary = result.summary()
        write(step, {f'eval/{key}': value for key, value in summary.items()})

    held_out(0, student.params)
    params = distill(
      policy,
      student.params,
      [(one.policy, one.model.params) for one in found],
      shares,
      student.tokenizer,
      task.train,
      settings,
      report,
    )
    held_out(args.steps, params)
  hf.save(args.out, student.config, params, student.tokenizer, 'float32')
  print(args.out)


def _evaluate(config, settings, task, student, policy, params):
  """Greedy answers, as in a run; None where the task has no such problems."""
  heldout = task.heldout[: config.heldout]
  if not heldout:
    return None
  tokenizer = student.tokenizer
  sampling = Sampling(
    group_size=1,
    max_new_tokens=settings.max_new_tokens,
    temperature=0.0,
    eos_ids=tuple(tokenizer.eos_ids),
    pad_id=tokenizer.pad_id,
  )
  with Pipeline(task.rewards) as pipeline:
    return evaluate(
      policy,
      params,
      tokenizer,
      pipeline,
      heldout,
      sampling,
      settings.max_prompt_tokens,
      min(config.eval_batch_size, len(heldout)),
      launcher.mesh_of(settings),
    )


if __name__ == '__main__':
  main()
