"""Word problems with three rewards: right, an integer, in the form asked for.

  arithmetic | gsm8k | tiny --> Task with the rewards
    correct  1.0 iff the final answer equals the gold one
    integer  1.0 iff the final answer is written as an integer
    format   1.0 iff the answer stands where it was asked for

The three rewards of the public GDPO recipe for GSM8K. `integer` and `format`
are soon learned, and then say nothing; it is `correct` that takes long.
"""

import functools
from collections.abc import Mapping
from typing import Any

from gdpo_jax.rewards import answers
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.base import Task, weighted
from gdpo_jax.tasks.math_len import SOURCES, load_math


def math_integer(
  source: str = 'arithmetic',
  *,
  weights: Mapping[str, float] | None = None,
  **settings: Any,
) -> Task:
  """Makes the task; settings beyond these go to the source.

  Args:
    source: 'arithmetic' (made here, no download), 'gsm8k', or 'tiny' for a
      model of single characters.
    weights: by name of the reward; those not named have weight 1.
    **settings: arguments of `arithmetic`, `gsm8k` or `tiny`.
  Raises:
    ValueError: an unknown source, setting or reward.
  """
  train, heldout = load_math(source, settings)
  reward = functools.partial(Reward, range=(0.0, 1.0))
  rewards = (
    reward(answers.correctness, name='correct'),
    reward(answers.integer, name='integer'),
    reward(SOURCES[source].form, name='format'),
  )
  return Task(
    name=f'math_integer/{source}',
    train=train,
    heldout=heldout,
    rewards=weighted(rewards, weights),
    demonstrate=SOURCES[source].demonstrate,
  )
