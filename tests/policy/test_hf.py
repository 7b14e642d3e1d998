"""Checkpoints in Hugging Face layout: exact, whole, or an error with a name."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CASES = sorted(path.stem for path in GOLDEN.glob('*.npz'))
EMBED, HEAD = 'model.embed_tokens.weight', 'lm_head.weight'


def golden(case):
  """(config.json, weights by HF name, tokens, mask, logits of transformers)."""
  with np.load(GOLDEN / f'{case}.npz') as file:
    weights = {
      name.removeprefix('weight:'): file[name]
      for name in file.files
      if name.startswith('weight:')
    }
    config = json.loads(str(file['config']))
    return config, weights, file['tokens'], file['mask'], file['logits']


def write(directory, config, weights):
  directory.mkdir(exist_ok=True)
  (directory / 'config.json').write_text(json.dumps(config))
  safetensors.numpy.save_file(weights, directory / 'model.safetensors')
  return directory


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('case', CASES)
def test_logits_of_a_transformers_checkpoint(tmp_path, case):
  config, weights, tokens, mask, expected = golden(case)
  config, params = hf.load(write(tmp_path, config, weights))
  policy = make_policy(config)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  logits = policy.logits(params, tokens, mask)
  np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-4, rtol=0)


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('max_shard_bytes', [10**9, 10_000])
def test_load_save_load_is_bit_equal(tmp_path, case, dtype, max_shard_bytes):
  config, weights, *_ = golden(case)
  if dtype == 'bfloat16':  # what bfloat16 can hold
    weights = {k: v.astype(ml_dtypes.bfloat16) for k, v in weights.items()}
  config, params = hf.load(write(tmp_path / 'a', config, weights))
  hf.save(
    tmp_path / 'b',
    config,
    params,
    dtype=dtype,
    max_shard_bytes=max_shard_bytes,
  )
  again, saved = hf.load(tmp_path / 'b')
  assert again == config
  assert_same(saved, params)
  files = {path.name for path in (tmp_path / 'b').iterdir()}
  sharded = 'model.safetensors.index.json' in files
  assert sharded == (max_shard_bytes == 10_000)
  assert ('model.safetensors' in files) != sharded
  # and the tensors themselves, by name, are those of the first file
  stored = {}
  for file in (tmp_path / 'b').glob('*.safetensors'):
    assert file.stat().st_size < max_shard_bytes + 5000  # the file's header
    stored |= safetensors.numpy.load_file(file)
  assert stored.keys() == weights.keys()
  for name, value in weights.items():
    assert stored[name].dtype == value.dtype
    np.testing.assert_array_equal(stored[name], value)


@pytest.mark.parametrize('case', CASES)
def test_transformers_reads_what_we_write(tmp_path, case):
  torch = pytest.importorskip('torch', reason='torch is not installed')
  transformers = pytest.importorskip('transformers')
  config, weights, tokens, mask, _ = golden(case)
  config, params = hf.load(write(tmp_path / 'a', config, weights))
  # other weights than the golden file's, and in several files
  params = jax.tree.map(lambda x: x * 1.25, params)
  hf.save(
    tmp_path / 'b', config, params, dtype='float32', max_shard_bytes=10_000
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'b')
  assert model.dtype == torch.float32
  with torch.no_grad():
    expected = model(
      torch.tensor(tokens),
      attention_mask=torch.tensor(mask.astype(np.int64)),
      position_ids=torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)),
    ).logits.numpy()
  logits = make_policy(config).logits(params, tokens, mask)
  np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-4, rtol=0)
  assert model.generation_config.eos_token_id == 2


def test_bfloat16_rounds_to_nearest_even_and_masters_are_float32(tmp_path):
  config, weights, *_ = golden('llama_tied')
  ulp = 2.0**-7  # of bfloat16 at 1
  weights['model.norm.weight'][:4] = [
    1 + 0.5 * ulp,  # ties to even: down,
    1 + 1.5 * ulp,  # up
    1 + 0.51 * ulp,
    1 + 0.49 * ulp,
  ]
  config, params = hf.load(write(tmp_path / 'a', config, weights))
  hf.save(tmp_path / 'b', config, params)
  _, rounded = hf.load(tmp_path / 'b')
  assert {x.dtype for x in jax.tree.leaves(rounded)} == {jnp.dtype('float32')}
  np.testing.assert_array_equal(
    rounded['norm']['scale'][:4], [1, 1 + 2 * ulp, 1 + ulp, 1]
  )


def test_half_precision_is_read(tmp_path):
  config, weights, *_ = golden('llama_tied')
  half = {k: v.astype(np.float16) for k, v in weights.items()}
  _, params = hf.load(write(tmp_path, config, half))
  np.testing.assert_array_equal(
    params['embed']['embedding'], half[EMBED].astype(np.float32)
  )


class TestTiedHead:
  """E = [[1, 2], [3, 4]], with and without an lm_head beside it."""

  def write(self, directory, tied, head=None, embed=True):
    config = PolicyConfig(
      family='llama',
      vocab_size=2,
      width=2,
      num_layers=1,
      num_heads=1,
      num_kv_heads=1,
      head_dim=2,
      mlp_width=2,
      tied=tied,
    )
    table = np.array([[1, 2], [3, 4]], np.float32)
    weights = {}
    for leaf in hf._layout(dataclasses.replace(config, tied=True)):
      for name in leaf.names():
        weights[name] = np.ones(leaf.shape, np.float32)
    weights[EMBED] = table
    if head is not None:
      weights[HEAD] = table + head
    return write(directory, config.to_hf(), weights)

  def count(self, params):
    return sum(
      params[name]['embedding'].size
      for name in ('embed', 'head')
      if name in params
    )

  def test_tied_without_and_with_an_equal_head(self, tmp_path):
    for head in (None, 0):
      _, params = hf.load(self.write(tmp_path, True, head))
      assert self.count(params) == 4
      np.testing.assert_array_equal(
        params['embed']['embedding'] @ jnp.ones(2), [3, 7]
      )

  def test_tied_with_a_different_head_is_refused(self, tmp_path):
    with pytest.raises(ValueError, match=r"tie_word.*'lm_head.weight' differs"):
      hf.load(self.write(tmp_path, True, 1))

  def test_untied_without_a_head_is_refused(self, tmp_path):
    with pytest.raises(ValueError, match=r'lm_head.weight.*not tied'):
      hf.load(self.write(tmp_path, False))

  def test_untied_has_two_leaves(self, tmp_path):
    _, params = hf.load(self.write(tmp_path, False, 1))
    assert self.count(params) == 8
    np.testing.assert_array_equal(
      params['head']['embedding'] @ jnp.ones(2), [5, 9]
    )

  def test_export_of_a_tied_model_reads_back(self, tmp_path):
    config, params = hf.load(self.write(tmp_path / 'a', True))
    hf.save(tmp_path / 'b', config, params)
    stored = safetensors.numpy.load_file(tmp_path / 'b' / 'model.safetensors')
    assert HEAD not in stored
    assert_same(hf.load(tmp_path / 'b')[1], params)


Q = 'model.layers.1.self_attn.q_proj.weight'


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda c, w: w.pop(Q), f'lacks .*{Q}'),
    (lambda c, w: w.pop('model.norm.weight'), 'lacks .*model.norm.weight'),
    (
      lambda c, w: w.update({'model.layers.2.extra': w[Q]}),
      'no place for.*model.layers.2.extra',
    ),
    (
      lambda c, w: w.update({Q: np.zeros((3, 5), np.float32)}),
      rf"{Q}' has shape \[3, 5\].*asks for \[32, 24\]",
    ),
    (lambda c, w: w.update({Q: w[Q].astype(np.int8)}), f'{Q}.*type I8'),
    (lambda c, w: c.update(model_type='mamba'), "'mamba'.*llama, qwen2, qwen3"),
    (lambda c, w: c.pop('hidden_size'), 'hidden_size'),
    (lambda c, w: c.update(num_hidden_layers=10**12), 'lacks'),
    (lambda c, w: c.update(vocab_size=10**12), f'{EMBED}.*has shape'),
    (lambda c, w: c.update(num_hidden_layers=1), 'no place for'),
    (lambda c, w: c.update(hidden_size=[24]), 'wrong kind'),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
  config, weights, *_ = golden('llama_scaled_untied')
  change(config, weights)
  write(tmp_path, config, weights)
  with pytest.raises(ValueError, match=message):
    hf.load(tmp_path)


def test_old_rope_tables_are_ignored(tmp_path):
  config, weights, *_ = golden('llama_tied')
  weights['model.layers.0.self_attn.rotary_emb.inv_freq'] = np.ones(4)
  hf.load(write(tmp_path, config, weights.copy()))


@pytest.mark.parametrize('keep', [0, 7, 200, -1])
def test_truncated_file(tmp_path, keep):
  config, weights, *_ = golden('llama_tied')
  file = write(tmp_path, config, weights) / 'model.safetensors'
  file.write_bytes(file.read_bytes()[:keep])
  with pytest.raises(ValueError, match=r'model.safetensors cannot be read'):
    hf.load(tmp_path)


def sharded(directory):
  config, weights, *_ = golden('llama_tied')
  config, params = hf.load(write(directory / 'whole', config, weights))
  hf.save(directory / 'm', config, params, max_shard_bytes=10_000)
  return directory / 'm'


def test_incomplete_and_tampered_shards(tmp_path):
  directory = sharded(tmp_path)
  index = directory / 'model.safetensors.index.json'
  shards = sorted(directory.glob('model-*.safetensors'))
  assert len(shards) > 2

  first = shards[0].read_bytes()
  shards[0].unlink()
  with pytest.raises(ValueError, match=rf'{shards[0].name}.*incomplete'):
    hf.load(directory)

  shutil.copy(shards[1], shards[0])
  with pytest.raises(ValueError, match='another shard'):
    hf.load(directory)
  shards[0].write_bytes(first)

  good = index.read_text()
  outside = tmp_path / 'whole' / 'model.safetensors'
  for name in ('../whole/model.safetensors', str(outside)):
    assert outside.is_file()
    index.write_text(re.sub(r'"model-[^"]*"', json.dumps(name), good))
    with pytest.raises(ValueError, match='names the file'):
      hf.load(directory)
  index.write_text('{}')
  with pytest.raises(ValueError, match='weight_map'):
    hf.load(directory)
  index.unlink()
  with pytest.raises(ValueError, match='cut short'):
    hf.load(directory)


def test_pickled_weights_are_refused(tmp_path):
  config, *_ = golden('llama_tied')
  (tmp_path / 'config.json').write_text(json.dumps(config))
  (tmp_path / 'pytorch_model.bin').write_bytes(b'\x80\x04.')
  with pytest.raises(ValueError, match='pickled'):
    hf.load(tmp_path)


def test_directory_without_config(tmp_path):
  with pytest.raises(ValueError, match=r'no config.json'):
    hf.load(tmp_path)


def test_eos_ids_are_joined(tmp_path):
  config, weights, *_ = golden('llama_tied')
  write(tmp_path / 'a', config, weights)
  (tmp_path / 'a' / 'generation_config.json').write_text(
    '{"eos_token_id": [5, 2, 6]}'
  )
  config, params = hf.load(tmp_path / 'a')
  assert config.eos_ids == (2, 5, 6)
  hf.save(tmp_path / 'b', config, params)
  assert hf.load_config(tmp_path / 'b') == config


def test_tokenizer_is_saved_beside_the_weights(tmp_path):
  from gdpo_jax.policy.tokenizer import Tokenizer

  config, params = hf.load(sharded(tmp_path))
  hf.save(tmp_path / 'b', config, params, byte_tokenizer())
  assert Tokenizer.from_hf(tmp_path / 'b').encode('A') == [65]
  # what ends a completion is the union: the model's 2, the tokenizer's 256
  assert hf.load_config(tmp_path / 'b').eos_ids == (2, 256)
  assert Tokenizer.from_hf(tmp_path / 'b').eos_ids == (256, 2)


def test_each_device_reads_its_slice_only(tmp_path):
  config, weights, *_ = golden('qwen2_untied')
  config, whole = hf.load(write(tmp_path, config, weights))
  mesh = jax.make_mesh(
    (2, 2), ('fsdp', 'tensor'), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )

  def shardings(tree):
    def choose(path, leaf):
      name = jax.tree_util.keystr(path)
      spec = P()
      if name.endswith("['kernel']"):
        spec = P(None, 'fsdp', 'tensor')
      elif 'head' in name:
        spec = P(None, 'fsdp')
      return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(choose, tree)

  _, params = hf.load(tmp_path, shardings)
  assert_same(params, whole)
  assert_same(hf.load(tmp_path, shardings(whole))[1], whole)
  kernel = params['layers']['attn']['q']['kernel']
  assert kernel.sharding.spec == P(None, 'fsdp', 'tensor')

  sizes = []

  def recording(array):
    def read(index):
      sizes.append((array[index].size, array.size))
      return array[index]

    return hf.Tensor(array.shape, read)

  tensors = {name: recording(array) for name, array in weights.items()}
  hf.assemble(config, tensors, 'memory', shardings=shardings)
  for name in ('q_proj.weight', 'down_proj.weight'):
    array = weights[
      f'model.layers.0.self_attn.{name}'.replace('self_attn.down', 'mlp.down')
    ]
    read = [part for part, all_of_it in sizes if all_of_it == array.size]
    assert set(read) == {array.size // 4}
  # devices that hold the same slice share one reading of it
  head = weights[HEAD].size
  assert sizes.count((head // 2, head)) == 2
  norm = weights['model.norm.weight'].size
  assert sizes.count((norm, norm)) == 1 + 2 * config.num_layers


class TestSave:
  def make(self, tmp_path):
    config, weights, *_ = golden('llama_tied')
    return hf.load(write(tmp_path / 'source', config, weights))

  def test_what_does_not_fit_the_config_is_refused(self, tmp_path):
    config, params = self.make(tmp_path)
    with pytest.raises(ValueError, match='norm/scale'):
      hf.save(tmp_path / 'b', config, params | {'norm': {'scale': jnp.ones(3)}})
    with pytest.raises(ValueError, match='head/embedding'):
      hf.save(tmp_path / 'b', config, params | {'head': params['embed']})
    with pytest.raises(ValueError, match="'float8'"):
      hf.save(tmp_path / 'b', config, params, dtype='float8')
    assert not (tmp_path / 'b').exists()

  def test_a_failed_save_leaves_the_previous_one(self, tmp_path):
    config, params = self.make(tmp_path)
    hf.save(tmp_path / 'b', config, params, max_shard_bytes=10_000)
    before = {p.name: p.read_bytes() for p in (tmp_path / 'b').iterdir()}

    class Full(np.ndarray):  # a disk that is full at the last tensor
      def __array__(self, *args, **kwargs):
        raise OSError(28, 'No space left on device')

      def __getitem__(self, index):
        raise OSError(28, 'No space left on device')

    last = params['layers']['attn']['v']['kernel']
    broken = jax.tree.map(lambda x: x * 2, params)
    broken['layers']['attn']['v']['kernel'] = np.asarray(last).view(Full)
    with pytest.raises(OSError, match='No space left'):
      hf.save(tmp_path / 'b', config, broken, max_shard_bytes=10_000)
    after = {p.name: p.read_bytes() for p in (tmp_path / 'b').iterdir()}
    assert after == before

  def test_stale_files_do_not_survive(self, tmp_path):
    config, params = self.make(tmp_path)
    out = tmp_path / 'b'
    hf.save(out, config, params, max_shard_bytes=10_000)
    (out / '.saving-killed').mkdir()
    doubled = jax.tree.map(lambda x: x * 2, params)
    hf.save(out, config, doubled, dtype='float32')
    assert {p.name for p in out.iterdir()} == {
      'model.safetensors',
      'config.json',
      'generation_config.json',
    }
    assert_same(hf.load(out)[1], doubled)
    hf.save(out, config, params, dtype='float32', max_shard_bytes=10_000)
    assert not (out / 'model.safetensors').exists()
    assert_same(hf.load(out)[1], params)

  def test_killed_while_moving_leaves_none_rather_than_a_mixture(
    self, tmp_path, monkeypatch
  ):
    config, params = self.make(tmp_path)
    out = tmp_path / 'b'
    hf.save(out, config, params, max_shard_bytes=10_000)
    replace, calls = hf.os.replace, []

    def stop_at_the_third(source, target):
      calls.append(target)
      if len(calls) == 5:
        raise KeyboardInterrupt
      replace(source, target)

    monkeypatch.setattr(hf.os, 'replace', stop_at_the_third)
    doubled = jax.tree.map(lambda x: x * 2, params)
    with pytest.raises(KeyboardInterrupt):
      hf.save(out, config, doubled, max_shard_bytes=10_000)
    with pytest.raises(ValueError, match='cut short'):
      hf.load(out)
    monkeypatch.undo()
    hf.save(out, config, doubled, dtype='float32', max_shard_bytes=10_000)
    assert_same(hf.load(out)[1], doubled)
