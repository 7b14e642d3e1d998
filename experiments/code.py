"""Programs that pass their tests, are short, and do not crash.

  python experiments/code.py --config=experiments/configs/code.py
  python experiments/code.py --config=experiments/configs/code.py:humaneval \\
    --config.task.train=data/HumanEval.jsonl.gz

Programs run in a sandbox; what it does not protect from stands in
gdpo_jax/rewards/code.py. A run that was stopped goes on when the same command
is given again.
"""

import pathlib
import runpy
import sysconfig

import launcher

from gdpo_jax.tasks import code as code_tasks

# The standard library has a module of this name too, which pdb imports. With
# this directory first on the path it finds this file, and its names here.
_STANDARD = pathlib.Path(sysconfig.get_path('stdlib')) / 'code.py'
if __name__ == 'code':
  globals().update(
    {k: v for k, v in runpy.run_path(str(_STANDARD)).items() if k[:2] != '__'}
  )


def task_of(config):
  """The task of a config; raises ValueError before anything is loaded."""
  if config.task.limit_tokens > config.max_new_tokens:
    raise ValueError(
      f'limit_tokens {config.task.limit_tokens} is above max_new_tokens '
      f'{config.max_new_tokens}: every program would be within the limit; lower '
      'the one or raise the other.'
    )
  return code_tasks.code_task(**config.task.to_dict())


if __name__ == '__main__':
  launcher.experiment(task_of)
