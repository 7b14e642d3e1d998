import collections
import json

import numpy as np
import pytest

from gdpo_jax.policy.tokenizer import char_tokenizer
from gdpo_jax.tasks import base, order, select

TOKENIZER = char_tokenizer('0123456789')


def examples(n=40):
  return [{'prompt': f'{i:03d}', 'level': 1 + i % 4} for i in range(n)]


def iterator(curriculum, data, prompts_per_step=10, seed=0):
  return base.PromptIterator(
    data, TOKENIZER, prompts_per_step, 4, seed, curriculum
  )


def drawn(it, n, key='prompt'):
  return [[e[key] for e in it.next().examples] for _ in range(n)]


def test_seven_two_one_in_every_batch_of_ten():
  data = [{'prompt': f'{i:03d}', 'level': i // 10} for i in range(30)]
  it = iterator(order.Shares('level'), data)
  for batch in drawn(it, 6, 'level'):
    assert collections.Counter(batch) == {0: 7, 1: 2, 2: 1}


def test_each_kind_has_epochs_of_its_own():
  data = [{'prompt': f'{i:03d}', 'level': i // 10} for i in range(30)]
  it = iterator(order.Shares('level'), data)
  easy = [p for b in drawn(it, 10) for p in b if p < '010']
  epochs = [easy[i : i + 10] for i in range(0, 70, 10)]
  assert all(sorted(e) == sorted(epochs[0]) for e in epochs)
  assert epochs[0] != epochs[1]


def test_many_levels_are_cut_into_equal_parts():
  data = [{'prompt': f'{i:03d}', 'level': i} for i in range(30)]
  it = iterator(order.Shares('level', (1, 1, 1)), data, 3)
  for batch in drawn(it, 10, 'level'):
    assert sorted(level // 10 for level in batch) == [0, 1, 2]


def test_shares_by_name_and_what_is_refused():
  data = [{'prompt': f'{i:03d}', 'kind': 'ab'[i % 2]} for i in range(8)]
  it = iterator(order.Shares('kind', {'a': 3, 'b': 1}), data, 4)
  assert all(b.count('a') == 3 for b in drawn(it, 5, 'kind'))
  for bad, message in (
    (order.Shares('kind', {'a': 1}), 'no share for kind b'),
    (order.Shares('kind'), 'not a number everywhere'),
    (order.Shares('none'), "no column 'none'"),
    (order.Shares('kind', {'a': 1, 'b': 0}), 'positive'),
    (order.Shares('kind', {'a': 1, 'b': 1, 'c': 1}), 'number 3 has no example'),
  ):
    with pytest.raises(ValueError, match=message):
      iterator(bad, data)


def watch(it, prompts, p_of):
  """Groups of 4 rows, of which the share that `p_of` says is right."""
  rates = [p_of(e) for e in prompts.examples]
  values = [[1.0] * round(4 * p) + [0.0] * (4 - round(4 * p)) for p in rates]
  it.observe(prompts.examples, {'correct': np.float32(values)})


def test_by_success_prefers_what_is_solved_now_and_then():
  data = examples(40)
  it = iterator(order.BySuccess('correct'), data, 8)
  rate = {1: 1.0, 2: 0.5, 3: 0.0, 4: 0.5}
  counts = collections.Counter()
  for step in range(60):
    prompts = it.next()
    assert len({e['prompt'] for e in prompts.examples}) == 8
    watch(it, prompts, lambda e: rate[e['level']])
    if step >= 10:
      counts.update(e['level'] for e in prompts.examples)
  # weights 1.05 for levels 2 and 4, 0.05 for 1 and 3
  assert counts[2] + counts[4] > 0.85 * sum(counts.values())
  assert min(counts.values()) > 0  # nothing is lost for ever


def test_missing_scores_tell_nothing():
  data = examples(2)
  it = iterator(order.BySuccess('correct'), data, 2)
  before = it.cursor
  prompts = it.next()
  it.observe(prompts.examples, {'correct': np.full((2, 4), np.nan)})
  assert it.cursor['rates'] == before['rates'] == [-1.0, -1.0]
  with pytest.raises(ValueError, match=r"watches .* 'correct', but .* \['x'\]"):
    it.observe(prompts.examples, {'x': np.zeros((2, 4))})


@pytest.mark.parametrize(
  'curriculum',
  [order.Shares('level', (4, 2, 1, 1)), order.BySuccess('correct')],
)
@pytest.mark.parametrize('stop', [0, 3, 7])
def test_a_curriculum_resumes_exactly(curriculum, stop):
  data = examples(12)

  def steps(it, n):
    out = []
    for _ in range(n):
      prompts = it.next()
      out.append([e['prompt'] for e in prompts.examples])
      watch(it, prompts, lambda e: e['level'] / 4)
    return out

  whole = steps(iterator(curriculum, data, 5, seed=2), 10)
  first = iterator(curriculum, data, 5, seed=2)
  steps(first, stop)
  again = iterator(curriculum, data, 5, seed=2)
  again.restore(json.loads(json.dumps(first.cursor)))
  assert steps(again, 10 - stop) == whole[stop:]


def test_a_cursor_of_another_curriculum_is_refused():
  data = examples(8)
  plain = iterator(None, data)
  with pytest.raises(ValueError, match='another curriculum'):
    iterator(order.BySuccess('correct'), data).restore(plain.cursor)
  two = iterator(order.Shares('level', (1, 1)), data)
  four = iterator(order.Shares('level', (1, 1, 1, 1)), data)
  with pytest.raises(ValueError, match='of 4 kinds of examples, here are 2'):
    two.restore(four.cursor)


def test_filters_say_what_went_and_why():
  data = [
    {'prompt': '1', 'level': 1},
    {'prompt': '1', 'level': 1},
    {'prompt': '22', 'level': 5},
    {'prompt': '3333', 'level': 2},
    {'prompt': '4'},
    {'prompt': '5', 'level': 2},
  ]
  kept = select.keep(
    data,
    unique=True,
    column='level',
    at_most=2,
    tokenizer=TOKENIZER,
    max_prompt_tokens=3,
  )
  assert [e['prompt'] for e in kept.examples] == ['1', '5']
  assert kept.dropped == {
    'duplicate': 1,
    'difficulty': 1,
    'too long': 1,
    'unknown difficulty': 1,
  }
  with pytest.raises(
    ValueError, match="none of 6 .* {'unknown difficulty': 1,|d"
  ):
    select.keep(data, column='level', at_least=9)
  with pytest.raises(ValueError, match='column and at_least or at_most'):
    select.keep(data, column='level')


def test_success_rates_from_answers():
  data = [{'prompt': 'a'}, {'prompt': 'b'}, {'prompt': 'c'}]
  answered = [
    {'prompt': 'a', 'rewards': {'correct': 1.0}},
    {'prompt': 'a', 'rewards': {'correct': 0.0}},
    {'prompt': 'b', 'rewards': {'correct': 1.0}},
    {'prompt': 'b', 'rewards': {'correct': None}},
  ]
  rated = select.with_success_rates(data, answered, 'correct')
  assert [e['success_rate'] for e in rated] == [0.5, 1.0, None]
  kept = select.keep(rated, column='success_rate', at_least=0.1, at_most=0.9)
  assert [e['prompt'] for e in kept.examples] == ['a']
