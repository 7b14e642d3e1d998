"""What a config says about data: filters and curricula, see `config.data`."""

import dataclasses
import sys

import ml_collections
from ml_collections import config_dict

from gdpo_jax.tasks import order, select
from gdpo_jax.tasks.base import Task

CURRICULA = ('none', 'shares', 'success')


def default() -> ml_collections.ConfigDict:
  """All examples, shuffled."""
  data = ml_collections.ConfigDict()
  data.unique = False  # leave out prompts that came before
  data.column = ''  # difficulty: a level, or a success rate of an earlier run
  data.at_least = config_dict.placeholder(float)  # bounds of that column,
  data.at_most = config_dict.placeholder(float)  # included
  data.curriculum = 'none'  # 'shares' of `column`, or by 'success'
  data.shares = (7, 2, 1)  # easy, middle, hard in every batch
  data.reward = 'correct'  # whose success rate 'success' watches
  return data


def apply(task: Task, data: ml_collections.ConfigDict) -> Task:
  """The task with what is left of its training examples, and their order.

  Held-out examples stay as they are, so that runs can be compared.
  """
  if data.curriculum not in CURRICULA:
    raise ValueError(
      f'data.curriculum is {data.curriculum!r}; choose from '
      f'{", ".join(CURRICULA)}.'
    )
  if data.curriculum == 'shares' and not data.column:
    raise ValueError('data.curriculum=shares needs data.column.')
  names = [reward.name for reward in task.rewards]
  if data.curriculum == 'success' and data.reward not in names:
    raise ValueError(
      f'data.reward is {data.reward!r}, but the rewards are {names}.'
    )
  bounded = data.at_least is not None or data.at_most is not None
  if bounded and not data.column:
    raise ValueError('data.at_least and data.at_most need data.column.')
  if data.unique or bounded:
    kept = select.keep(
      task.train,
      unique=data.unique,
      column=data.column if bounded else None,
      at_least=data.at_least,
      at_most=data.at_most,
    )
    print(
      f'{len(kept.examples)} examples; left out: {kept.dropped}',
      file=sys.stderr,
    )
    task = dataclasses.replace(task, train=kept.examples)
  curriculum = {
    'none': task.curriculum,
    'shares': order.Shares(data.column, tuple(data.shares)),
    'success': order.BySuccess(data.reward),
  }[data.curriculum]
  return dataclasses.replace(task, curriculum=curriculum)
