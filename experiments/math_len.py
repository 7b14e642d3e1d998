"""Correct and short: arithmetic or GSM8K with a limit on the answer's length.

  python experiments/math_len.py --config=experiments/configs/math_len.py
  python experiments/math_len.py --config=experiments/configs/math_len.py:tiny \\
    --config.algorithm=grpo --run_dir=runs/tiny_grpo

A run that was stopped goes on when the same command is given again.
"""

import launcher

from gdpo_jax.tasks import math_len


def task_of(config):
  """The task of a config; raises ValueError before anything is loaded."""
  if config.task.limit_tokens > config.max_new_tokens:
    raise ValueError(
      f'limit_tokens {config.task.limit_tokens} is above max_new_tokens '
      f'{config.max_new_tokens}: every answer would be within the limit; lower '
      'the one or raise the other.'
    )
  task = config.task.to_dict()
  if not task['with_format']:
    task['weights'].pop('format')
  return math_len.math_len(**task)


if __name__ == '__main__':
  launcher.experiment(task_of)
