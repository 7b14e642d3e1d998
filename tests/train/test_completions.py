"""The way of a row from raw reward to advantage, by hand."""

import types

import numpy as np
import pytest

from gdpo_jax.objectives import advantages
from gdpo_jax.rewards.pipeline import Failure, Scores
from gdpo_jax.train import completions
from gdpo_jax.train.experience import Experience, Groups
from gdpo_jax.train.settings import Settings

NAN = np.nan
NAMES = ('right', 'short')
# two prompts, two samples; 'short' counts only where 'right' is 1
RAW = np.float32([[[1, 1], [0, 1]], [[1, NAN], [1, 0]]])
SHAPED = np.float32([[[1, 1], [0, 0]], [[1, 0], [1, 0]]])
VALID = np.isfinite(RAW)
WEIGHTS = np.float32([1.0, 0.5])
HALF = np.sqrt(0.5)  # z-score of the better of two


def experience(method='gdpo', settings=None):
  groups = Groups(
    prompt=np.zeros((2, 3), np.int32),
    prompt_mask=np.ones((2, 3), bool),
    examples=np.array(
      [{'prompt': '1+1:'}, {'prompt': [{'role': 'user', 'content': 'hi'}]}],
      object,
    ),
    tokens=np.zeros((2, 2, 4), np.int32),
    mask=np.arange(4) < np.array([[[1], [2]], [[3], [4]]]),
    logp=np.zeros((2, 2, 4), np.float32),
    ended=np.array([[True, True], [True, False]]),
    texts=np.array([['2', '3'], ['<b>', '']], object),
    values=RAW,
    held=VALID,
    conditioned=SHAPED,
    rewards=SHAPED,
    valid=VALID,
    informative=np.ones(2, bool),
  )
  scores = Scores(
    names=NAMES,
    values=RAW.reshape(4, 2),
    weights=WEIGHTS,
    reasons={'short': {'timeout': 1}},
    fallbacks={},
    failures=[Failure('short', 2, 'timeout', 'took 60 s', '<b>', 1)],
    metrics={},
    extra={},
    seconds={},
  )
  final = np.asarray(
    advantages.ADVANTAGES[method](SHAPED, VALID, WEIGHTS, whiten='none')
  )
  return Experience(
    batch=types.SimpleNamespace(),
    groups=groups,
    names=NAMES,
    weights=WEIGHTS,
    advantages=final,
    counted=np.ones((2, 2), bool),
    kl_nats=None,
    scores=(scores,),
    rounds=1,
  )


def test_trace_by_hand():
  s = Settings(whiten='none', advantage_eps=0.0).resolve()
  made = completions.trace(experience(), s)
  np.testing.assert_array_equal(made.raw, RAW)
  np.testing.assert_allclose(made.normalized[0, 0], [HALF, HALF], rtol=1e-6)
  np.testing.assert_allclose(made.weighted[0, 1], [-HALF, -HALF / 2], rtol=1e-6)
  # second prompt: right is equal, short has one value only
  np.testing.assert_allclose(made.normalized[1], [[0, NAN], [0, 0]])
  np.testing.assert_allclose(
    made.combined, [[1.5 * HALF, -1.5 * HALF], [0, 0]], rtol=1e-6
  )
  # without a batch step the sum is the advantage, but for eps
  np.testing.assert_allclose(made.combined, made.final, rtol=1e-3)


def test_trace_of_a_method_that_sums_first():
  s = Settings(algorithm='grpo').resolve()
  made = completions.trace(experience('grpo'), s)
  np.testing.assert_allclose(made.normalized[0, 0], [0.5, 0.5])
  np.testing.assert_allclose(made.combined[0], [0.75, -0.75])
  assert np.sign(made.combined).tolist() == np.sign(made.final).tolist()


def test_records_tell_the_whole_way():
  e = experience()
  made = completions.trace(e, Settings().resolve())
  rows = completions.records(7, e, made, max_groups=8)
  assert [r['row'] for r in rows] == [0, 1, 2, 3]
  assert [r['group'] for r in rows] == [0, 0, 1, 1]
  assert rows[1]['rewards'] == {'right': 0.0, 'short': 1.0}
  assert rows[1]['shaped'] == {'right': 0.0, 'short': 0.0}
  assert rows[2]['rewards']['short'] is None
  assert rows[2]['failures'] == {'short': 'timeout: took 60 s'}
  assert rows[3]['tokens'] == 4 and not rows[3]['ended']
  assert len(completions.records(7, e, made, max_groups=1)) == 2


def test_table_reads_back(tmp_path):
  parquet = pytest.importorskip('pyarrow.parquet')
  e = experience()
  made = completions.trace(e, Settings().resolve())
  path = completions.write_table(tmp_path, 7, e, made)
  table = parquet.read_table(path).to_pydict()
  assert path.name == '7.parquet'
  assert table['completion'] == ['2', '3', '<b>', '']
  assert table['prompt'][3] == 'user: hi'
  assert table['raw/right'] == [1, 0, 1, 1]
  assert np.isnan(table['raw/short'][2])
  for column in ('shaped', 'normalized', 'weighted'):
    assert f'{column}/short' in table
  np.testing.assert_allclose(table['final'], made.final.reshape(-1))


def test_contributions_by_hand():
  # 'right' and 'short' agree, 'odd' says the opposite
  rewards = np.float32([[[1, 1, 0], [0, 0, 1]], [[0, 0, 1], [1, 1, 0]]])
  names = ('right', 'short', 'odd')

  def without_each(*weights):
    return completions.contributions(
      lambda w: advantages.gdpo(rewards, None, w), np.float32(weights), names
    )

  # the two that agree outweigh the third, with or without any one of them
  for found in without_each(1, 1, 0.5).values():
    assert found.cosine == pytest.approx(1) and found.rank_changes == 0
  # only with 'right' does the first side win: leaving it out turns every pair
  found = without_each(2, 0.5, 1)
  assert found['right'].cosine == pytest.approx(-1)
  assert found['right'].rank_changes == 1
  # nothing is left: every tie is a change
  assert without_each(1, 0, 0)['right'] == (0.0, 1.0)
