"""Right, an integer, in the form asked for: word problems, or GSM8K.

  python experiments/gsm8k.py --config=experiments/configs/gsm8k.py
  python experiments/gsm8k.py --config=experiments/configs/gsm8k.py:gsm8k \\
    --config.task.train=data/gsm8k_train.jsonl \\
    --config.task.heldout=data/gsm8k_test.jsonl

A run that was stopped goes on when the same command is given again.
"""

import launcher

from gdpo_jax.tasks import math_integer


def task_of(config):
  """The task of a config; raises ValueError before anything is loaded."""
  return math_integer.math_integer(**config.task.to_dict())


if __name__ == '__main__':
  launcher.experiment(task_of)
