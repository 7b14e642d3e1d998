import math

import pytest

from gdpo_jax.rewards import text
from gdpo_jax.rewards.pipeline import Reward


def test_matches_wants_the_whole_completion():
  assert text.matches(r'a.*b')(['a\nb', 'xab', 'abx']) == [1, 0, 0]


def test_words_between_includes_its_bounds():
  fn = text.words_between(1, 2)
  assert fn(['', 'a', 'a b', 'a b c']) == [0, 1, 1, 0]
  with pytest.raises(ValueError, match='at_least <= at_most'):
    text.words_between(3, 2)


def test_efficiency_falls_with_the_logarithm_of_the_length():
  assert text.efficiency([[], [1], [1] * 99]) == pytest.approx(
    [1.0, 1 / (1 + math.log(2)), 1 / (1 + math.log(100))]
  )


def test_coherence_is_the_complement_of_a_sigmoid():
  values = text.coherence(['x'] * 4, entropy=[0.0, math.log(3), 1e6, None])
  assert values[:2] == pytest.approx([0.5, 0.25])
  assert values[2] < 1e-300 and values[3] is None


def test_novelty_counts_what_siblings_do_not_have():
  fn = text.novelty(num_words=2)
  values = fn(
    ['a b c', 'A b d', 'a b c', 'e', ''], prompts=['p', 'p', 'q', 'p', 'p']
  )
  assert values == [0.5, 0.5, 1.0, 1.0, 0.0]


def test_word_accuracy_is_one_minus_word_errors():
  pytest.importorskip('jiwer')
  values = text.word_accuracy(
    ['The cat sat.', 'the cat', 'x y z u v w', '', 'a', 'a'],
    ['the cat sat', 'the cat sat', 'a', '', '', None],
  )
  assert values == pytest.approx([1.0, 2 / 3, 0.0, 1.0, 0.0, None], nan_ok=True)


def test_chrf_and_rouge_order_texts():
  pytest.importorskip('sacrebleu')
  pytest.importorskip('rouge_score')
  texts = ['a man walks his dog', 'a man walks a cat', 'qqq zzz']
  for fn in (text.chrf, text.rouge('rougeL')):
    same, close, far = fn(texts, [texts[0]] * 3)
    assert same == pytest.approx(1) and 1 > close > far >= 0
    assert fn(['x'], [None]) == [None]
  # Longest common subsequence 3 of 5 and 5 words.
  assert text.rouge('rougeL')([texts[1]], [texts[0]]) == pytest.approx([0.6])


def test_factories_name_their_rewards():
  assert Reward(text.novelty()).name == 'novelty'
  assert Reward(text.words_between(1, 2)).name == 'words_between'
