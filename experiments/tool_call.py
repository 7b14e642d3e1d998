"""The right tool, the right arguments, the right form.

  python experiments/tool_call.py --config=experiments/configs/tool_call.py
  python experiments/tool_call.py \\
    --config=experiments/configs/tool_call.py:rlla \\
    --config.task.train=data/rlla_sft.json

A run that was stopped goes on when the same command is given again.
"""

import launcher

from gdpo_jax.tasks import tool_call


def task_of(config):
  """The task of a config; raises ValueError before anything is loaded."""
  return tool_call.tool_call(**config.task.to_dict())


if __name__ == '__main__':
  launcher.experiment(task_of)
