"""Parameters in Hugging Face's directory layout, read and written.

  config.json --PolicyConfig--> layout: one row per leaf of the tree
  *.safetensors --row by row, layer by layer--> leaf f32[L, ...]

A leaf is read straight into the layout of the parameter tree: layers stacked,
kernels transposed to [in, out], float32. With shardings given, each device's
slice is all that is read for it. Files are not trusted: names, shapes and
types are compared with what the config asks for before anything is allocated,
and pickled weights are refused.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.tokenizer import Tokenizer, read_json

_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_READABLE = ('F32', 'F16', 'BF16')
_DTYPES = {'bfloat16': ml_dtypes.bfloat16, 'float32': np.float32}
# RoPE frequencies that old versions saved; the config determines them
_HARMLESS = re.compile(r'(^|\.)rotary_emb\.inv_freq$')
_HEAD = 'lm_head.weight'


class Pretrained(NamedTuple):
  """All that a checkpoint of a language model holds."""

  config: PolicyConfig
  params: Any
  tokenizer: Tokenizer


class Tensor(NamedTuple):
  """A tensor in a file: its shape there, and a reader of slices as f32."""

  shape: tuple[int, ...]
  read: Callable[[tuple[slice, ...]], np.ndarray]


class _Leaf(NamedTuple):
  """Where one leaf of the parameter tree lives in a checkpoint."""

  path: tuple[str, ...]
  name: str  # tensor name; `{}` is the layer
  shape: tuple[int, ...]  # of one layer, as the file has it
  layers: int | None  # None: not stacked
  transposed: bool

  @property
  def stacked_shape(self):
    shape = self.shape[::-1] if self.transposed else self.shape
    return shape if self.layers is None else (self.layers, *shape)

  def names(self) -> Iterator[str]:
    if self.layers is None:
      yield self.name
    else:
      yield from (self.name.format(i) for i in range(self.layers))


def load(
  directory: str | os.PathLike, shardings: Any = None
) -> tuple[PolicyConfig, Any]:
  """Reads a model directory: config.json and safetensors, single or sharded.

  Args:
    directory: in hub layout; bf16, f16 and f32 tensors.
    shardings: a tree of `jax.sharding.Sharding` like the parameters, or a
      function from the tree of `jax.ShapeDtypeStruct` to one; every process
      then reads only the slices of its own devices.
  Returns:
    The config (EOS ids of generation_config.json joined in) and the float32
    parameters.
  Raises:
    ValueError: an unknown architecture; a missing, surplus, misshapen or
      quantized tensor; a tied model whose lm_head differs from its embedding;
      a truncated file; pickled weights. The message names the offender.
  """
  config = load_config(directory)
  with open_tensors(directory) as tensors:
    return config, assemble(config, tensors, directory, shardings=shardings)


@contextlib.contextmanager
def open_tensors(directory: str | os.PathLike) -> Iterator[dict[str, Tensor]]:
  """The tensors of a model directory by name, readable inside the `with`."""
  directory = pathlib.Path(directory)
  with contextlib.ExitStack() as stack:
    tensors = {}
    for file in _weight_files(directory):
      try:
        opened = stack.enter_context(
          safetensors.safe_open(str(file), framework='numpy')
        )
      except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(
          f'{file} cannot be read as safetensors ({error}); the file is '
          'truncated or damaged, fetch it again.'
        ) from error
      for name in opened.keys():  # noqa: SIM118, it is not a mapping
        if _HARMLESS.search(name):
          continue
        if name in tensors:
          raise ValueError(f'{name!r} is in {file} and in another shard too.')
        tensors[name] = _tensor(opened.get_slice(name), name, file)
    yield tensors


def load_config(directory: str | os.PathLike) -> PolicyConfig:
  """The config alone, for instance to plan a mesh before weights are read."""
  directory = pathlib.Path(directory)
  config = read_json(directory / 'config.json')
  if not config:
    raise ValueError(
      f'{directory} has no config.json; is it a model directory?'
    )
  # the list of EOS ids often stands in this file only
  generation = read_json(directory / 'generation_config.json')
  eos = _as_list(config.get('eos_token_id'))
  eos += _as_list(generation.get('eos_token_id'))
  try:
    config['eos_token_id'] = list(dict.fromkeys(eos)) or None
    return PolicyConfig.from_hf(config)
  except (TypeError, OverflowError) as error:
    raise ValueError(
      f'{directory}/config.json has a value of the wrong kind: {error}.'
    ) from error


def assemble(
  config: PolicyConfig,
  tensors: Mapping[str, Tensor],
  source: Any,
  *,
  rename: Callable[[str], str] = str,
  shardings: Any = None,
) -> Any:
  """Builds the parameter tree from named tensors; `load` says how.

  Args:
    config: what the tree must look like.
    tensors: by their name in the file, shapes in HF's [out, in] order.
    source: what error messages call the checkpoint.
    rename: from a tensor's HF name to its name in the file.
    shardings: as for `load`.
  """
  leaves = _layout(config)
  _check_names(config, leaves, tensors, source, rename)
  for leaf in leaves:
    for name in map(rename, leaf.names()):
      if tensors[name].shape != leaf.shape:
        raise ValueError(
          f'{source}: {name!r} has shape {list(tensors[name].shape)}, but the '
          f'config asks for {list(leaf.shape)}.'
        )
  _check_tied_head(config, tensors, source, rename)

  if callable(shardings):
    shardings = shardings(abstract_params(config))
  if shardings is not None:
    shardings = _flat(shardings)

  def build(leaf):
    files = [tensors[rename(name)] for name in leaf.names()]
    if shardings is None:
      return jax.device_put(_read_leaf(leaf, files, (slice(None),) * 3))
    done = {}  # devices that hold the same slice share one reading of it

    def read(index):
      key = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.stacked_shape))
      if key not in done:
        done[key] = _read_leaf(leaf, files, index)
      return done[key]

    return jax.make_array_from_callback(
      leaf.stacked_shape, shardings[leaf.path], read
    )

  return _tree({leaf.path: build(leaf) for leaf in leaves})


def abstract_params(config: PolicyConfig) -> Any:
  """The parameter tree as `jax.ShapeDtypeStruct`, float32."""
  return _tree(
    {
      leaf.path: jax.ShapeDtypeStruct(leaf.stacked_shape, jnp.float32)
      for leaf in _layout(config)
    }
  )


def save(
  directory: str | os.PathLike,
  config: PolicyConfig,
  params: Any,
  tokenizer: Tokenizer | None = None,
  dtype: str = 'bfloat16',
  max_shard_bytes: int = 5_000_000_000,
) -> None:
  """Writes a directory that `load` and transformers read; one writer at a time.

  Everything is written aside and moved into place at the end, the index of a
  sharded checkpoint last and the old one removed first: a save that fails
  leaves the previous one, and one killed while moving leaves the weights of
  one save or none that `load` accepts, never a mixture.

  Args:
    directory: made if need be; weights of an earlier save are replaced.
    params: as `load` returns them, on addressable devices or the host.
    tokenizer: saved beside the weights if given.
    dtype: 'bfloat16' rounds to nearest even, 'float32' is exact.
    max_shard_bytes: a file grows up to this size, but holds at least one
      tensor. One file's tensors are on the host at a time.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'dtype is {dtype!r}; choose one of {sorted(_DTYPES)}.')
  if {'lora', 'heads'} & params.keys():
    raise ValueError(
      'adapters are merged first (lora.merge); a mixture of sub-policies is no '
      'single model, one of them is (decoupled.alone; run.py export --head).'
    )
  leaves = _layout(config)
  flat = _flat(params)
  want = {leaf.path: leaf.stacked_shape for leaf in leaves}
  have = {path: tuple(value.shape) for path, value in flat.items()}
  for path in sorted(want.keys() | have.keys()):
    if want.get(path) != have.get(path):
      raise ValueError(
        f'params have {have.get(path)} at {"/".join(path)}, but the config '
        f'asks for {want.get(path)} (None: no such leaf).'
      )

  entries = [
    (name, leaf, layer)
    for leaf in leaves
    for layer, name in enumerate(leaf.names())
  ]
  itemsize = np.dtype(_DTYPES[dtype]).itemsize
  shards, size = [[]], 0
  for entry in entries:
    nbytes = math.prod(entry[1].shape) * itemsize
    if shards[-1] and size + nbytes > max_shard_bytes:
      shards.append([])
      size = 0
    shards[-1].append(entry)
    size += nbytes
  files = [_SINGLE]
  if len(shards) > 1:
    files = [
      f'model-{i:05d}-of-{len(shards):05d}.safetensors'
      for i in range(1, len(shards) + 1)
    ]

  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  for stale in directory.glob('.saving-*'):  # of a save that was killed
    shutil.rmtree(stale, ignore_errors=True)
  with tempfile.TemporaryDirectory(dir=directory, prefix='.saving-') as aside:
    aside = pathlib.Path(aside)
    weight_map, total = {}, 0
    for file, shard in zip(files, shards):
      arrays = {}
      for name, leaf, layer in shard:
        value = flat[leaf.path]
        value = np.asarray(value if leaf.layers is None else value[layer])
        value = value.T if leaf.transposed else value
        arrays[name] = np.ascontiguousarray(value, dtype=_DTYPES[dtype])
        weight_map[name] = file
        total += arrays[name].nbytes
      # transformers wants to know the layout of the tensors: torch's
      safetensors.numpy.save_file(arrays, aside / file, {'format': 'pt'})
    _write_configs(aside, config, tokenizer, dtype)
    for file in files:  # safetensors makes its files readable to the owner only
      shutil.copymode(aside / 'config.json', aside / file)
    if len(files) > 1:
      index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
      (aside / _INDEX).write_text(json.dumps(index, indent=2), encoding='utf-8')
    _move_into_place(aside, directory)


