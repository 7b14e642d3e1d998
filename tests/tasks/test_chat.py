import random

import jax
import numpy as np
import pytest

from gdpo_jax.policy import weights
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.hf import Pretrained
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks import chat_reader
from gdpo_jax.tasks.chat import (
  ACTS,
  CATALOGUE,
  PRODUCTS,
  Customer,
  agreement,
  chat,
  scores,
)
from gdpo_jax.tasks.chat_labels import LABELLED

SMALL = {'num_train': 30, 'num_heldout': 10}
BUYER = Customer('offer', 'kettle', 40, patience=12, clearness=0.5)


@pytest.fixture(scope='module')
def reader():
  """A model with random weights: its states still tell texts apart."""
  tokenizer = byte_tokenizer()
  config = PolicyConfig(
    family='llama',
    vocab_size=260,
    width=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=64,
    tied=True,
    eos_ids=tokenizer.eos_ids,
    pad_id=tokenizer.pad_id,
  )
  params = make_policy(config).init(jax.random.key(0))
  model = Pretrained(config, params, tokenizer)
  return chat_reader.fit(model, num_replies=150, max_tokens=160)


def test_what_a_customer_does():
  offer = 'Take the kettle Calor for 39 euros.'
  assert BUYER.buys(offer, act=0.9, about=0.9)
  assert not BUYER.buys(offer, act=0.4, about=0.9)  # not understood
  assert not BUYER.buys(offer, act=0.9, about=0.4)
  assert not BUYER.buys('Take a kettle.', 0.9, 0.9)  # nothing to order
  assert not BUYER.buys('Take the kettle Zenit.', 0.9, 0.9)  # 75 euros
  assert BUYER.buys('Take the Zenit or the Brisk.', 0.9, 0.9)
  assert not BUYER.buys(offer + ' It is' + ' very' * 8 + ' good.', 0.9, 0.9)


def test_customers_are_seeded_and_can_always_afford_something():
  drawn = [Customer.draw(random.Random(i)) for i in range(200)]
  assert drawn == [Customer.draw(random.Random(i)) for i in range(200)]
  for who in drawn:
    assert who.budget >= CATALOGUE[who.product][0][1]
    assert who.aim in ACTS[:-1] and who.product in PRODUCTS[:-1]


def test_the_model_reads_better_than_chance(reader):
  texts, acts, products = zip(*chat_reader.labelled_replies(100, seed=9))
  reading = reader(texts)
  np.testing.assert_allclose(reading.acts.sum(1), 1, rtol=1e-5)
  found = (reading.acts.argmax(1) == acts).mean()
  assert found > 0.5 > 2 / len(ACTS)
  again = reader(texts[:3])  # from memory
  np.testing.assert_array_equal(again.acts, reading.acts[:3])


def test_the_task_and_its_rewards(reader):
  task = chat(reader, limit_tokens=20, **SMALL)
  names = [r.name for r in task.rewards]
  assert names == ['intent', 'relevance', 'conversion', 'brevity']
  assert [r.condition for r in task.rewards] == [None, *['intent>0.7'] * 3]
  rows = task.train[:8]
  columns = {'customer': [e['customer'] for e in rows]}
  replies = [[{'role': 'assistant', 'content': f'Hello {i}'}] for i in range(8)]
  with Pipeline(task.rewards) as pipeline:
    values = pipeline.score(
      [e['prompt'] for e in rows], replies, columns, completion_ids=[[1]] * 8
    ).values
  shoppers = np.array([e['customer']['aim'] == 'offer' for e in rows])
  assert shoppers.any() and not shoppers.all()
  # who did not come to buy has no opinion on conversion
  np.testing.assert_array_equal(np.isnan(values[:, 2]), ~shoppers)
  assert np.isfinite(values[:, [0, 1, 3]]).all()
  wanted = scores(reader, [f'Hello {i}' for i in range(8)], columns['customer'])
  np.testing.assert_allclose(values[:, 0], wanted['intent'], rtol=1e-6)


def test_the_assistant_is_not_told_what_is_hidden(reader):
  task = chat(reader, limit_tokens=20, **SMALL)
  for example in (*task.train, *task.heldout):
    message = example['prompt'][-1]['content']
    assert str(example['customer']['clearness']) not in message
    assert example['customer']['product'] in message
  keys = [
    {(c['aim'], c['product'], c['budget']) for c in (e['customer'] for e in s)}
    for s in (task.train, task.heldout)
  ]
  assert not keys[0] & keys[1]


def test_labels_cover_every_act_and_verdict():
  for k in range(3):
    assert {label[k] for _, _, label in LABELLED} >= {True, False}
  assert {who['aim'] for who, _, _ in LABELLED} == set(ACTS[:-1])
  trained = {t for t, _, _ in chat_reader.labelled_replies(3000, seed=0)}
  assert not trained & {reply for _, reply, _ in LABELLED}


@pytest.mark.slow
@pytest.mark.weights
def test_scores_agree_with_people():
  if weights.path('smollm2-135m') is None:
    pytest.skip('no SmolLM2 weights; run make weights')
  reader = chat_reader.fit(weights.load('smollm2-135m'))
  found = agreement(reader, LABELLED)
  print(found)
  assert found.accuracy['intent'] >= 0.8
  assert found.accuracy['relevance'] >= 0.8
  assert found.accuracy['conversion'] >= 0.8
