"""GGUF files: exact, or an error with a name; SmolLM2 against its references."""

import json
import pathlib

import gguf as gguf_package
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdpo_jax.policy import gguf, hf, weights
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.sampler import generate
from gdpo_jax.sampling import Sampling
from gdpo_jax.types import Prompts

GOLDEN = pathlib.Path(__file__).parent / 'golden'
NORMAL, CONTROL = gguf_package.TokenType.NORMAL, gguf_package.TokenType.CONTROL
QUANT = gguf_package.GGMLQuantizationType
TEMPLATE = (
  "{{ bos_token }}{% for m in messages %}{{ m['content'] }}</s>{% endfor %}"
)


def random_model(family='llama', tied=True, seed=0, **changes):
  """(config, HF tensors) with every dimension different, in blocks of 32."""
  config = PolicyConfig(
    **{
      'family': family,
      'vocab_size': 300,
      'width': 64,
      'num_layers': 2,
      'num_heads': 6,
      'num_kv_heads': 2,
      'head_dim': 16,
      'mlp_width': 160,
      'max_positions': 128,
      'rope_base': 1e5,
      'norm_eps': 1e-5,
      'tied': tied,
      'qkv_bias': family == 'qwen2',
      'qk_norm': family == 'qwen3',
      'eos_ids': (257,),
      'bos_id': 256,
      'pad_id': 257,
    }
    | changes
  )
  rng = np.random.default_rng(seed)
  tensors = {
    name: rng.normal(size=leaf.shape).astype(np.float32)
    for leaf in hf._layout(config)
    for name in leaf.names()
  }
  return config, tensors


def tree(config, tensors):
  return hf.assemble(
    config,
    {k: hf.Tensor(v.shape, v.__getitem__) for k, v in tensors.items()},
    'memory',
  )


def interleaved(rows, heads):
  """llama.cpp's order, written out: row i of a half goes to 2i (+ 1)."""
  out, size = np.empty_like(rows), len(rows) // heads
  for head in range(heads):
    for i in range(size // 2):
      for half in (0, 1):
        out[head * size + 2 * i + half] = rows[
          head * size + half * size // 2 + i
        ]
  return out


def write(
  file,
  config,
  tensors,
  *,
  arch=None,
  kind=QUANT.F32,
  metadata=None,
  pre='gpt-2',
  merges=('h e', 'he l'),
):
  arch = arch or config.family
  writer = gguf_package.GGUFWriter(file, arch)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_positions)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.mlp_width)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_rope_freq_base(config.rope_base)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  vocab = byte_tokenizer().backend.get_vocab()
  tokens = sorted(
    (token for token, i in vocab.items() if i < 256), key=vocab.get
  )
  tokens += ['<s>', '</s>', 'he', 'hel', 'Hi']
  types = [NORMAL] * 256 + [CONTROL] * 2 + [NORMAL] * 3
  writer.add_tokenizer_model('gpt2')
  writer.add_tokenizer_pre(pre)
  writer.add_token_list(tokens)
  writer.add_token_types(types)
  writer.add_token_merges(list(merges))
  writer.add_bos_token_id(config.bos_id)
  writer.add_eos_token_id(config.eos_ids[0])
  writer.add_pad_token_id(config.pad_id)
  writer.add_chat_template(TEMPLATE)
  for key, (value, value_type) in (metadata or {}).items():
    writer.add_key_value(key, value, value_type)
  names = gguf_package.get_tensor_name_map(
    gguf_package.MODEL_ARCH.QWEN3, config.num_layers
  )
  for name, value in tensors.items():
    if arch == 'llama':
      for proj, heads in (('q', config.num_heads), ('k', config.num_kv_heads)):
        if name.endswith(f'{proj}_proj.weight'):
          value = interleaved(value, heads)
    name = names.get_name(name, try_suffixes=('.weight', '.bias')) or name
    use = kind if value.ndim == 2 else QUANT.F32
    writer.add_tensor(name, gguf_package.quantize(value, use), raw_dtype=use)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return file


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want)):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize('tied', [True, False])
@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3'])
def test_every_family_reads_back(tmp_path, family, tied):
  config, tensors = random_model(family, tied)
  read = gguf.load(write(tmp_path / 'm.gguf', config, tensors))
  assert read.config == config
  assert_same(read.params, tree(config, tensors))


