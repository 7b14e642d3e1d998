"""A language model from a GGUF file: config, float32 parameters, tokenizer.

  header --bounds-checked--> metadata, tensor table
  metadata --> HF config --> PolicyConfig;  vocabulary, merges --> Tokenizer
  tensors --dequantized, q/k rows put back--> hf.assemble --> params

GGUF (the file format of llama.cpp, version 2 and 3, little-endian) is a header
of key-value pairs, a table of tensors, then their data. The header is read
here and not by `gguf.GGUFReader`, because a file is not trusted: every count
and offset is held against the length of the file before it is used, where the
reader of the package runs past the end. The package does the dequantization
and knows the tensor names.
"""

import math
import os
import pathlib
import struct
from typing import Any

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.tokenizer import Tokenizer

_ARCHITECTURES = {
  'llama': gguf.MODEL_ARCH.LLAMA,
  'qwen2': gguf.MODEL_ARCH.QWEN2,
  'qwen3': gguf.MODEL_ARCH.QWEN3,
}
# HF config field -> metadata key after the architecture
_FIELDS = {
  'hidden_size': 'embedding_length',
  'num_hidden_layers': 'block_count',
  'num_attention_heads': 'attention.head_count',
  'num_key_value_heads': 'attention.head_count_kv',
  'head_dim': 'attention.key_length',
  'intermediate_size': 'feed_forward_length',
  'max_position_embeddings': 'context_length',
  'rope_theta': 'rope.freq_base',
  'rms_norm_eps': 'attention.layer_norm_rms_epsilon',
  'num_experts': 'expert_count',
}
_SCALARS = {
  gguf.GGUFValueType.UINT8: 'B',
  gguf.GGUFValueType.INT8: 'b',
  gguf.GGUFValueType.UINT16: 'H',
  gguf.GGUFValueType.INT16: 'h',
  gguf.GGUFValueType.UINT32: 'I',
  gguf.GGUFValueType.INT32: 'i',
  gguf.GGUFValueType.FLOAT32: 'f',
  gguf.GGUFValueType.BOOL: '?',
  gguf.GGUFValueType.UINT64: 'Q',
  gguf.GGUFValueType.INT64: 'q',
  gguf.GGUFValueType.FLOAT64: 'd',
}
_ROPE_FACTORS = 'rope_freqs.weight'
_WORDS = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
  r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def load(file: str | os.PathLike, shardings: Any = None) -> hf.Pretrained:
  """Reads a GGUF file of a Llama, Qwen2 or Qwen3 model.

  Quantized tensors are dequantized to float32. The head is tied where the
  file has no tensor for it. `shardings` as for `hf.load`.

  Raises:
    ValueError: not GGUF, truncated, or with sizes that do not fit the file;
      an unknown architecture, tokenizer or tensor type; a missing, surplus or
      misshapen tensor. The message names the offender.
  """
  file = pathlib.Path(file)
  if not file.is_file() or not file.stat().st_size:
    raise ValueError(f'{file} is not a file with something in it.')
  # a plain array over the mapping: slicing np.memmap itself is slow
  data = np.asarray(np.memmap(file, mode='r'))
  metadata, tensors = _read_header(data, file)
  config = _config(metadata, tensors, file)
  tokenizer = _tokenizer(metadata, file)
  if tokenizer.vocab_size > config.vocab_size:
    raise ValueError(
      f'{file} has {tokenizer.vocab_size} tokens but embeds '
      f'{config.vocab_size} of them.'
    )
  tensors.pop(_ROPE_FACTORS, None)
  names = gguf.get_tensor_name_map(
    _ARCHITECTURES[config.family], config.num_layers
  )

  def rename(name):
    return names.get_name(name, try_suffixes=('.weight', '.bias'))

  if config.family == 'llama':
    for kind, heads in (('q', config.num_heads), ('k', config.num_kv_heads)):
      for i in range(config.num_layers):
        name = rename(f'model.layers.{i}.self_attn.{kind}_proj.weight')
        if name in tensors:
          tensors[name] = _rotate_half_order(tensors[name], heads)
  params = hf.assemble(
    config, tensors, file, rename=rename, shardings=shardings
  )
  return hf.Pretrained(config, params, tokenizer)


