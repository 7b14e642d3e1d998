import functools
import json
import os
import pathlib
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_jax.rewards import answers

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))


@pytest.mark.parametrize(
  'text, expected',
  [
    (r'so \boxed{\frac{1}{2}}', r'\frac{1}{2}'),  # braces, not [^}]+
    (r'\boxed{5} ... \boxed{7}', '7'),
    (r'\boxed{1} and again \boxed{1}', '1'),
    (r'\fbox{42}', '42'),
    (r'\boxed{\boxed{3}}', '3'),
    (r'\boxed{4', None),
    (r'\boxed{5}, no: \boxed{7', None),  # the last one decides, and is cut off
    (r'\boxed{}', ''),
    (r'\boxed{\text{E}}', 'E'),
    (r'\boxed 7', '7'),
    (r'\boxed{\{1, 2\}}', r'\{1, 2\}'),
    (r'\boxed{\left\{1\right.}', r'\left\{1\right.'),
    (r'<answer>\boxed{42}</answer>', '42'),
    ('<answer> 42 </answer>', '42'),
    ('<think>maybe 3</think>The answer is 4.', '4'),
    ('<think>is it 3', None),
    ('work\n#### 1,234', '1,234'),
    ('The answer is 3.5. That was easy, 7 steps.', '3.5'),
    ('Answer: **73**', '73'),
    (r'The final answer is: $\frac12$.', r'\frac12'),
    ('42. That is the final count.', '42'),
    ('I count 1,234 apples. Done', '1,234'),
    ('it is 12:00.', '12:00'),
    ('the balance is -5', '-5'),
    ('it comes to 1e5', '1e5'),
    ('it comes to 2.5e-3.', '2.5e-3'),
    ('no number here', None),
    ('', None),
  ],
)
def test_extract(text, expected):
  assert answers.extract(text) == expected


EQUAL = [
  ('42', '42.'),
  ('1,234', '1234'),
  (r'1{,}234', '1234'),
  (r'1\,234', '1234'),
  ('1 234', '1234'),
  ('\u22125', '-5'),
  ('$5', '5 dollars'),
  (r'\$5.00', '5'),
  ('42 apples in total', '42'),
  ('5 cm', '5'),
  ('5cm', '5 centimeters'),
  ('5 km/h', '5'),
  ('2pi', r'2\pi'),
  ('1, 2', '(1, 2)'),
  ('2 2/3', '8/3'),
  (r'2\frac{2}{3}', '8/3'),
  ('2\u00bd', '5/2'),
  (r'\frac12', '1/2'),
  (r'-\frac{1}{2}', '-0.5'),
  ('50%', '0.5'),
  ('50%', '50'),
  (r'50\%', '50 percent'),
  ('2/3', '0.6667'),
  ('1e5', '100000'),
  (r'1.5 \times 10^{3}', '1500'),
  ('**73**', '73'),
  (r'\boxed{7}', '7'),
  (r'\text{E}', 'E'),
  ('(B)', 'B'),
  ('Yes', 'yes'),
  ('x = 5', '5'),
  (r'x \in [1, 2]', '[1,2]'),
  ('1, 2', '2, 1'),
  (r'\{1, 2\}', '2 and 1'),
  (r'\pm 3', '3, -3'),
  (r'[1, \infty)', '[1,\u221e)'),
  (r'(-\infty,1) \cup (2,3)', r'(2,3) \cup (-\infty,1)'),
  ('x>3', '3<x'),
  (r'\sqrt{8}', r'2\sqrt{2}'),
  ('(x-1)(x+1)', 'x^2-1'),
  (r'\sqrt{2+\sqrt3}', r'\frac{\sqrt6+\sqrt2}{2}'),
  ('0.1+0.2', '0.3'),
  (r'\pi', '3.1416'),
  (r'\begin{pmatrix}1&2\\3&4\end{pmatrix}', r'\begin{bmatrix}1&2\\3&4\end{bmatrix}'),
]  # fmt: skip

DIFFERENT = [
  ('1/2^99', '1/2^98'),
  ('1/2004!', '1/2006!'),
  (r'\sqrt{2}\cdot 10^{-50}', r'\sqrt{2}\cdot 10^{-51}'),
  ('2^{400}', '2^{400}+1'),
  ('2 2/3', '2'),
  ('4 10/3', '10'),
  (r'\pm 2021', '2021'),
  ('\u00b12021', '2021'),
  ('+-2021', '2021'),
  (r'\frac{1}{2}', r'\frac{1}{3}'),
  ('12:00', '1:00'),
  (r'\frac{1}{0}', '12:00'),
  ('19, 46, 82', '21, 36, 82'),
  ('1, 2', '1, 2, 3'),
  ('(1, 2)', '(2, 1)'),
  ('[1, 2)', '[1, 2]'),
  ('5 cm', '5 m'),
  ('0.5%', '50%'),
  ('2/3', '0.67'),
  ('2/3', '0.6666'),
  ('12345.67', '12345.68'),
  ('1000000', '1000001'),
  ('3 4', '7'),
  ('2x', '2'),
  ('x = 5', 'y = 5'),
  ('5x', '5y'),
  ('5 x', '5'),
  ('2xy', '2'),
  ('2 xy', '2'),
  ('2 sin x', '2'),
  (r'\{1, 2\}', '(1, 2)'),
  ('hello', 'world'),
  ('', ''),
]


