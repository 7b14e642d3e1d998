"""A classifier head on the decoder: equal to transformers, however batched."""

import dataclasses
import json
import math
import os
import pathlib
import socket
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax import sharding
from gdpo_jax.judge import JaxJudge
from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.decoder import Decoder
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer, char_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline, Reward

CONFIG = PolicyConfig(
  family='llama',
  vocab_size=260,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_width=32,
  max_positions=64,
)
TEXTS = [
  'a',
  'a longer text, of more than sixteen bytes',
  'seven b',
  'x' * 16,
  'y' * 17,
  'z' * 64,
  'naïve ✓',
]
TEMPLATE = (
  '{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}'
  '{% if add_generation_prompt %}<assistant>{% endif %}'
)


@pytest.fixture(scope='module')
def weights():
  """Parameters large enough for scores to differ, and a score of one label."""
  params = make_policy(CONFIG).init(jax.random.key(0))
  params = jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, params)
  return params, jax.random.normal(jax.random.key(1), (1, CONFIG.width))


@pytest.fixture(scope='module')
def judge(weights):
  """One bucket for all, one text at a time: what the others must equal."""
  return JaxJudge(
    CONFIG, *weights, byte_tokenizer(), buckets=[64], batch_rows=1
  )


def make(weights, **options):
  options = {'buckets': [8, 16, 64], 'batch_rows': 4} | options
  return JaxJudge(CONFIG, *weights, byte_tokenizer(), **options)


@pytest.fixture
def traces(monkeypatch):
  """Grows by one whenever a decoder is traced."""
  seen, call = [], Decoder.__call__

  def counted(self, tokens, *args):
    seen.append(tokens.shape)
    return call(self, tokens, *args)

  monkeypatch.setattr(Decoder, '__call__', counted)
  return seen


@pytest.mark.parametrize(
  'family, labels, pad_id',
  [
    ('Llama', 1, 257),
    ('Llama', 3, 10),
    ('Llama', 1, None),
    ('Qwen2', 3, 257),
    ('Qwen3', 1, 10),
  ],
)
def test_logits_of_a_transformers_classifier(tmp_path, family, labels, pad_id):
  torch = pytest.importorskip('torch')
  transformers = pytest.importorskip('transformers')
  config = getattr(transformers, f'{family}Config')(
    vocab_size=260,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
    pad_token_id=pad_id,
    num_labels=labels,
    initializer_range=0.3,
  )
  torch.manual_seed(0)
  name = f'{family}ForSequenceClassification'
  model = getattr(transformers, name)(config).eval()
  model.save_pretrained(tmp_path)
  tokenizer = byte_tokenizer()
  tokenizer.backend.save(str(tmp_path / 'tokenizer.json'))

  # a pad (10 is the line feed) at the end of a text is not what is scored
  texts = ['one', 'a longer text of some bytes', 'ends\n\n', '\n', 'a\nb']
  ids = [list(text.encode()) for text in texts]
  if pad_id is None:
    with torch.inference_mode():
      rows = [model(torch.tensor([row])).logits[0] for row in ids]
      expected = torch.stack(rows).numpy()
  else:
    width = max(map(len, ids))
    padded = torch.tensor([row + [pad_id] * (width - len(row)) for row in ids])
    mask = torch.tensor([[i < len(row) for i in range(width)] for row in ids])
    with torch.inference_mode():
      output = model(padded, attention_mask=mask.long())
    expected = output.logits.numpy()

  label = 'LABEL_1' if labels > 1 else None
  judge = JaxJudge.from_hf(tmp_path, label=label, buckets=[4, 32], batch_rows=4)
  # the alphabet of the byte tokenizer is the bytes themselves
  assert [tokenizer.encode(text) for text in texts] == ids
  np.testing.assert_allclose(judge.logits(texts), expected, atol=1e-4, rtol=0)
  values = expected[:, 0]
  if labels > 1:
    values = torch.softmax(torch.tensor(expected), -1)[:, 1].numpy()
  np.testing.assert_allclose(judge(texts), values, atol=1e-4)


