import json

import numpy as np
import pytest

from gdpo_jax.policy.tokenizer import char_tokenizer
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks import base

TOKENIZER = char_tokenizer('0123456789<>| ')
TEMPLATE = (
  '{% for m in messages %}<{{ m.content }}>{% endfor %}'
  '{% if add_generation_prompt %}|{% endif %}'
)


def examples(n=10):
  return [{'prompt': f'{i:02d}', 'answer': str(i)} for i in range(n)]


def iterator(data=None, prompts_per_step=2, width=4, seed=0):
  data = examples() if data is None else data
  return base.PromptIterator(data, TOKENIZER, prompts_per_step, width, seed)


def answers(prompts):
  return [example['answer'] for example in prompts.examples]


def batches(it, n):
  return [answers(it.next()) for _ in range(n)]


def test_batch_is_left_padded_and_says_what_is_real():
  prompts = iterator(width=5).next()
  assert prompts.tokens.shape == prompts.mask.shape == (2, 5)
  assert prompts.tokens.dtype == np.int32 and prompts.mask.dtype == bool
  for row, mask, example in zip(*prompts):
    assert mask.tolist() == [False] * 3 + [True] * 2
    assert TOKENIZER.decode(row[mask]) == example['prompt']
    assert set(row[~mask]) == {TOKENIZER.pad_id}