@pytest.mark.parametrize('one, other', EQUAL)
def test_equal_values_in_different_spellings(one, other):
  assert answers.equal(one, other)
  assert answers.equal(other, one)


@pytest.mark.parametrize('one, other', DIFFERENT)
def test_no_false_equality(one, other):
  assert not answers.equal(one, other)
  assert not answers.equal(other, one)


def test_missing_answers_equal_nothing():
  assert not answers.equal(None, '3')
  assert not answers.equal('3', None)
  assert not answers.equal(None, None)


def test_hanging_expressions_are_wrong_in_time_and_off_the_main_thread():
  assert answers.equal('1+x', 'x+1')  # starts the workers
  verdicts = []

  def compare():
    for hostile in ('9^{9^{9^9}}', r'\binom{10^9}{5 \cdot 10^8}', '10000000!'):
      verdicts.append(answers.equal(hostile, '3'))
    verdicts.append(answers.equal('2+x', 'x+2'))

  thread = threading.Thread(target=compare)
  start = time.monotonic()
  thread.start()
  thread.join(timeout=30)
  assert verdicts == [False, False, False, True]
  assert time.monotonic() - start < 15


def test_making_the_workers_is_not_counted(monkeypatch):
  assert answers.equal('1+y', 'y+1')
  pool = answers.equality._POOL

  def slow(*args, **options):
    time.sleep(4)
    return pool

  monkeypatch.setattr(answers.equality, '_POOL', None)
  monkeypatch.setattr(answers.equality.workers, 'Pool', slow)
  assert answers.equal('2+y', 'y+2')


def test_correctness_reads_gold_texts_and_has_no_opinion_without_one():
  values = answers.correctness(
    [
      'Answer: 4',
      [{'role': 'assistant', 'content': 'it is 5'}],
      '6',
      r'\boxed{}',
    ],
    answer=['2+2\n#### 4', 4, None, '7'],
  )
  assert values == [1.0, 0.0, None, 0.0]


def test_think_format_looks_at_the_end_of_the_prompt():
  completion = 'First, 2 plus 2.\n</think>\nThe answer is 4.'
  opened, plain = 'Solve it.\n<think>\n', 'Solve it.\n'
  assert answers.think_format([completion], [opened]) == [1.0]
  assert answers.think_format([completion], [plain]) == [0.0]
  assert answers.think_format(['<think>' + completion], [plain]) == [1.0]
  assert answers.think_format(['<think>' + completion], [opened]) == [0.0]
  messages = [{'role': 'user', 'content': 'Solve it.'}]
  told = functools.partial(answers.think_format, opened=True)
  assert told([completion], [messages]) == [1.0]
  assert answers.think_format([completion], [messages]) == [0.0]


@pytest.mark.parametrize(
  'text, value',
  [
    ('<think>a</think><answer>4</answer>', 1.0),
    ('<think>a</think>\n<answer>\n4\n</answer>\n', 1.0),
    ('so <think>a</think><answer>4</answer>', 0.0),
    ('<think>a</think><answer>4</answer> done', 0.0),
    ('<think>a</think> well <answer>4</answer>', 0.0),
    ('<think>a</think><answer> </answer>', 0.0),
    ('<think>a<think>b</think><answer>4</answer>', 0.0),
    ('<think>a</think><answer>4</answer><answer>5</answer>', 0.0),
    ('<answer>4</answer><think>a</think>', 0.0),
    ('<think>a</think>4', 0.0),
  ],
)
def test_think_answer_format_is_strict(text, value):
  assert answers.think_answer_format([text]) == [value]


def test_integer_means_written_as_one():
  texts = ['Answer: 1,234', 'Answer: -5', 'Answer: 42.0', 'Answer: 84/2', 'no']
  assert answers.integer(texts) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_length_counts_tokens_and_includes_the_limit():
  length = answers.length(limit_tokens=3)
  assert length(completion_ids=[[1, 2], [1, 2, 3], [1, 2, 3, 4], []]) == [
    1,
    1,
    0,
    1,
  ]
  with pytest.raises(ValueError, match='at least 1'):
    answers.length(0)


