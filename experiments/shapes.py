"""Shapes of the models in the configs, for runs that are only built.

`PolicyConfig` fields; a real run reads them from the checkpoint.
"""

from typing import Any

import ml_collections

# A byte-level model: 256 bytes, end, pad; a multiple of 4 for meshes.
TINY = {
  'family': 'llama',
  'vocab_size': 260,
  'width': 64,
  'num_layers': 2,
  'num_heads': 4,
  'num_kv_heads': 4,
  'head_dim': 16,
  'mlp_width': 192,
  'max_positions': 128,
  'tied': True,
}

SMOLLM2 = {
  'family': 'llama',
  'vocab_size': 49152,
  'width': 576,
  'num_layers': 30,
  'num_heads': 9,
  'num_kv_heads': 3,
  'head_dim': 64,
  'mlp_width': 1536,
  'max_positions': 8192,
  'rope_base': 1e5,
  'norm_eps': 1e-5,
  'tied': True,
  'eos_ids': (2,),
}


def _qwen2(width, num_layers, num_heads, num_kv_heads, mlp_width, **rest):
  return {
    'family': 'qwen2',
    'vocab_size': 151936,
    'width': width,
    'num_layers': num_layers,
    'num_heads': num_heads,
    'num_kv_heads': num_kv_heads,
    'head_dim': 128,
    'mlp_width': mlp_width,
    'norm_eps': 1e-6,
    'qkv_bias': True,
    **rest,
  }


_R1 = {'max_positions': 131072, 'rope_base': 1e4}
_INSTRUCT = {'max_positions': 32768, 'rope_base': 1e6, 'tied': True}
# name -> (id on the hub, shape)
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
  'r1_1p5b': (
    'deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B',
    _qwen2(1536, 28, 12, 2, 8960, **_R1),
  ),
  'r1_7b': (
    'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B',
    _qwen2(3584, 28, 28, 4, 18944, **_R1) | {'vocab_size': 152064},
  ),
  'qwen2p5_1p5b': (
    'Qwen/Qwen2.5-1.5B-Instruct',
    _qwen2(1536, 28, 12, 2, 8960, **_INSTRUCT),
  ),
  'qwen2p5_3b': (
    'Qwen/Qwen2.5-3B-Instruct',
    _qwen2(2048, 36, 16, 2, 11008, **_INSTRUCT),
  ),
  'qwen3_4b': (
    'Qwen/Qwen3-4B-Instruct-2507',
    {
      'family': 'qwen3',
      'vocab_size': 151936,
      'width': 2560,
      'num_layers': 36,
      'num_heads': 32,
      'num_kv_heads': 8,
      'head_dim': 128,
      'mlp_width': 9728,
      'max_positions': 262144,
      'rope_base': 5e6,
      'norm_eps': 1e-6,
      'tied': True,
      'qk_norm': True,
    },
  ),
}


def use(config: ml_collections.ConfigDict, name: str) -> None:
  """Sets model and shape of a config to a known one."""
  config.model, shape = KNOWN[name]
  config.shape = ml_collections.ConfigDict(shape)