class _Cursor:
  """Reads forward through the header, and never past the end of the file."""

  def __init__(self, data, file):
    self.data = memoryview(data)
    self.file = file
    self.at = 0

  def take(self, count):
    if count > len(self.data) - self.at:
      raise ValueError(
        f'{self.file} ends at byte {len(self.data)}, but its header asks for '
        f'{count} bytes at {self.at}; it is truncated or damaged, fetch it '
        'again.'
      )
    self.at += count
    return self.data[self.at - count : self.at].tobytes()

  def scalar(self, code):
    return struct.unpack('<' + code, self.take(struct.calcsize('<' + code)))[0]

  def string(self):
    try:
      return self.take(self.scalar('Q')).decode('utf-8')
    except UnicodeDecodeError as error:
      raise ValueError(f'{self.file} has text that is not UTF-8.') from error

  def value(self, kind):
    if kind == gguf.GGUFValueType.STRING:
      return self.string()
    if kind in _SCALARS:
      return self.scalar(_SCALARS[kind])
    if kind == gguf.GGUFValueType.ARRAY:
      kind, count = self.scalar('I'), self.scalar('Q')
      if kind == gguf.GGUFValueType.STRING:
        return [self.string() for _ in range(count)]
      if kind in _SCALARS:
        item = np.dtype('<' + _SCALARS[kind])
        return np.frombuffer(self.take(count * item.itemsize), item).tolist()
    raise ValueError(f'{self.file} has a value of unknown type {kind}.')