def test_neither_buckets_nor_neighbours_nor_order_matter(weights, judge):
  expected = judge.logits(TEXTS)
  assert np.ptp(expected) > 0.5, 'the judge tells the texts apart'
  bucketed = make(weights)
  np.testing.assert_allclose(bucketed.logits(TEXTS), expected, atol=1e-5)
  np.testing.assert_allclose(
    bucketed.logits(TEXTS[::-1]), expected[::-1], atol=1e-5
  )
  for row, text in enumerate(TEXTS):
    np.testing.assert_allclose(
      bucketed.logits([text]), expected[row : row + 1], atol=1e-5
    )
  assert bucketed([]) == []


@pytest.mark.parametrize(
  'axes', [{'data': 4}, {'data': 1, 'fsdp': 4}, {'fsdp': 2, 'tensor': 2}]
)
def test_four_devices_equal_one(weights, judge, axes):
  mesh = sharding.make_mesh(**axes)
  assert mesh.size == 4
  split = make(weights, mesh=mesh)
  tokens = jax.tree.leaves(split._weights)[0].sharding.device_set
  assert len(tokens) == 4
  np.testing.assert_allclose(
    split.logits(TEXTS), judge.logits(TEXTS), atol=1e-5
  )


def test_a_directory_is_read_onto_the_mesh(tmp_path, weights, judge):
  save(tmp_path, weights)
  mesh = sharding.make_mesh(data=2, fsdp=2)
  loaded = JaxJudge.from_hf(tmp_path, mesh=mesh, buckets=[8, 64], batch_rows=4)
  np.testing.assert_allclose(
    loaded.logits(TEXTS), judge.logits(TEXTS), atol=1e-5
  )


def save(directory, weights):
  """A classifier's directory, from the parts of a language model's."""
  import safetensors.numpy

  params, score = weights
  hf.save(directory, CONFIG, params, byte_tokenizer(), dtype='float32')
  file = directory / 'model.safetensors'
  tensors = safetensors.numpy.load_file(file)
  del tensors['lm_head.weight']
  tensors['score.weight'] = np.asarray(score)
  safetensors.numpy.save_file(tensors, file)


def test_a_directory_that_is_no_classifier_is_refused(tmp_path, weights):
  hf.save(tmp_path, CONFIG, weights[0], byte_tokenizer(), dtype='float32')
  with pytest.raises(ValueError, match="no 'score.weight'"):
    JaxJudge.from_hf(tmp_path)


def test_an_unknown_label_is_refused(tmp_path, weights):
  params, _ = weights
  save(tmp_path, (params, jnp.ones((2, CONFIG.width))))
  file = tmp_path / 'config.json'
  labels = {'id2label': {'0': 'bad', '1': 'good'}}
  file.write_text(json.dumps(json.loads(file.read_text()) | labels))
  with pytest.raises(ValueError, match=r"'fine' is none of .*'bad', 'good'"):
    JaxJudge.from_hf(tmp_path, label='fine')
  with pytest.raises(ValueError, match='2 labels; choose one'):
    JaxJudge.from_hf(tmp_path)
  assert JaxJudge.from_hf(tmp_path, label='good')(['a']) == [0.5]


def test_nothing_is_traced_after_the_warm_up(weights, traces):
  judge = make(weights, mesh=sharding.make_mesh())
  judge.warm_up()
  assert traces == [(4, 8), (4, 16), (4, 64)]
  judge(TEXTS)
  judge(TEXTS[:1])
  judge(TEXTS * 3, prompts=['?'] * 21)
  assert len(traces) == 3


def test_a_bucket_compiles_when_first_needed(weights, traces):
  judge = make(weights)
  judge(['a', 'b'])
  judge(['x' * 20, 'a'])
  assert traces == [(4, 8), (4, 64)]