def gsm8k():
  answers_ = []
  for name in ('gsm8k_train.jsonl', 'gsm8k_test.jsonl'):
    path = SHARED / 'data' / name
    if not path.exists():
      pytest.skip(f'needs {path} (set GDPO_SHARED)')
    with open(path, encoding='utf-8') as file:
      answers_ += [json.loads(line)['answer'] for line in file]
  return answers_


def spellings(gold):
  """Plain, boxed, with unit, with thousands separators, with a sentence."""
  number = gold.rpartition('####')[2].strip()
  plain = number.replace(',', '')
  separated = f'{int(plain):,}' if plain.lstrip('-').isdigit() else plain
  return [
    plain,
    rf'so that is \boxed{{{plain}}}',
    f'The answer is {plain} dollars',
    f'Answer: {separated}',
    f'It comes to {plain}. I checked every step of it twice.',
  ]


def check_gsm8k(golds):
  for gold, following in zip(golds, golds[1:] + golds[:1]):
    texts = spellings(gold)
    assert answers.correctness(texts, [gold] * 5) == [1.0] * 5, gold
    numbers = [
      float(text.rpartition('####')[2].replace(',', ''))
      for text in (gold, following)
    ]
    if numbers[0] != numbers[1]:
      wrong = answers.correctness(texts, [following] * 5)
      assert wrong == [0.0] * 5, (gold, following)


def test_gsm8k_sample():
  check_gsm8k(gsm8k()[::20])


@pytest.mark.slow
def test_gsm8k():
  golds = gsm8k()
  assert len(golds) == 8792
  check_gsm8k(golds)


def test_a_batch_of_endless_expressions_is_missing_only_in_part(monkeypatch):
  monkeypatch.setattr(answers, '_BUDGET_S', 0.5)
  monkeypatch.setattr(answers.equality, '_COMPARE_TIMEOUT_S', 0.3)
  endless = [
    rf'\boxed{{\binom{{10^9}}{{5 \cdot 10^8 + {i}}}}}' for i in range(30)
  ]
  start = time.monotonic()
  values = answers.correctness(['\\boxed{3}', *endless], ['3'] * 31)
  assert time.monotonic() - start < 10
  assert values[0] == 1.0 and values[1] == 0.0 and values[-1] is None


@pytest.mark.parametrize(
  'hostile',
  [
    '\\boxed{' * 5000,
    '\\boxed{' * 5000 + '3' + '}' * 5000,
    '\\boxed{3}' * 5000,
    '<answer>' * 5000,
    '{' * 100000,
    '1 ' * 50000,
    '1' * 100000,
    '1/' * 50000,
    'answer is ' * 5000,
    '(' * 5000 + ')' * 5000,
  ],
)
def test_hostile_texts_are_read_in_time(hostile):
  start = time.monotonic()
  answers.correctness([hostile], ['3'])
  assert time.monotonic() - start < 3


@pytest.mark.parametrize(
  'hostile',
  [
    r'\pm ' * 60 + '1',
    ', '.join(f'x^{i}+{i}' for i in range(40)),
    r'\{' * 60 + '1, 2' + r'\}' * 60,
    '(1,' * 90 + '2' + ')' * 90,
    '1/' * 90 + '2',
    'x' * 399,
    '-' * 300 + '1',
    '9' * 390,
  ],
)
def test_hostile_answers_are_compared_in_time(hostile):
  start = time.monotonic()
  assert not answers.equal(hostile, r'x+\sqrt{2}')
  assert not answers.equal(hostile, r'x+1, y+1, z+1')
  assert time.monotonic() - start < 15


RATIONALS = st.fractions(-100, 100, max_denominator=50)


def spelled(value, kind):
  sign, rest = ('-' if value < 0 else ''), abs(value)
  whole, part = divmod(rest.numerator, rest.denominator)
  if kind == 'latex':
    return rf'{sign}\frac{{{rest.numerator}}}{{{rest.denominator}}}'
  if kind == 'mixed' and whole and part:
    return f'{sign}{whole} {part}/{rest.denominator}'
  if kind == 'minus':
    return f'{value}'.replace('-', '\u2212')
  return f'{value}'


@given(
  RATIONALS, RATIONALS, *[st.sampled_from(['latex', 'mixed', 'minus'])] * 2
)
def test_rationals_are_equal_iff_they_are(a, b, kind, other_kind):
  assert answers.equal(spelled(a, kind), spelled(a, other_kind))
  assert answers.equal(spelled(a, kind), spelled(b, other_kind)) == (a == b)


@settings(max_examples=40, deadline=None)
@given(*[st.text(r'0123459.,/%-+^ {}()[]\\$xfracpm', max_size=15)] * 2)
def test_comparison_is_total_and_symmetric(a, b):
  assert answers.equal(a, b) == answers.equal(b, a)
  answers.extract(a + b)
