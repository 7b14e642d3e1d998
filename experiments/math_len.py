"""Correct and short: arithmetic or GSM8K with a limit on the answer's length.

  python experiments/math_len.py --config=experiments/configs/math_len.py
  python experiments/math_len.py --config=experiments/configs/math_len.py:tiny \\
    --config.algorithm=grpo --run_dir=runs/tiny_grpo

A run that was stopped goes on when the same command is given again.
"""

import launcher
from absl import app, flags
from ml_collections import config_flags

from gdpo_jax.tasks import math_len

_CONFIG = config_flags.DEFINE_config_file(
  'config',
  None,
  'FILE[:VARIANT], such as experiments/configs/math_len.py:tiny.',
)
_RUN_DIR = flags.DEFINE_string(
  'run_dir', '', 'Where everything is written; runs/TASK by default.'
)
_DRY_RUN = flags.DEFINE_bool(
  'dry_run', False, 'Only build the whole step abstractly and print its sizes.'
)


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


def main(argv):
  if len(argv) > 1:
    raise app.UsageError(f'unexpected arguments {argv[1:]}.')
  launcher.main(_CONFIG.value, task_of, _RUN_DIR.value, _DRY_RUN.value)


if __name__ == '__main__':
  flags.mark_flag_as_required('config')
  launcher.start(main)