def _layout(config):
  """Every leaf of the tree, with the tensor it comes from."""
  d, f, hd = config.width, config.mlp_width, config.head_dim
  q, kv = config.num_heads * hd, config.num_kv_heads * hd

  def per_layer(path, name, shape):
    return _Leaf(
      ('layers', *path.split('/')),
      f'model.layers.{{}}.{name}',
      shape,
      config.num_layers,
      len(shape) == 2,
    )

  leaves = [
    _Leaf(
      ('embed', 'embedding'),
      'model.embed_tokens.weight',
      (config.vocab_size, d),
      None,
      False,
    ),
    per_layer('attn_norm/scale', 'input_layernorm.weight', (d,)),
    per_layer('attn/o/kernel', 'self_attn.o_proj.weight', (d, q)),
    per_layer('mlp_norm/scale', 'post_attention_layernorm.weight', (d,)),
    per_layer('mlp/gate/kernel', 'mlp.gate_proj.weight', (f, d)),
    per_layer('mlp/up/kernel', 'mlp.up_proj.weight', (f, d)),
    per_layer('mlp/down/kernel', 'mlp.down_proj.weight', (d, f)),
    _Leaf(('norm', 'scale'), 'model.norm.weight', (d,), None, False),
  ]
  for key, width in (('q', q), ('k', kv), ('v', kv)):
    name = f'self_attn.{key}_proj'
    leaves.append(per_layer(f'attn/{key}/kernel', f'{name}.weight', (width, d)))
    if config.qkv_bias:
      leaves.append(per_layer(f'attn/{key}/bias', f'{name}.bias', (width,)))
    if config.qk_norm and key != 'v':
      leaves.append(
        per_layer(
          f'attn/{key}_norm/scale', f'self_attn.{key}_norm.weight', (hd,)
        )
      )
  if not config.tied:
    leaves.append(
      _Leaf(('head', 'embedding'), _HEAD, (config.vocab_size, d), None, False)
    )
  return leaves