def _read_header(data, file):
  """Metadata by key, and `hf.Tensor` by name."""
  cursor = _Cursor(data, file)
  if cursor.take(4) != b'GGUF':
    raise ValueError(f'{file} is not a GGUF file.')
  version = cursor.scalar('I')
  if version not in (2, 3):
    raise ValueError(
      f'{file} is GGUF version {version} (or big-endian); versions 2 and 3, '
      'little-endian, are supported.'
    )
  num_tensors, num_values = cursor.scalar('Q'), cursor.scalar('Q')
  metadata = {}
  for _ in range(num_values):
    key = cursor.string()
    metadata[key] = cursor.value(cursor.scalar('I'))
  table = {}
  for _ in range(num_tensors):
    name = cursor.string()
    if name in table:
      raise ValueError(f'{file} has two tensors named {name!r}.')
    rank = cursor.scalar('I')
    if rank > 4:
      raise ValueError(f'{file}: {name!r} has {rank} dimensions.')
    # the file counts dimensions from the fastest
    shape = tuple(cursor.scalar('Q') for _ in range(rank))[::-1]
    table[name] = (shape, cursor.scalar('I'), cursor.scalar('Q'))
  alignment = metadata.get('general.alignment', 32)
  if not isinstance(alignment, int) or alignment < 1:
    raise ValueError(f'{file} has general.alignment {alignment!r}.')
  start = -(-cursor.at // alignment) * alignment
  tensors = {
    name: _tensor(data, file, name, start + offset, shape, kind)
    for name, (shape, kind, offset) in table.items()
  }
  return metadata, tensors


def _tensor(data, file, name, offset, shape, kind):
  try:
    kind = gguf.GGMLQuantizationType(kind)
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
  except (ValueError, KeyError) as error:
    raise ValueError(f'{file}: {name!r} has unknown type {kind}.') from error
  if not shape or shape[-1] % block:
    raise ValueError(
      f'{file}: {name!r} of shape {list(shape)} is not made of {kind.name} '
      f'blocks of {block}.'
    )
  row_bytes = shape[-1] // block * block_bytes
  end = offset + math.prod(shape[:-1]) * row_bytes
  if end > len(data):
    raise ValueError(
      f'{file} has {len(data)} bytes, but {name!r} ends at {end}; it is '
      'truncated or damaged, fetch it again.'
    )

  def read(index):
    raw = data[offset:end].reshape(*shape[:-1], row_bytes)
    try:
      values = gguf.dequantize(raw, kind)
    except NotImplementedError as error:
      raise ValueError(
        f'{file}: {name!r} is {kind.name}, which the gguf package cannot '
        'dequantize.'
      ) from error
    # a copy always: a view of the file must not become a device buffer
    return np.array(values, dtype=np.float32).reshape(shape)[index]

  return hf.Tensor(shape, read)


def _config(metadata, tensors, file):
  architecture = metadata.get('general.architecture')
  if architecture not in _ARCHITECTURES:
    raise ValueError(
      f'{file} has architecture {architecture!r}; supported: '
      f'{", ".join(_ARCHITECTURES)}.'
    )
  config = {'model_type': architecture}
  for field, key in _FIELDS.items():
    value = metadata.get(f'{architecture}.{key}')
    if isinstance(value, float):
      value = float(str(np.float32(value)))  # 1e-5, not 9.9999997e-6
    if value is not None and not (
      isinstance(value, int | float) and (value > 0 or field == 'num_experts')
    ):
      raise ValueError(f'{file} has {architecture}.{key} = {value!r:.80}.')
    config[field] = value
  embedding = tensors.get('token_embd.weight')
  if embedding is None:
    raise ValueError(f"{file} lacks the tensor 'token_embd.weight'.")
  config |= {
    'vocab_size': embedding.shape[0],
    'tie_word_embeddings': 'output.weight' not in tensors,
    'rope_scaling': _rope_scaling(metadata, tensors, architecture, file),
    'bos_token_id': metadata.get('tokenizer.ggml.bos_token_id'),
    'eos_token_id': _eos_ids(metadata),
    'pad_token_id': metadata.get('tokenizer.ggml.padding_token_id'),
  }
  config['head_dim'] = (
    config['head_dim']
    or metadata.get(f'{architecture}.rope.dimension_count')
    or None
  )
  if (config['num_hidden_layers'] or 0) > len(tensors):
    raise ValueError(
      f'{file} declares {config["num_hidden_layers"]} layers, but has '
      f'{len(tensors)} tensors.'
    )
  result = PolicyConfig.from_hf(
    {field: value for field, value in config.items() if value is not None}
  )
  for key in ('attention.value_length', 'rope.dimension_count'):
    value = metadata.get(f'{architecture}.{key}', result.head_dim)
    if value != result.head_dim:
      raise ValueError(
        f'{file} has {architecture}.{key} {value}, but heads of '
        f'{result.head_dim}; the two must be equal.'
      )
  return result


def _rope_scaling(metadata, tensors, architecture, file):
  """Llama-3 scaling is a tensor of one factor per frequency in GGUF.

  The file drops the four numbers that made it; `factor` is its largest entry,
  the others are the ones that all Llama-3 models use, and the tensor must
  come out of them again.
  """
  kind = metadata.get(f'{architecture}.rope.scaling.type', 'none')
  if kind != 'none':
    raise ValueError(
      f'{file} has {architecture}.rope.scaling.type {kind!r}; supported: '
      f'none, or the tensor {_ROPE_FACTORS!r} of Llama-3.'
    )
  if _ROPE_FACTORS not in tensors:
    return None
  factors = tensors[_ROPE_FACTORS].read((slice(None),))
  low, high, original = 1.0, 4.0, 8192
  factor = float(factors.max())
  base = metadata.get(f'{architecture}.rope.freq_base', 10_000.0)
  turns = original / (
    2 * np.pi * base ** (np.arange(factors.size) / factors.size)
  )
  kept = np.clip((turns - low) / (high - low), 0, 1)
  want = 1 / (kept + (1 - kept) / factor)
  if not np.allclose(factors, want, rtol=1e-3):
    raise ValueError(
      f'{file}: {_ROPE_FACTORS!r} is not the llama3 scaling of factor '
      f'{factor:g} over {original} positions; take the safetensors of this '
      'model, whose config.json has the numbers.'
    )
  return {
    'rope_type': 'llama3',
    'factor': factor,
    'low_freq_factor': low,
    'high_freq_factor': high,
    'original_max_position_embeddings': original,
  }


def _rotate_half_order(tensor, heads):
  """Undoes the interleaving of q and k rows for llama.cpp's RoPE.

  It turns neighbours (2i, 2i + 1) where HF turns (i, i + head_dim / 2), so
  the converter wrote row i of a head's first half to 2i and of its second
  half to 2i + 1.
  """

  def read(index):
    rows = tensor.read((slice(None), slice(None)))
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)[index]

  return hf.Tensor(tensor.shape, read)