@pytest.mark.parametrize(
  'kind', [QUANT.F16, QUANT.BF16, QUANT.Q8_0, QUANT.Q4_1]
)
def test_quantized_tensors(tmp_path, kind):
  config, tensors = random_model()
  read = gguf.load(write(tmp_path / 'm.gguf', config, tensors, kind=kind))
  # what a block of 32 holds does not depend on the order of the rows
  rounded = {
    name: gguf_package.dequantize(gguf_package.quantize(value, kind), kind)
    if value.ndim == 2
    else value
    for name, value in tensors.items()
  }
  assert_same(read.params, tree(config, rounded))


def test_against_the_reader_of_transformers(tmp_path):
  pytest.importorskip('torch', reason='torch is not installed')
  transformers = pytest.importorskip('transformers')
  # it wants whole heads in the width, and a token for every row
  config, tensors = random_model(width=96, vocab_size=261)
  file = write(tmp_path / 'm.gguf', config, tensors, kind=QUANT.Q8_0)
  theirs = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, gguf_file=file.name, dtype='float32'
  ).state_dict()
  read = gguf.load(file)
  ours = read.params['layers']['attn']
  for i in range(config.num_layers):
    for name in 'qkvo':
      np.testing.assert_array_equal(
        ours[name]['kernel'][i].T,
        theirs[f'model.layers.{i}.self_attn.{name}_proj.weight'].numpy(),
      )


def test_llama3_scaling_is_recovered_from_its_tensor(tmp_path):
  config, tensors = random_model(head_dim=64, rope_base=5e5)
  inverse = 5e5 ** -(np.arange(32) / 32)
  factors = np.empty(32, np.float32)
  for i, frequency in enumerate(inverse):  # the rule as llama.cpp writes it
    wavelength = 2 * np.pi / frequency
    if wavelength < 8192 / 4:
      factors[i] = 1
    elif wavelength > 8192:
      factors[i] = 32
    else:
      smooth = (8192 / wavelength - 1) / 3
      factors[i] = 1 / ((1 - smooth) / 32 + smooth)
  tensors['rope_freqs.weight'] = factors
  scaling = gguf.load(write(tmp_path / 'm.gguf', config, tensors)).config
  assert scaling.rope_scaling.factor == 32
  assert scaling.rope_scaling.original_max_positions == 8192
  tensors['rope_freqs.weight'] = factors * np.linspace(1, 2, 32)
  with pytest.raises(ValueError, match='not the llama3 scaling'):
    gguf.load(write(tmp_path / 'n.gguf', config, tensors.copy()))


STRING = gguf_package.GGUFValueType.STRING
UINT = gguf_package.GGUFValueType.UINT32
LAST = 'model.layers.1.self_attn.q_proj.weight'


@pytest.mark.parametrize(
  'change, message',
  [
    (lambda t, o: t.pop(LAST), r'lacks .*blk.1.attn_q.weight'),
    (lambda t, o: t.pop('model.embed_tokens.weight'), 'token_embd.weight'),
    (
      lambda t, o: t.update({'blk.1.attn_sinks': np.ones(6, np.float32)}),
      'no place for.*blk.1.attn_sinks',
    ),
    (
      lambda t, o: t.update({LAST: np.ones((96, 32), np.float32)}),
      r'blk.1.attn_q.*has shape \[96, 32\].*asks for \[96, 64\]',
    ),
    (lambda t, o: o.update(arch='mamba'), "'mamba'; supported: llama, qwen2"),
    (lambda t, o: o.update(pre='tekken'), "'tekken'; supported: smollm"),
    (lambda t, o: o.update(merges=['h e', 'x y z']), 'unusable merges'),
    (lambda t, o: o.update(merges=['h nope']), 'unusable merges'),
    (
      lambda t, o: o.update(
        metadata={'llama.rope.scaling.type': ('yarn', STRING)}
      ),
      "rope.scaling.type 'yarn'",
    ),
    (
      lambda t, o: o.update(metadata={'llama.expert_count': (8, UINT)}),
      'num_experts=8',
    ),
    (
      lambda t, o: o.update(metadata={'llama.rope.dimension_count': (8, UINT)}),
      'rope.dimension_count 8',
    ),
    (
      lambda t, o: o.update(
        metadata={'tokenizer.ggml.eot_token_id': (5000, UINT)}
      ),
      'token 5000 of 261',
    ),
  ],
)
def test_what_does_not_fit_is_named(tmp_path, change, message):
  config, tensors = random_model()
  options = {}
  change(tensors, options)
  file = write(tmp_path / 'm.gguf', config, tensors, **options)
  with pytest.raises(ValueError, match=message):
    gguf.load(file)


