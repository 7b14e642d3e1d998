"""PolicyConfig: what it reads from a config.json, refuses, and writes back."""

import pytest

from gdpo_jax.policy.config import PolicyConfig, RopeScaling

LLAMA = {
  'model_type': 'llama',
  'vocab_size': 49152,
  'hidden_size': 576,
  'num_hidden_layers': 30,
  'num_attention_heads': 9,
  'num_key_value_heads': 3,
  'intermediate_size': 1536,
  'max_position_embeddings': 8192,
  'rope_theta': 100_000.0,
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': True,
  'bos_token_id': 1,
  'eos_token_id': 2,
}


def test_smollm2_shape():
  config = PolicyConfig.from_hf(LLAMA)
  assert config.head_dim == 64
  assert config.rope_base == 1e5
  assert config.eos_ids == (2,)
  assert config.pad_id == 2  # none named: an end token, read only under masks
  assert config.num_params == 134_515_008


def test_hashable_and_equal():
  assert hash(PolicyConfig.from_hf(LLAMA)) == hash(PolicyConfig.from_hf(LLAMA))


@pytest.mark.parametrize('family', ['llama', 'qwen2', 'qwen3'])
def test_round_trip(family):
  scaling = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
  }
  config = PolicyConfig.from_hf(
    LLAMA
    | {
      'model_type': family,
      'rope_scaling': scaling,
      'eos_token_id': [2, 0],
      'head_dim': 32,
    }
  )
  assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
  assert config.eos_ids == (2, 0)
  assert PolicyConfig.from_hf(config.to_hf()) == config


def test_version_5_rope_parameters():
  rope = {'rope_theta': 5e5, 'rope_type': 'default'}
  new = {k: v for k, v in LLAMA.items() if k != 'rope_theta'}
  config = PolicyConfig.from_hf(new | {'rope_parameters': rope})
  assert (config.rope_base, config.rope_scaling) == (5e5, None)


def test_transformers_reads_what_we_write():
  transformers = pytest.importorskip('transformers')
  scaling = RopeScaling(8.0, 1.0, 4.0, 128)
  for name, family in (
    ('LlamaConfig', 'llama'),
    ('Qwen2Config', 'qwen2'),
    ('Qwen3Config', 'qwen3'),
  ):
    config = PolicyConfig.from_hf(
      LLAMA | {'model_type': family, 'head_dim': 64, 'eos_token_id': [2, 5]}
    )
    config = PolicyConfig(**(vars(config) | {'rope_scaling': scaling}))
    theirs = getattr(transformers, name)(**config.to_hf())
    assert PolicyConfig.from_hf(theirs.to_dict()) == config


def test_unknown_family_lists_the_supported():
  with pytest.raises(ValueError, match='gemma3.*llama, qwen2, qwen3'):
    PolicyConfig.from_hf(LLAMA | {'model_type': 'gemma3'})


@pytest.mark.parametrize(
  ('field', 'extra'),
  [
    ('attention_bias', {'attention_bias': True}),
    ('mlp_bias', {'mlp_bias': True}),
    ('hidden_act', {'hidden_act': 'gelu'}),
    ('num_experts', {'num_experts': 8}),
    ('partial_rotary_factor', {'partial_rotary_factor': 0.5}),
    (
      'sliding_window',
      {
        'use_sliding_window': True,
        'sliding_window': 4096,
        'max_window_layers': 2,
      },
    ),
    ('layer_types', {'layer_types': ['sliding_attention'] * 30}),
    ('yarn', {'rope_scaling': {'type': 'yarn', 'factor': 2.0}}),
    ('low_freq', {'rope_scaling': {'rope_type': 'llama3', 'factor': 2.0}}),
    ('hidden_size', {'hidden_size': None}),
    ('num_kv_heads', {'num_key_value_heads': 2}),
  ],
)
def test_refuses_by_name(field, extra):
  with pytest.raises(ValueError, match=field):
    PolicyConfig.from_hf(LLAMA | extra)


def test_a_window_that_is_off_is_accepted():
  window = {'use_sliding_window': False, 'sliding_window': 4096}
  PolicyConfig.from_hf(LLAMA | window | {'max_window_layers': 2})


@pytest.mark.parametrize('eos', [None, 0, [0], [3, 1]])
def test_end_tokens_survive(eos):
  config = PolicyConfig.from_hf(LLAMA | {'eos_token_id': eos})
  assert PolicyConfig.from_hf(config.to_hf()).eos_ids == config.eos_ids
