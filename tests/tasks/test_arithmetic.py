import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdpo_jax.rewards import answers
from gdpo_jax.tasks import arithmetic as arith
from gdpo_jax.tasks.arithmetic import Problem

EVERY_LEVEL = tuple(arith.LEVELS)


def question(example):
  return example['prompt'][-1]['content']


@pytest.mark.parametrize(
  'problem, text, values',
  [
    (Problem(5, (('+', 7),)), '5 + 7', [5, 12]),
    (Problem(5, (('+', 7), ('*', 2))), '(5 + 7) * 2', [5, 12, 24]),
    (Problem(5, (('*', 7), ('-', 2))), '5 * 7 - 2', [5, 35, 33]),
    (Problem(9, (('-', 4), ('*', 2), ('*', 3))), '(9 - 4) * 2 * 3', [9, 5, 10, 30]),
    (
      Problem(2, (('+', 1), ('*', 3), ('-', 4), ('*', 2))),
      '((2 + 1) * 3 - 4) * 2',
      [2, 3, 9, 5, 10],
    ),
  ],
)  # fmt: skip
def test_expression_and_values(problem, text, values):
  assert problem.expression == text
  assert problem.values == values
  assert eval(text) == problem.answer  # Python's precedence is the usual one


def test_canonical_names_what_is_asked():
  assert Problem(7, (('+', 5),)).canonical == Problem(5, (('+', 7),)).canonical
  assert Problem(7, (('*', 5),)).canonical == '5 * 7'
  assert Problem(7, (('-', 5),)).canonical == '7 - 5'
  first = Problem(7, (('+', 5), ('*', 2))).canonical
  assert first == Problem(5, (('+', 7), ('*', 2))).canonical == '(5 + 7) * 2'


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32), st.sampled_from(EVERY_LEVEL))
def test_drawn_problems_keep_to_their_level(seed, level):
  problem = arith.draw(random.Random(seed), level)
  operations, largest, limit = arith.LEVELS[level]
  assert len(problem.steps) == operations
  assert all(2 <= n <= largest for op, n in problem.steps if op != '*')
  assert all(2 <= n <= 9 for op, n in problem.steps if op == '*')
  assert all(0 <= value <= limit for value in problem.values)
  assert eval(problem.expression) == problem.answer


@pytest.mark.parametrize('style', ['expression', 'story', 'mixed'])
def test_examples_ask_what_the_answer_is_to(style):
  train, heldout = arith.arithmetic(EVERY_LEVEL, 200, 100, style=style)
  assert (len(train), len(heldout)) == (200, 100)
  for example in train + heldout:
    assert eval(example['problem']) == int(example['answer'])
    # a story may name the factor before the number it multiplies
    assert sorted(re.findall(r'\d+', question(example))) == sorted(
      re.findall(r'\d+', example['problem'])
    )
    assert 'None' not in question(example) and '{' not in question(example)
  stories = sum(
    'has now' in question(e) or 'have now' in question(e) for e in train
  )
  low, high = {'expression': (0, 0), 'story': (200, 200), 'mixed': (70, 130)}[
    style
  ]
  assert low <= stories <= high
  assert {e['level'] for e in train} == set(EVERY_LEVEL)


@pytest.mark.parametrize('style', ['expression', 'story'])
def test_no_heldout_problem_is_trained_on_whatever_the_seeds(style):
  def canonical(example):
    # one operation: the sum is 'a op b'
    a, op, b = example['problem'].split()
    return Problem(int(a), ((op, int(b)),)).canonical

  trained, asked = set(), set()
  for seed in range(4):
    train, heldout = arith.arithmetic((1, 2), 400, 100, seed, style)
    trained |= {canonical(example) for example in train}
    asked |= {canonical(example) for example in heldout}
  assert len(trained) > 200 and len(asked) > 80
  assert not trained & asked
  # a split drawn by chance from so few problems would overlap
  assert 0.2 < len(asked) / len(trained | asked) < 0.45


def test_split_does_not_move():
  """Recorded; another split would train on what was held out before."""
  heldout = [
    f'{a}+{b}' for a in range(2, 7) for b in range(a, 7)
    if arith.held_out(Problem(a, (('+', b),)))
  ]  # fmt: skip
  assert heldout == ['2+6', '4+6', '5+5']


def test_prompts_are_distinct_and_the_seed_decides():
  train, heldout = arith.arithmetic(num_train=300, num_heldout=100, seed=1)
  prompts = [str(e['prompt']) for e in train + heldout]
  assert len(set(prompts)) == 400
  assert arith.arithmetic(num_train=300, num_heldout=100, seed=1)[0] == train
  assert arith.arithmetic(num_train=300, num_heldout=100, seed=2)[0] != train
  # more held-out problems leave the training problems as they were
  assert arith.arithmetic(num_train=300, num_heldout=150, seed=1)[0] == train


