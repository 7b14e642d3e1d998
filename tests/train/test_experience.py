"""Which row of a batch belongs to which prompt, and which rows count."""

import jax
import numpy as np
import pytest
from tiny_runs import TOKENIZER, byte_model, digits, settings, task, train

from gdpo_jax import sampler, sharding
from gdpo_jax.rewards.pipeline import Failure, Pipeline, Reward, Scores
from gdpo_jax.train.experience import _in_batch_order, sample
from gdpo_jax.train.scoring import decode_completions, submit_rollout
from gdpo_jax.types import Prompts, Rollout


@pytest.mark.parametrize('chat', [False, True])
def test_rewards_see_each_row_beside_its_own_prompt(chat):
  """Rows p * G + g; completion ids end with the EOS, texts do not have it."""
  seen = {}

  def look(prompts, completions, completion_ids, answer):
    seen.update(p=prompts, c=completions, ids=completion_ids, a=answer)
    return [0.0] * len(completions)

  texts = ['w', 'xx', 'yyy', 'zzzz']
  ids = [[*TOKENIZER.encode(text), TOKENIZER.eos_id] for text in texts]
  ids[3] = ids[3][:4]  # cut off: no EOS
  mask = np.arange(4) < np.array([len(row) for row in ids])[:, None]
  tokens = np.full((4, 4), TOKENIZER.pad_id)
  tokens[mask] = np.concatenate(ids)
  empty = np.zeros((4, 1), np.int32)
  rollout = Rollout(empty, empty > 0, tokens, mask, mask * 0.0, mask.any(1))
  decoded = decode_completions(TOKENIZER, rollout)
  assert decoded == texts

  def prompt(text):
    return [{'role': 'user', 'content': text}] if chat else text

  examples = [{'prompt': prompt(p), 'answer': a} for p, a in ('p1', 'q2')]
  prompts = Prompts(empty[:2], empty[:2] > 0, examples)
  with Pipeline([Reward(look)]) as pipeline:
    submit_rollout(pipeline, prompts, rollout, decoded, step=0).result()
  assert seen['p'] == [prompt(p) for p in 'ppqq']
  assert seen['a'] == ['1', '1', '2', '2']
  assert seen['ids'] == ids
  assert [len(row) for row in seen['ids']] == mask.sum(1).tolist()
  expected = [[{'role': 'assistant', 'content': t}] for t in texts]
  assert seen['c'] == (expected if chat else texts)


def test_rows_that_every_reward_abstains_on_do_not_train(tmp_path):
  """One row of four; its length alone is no opinion, nor is a weight of 0."""

  def most(completions, **_):
    values = digits(completions)
    values[1::4] = [None] * len(values[1::4])
    return values

  result = train(
    byte_model(),
    tmp_path,
    settings(num_steps=1, overlong_share=0.5),
    the_task=task(Reward(most), Reward(digits, name='seen', weight=0.0)),
    heldout=[],
  )
  [row] = [row for row in result.history if 'loss' in row]
  assert row['rows/excluded'] == 8
  assert row['rewards/overlong/missing'] == 0.25
  assert row['rewards/seen/missing'] == 0
  assert np.isfinite(row['loss']) and row['grad_norm'] > 0


def test_prompts_that_the_devices_do_not_divide_are_filled_up_and_cut():
  """Five on four devices: their samples are those of one device, and no more."""
  policy, params = byte_model()
  tokens = np.random.default_rng(0).integers(2, 256, (5, 6)).astype(np.int32)
  prompts = Prompts(tokens, np.ones((5, 6), bool), [])
  sampling = sampler.Sampling(2, 4, eos_ids=tuple(range(200, 256)))
  found = [
    sample(policy, params, prompts, jax.random.key(0), sampling, mesh, ids)
    for mesh, ids in (
      (sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1]), None),
      (sharding.make_mesh(2, 2, 1), np.arange(10)),
    )
  ]
  assert found[1].tokens.shape == (10, 4)
  for name in ('prompt', 'tokens', 'mask', 'ended'):
    np.testing.assert_array_equal(*(getattr(r, name) for r in found))
  np.testing.assert_allclose(found[0].logp, found[1].logp, atol=1e-5)


def test_failures_name_the_rows_of_the_batch():
  """Two parts of two rows; the second part entered first."""

  def part(*failed):
    failures = [Failure('r', row, 'raised', '', '', 0) for row in failed]
    return Scores(
      ('r',), np.zeros((2, 1)), np.ones(1), {}, {}, failures, {}, {}, {}
    )

  rows = np.array([2, 3, 0, 1])
  first, second = _in_batch_order([part(0, 1), part(1)], rows)
  # a reader adds the rows of the parts before
  assert [failure.row for failure in first.failures] == [2, 3]
  assert [2 + failure.row for failure in second.failures] == [1]


@pytest.mark.parametrize('dtype', ['bfloat16', 'int8'])
def test_rounded_rollouts_are_logged_and_corrected(tmp_path, dtype):
  s = settings(
    num_steps=2, save_every=0, rollout_dtype=dtype, importance_cap=2.0
  )
  result = train(byte_model(), tmp_path, s, heldout=[])
  for row in result.history:
    assert 1e-5 < row['sampler_mismatch'] < 0.1
    assert 0.9 < row['importance/weight_mean'] < 1.1
    assert row['importance/capped'] == 0