def test_texts_without_tokens_or_with_too_many_are_missing(weights):
  values = make(weights)(['', 'a', 'x' * 64, 'x' * 65])
  assert [math.isnan(value) for value in values] == [True, False, False, True]


def test_prompts_and_completions_are_joined_as_they_were_sampled(judge):
  assert judge(['b'], prompts=['a']) == judge(['ab'])


def test_messages_are_rendered_with_the_chat_template(weights):
  tokenizer = byte_tokenizer()
  tokenizer.chat_template = TEMPLATE
  judge = JaxJudge(CONFIG, *weights, tokenizer, buckets=[64], batch_rows=1)
  prompt = [{'role': 'user', 'content': 'q'}]
  answer = [{'role': 'assistant', 'content': 'r'}]
  expected = judge(['<user>q\n<assistant>r\n'])
  assert judge([answer], prompts=[prompt]) == expected
  assert judge([prompt + answer]) == expected
  assert judge(['r'], prompts=[prompt]) == expected


def test_bfloat16_is_close(weights, judge):
  half = make(weights, dtype=jnp.bfloat16)
  expected = judge.logits(TEXTS)
  error = np.abs(half.logits(TEXTS) - expected).max()
  assert 0 < error < 0.05 * np.abs(expected).max()


def test_as_a_reward_it_runs_on_the_callers_thread(weights):
  judge = make(weights, mesh=sharding.make_mesh())
  prompts, completions = ['p '] * len(TEXTS), [text[:40] for text in TEXTS]
  expected = judge([p + c for p, c in zip(prompts, completions)])
  with Pipeline([Reward(judge, name='judge', isolation='main')]) as pipeline:
    scores = pipeline.score(prompts, completions)
  np.testing.assert_array_equal(scores.values[:, 0], np.float32(expected))
  assert scores.reasons == {}

  # any other thread is told what to do, and the run goes on
  with Pipeline([Reward(judge, name='judge')]) as pipeline:
    scores = pipeline.score(prompts, completions)
  assert np.isnan(scores.values).all()
  assert "use isolation='main'" in scores.failures[0].reason


def test_it_is_not_sent_to_another_process(judge):
  reward = Reward(judge, name='judge', isolation='process')
  with pytest.raises(ValueError, match="'judge'.*use isolation='main'"):
    Pipeline([reward])


def test_one_device_may_be_called_from_any_thread(weights, judge):
  got = []
  thread = threading.Thread(target=lambda: got.extend(judge(['a'])))
  thread.start()
  thread.join()
  assert got == judge(['a'])


def test_a_failing_judge_is_a_missing_value(weights):
  config = dataclasses.replace(CONFIG, vocab_size=8)
  params = make_policy(config).init(jax.random.key(0))
  judge = JaxJudge(
    config, params, weights[1], char_tokenizer('abc'), batch_rows=4
  )
  rewards = [
    Reward(judge, name='judge', isolation='main', mute_after=2),
    Reward(lambda completions: [1.0] * len(completions), name='other'),
  ]
  with Pipeline(rewards) as pipeline:
    scores = pipeline.score(['a'] * 3, ['a', 'b', 'z'])
    assert np.isnan(scores.values[:, 0]).all()
    assert (scores.values[:, 1] == 1).all()
    assert scores.reasons == {'judge': {'exception': 3}}
    assert 'cannot tokenize' in scores.failures[0].reason
    assert np.isfinite(pipeline.score(['a'] * 3, ['a', 'b', 'c']).values).all()
    for _ in range(2):
      pipeline.score(['a'], ['z'])
    assert pipeline.muted == ('judge',)


def test_a_tokenizer_of_another_model_is_told(weights):
  config = dataclasses.replace(CONFIG, vocab_size=100)
  params = make_policy(config).init(jax.random.key(0))
  judge = JaxJudge(config, params, weights[1], byte_tokenizer())
  with pytest.raises(ValueError, match='token 122 is outside the 100'):
    judge(['z'])


