import pytest

from gdpo_jax.policy.tokenizer import char_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks import arithmetic
from gdpo_jax.tasks.base import PromptIterator
from gdpo_jax.tasks.math_len import after_equals, answer_line, math_len

SMALL = {'num_train': 32, 'num_heldout': 8}


def test_scores_of_hand_made_completions():
  task = math_len(limit_tokens=4, with_format=True, conditioned=True, **SMALL)
  assert task.name == 'math_len/arithmetic' and task.demonstrate is None
  assert (len(task.train), len(task.heldout)) == (32, 8)
  example = task.train[0]
  gold = example['answer']
  completions = [
    f'So we add.\nAnswer: {gold}',
    f'It is {gold}',
    'Answer: 9999',
    'I do not know.',
  ]
  columns = {
    key: [value] * 4 for key, value in example.items() if key != 'prompt'
  }
  with Pipeline(task.rewards) as pipeline:
    pipeline.check_columns(list(columns))
    scores = pipeline.score(
      [example['prompt']] * 4,
      [[{'role': 'assistant', 'content': text}] for text in completions],
      columns,
      completion_ids=[[1] * n for n in (5, 4, 3, 5)],
    )
  assert scores.names == ('correct', 'length', 'format')
  assert scores.values.tolist() == [
    [1, 0, 1],
    [1, 1, 0],
    [0, 1, 1],
    [0, 0, 0],
  ]
  conditions = [reward.condition for reward in task.rewards]
  assert conditions == [None, 'correct>=1', None]
  assert [reward.range for reward in task.rewards] == [(0.0, 1.0)] * 3


@pytest.mark.parametrize(
  'text, value',
  [
    ('Answer: 7', 1),
    ('4 + 3 = 7\nAnswer: 7\n', 1),
    ('Answer: -1,234.5', 1),
    ('Answer: 7.', 0),
    ('Answer: seven', 0),
    ('The Answer: 7', 0),
    ('Answer: 7\nSo it is.', 0),
    ('Answer: 5\nAnswer: 7', 0),
    ('', 0),
  ],
)
def test_answer_line(text, value):
  assert answer_line([text]) == [value]


@pytest.mark.parametrize(
  'text, value',
  [('=46', 1), ('06;04;=46', 1), ('46', 0), ('=4=6', 0), ('=46;', 0), ('=', 0)],
)
def test_after_equals(text, value):
  assert after_equals([text]) == [value]


def test_tiny_task_end_to_end():
  task = math_len(
    'tiny', limit_tokens=arithmetic.TINY_LIMIT_TOKENS, with_format=True, **SMALL
  )
  tokenizer = char_tokenizer(arithmetic.TINY_ALPHABET)
  prompts = PromptIterator(task.train, tokenizer, 4, 6).next()
  assert prompts.mask.all()
  pairs = task.demonstrate(0, 64)
  golds = [str(sum(map(int, p[:-1].split('+')))) for p, _ in pairs]
  completions = [completion for _, completion in pairs]
  ids = [tokenizer.encode(c) + [tokenizer.eos_id] for c in completions]
  with Pipeline(task.rewards) as pipeline:
    scores = pipeline.score(
      [p for p, _ in pairs],
      completions,
      {'answer': golds},
      completion_ids=ids,
    )
  correct, length, form = scores.values.mean(0)
  assert 0.6 < correct < 0.95 and 0.3 < length < 0.7 and form == 1
  assert (scores.values[:, :2] == 1).all(1).any()  # right and short exists


def test_weights_by_name():
  task = math_len(limit_tokens=18, weights={'length': 0.5}, **SMALL)
  assert [reward.weight for reward in task.rewards] == [1.0, 0.5]


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'source': 'gsm9k'}, r"\['arithmetic', 'gsm8k', 'tiny'\], got 'gsm9k'"),
    ({'limit_tokens': 0}, 'limit_tokens must be at least 1'),
    ({'source': 'tiny', 'level': 2}, r"no setting \['level'\]; it has \['num_"),
    ({'weights': {'format': 1}}, 'with_format=True'),
    ({'weights': {'correct': float('nan')}}, 'finite'),
    ({'source': 'gsm8k', 'train': 'no.jsonl'}, 'there is no file no.jsonl'),
  ],
)
def test_what_cannot_be_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    math_len(**({'limit_tokens': 18} | settings))
