"""The shape of a decoder, and its translation from and to a HF config.json."""

import dataclasses
from collections.abc import Mapping
from typing import Any

# family -> (class name in transformers, qkv bias, q/k norm)
FAMILIES = {
  'llama': ('LlamaForCausalLM', False, False),
  'qwen2': ('Qwen2ForCausalLM', True, False),
  'qwen3': ('Qwen3ForCausalLM', False, True),
}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
  """Llama-3 scaling: low frequencies are slowed by `factor`, high ones kept.

  Wavelengths above `original_max_positions / low_freq_factor` are stretched,
  those below `original_max_positions / high_freq_factor` are not, and between
  them the two are blended linearly in the frequency (arXiv:2407.21783).
  """

  factor: float
  low_freq_factor: float
  high_freq_factor: float
  original_max_positions: int


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """Everything that fixes the arithmetic of a policy; hashable, so static.

  `width` is D, `num_layers` L, `vocab_size` V; the head is tied to the
  embedding or a leaf of its own. `eos_ids` may be empty (a base model without
  an end), `pad_id` is only ever read under a mask.
  """

  family: str
  vocab_size: int
  width: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  mlp_width: int
  max_positions: int = 2048
  rope_base: float = 10_000.0
  rope_scaling: RopeScaling | None = None
  norm_eps: float = 1e-6
  tied: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  eos_ids: tuple[int, ...] = ()
  bos_id: int | None = None
  pad_id: int = 0

  def __post_init__(self):
    _check_family(self.family)
    _, qkv_bias, qk_norm = FAMILIES[self.family]
    if (self.qkv_bias, self.qk_norm) != (qkv_bias, qk_norm):
      raise ValueError(
        f'family {self.family!r} has qkv_bias={qkv_bias}, qk_norm={qk_norm}; '
        f'got qkv_bias={self.qkv_bias}, qk_norm={self.qk_norm}.'
      )
    if self.num_heads % self.num_kv_heads:
      raise ValueError(
        f'num_heads {self.num_heads} is not a multiple of num_kv_heads '
        f'{self.num_kv_heads}; each key head serves a whole set of queries.'
      )
    if self.head_dim % 2:
      raise ValueError(
        f'head_dim {self.head_dim} is odd; RoPE turns pairs, use an even one.'
      )

  @property
  def num_params(self) -> int:
    """Number of trained values, a tied head counted once."""
    q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
    layer = self.width * (2 * q + 2 * kv + 3 * self.mlp_width + 2)
    layer += (q + 2 * kv) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
    tables = (1 if self.tied else 2) * self.vocab_size * self.width
    return tables + self.num_layers * layer + self.width

  @classmethod
  def from_hf(cls, config: Mapping[str, Any]) -> 'PolicyConfig':
    """Reads the dict of a `config.json` (transformers 4 or 5).

    Raises:
      ValueError: unknown `model_type`, a missing field, or a feature that the
        decoder does not have; the message names the field.
    """
    family = config.get('model_type')
    _check_family(family)
    _, qkv_bias, qk_norm = FAMILIES[family]
    _refuse_unsupported(config)

    required = {
      'vocab_size': 'vocab_size',
      'width': 'hidden_size',
      'num_layers': 'num_hidden_layers',
      'num_heads': 'num_attention_heads',
      'mlp_width': 'intermediate_size',
    }
    missing = [key for key in required.values() if config.get(key) is None]
    if missing:
      raise ValueError(f'config.json lacks {missing}, needed for {family!r}.')
    sizes = {name: int(config[key]) for name, key in required.items()}

    eos = config.get('eos_token_id')
    eos = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
    eos = tuple(int(i) for i in eos)
    pad = config.get('pad_token_id')
    if pad is None or pad < 0:
      pad = eos[0] if eos else 0
    rope_base, rope_scaling = _read_rope(config)
    heads = sizes['num_heads']
    # absent means what the transformers class of that family defaults to
    return cls(
      family=family,
      **sizes,
      num_kv_heads=int(config.get('num_key_value_heads') or heads),
      head_dim=int(
        config.get('head_dim')
        or (128 if family == 'qwen3' else sizes['width'] // heads)
      ),
      max_positions=int(config.get('max_position_embeddings', 2048)),
      rope_base=rope_base,
      rope_scaling=rope_scaling,
      norm_eps=float(config.get('rms_norm_eps', 1e-6)),
      tied=bool(config.get('tie_word_embeddings', False)),
      qkv_bias=qkv_bias,
      qk_norm=qk_norm,
      eos_ids=eos,
      bos_id=config.get('bos_token_id'),
      pad_id=int(pad),
    )

  def to_hf(self) -> dict[str, Any]:
    """The dict of a `config.json` that transformers 4 and 5 both read."""
    scaling = self.rope_scaling
    config = {
      'model_type': self.family,
      'architectures': [FAMILIES[self.family][0]],
      'vocab_size': self.vocab_size,
      'hidden_size': self.width,
      'num_hidden_layers': self.num_layers,
      'num_attention_heads': self.num_heads,
      'num_key_value_heads': self.num_kv_heads,
      'head_dim': self.head_dim,
      'intermediate_size': self.mlp_width,
      'hidden_act': 'silu',
      'max_position_embeddings': self.max_positions,
      'rope_theta': self.rope_base,
      'rope_scaling': scaling
      and {
        'rope_type': 'llama3',
        'factor': scaling.factor,
        'low_freq_factor': scaling.low_freq_factor,
        'high_freq_factor': scaling.high_freq_factor,
        'original_max_position_embeddings': scaling.original_max_positions,
      },
      'rms_norm_eps': self.norm_eps,
      'tie_word_embeddings': self.tied,
      'attention_dropout': 0.0,
      'bos_token_id': self.bos_id,
      'eos_token_id': list(self.eos_ids) or None,
      'pad_token_id': self.pad_id,
    }
    if len(self.eos_ids) == 1:
      config['eos_token_id'] = self.eos_ids[0]
    if self.family != 'qwen2':
      config['attention_bias'] = False
    if self.family == 'llama':
      config['mlp_bias'] = False
    else:
      config['use_sliding_window'] = False
    return config


def _check_family(family):
  if family not in FAMILIES:
    raise ValueError(
      f'unknown model_type {family!r}; supported families: '
      f'{", ".join(sorted(FAMILIES))}.'
    )


def _refuse_unsupported(config):
  """Features that would change the arithmetic silently if they were ignored."""
  layers = config.get('num_hidden_layers') or 0
  sliding = config.get('use_sliding_window') and config.get('sliding_window')
  refused = {
    'attention_bias': config.get('attention_bias', False),
    'mlp_bias': config.get('mlp_bias', False),
    'hidden_act': config.get('hidden_act', 'silu') != 'silu',
    'num_experts': config.get('num_experts') or config.get('num_local_experts'),
    'partial_rotary_factor': config.get('partial_rotary_factor') or 1.0,
    'quantization_config': config.get('quantization_config') is not None,
    'sliding_window': sliding
    and config.get('max_window_layers', layers) < layers,
    'layer_types': any(
      kind != 'full_attention' for kind in config.get('layer_types') or ()
    ),
  }
  refused['partial_rotary_factor'] = refused['partial_rotary_factor'] != 1.0
  for field, present in refused.items():
    if present:
      raise ValueError(
        f'config.json has {field}={config.get(field)!r}, which this decoder '
        'does not implement; use a checkpoint without it.'
      )


def _read_rope(config):
  """(base, scaling) from `rope_theta` and `rope_scaling`, or version 5's dict."""
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  base = rope.get('rope_theta') or config.get('rope_theta') or 10_000.0
  if kind == 'default':
    return float(base), None
  if kind != 'llama3':
    raise ValueError(
      f"config.json has rope_type {kind!r}; supported: 'default', 'llama3'."
    )
  fields = ('factor', 'low_freq_factor', 'high_freq_factor')
  missing = [field for field in fields if field not in rope]
  if missing:
    raise ValueError(f'llama3 rope_scaling in config.json lacks {missing}.')
  original = rope.get('original_max_position_embeddings')
  return float(base), RopeScaling(
    *(float(rope[field]) for field in fields),
    int(original or config.get('max_position_embeddings', 2048)),
  )