@pytest.mark.parametrize('prompts_per_step', [1, 2, 3, 4, 7, 10, 23])
def test_each_example_once_per_epoch_across_batches(prompts_per_step):
  it = iterator(prompts_per_step=prompts_per_step)
  n_batches = -(-30 // prompts_per_step)
  drawn = [a for b in batches(it, n_batches) for a in b]
  epochs = [drawn[i : i + 10] for i in (0, 10, 20)]
  for epoch in epochs:
    assert sorted(epoch) == [str(i) for i in range(10)]
  assert epochs[0] != epochs[1] != epochs[2]  # an order of its own


def test_seeds_give_orders_and_the_same_seed_gives_the_same():
  assert batches(iterator(seed=3), 15) == batches(iterator(seed=3), 15)
  assert batches(iterator(seed=3), 5) != batches(iterator(seed=4), 5)


@pytest.mark.parametrize('prompts_per_step', [2, 3])
@pytest.mark.parametrize('stop', [0, 5, 7, 10, 14])
def test_resume_goes_on_as_if_it_had_not_stopped(stop, prompts_per_step):
  whole = batches(iterator(prompts_per_step=prompts_per_step, seed=1), 15)
  first = iterator(prompts_per_step=prompts_per_step, seed=1)
  batches(first, stop)
  cursor = json.loads(json.dumps(first.cursor))
  again = iterator(prompts_per_step=prompts_per_step, seed=1)
  batches(again, 3)  # wherever it was before
  again.restore(cursor)
  assert batches(again, 15 - stop) == whole[stop:]
  assert again.cursor['epoch'] == 15 * prompts_per_step // 10


def test_cursor_of_other_data_is_refused():
  cursor = iterator().cursor
  other_answer = examples()
  other_answer[3]['answer'] = '7'
  for other in (
    iterator(examples(9)),
    iterator(examples()[::-1]),
    iterator(other_answer),
  ):
    with pytest.raises(ValueError, match='other examples'):
      other.restore(cursor)
  with pytest.raises(ValueError, match='other seed: seed 0, here 1'):
    iterator(seed=1).restore(cursor)
  with pytest.raises(ValueError, match='position 10 lies outside the 10'):
    iterator().restore(cursor | {'position': 10})


def test_fingerprint_takes_columns_that_json_cannot_hold():
  data = [{'prompt': '1', 'x': np.arange(3), 'f': object()}]
  same = [{'prompt': '1', 'x': np.arange(3), 'f': object()}]
  other = [{'prompt': '1', 'x': np.arange(4), 'f': object()}]
  cursor = iterator(data, 1).cursor
  iterator(same, 1).restore(cursor)
  with pytest.raises(ValueError, match='other examples'):
    iterator(other, 1).restore(cursor)


def test_too_long_and_duplicate_prompts_are_counted():
  data = [{'prompt': p} for p in ('1', '22', '22', '333', '4444', '22')]
  it = iterator(data, prompts_per_step=4, width=3)
  assert (it.num_examples, it.num_too_long, it.num_duplicates) == (5, 1, 2)
  drawn = [e['prompt'] for _ in range(5) for e in it.next().examples]
  assert sorted(drawn) == sorted(['1', '22', '22', '22', '333'] * 4)
  with pytest.raises(ValueError, match='none of 6 prompts has at most .* 0 '):
    iterator(data, width=0)


@pytest.mark.parametrize('bad', [{'prompts_per_step': 0}, {'seed': -1}])
def test_numbers_out_of_range_are_refused(bad):
  with pytest.raises(ValueError, match='must be at least'):
    iterator(**bad)


def test_strings_get_one_bos_and_chats_end_in_the_header():
  tokenizer = char_tokenizer('<>|0123456789')
  tokenizer.chat_template = TEMPLATE
  tokenizer.bos_id, tokenizer.adds_bos = tokenizer.encode('0')[0], True
  chat = [{'role': 'system', 'content': '4'}, {'role': 'user', 'content': '5'}]
  data = [{'prompt': '12'}, {'prompt': '012'}, {'prompt': chat}]
  prompts = base.encode_prompts(data, tokenizer, 8)
  texts = [tokenizer.decode(r[m]) for r, m in zip(prompts.tokens, prompts.mask)]
  assert texts == ['012', '012', '<4><5>|']


def test_encode_prompts_cuts_nothing():
  data = [{'prompt': '1'}, {'prompt': '12345'}]
  with pytest.raises(ValueError, match='1 of 2 .* longest has 5'):
    base.encode_prompts(data, TOKENIZER, 4)


def test_evaluation_batches_fill_the_last_and_flag_the_copies():
  made = base.evaluation_batches(examples(7), TOKENIZER, 3, 4)
  assert [p.tokens.shape for p, _ in made] == [(3, 4)] * 3
  assert [real.tolist() for _, real in made] == [
    [True] * 3,
    [True] * 3,
    [True, False, False],
  ]
  kept = [
    e['answer'] for p, real in made for e, r in zip(p.examples, real) if r
  ]
  assert kept == [str(i) for i in range(7)]
  assert answers(made[-1][0]) == ['6', '6', '6']
  assert base.evaluation_batches([], TOKENIZER, 3, 4) == []


def test_chat_prompt_layouts():
  worked = [('1 + 1?', '2'), ('2 + 2?', '4')]
  turns = base.chat_prompt('3 + 3?', 'Add.', worked)
  assert [m['role'] for m in turns] == [
    'system', 'user', 'assistant', 'user', 'assistant', 'user',
  ]  # fmt: skip
  assert turns[-1]['content'] == '3 + 3?'
  [single] = base.chat_prompt('3 + 3?', 'Add.', worked, 'single')
  assert single['role'] == 'user'
  assert single['content'] == (
    'Add.\n\nProblem: 1 + 1?\n2\n\nProblem: 2 + 2?\n4\n\nProblem: 3 + 3?'
  )
  [bare] = base.chat_prompt('3 + 3?', 'Add.', layout='single')
  assert bare['content'] == 'Add.\n\n3 + 3?'
  with pytest.raises(ValueError, match="'turns' or 'single', got 'flat'"):
    base.chat_prompt('3 + 3?', 'Add.', worked, 'flat')


def zero(completions, **_):
  return [0.0] * len(completions)


def test_task_refuses_what_cannot_be_trained_on():
  one = Reward(zero)

  def task(train=None, heldout=(), rewards=(one,)):
    return base.Task(
      't', examples() if train is None else train, heldout, rewards
    )

  assert task().rewards[0].name == 'zero'
  with pytest.raises(ValueError, match=r"names of their own, got \['zero', 'z"):
    task(rewards=(Reward(zero), Reward(zero)))
  with pytest.raises(ValueError, match='needs rewards'):
    task(rewards=())
  with pytest.raises(ValueError, match='no training examples'):
    task(train=[])
  with pytest.raises(
    ValueError, match=r"heldout\[0\] has no prompt, only \['q"
  ):
    task(heldout=[{'question': '1'}])
  with pytest.raises(ValueError, match='2 of 3 held-out prompts'):
    task(heldout=[*examples(2), {'prompt': '77'}])