def _eos_ids(metadata):
  keys = ('tokenizer.ggml.eos_token_id', 'tokenizer.ggml.eot_token_id')
  return list(dict.fromkeys(metadata[key] for key in keys if key in metadata))


def _pre_tokenizer(name, file):
  """(pre-tokenizer, normalizer or None) by llama.cpp's name for it."""
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
  encode_bytes = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )

  def split(digits):
    pattern = tokenizers.Regex(_WORDS % digits)
    return pre_tokenizers.Sequence(
      [pre_tokenizers.Split(pattern, 'isolated'), encode_bytes]
    )

  known = {
    # digits leave the text one by one before words are formed, so that spaces
    # before a digit stay together
    'smollm': (
      pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
      ),
      None,
    ),
    'gpt-2': (byte_level, None),
    'llama-bpe': (split('{1,3}'), None),
    'qwen2': (split(''), normalizers.NFC()),
  }
  if name not in known:
    raise ValueError(
      f'{file} has tokenizer.ggml.pre {name!r}; supported: '
      f'{", ".join(known)}. Load a directory with a tokenizer.json instead.'
    )
  return known[name]


def _tokenizer(metadata: dict[str, Any], file: pathlib.Path) -> Tokenizer:
  def get(key, kind, default=None):
    value = metadata.get(f'tokenizer.ggml.{key}', default)
    if value is not None and not isinstance(value, kind):
      raise ValueError(f'{file} has tokenizer.ggml.{key} = {value!r:.80}.')
    return value

  if get('model', str) != 'gpt2':
    raise ValueError(
      f'{file} has a tokenizer of model {get("model", str)!r}; supported: '
      "'gpt2' (byte-level BPE). Load a directory with a tokenizer.json instead."
    )
  tokens = get('tokens', list, [])
  types = get('token_type', list, [gguf.TokenType.NORMAL] * len(tokens))
  merges = [tuple(map(str, str(m).split(' '))) for m in get('merges', list, [])]
  vocab = {token: i for i, token in enumerate(map(str, tokens))}
  if not tokens or len(vocab) != len(tokens) or len(types) != len(tokens):
    raise ValueError(
      f'{file} has {len(tokens)} tokens, {len(vocab)} of them distinct, and '
      f'{len(types)} token types; the three must agree.'
    )
  pre = get('pre', str)
  pre_tokenizer, normalizer = _pre_tokenizer(pre, file)
  try:
    model = models.BPE(vocab, merges, ignore_merges=pre == 'llama-bpe')
  except Exception as error:  # the Rust side raises bare Exception
    raise ValueError(f'{file} has unusable merges: {error}') from error
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = pre_tokenizer
  backend.decoder = decoders.ByteLevel()
  if normalizer is not None:
    backend.normalizer = normalizer
  backend.add_tokens(
    [
      tokenizers.AddedToken(
        token, special=kind == gguf.TokenType.CONTROL, normalized=False
      )
      for token, kind in zip(tokens, types)
      if kind in (gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED)
    ]
  )
  ids = (get('bos_token_id', int), get('padding_token_id', int))
  bos, pad = ids
  for i in (*ids, *_eos_ids(metadata)):
    if i is not None and not 0 <= i < len(tokens):
      raise ValueError(f'{file} names token {i} of {len(tokens)} as special.')
  adds_bos = bos is not None and get('add_bos_token', bool, pre == 'llama-bpe')
  if adds_bos:  # for whoever opens the saved tokenizer.json
    backend.post_processor = processors.TemplateProcessing(
      single=f'{tokens[bos]} $A', special_tokens=[(tokens[bos], bos)]
    )
  template = metadata.get('tokenizer.chat_template')
  return Tokenizer(
    backend,
    eos_ids=_eos_ids(metadata),
    bos_id=bos,
    pad_id=pad,
    adds_bos=adds_bos,
    chat_template=template if isinstance(template, str) else None,
  )