@pytest.mark.parametrize(
  'options, said',
  [
    ({'buckets': []}, 'rising lengths'),
    ({'buckets': [16, 8]}, 'rising lengths'),
    ({'buckets': [8, 65]}, '64 positions'),
    ({'batch_rows': 0}, 'positive multiple'),
    ({'label': 1}, '1 labels'),
  ],
)
def test_wrong_options_are_refused(weights, options, said):
  with pytest.raises(ValueError, match=said):
    make(weights, **options)


def test_rows_must_fit_the_mesh(weights):
  with pytest.raises(ValueError, match='multiple of the 4'):
    make(weights, batch_rows=6, mesh=sharding.make_mesh())


def test_score_weights_must_fit_the_model(weights):
  with pytest.raises(ValueError, match=r'expected \[labels, 16\]'):
    make((weights[0], jnp.ones((1, 15))))


@pytest.mark.parametrize(
  'positions, buckets',
  [
    (64, (64,)),
    (128, (128,)),
    (300, (128, 256, 300)),
    (4096, (128, 256, 512, 1024, 2048)),
  ],
)
def test_buckets_by_default(positions, buckets, weights):
  config = dataclasses.replace(CONFIG, max_positions=positions)
  judge = JaxJudge(config, *weights, byte_tokenizer())
  assert judge.buckets == buckets


PROCESS = """
import json, sys, jax
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
jax.distributed.initialize(f'localhost:{sys.argv[1]}', 2, int(sys.argv[2]))
from gdpo_jax import sharding
from gdpo_jax.judge import JaxJudge
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline, Reward

batches = json.loads(sys.argv[4])[int(sys.argv[2])]
mesh = sharding.make_mesh(data=1, fsdp=4)  # weights over both processes
judge = JaxJudge.from_hf(
  sys.argv[3], mesh=mesh, buckets=[8, 16, 64], batch_rows=8
)
with Pipeline([Reward(judge, name='judge', isolation='main')]) as pipeline:
  for texts in batches:
    scores = pipeline.score([''] * len(texts), texts)
    print('scores', json.dumps([scores.values[:, 0].tolist(), scores.reasons]))
"""


def test_two_processes_with_uneven_texts_do_not_wait_for_ever(
  tmp_path, weights, judge
):
  """Other buckets, other numbers of batches, and one whose texts are refused."""
  save(tmp_path, weights)
  many = [text[:60] for text in TEXTS * 2]
  # a chat is refused, as the tokenizer has no template
  chat = [{'role': 'assistant', 'content': 'b'}]
  batches = [[['a'], many, ['b', chat]], [many, ['x' * 60], ['c', 'd' * 20]]]
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = str(free.getsockname()[1])
  environment = os.environ | {
    'XLA_FLAGS': '--xla_force_host_platform_device_count=2'
  }
  processes = [
    subprocess.Popen(
      [
        sys.executable,
        '-c',
        PROCESS,
        port,
        str(i),
        str(tmp_path),
        json.dumps(batches),
      ],
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
      env=environment,
      cwd=pathlib.Path(__file__).parent.parent,
    )
    for i in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=120) for process in processes]
  finally:
    for process in processes:
      process.kill()
  for rank, (out, errors) in enumerate(outputs):
    lines = [line for line in out.splitlines() if line.startswith('scores ')]
    assert len(lines) == 3, errors[-2000:]
    for texts, line in zip(batches[rank], lines):
      values, reasons = json.loads(line.removeprefix('scores '))
      if chat in texts:
        assert reasons == {'judge': {'exception': 2}}
      else:
        expected = judge.logits(texts)[:, 0]
        np.testing.assert_allclose(values, expected, atol=1e-5)
        assert reasons == {}