def _check_names(config, leaves, tensors, source, rename):
  wanted = (rename(name) for leaf in leaves for name in leaf.names())
  # stops after a few, so a config of a billion layers ends here
  missing = list(
    itertools.islice((name for name in wanted if name not in tensors), 5)
  )
  if missing:
    hint = ''
    if rename(_HEAD) in missing:
      hint = ' The head is not tied to the embedding, so it needs a tensor.'
    raise ValueError(
      f'{source} lacks {missing}, which a {config.family} model of '
      f'{config.num_layers} layers has.{hint}'
    )
  known = {rename(name) for leaf in leaves for name in leaf.names()}
  known.add(rename(_HEAD))  # where tied, it is compared with the embedding
  surplus = sorted(tensors.keys() - known)
  if surplus:
    raise ValueError(
      f'{source} has {len(surplus)} tensors that a {config.family} model of '
      f'{config.num_layers} layers has no place for: {surplus[:5]}.'
    )


def _check_tied_head(config, tensors, source, rename):
  head = tensors.get(rename(_HEAD))
  if not config.tied or head is None:
    return
  everything = (slice(None), slice(None))
  embed = tensors[rename('model.embed_tokens.weight')]
  if head.shape != embed.shape or not np.array_equal(
    head.read(everything), embed.read(everything)
  ):
    raise ValueError(
      f'{source}: tie_word_embeddings is true, but {rename(_HEAD)!r} differs '
      'from the embedding. Set it to false to keep both, or remove the tensor '
      'that is not meant.'
    )