@pytest.fixture(scope='module')
def small_file(tmp_path_factory):
  config, tensors = random_model(num_layers=1)
  file = tmp_path_factory.mktemp('gguf') / 'm.gguf'
  write(file, config, tensors, kind=QUANT.Q8_0)
  return file.read_bytes()


def test_truncated_anywhere(tmp_path, small_file):
  file = tmp_path / 'm.gguf'
  file.write_bytes(small_file)
  gguf.load(file)
  for keep in [0, 3, 4, 20, 23, *range(24, len(small_file), 1501)]:
    file.write_bytes(small_file[:keep])
    with pytest.raises(ValueError, match=r'm\.gguf'):
      gguf.load(file)
  file.write_bytes(small_file[:-1])
  with pytest.raises(ValueError, match='truncated'):
    gguf.load(file)


@settings(
  max_examples=150,
  deadline=None,
  suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_damaged_header_is_refused_or_harmless(tmp_path, small_file, data):
  """Any 8 bytes of the header become anything: ValueError, or it loads."""
  header = small_file.index(b'output_norm.weight') + 60
  at = data.draw(st.integers(0, header))
  damage = data.draw(
    st.one_of(
      st.binary(min_size=1, max_size=8),
      st.sampled_from(
        [b'\xff' * 8, b'\xff' * 4, b'\0' * 8, b'\xff' * 7 + b'\x7f']
      ),
    )
  )
  file = tmp_path / 'm.gguf'
  file.write_bytes(small_file[:at] + damage + small_file[at + len(damage) :])
  try:
    gguf.load(file)
  except ValueError as error:
    assert str(error)


class TestTokenizer:
  def load(self, tmp_path, **options):
    config, tensors = random_model(num_layers=1)
    file = write(tmp_path / 'm.gguf', config, tensors, **options)
    return gguf.load(file).tokenizer

  def test_merges_and_control_tokens(self, tmp_path):
    tokenizer = self.load(tmp_path)
    assert tokenizer.encode('hello') == [259, ord('l'), ord('o')]
    assert tokenizer.encode('a</s>') == [ord('a'), 257]
    assert tokenizer.decode([259, 257]) == 'hel'
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (
      256,
      (257,),
      257,
    )
    assert tokenizer.vocab_size == 261

  def test_only_models_trained_with_bos_get_one(self, tmp_path):
    plain = self.load(tmp_path)
    assert plain.encode('a', add_bos=True) == [97]
    llama3 = self.load(tmp_path, pre='llama-bpe')
    assert llama3.encode('a', add_bos=True) == [256, 97]
    assert llama3.chat([{'role': 'user', 'content': 'a'}]) == [256, 97, 257]
    llama3.save(tmp_path / 'saved')
    again = type(llama3).from_hf(tmp_path / 'saved')
    assert again.encode('a', add_bos=True) == [256, 97]

  def test_whole_words_of_the_vocabulary_need_no_merges(self, tmp_path):
    assert self.load(tmp_path, pre='llama-bpe').encode('Hi') == [260]
    assert self.load(tmp_path, pre='qwen2').encode('Hi') == [72, 105]

  @pytest.mark.parametrize(
    'pre, words',
    [
      ('smollm', ['a', '  ', '1', '2', '3', '4', ' b', "'s"]),
      ('gpt-2', ['a', ' ', ' 1234', ' b', "'s"]),
      ('llama-bpe', ['a', ' ', ' ', '123', '4', ' b', "'s"]),
      ('qwen2', ['a', ' ', ' ', '1', '2', '3', '4', ' b', "'s"]),
    ],
  )
  def test_where_words_begin(self, tmp_path, pre, words):
    backend = self.load(tmp_path, pre=pre).backend
    split = backend.pre_tokenizer.pre_tokenize_str("a  1234 b's")
    assert [word.replace('\u0120', ' ') for word, _ in split] == words


@pytest.fixture(scope='module')
def smollm2():
  if weights.path('smollm2-135m') is None:
    pytest.skip(
      'SmolLM2 is not cached; python -m gdpo_jax.policy.weights smollm2-135m'
    )
  return weights.load('smollm2-135m')


def greedy_golden():
  return json.loads((GOLDEN / 'smollm2_greedy.json').read_text())


@pytest.mark.weights
class TestSmolLM2:
  def test_config(self, smollm2):
    config = smollm2.config
    assert config.num_params == 134_515_008
    assert (config.rope_base, config.norm_eps, config.tied) == (1e5, 1e-5, True)
    assert (config.eos_ids, config.bos_id, config.pad_id) == ((2,), 1, 2)

  def test_tokens_are_those_of_llama_cpp(self, smollm2):
    golden = json.loads((GOLDEN / 'smollm2_tokens.json').read_text())
    for record in golden['texts']:
      ids = smollm2.tokenizer.encode(record['text'], add_bos=True)
      assert ids == record['ids'], record['text']
      assert smollm2.tokenizer.decode(ids, skip_special=False) == record['text']

  def test_chats_are_those_of_transformers(self, smollm2):
    for chat in greedy_golden()['chats']:
      assert smollm2.tokenizer.render(chat['messages']) == chat['text']
      ids = smollm2.tokenizer.chat(chat['messages'])
      assert ids == chat['prompt']
      header = smollm2.tokenizer.encode('<|im_start|>assistant\n')
      assert ids[-len(header) :] == header

  def test_greedy_continuations_are_those_of_transformers(self, smollm2):
    golden = greedy_golden()
    chats = golden['chats']
    width = max(len(chat['prompt']) for chat in chats)
    # pad == eos == 2: only the mask says which is which
    tokens = np.full((len(chats), width), smollm2.config.pad_id, np.int32)
    mask = np.zeros((len(chats), width), bool)
    for row, chat in enumerate(chats):
      start = width - len(chat['prompt'])
      tokens[row, start:] = chat['prompt']
      mask[row, start:] = True
    policy = make_policy(smollm2.config)
    rollout = generate(
      policy,
      smollm2.params,
      Prompts(tokens, mask, []),
      jax.random.key(0),
      Sampling(
        group_size=1,
        max_new_tokens=32,
        temperature=0.0,
        eos_ids=smollm2.tokenizer.eos_ids,
        pad_id=smollm2.tokenizer.pad_id,
      ),
    )
    for row, chat in enumerate(chats):
      got = np.asarray(rollout.tokens[row])[np.asarray(rollout.mask[row])]
      assert got.tolist() == chat['tokens'], chat['messages']
    first = jax.jit(policy.logits)(smollm2.params, tokens, mask)[:, -1]
    np.testing.assert_allclose(
      first[:, :: golden['stride']],
      [chat['first_logits'] for chat in chats],
      atol=1e-5 * np.abs(first).max(),
      rtol=0,
    )

  @pytest.mark.slow
  def test_exported_model_in_transformers(self, smollm2, tmp_path):
    torch = pytest.importorskip('torch', reason='torch is not installed')
    transformers = pytest.importorskip('transformers')
    hf.save(tmp_path, *smollm2, dtype='float32')
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    chat = greedy_golden()['chats'][1]
    prompt = np.array([chat['prompt'] + chat['tokens']])
    with torch.no_grad():
      expected = model(torch.tensor(prompt)).logits.numpy()
    logits = make_policy(smollm2.config).logits(
      smollm2.params, jnp.asarray(prompt), np.ones(prompt.shape, bool)
    )
    largest = np.abs(logits - expected).max()
    print(f'largest difference {largest:.2e}, logits to {expected.max():.1f}')
    # transformers' own float32 logits are 8e-5 off its float64 ones here
    assert largest < 1e-5 * np.abs(expected).max()
    tokens = model.generate(
      torch.tensor([chat['prompt']]), max_new_tokens=32, do_sample=False
    )
    assert tokens[0, len(chat['prompt']) :].tolist() == chat['tokens']