def test_worked_examples_are_right_and_never_asked():
  train, heldout = arith.arithmetic(
    (1, 4, 5), 600, 60, worked=('long', 'brief')
  )
  for example in train[:50]:
    roles = [m['role'] for m in example['prompt']]
    assert roles == ['system', 'user', 'assistant', 'user', 'assistant', 'user']
    _, asked1, long, asked2, brief, _ = [
      m['content'] for m in example['prompt']
    ]
    for asked, answered in ((asked1, long), (asked2, brief)):
      total = eval(re.sub('[A-Za-z?]|\\.$', '', asked))
      assert answers.correctness([answered], [str(total)]) == [1.0]
      assert answered.endswith(f'\nAnswer: {total}')
    assert 'equal to' in long and 'equal to' not in brief
    # as many operations as the question
    steps = {1: 1, 4: 2, 5: 3}[example['level']]
    assert brief.count('=') == steps
  shown = {p.expression for pair in arith._WORKED.values() for p in pair}
  assert not shown & {e['problem'] for e in train + heldout}
  [bare] = {len(e['prompt']) for e in arith.arithmetic(1, 20, 5, worked=())[0]}
  assert bare == 2


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'level': 9}, r'among \[1, 2, 3, 4, 5\], got 9'),
    ({'level': ()}, 'level must be among'),
    ({'style': 'poem'}, "'story' or 'mixed', got 'poem'"),
    ({'worked': ('brief',) * 3}, 'at most two'),
    ({'worked': ('short',)}, "'brief' and 'long', got"),
    (
      {'level': 1},
      r'level 1: found only 10\d of 400 training and 5\d of 200 held',
    ),
  ],
)
def test_settings_that_cannot_be_met_are_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    arith.arithmetic(**settings)


def test_tiny_prompts_fit_the_alphabet_and_the_split():
  train, heldout = arith.tiny(num_train=3000, num_heldout=500)
  assert (len(train), len(heldout)) == (3000, 500)
  for example in train + heldout:
    assert re.fullmatch(r'\d\d\+\d\d:', example['prompt'])
    a, b = map(int, re.findall(r'\d+', example['prompt']))
    assert int(example['answer']) == a + b
  pairs = [
    {tuple(sorted(e['prompt'][:-1].split('+'))) for e in side}
    for side in (train, heldout)
  ]
  assert not pairs[0] & pairs[1]


def test_tiny_demonstrations_mix_styles_and_errors():
  n = 4000
  pairs = arith.tiny_demonstrations(3, n)
  assert pairs == arith.tiny_demonstrations(3, n)
  assert set(''.join(map(''.join, pairs))) <= set(arith.TINY_ALPHABET)
  styles = {'direct': [], 'columns': [], 'full': []}
  for prompt, completion in pairs:
    a, b = map(int, re.findall(r'\d+', prompt))
    assert not arith.held_out(Problem(a, (('+', b),)))
    name = (
      'full' if '>' in completion
      else 'columns' if ';' in completion else 'direct'
    )  # fmt: skip
    right = answers.correctness([completion], [str(a + b)])[0]
    styles[name].append((len(completion) + 1, right))
  share = {name: len(rows) / n for name, rows in styles.items()}
  assert share == pytest.approx(
    {'direct': 0.2, 'columns': 0.3, 'full': 0.5}, abs=0.03
  )
  right = [r for rows in styles.values() for _, r in rows]
  assert sum(right) / n == pytest.approx(0.8, abs=0.03)
  limit = arith.TINY_LIMIT_TOKENS
  assert max(t for t, r in styles['columns'] if r) == limit
  assert all(t <= limit for t, _ in styles['direct'])
  assert all(t > limit for t, _ in styles['full'])
  assert not [
    c for p, c in arith.tiny_demonstrations(3, 200, wrong=0.0)
    if eval(re.sub(r'\b0', '', p[:-1])) != int(c.rpartition('=')[2])
  ]  # fmt: skip


def test_tiny_working_is_column_addition():
  problem = Problem(58, (('+', 67),))  # 8 + 7 = 15, 5 + 6 + 1 = 12
  assert ''.join(arith._columns(problem, 'columns')) == '15;12;'
  assert ''.join(arith._columns(problem, 'full')) == '8+7+0>15;5+6+1>12;'


@pytest.mark.weights
def test_defaults_fit_the_limits_that_are_documented_for_smollm2():
  from gdpo_jax.policy import gguf, weights
  from gdpo_jax.tasks.base import encode_prompts

  file = weights.path('smollm2-135m')
  if file is None:
    pytest.skip('the weights of smollm2-135m are not in the cache')
  tokenizer = gguf.load(file).tokenizer
  train, heldout = arith.arithmetic()
  prompts = encode_prompts(train + heldout, tokenizer, 128)
  assert prompts.mask.sum(1).max() == 116
  for example in train + heldout:
    a, op, b = example['problem'].split()
    problem = Problem(int(a), ((op, int(b)),))
    brief = len(tokenizer.encode(arith.solution(problem, 'brief'))) + 1
    long = len(tokenizer.encode(arith.solution(problem, 'long'))) + 1
    assert brief <= 18 < long <= 48  # EOS counted