def _read_leaf(leaf, files, index):
  """The slice `index` of a leaf: f32, layers stacked, kernels [in, out]."""
  if leaf.layers is not None:
    files, index = files[index[0]], index[1:]
  index = index[: len(leaf.shape)]
  if leaf.transposed:
    index = index[::-1]
  out = None
  for layer, file in enumerate(files):
    part = file.read(index)
    part = part.T if leaf.transposed else part
    if leaf.layers is None:
      return part
    if out is None:
      out = np.empty((len(files), *part.shape), np.float32)
    out[layer] = part
  return out


def _tensor(opened, name, file):
  if opened.get_dtype() not in _READABLE:
    raise ValueError(
      f'{name!r} in {file} has type {opened.get_dtype()}; readable are '
      f'{", ".join(_READABLE)}. Quantized checkpoints are not supported.'
    )
  return Tensor(
    tuple(opened.get_shape()),
    lambda index: np.asarray(opened[index], dtype=np.float32),
  )


def _weight_files(directory):
  """The safetensors files; a single file wins, as in transformers."""
  if (directory / _SINGLE).is_file():
    return [directory / _SINGLE]
  if (directory / _INDEX).is_file():
    weight_map = read_json(directory / _INDEX).get('weight_map')
    if not isinstance(weight_map, dict):
      raise ValueError(f'{directory / _INDEX} has no weight_map.')
    files = sorted(set(map(str, weight_map.values())))
    for file in files:
      if pathlib.PurePath(file).name != file:  # no way out of the directory
        raise ValueError(f'{directory / _INDEX} names the file {file!r}.')
      if not (directory / file).is_file():
        raise ValueError(
          f'{directory / _INDEX} names {file!r}, which is not there; the '
          'checkpoint is incomplete, fetch it again.'
        )
    return [directory / file for file in files]
  if any(directory.glob('*.bin')) or any(directory.glob('*.pt*')):
    raise ValueError(
      f'{directory} holds pickled weights only, and opening a pickle can run '
      'any code. Convert them where you trust them: transformers '
      'save_pretrained writes safetensors.'
    )
  raise ValueError(
    f'{directory} has neither {_SINGLE} nor {_INDEX}: not a model directory, '
    'or one whose save was cut short.'
  )


def _write_configs(directory, config, tokenizer, dtype):
  eos = list(config.eos_ids)
  if tokenizer is not None:
    tokenizer.save(directory)
    eos += [i for i in tokenizer.eos_ids if i not in eos]
  written = dataclasses.replace(config, eos_ids=tuple(eos)).to_hf()
  ids = ('bos_token_id', 'eos_token_id', 'pad_token_id')
  generation = {key: written[key] for key in ids}
  for name, value in (
    ('config.json', written | {'torch_dtype': dtype}),
    ('generation_config.json', generation),
  ):
    (directory / name).write_text(json.dumps(value, indent=2), encoding='utf-8')


def _move_into_place(aside, directory):
  names = {path.name for path in aside.iterdir()}
  for path in aside.iterdir():  # what a name stands for is on the disk first
    with open(path, 'rb') as file:
      os.fsync(file.fileno())
  (directory / _INDEX).unlink(missing_ok=True)
  for old in directory.glob('model*.safetensors'):
    if old.name not in names:
      old.unlink()
  for name in sorted(names - {_INDEX}):
    os.replace(aside / name, directory / name)
  if _INDEX in names:
    os.replace(aside / _INDEX, directory / _INDEX)


def _tree(flat):
  tree = {}
  for path, value in flat.items():
    node = tree
    for key in path[:-1]:
      node = node.setdefault(key, {})
    node[path[-1]] = value
  return tree


def _flat(tree, path=()):
  if not isinstance(tree, Mapping):
    return {path: tree}
  flat = {}
  for key, value in tree.items():
    flat |= _flat(value, (*path, key))
  return flat


def _as_list(ids):
  return [] if ids is None else list(ids) if isinstance(ids, list) else [ids]
