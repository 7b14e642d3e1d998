"""Several tasks in one batch; what does not apply to a row is missing there.

  tasks --mixture--> one Task: examples with the column 'task' and all columns,
                     each reward asked only about the rows of its own tasks

A reward that knows nothing about a row says None, not 0: it leaves the
statistics of that row's group, which is judged by the rewards of its own task.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from gdpo_jax.rewards.by_task import ByTask
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.base import Task
from gdpo_jax.tasks.order import Shares


def mixture(
  tasks: Sequence[Task],
  shares: Sequence[float] | None = None,
  name: str = 'mixture',
) -> Task:
  """One task out of several.

  Rewards of one name are one reward, asked with the function of each row's
  task; all else about them must agree. Every batch holds the tasks in the given
  shares. Examples get the column 'task' and, as None, the columns of the
  others. Demonstrations come in turn from the tasks, if all have them.

  Args:
    tasks: with names of their own; prompts all strings or all messages.
    shares: of each task in every batch; equal by default.
  Raises:
    ValueError: names that are there twice, prompts of two kinds, rewards of one
      name that are declared differently, a number of shares that does not fit.
  """
  names = [task.name for task in tasks]
  if len(tasks) < 2 or len(set(names)) < len(names):
    raise ValueError(f'a mixture needs tasks with names of their own: {names}.')
  shares = [1.0] * len(tasks) if shares is None else list(shares)
  if len(shares) != len(tasks):
    raise ValueError(f'{len(shares)} shares were given for {names}.')
  kinds = {isinstance(t.train[0]['prompt'], str) for t in tasks}
  if len(kinds) > 1:
    raise ValueError(
      f'some of {names} have prompts that are strings, some message lists; '
      'turn the strings into messages.'
    )
  columns = {c for t in tasks for e in (*t.train, *t.heldout) for c in e}
  empty = dict.fromkeys(sorted(columns))

  def together(part: str) -> list[dict[str, Any]]:
    return [
      {**empty, **example, 'task': task.name}
      for task in tasks
      for example in getattr(task, part)
    ]

  demonstrate = None
  if all(task.demonstrate for task in tasks):

    def demonstrate(seed: int, n: int):
      parts = [t.demonstrate(seed, -(-n // len(tasks))) for t in tasks]
      return [pair for turn in zip(*parts) for pair in turn][:n]

  return Task(
    name=name,
    train=together('train'),
    heldout=together('heldout'),
    rewards=_rewards(tasks),
    demonstrate=demonstrate,
    curriculum=Shares('task', dict(zip(names, shares))),
  )


def _rewards(tasks: Sequence[Task]) -> list[Reward]:
  declared: dict[str, Reward] = {}
  functions: dict[str, dict[str, Callable]] = {}
  for task in tasks:
    for reward in task.rewards:
      # the function may differ from task to task, how it is run may not
      plain = dataclasses.replace(reward, fn=_rewards)
      first = declared.setdefault(reward.name, plain)
      if plain != first:
        differ = [
          field.name
          for field in dataclasses.fields(Reward)
          if getattr(plain, field.name) != getattr(first, field.name)
        ]
        raise ValueError(
          f'two tasks declare the reward {reward.name!r} with another '
          f'{", ".join(differ)}; make them agree, or give one another name.'
        )
      functions.setdefault(reward.name, {})[task.name] = reward.fn
  return [
    dataclasses.replace(reward, fn=ByTask(name, functions[name]))
    for name, reward in declared.items()
  ]
