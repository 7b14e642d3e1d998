import math

import numpy as np
import pytest

from gdpo_jax.objectives import advantages
from gdpo_jax.policy.tokenizer import char_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline, Reward
from gdpo_jax.tasks.base import PromptIterator, Task
from gdpo_jax.tasks.mixture import mixture

nan = math.nan


def right(completions, answer, **_):
  return [float(c == a) for c, a in zip(completions, answer)]


async def shouted(completions, **_):
  return [float(c.isupper()) for c in completions]


def lower(completions, loudness):
  assert None not in loudness  # sees the rows of its own task alone
  return [float(c.islower()) for c in completions]


def short(completions, completion_ids):
  return [1.0 / len(ids) for ids in completion_ids]


def tasks():
  maths = Task(
    'maths',
    [{'prompt': f'1{i}', 'answer': 'x'} for i in range(6)],
    [{'prompt': '99', 'answer': 'x'}],
    (Reward(right), Reward(shouted, name='format'), Reward(short)),
    demonstrate=lambda seed, n: [('1', 'x')] * n,
  )
  words = Task(
    'words',
    [{'prompt': f'2{i}', 'loudness': 3} for i in range(6)],
    [],
    (Reward(lower, name='format'),),
    demonstrate=lambda seed, n: [('2', 'y')] * n,
  )
  return maths, words


def test_a_reward_that_does_not_apply_is_missing_not_zero():
  mixed = mixture(tasks())
  assert [r.name for r in mixed.rewards] == ['right', 'format', 'short']
  rows = [mixed.train[0]] * 2 + [mixed.train[6]] * 2
  columns = {k: [r[k] for r in rows] for k in rows[0] if k != 'prompt'}
  completions = ['x', 'Y', 'x', 'Y']
  with Pipeline(mixed.rewards) as pipeline:
    pipeline.check_columns(set(mixed.train[0]) - {'prompt'})
    values = pipeline.score(
      ['p'] * 4, completions, columns, completion_ids=[[1], [1, 2], [1], [1]]
    ).values
  np.testing.assert_array_equal(
    values, np.float32([[1, 0, 1], [0, 1, 0.5], [nan, 1, nan], [nan, 0, nan]])
  )
  # the groups of a task without `right` get nothing from it, and no NaN
  grouped = values.reshape(2, 2, 3)
  out = advantages.mo_grpo(
    grouped, np.isfinite(grouped), np.ones(3, np.float32), eps=0.0
  )
  z = math.sqrt(0.5)
  np.testing.assert_allclose(out, [[z, -z], [z, -z]], atol=1e-6)


def test_batches_hold_the_tasks_in_their_shares():
  mixed = mixture(tasks(), [3, 1])
  it = PromptIterator(
    mixed.train, char_tokenizer('0123456789'), 4, 4, 0, mixed.curriculum
  )
  for _ in range(5):
    kinds = [e['task'] for e in it.next().examples]
    assert kinds.count('maths') == 3
  assert mixed.demonstrate(0, 3) == [('1', 'x'), ('2', 'y'), ('1', 'x')]
  assert [e['task'] for e in mixed.heldout] == ['maths']


@pytest.mark.parametrize(
  'returned, kind, said',
  [
    ([1.0] * 9, 'length', 'expected 2 values, got 9'),
    # keys and characters are no values
    ({0: 1.0, 1: 1.0}, 'type', 'got dict'),
    ('12', 'type', 'got str'),
  ],
)
def test_what_is_not_a_value_per_row_is_a_failed_call(returned, kind, said):
  maths, words = tasks()
  words = Task(
    'words',
    words.train,
    [],
    (Reward(lambda completions: returned, name='format'),),
  )
  mixed = mixture([maths, words])
  row = mixed.train[6]
  columns = {k: [row[k]] * 2 for k in row if k != 'prompt'}
  with Pipeline(mixed.rewards) as pipeline:
    scores = pipeline.score(
      ['p'] * 2, ['a', 'b'], columns, completion_ids=[[1]] * 2
    )
  assert scores.reasons['format'] == {kind: 2}
  [reason] = {f.reason for f in scores.failures if f.reward == 'format'}
  assert reason.startswith("format: task 'words': ") and said in reason


def test_tasks_that_do_not_go_together_are_refused():
  maths, words = tasks()
  with pytest.raises(ValueError, match='names of their own'):
    mixture([maths, maths])
  with pytest.raises(ValueError, match='1 shares were given'):
    mixture([maths, words], [1])
  chatty = Task(
    'c', [{'prompt': [{'role': 'user', 'content': 'x'}]}], [], maths.rewards
  )
  with pytest.raises(ValueError, match='turn the strings into messages'):
    mixture([maths, chatty])
  heavy = Task(
    'h', words.train, [], (Reward(lower, name='format', weight=2.0),)
  )
  with pytest.raises(ValueError, match="'format' with another weight"):
    mixture([maths, heavy])
