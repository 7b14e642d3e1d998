"""LoRA adapters in the format of PEFT, read and written.

  adapter_config.json          rank, alpha, which modules
  adapter_model.safetensors    base_model.model.model.layers.I.MODULE.lora_A.weight
                               [r, in] and lora_B.weight [out, r]

Files are not trusted: names, shapes and types are compared with the model
before anything is allocated, and what LoRA here cannot do is refused by name.
"""

import json
import math
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.lora import PROJECTIONS, Lora, sizes
from gdpo_jax.policy.tokenizer import read_json

_CONFIG = 'adapter_config.json'
_WEIGHTS = 'adapter_model.safetensors'
_MODULES = {
  name: ('self_attn.' if name.startswith('attn') else 'mlp.')
  + name.split('/')[1]
  + '_proj'
  for name in PROJECTIONS
}
# What an adapter may also do, and the values that mean that it does not.
_OFF = {
  'alpha_pattern': ({}, None),
  'bias': ('none', None),
  'fan_in_fan_out': (False, None),
  'layer_replication': (None, []),
  'lora_bias': (False, None),
  'modules_to_save': (None, []),
  'rank_pattern': ({}, None),
  'target_parameters': (None, []),
  'trainable_token_indices': (None, [], {}),
  'use_bdlora': (None, False),
  'use_dora': (False, None),
  'use_qalora': (False, None),
}


def save(
  directory: str | os.PathLike,
  config: PolicyConfig,
  adapters: Any,
  lora: Lora,
  base_model: str = '',
) -> None:
  """Writes the adapters for PEFT, in float32, replacing earlier ones.

  Args:
    adapters: params['lora'].
    base_model: name or directory of the model that they are for.
  Raises:
    ValueError: the tree is not that of `config` and `lora`.
  """
  tensors = {}
  for name in lora.projections:
    part, leaf = name.split('/')
    found = adapters['layers'].get(part, {}).get(leaf)
    inputs, outputs = sizes(config, name)
    want = {
      'a': (config.num_layers, inputs, lora.rank),
      'b': (config.num_layers, lora.rank, outputs),
    }
    have = found and {key: tuple(x.shape) for key, x in found.items()}
    if have != want:
      raise ValueError(f'the adapters of {name} are {have}, expected {want}.')
    for key, matrix in (('a', 'A'), ('b', 'B')):
      for i, x in enumerate(np.asarray(found[key], np.float32)):
        tensors[_name(i, name, matrix)] = np.ascontiguousarray(x.T)
  written = {
    'peft_type': 'LORA',
    'task_type': 'CAUSAL_LM',
    'base_model_name_or_path': base_model,
    'r': lora.rank,
    'lora_alpha': lora.alpha,
    'use_rslora': lora.rank_stabilized,
    'target_modules': [_MODULES[n].split('.')[1] for n in lora.projections],
    'lora_dropout': 0.0,
    'bias': 'none',
    'fan_in_fan_out': False,
    'inference_mode': True,
  }
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=directory, prefix='.saving-') as aside:
    aside = pathlib.Path(aside)
    (aside / _CONFIG).write_text(json.dumps(written, indent=2), 'utf-8')
    safetensors.numpy.save_file(tensors, aside / _WEIGHTS, {'format': 'pt'})
    # safetensors makes its files readable to the owner only
    shutil.copymode(aside / _CONFIG, aside / _WEIGHTS)
    # A config without weights is refused; weights of another config are not.
    (directory / _WEIGHTS).unlink(missing_ok=True)
    for name in (_CONFIG, _WEIGHTS):
      os.replace(aside / name, directory / name)


def load(
  directory: str | os.PathLike, config: PolicyConfig
) -> tuple[Lora, Any]:
  """Reads an adapter for a model of `config`: (Lora, params['lora']), float32.

  Raises:
    ValueError: not LoRA, or with parts that are not supported here (named);
      tensors that are missing, surplus or misshapen; a damaged file.
  """
  directory = pathlib.Path(directory)
  written = read_json(directory / _CONFIG)
  if not written:
    raise ValueError(f'{directory} has no {_CONFIG}; is it a PEFT adapter?')
  if written.get('peft_type') != 'LORA':
    raise ValueError(
      f'{directory} holds an adapter of type {written.get("peft_type")!r}; '
      'LORA is what can be read.'
    )
  on = [n for n, off in _OFF.items() if n in written and written[n] not in off]
  if on:
    raise ValueError(
      f'{directory / _CONFIG} asks for {", ".join(on)}, which is not supported; '
      'merge the adapter with PEFT and load the model instead.'
    )
  rank, alpha = written.get('r'), written.get('lora_alpha')
  numbers = [isinstance(x, int | float) for x in (rank, alpha)]
  if not all(numbers) or not math.isfinite(alpha) or int(rank) != rank:
    raise ValueError(
      f'{directory / _CONFIG}: r {rank!r} and lora_alpha {alpha!r} must be '
      'numbers, r a whole one.'
    )
  try:
    with safetensors.safe_open(
      str(directory / _WEIGHTS), framework='numpy'
    ) as file:
      names = set(file.keys())
      found = [n for n in PROJECTIONS if _name(0, n, 'A') in names]
      if not found:
        raise ValueError(
          f'{directory / _WEIGHTS} has no adapter of a projection of layer 0; '
          f'it has {sorted(names)[:5]}.'
        )
      lora = Lora(
        int(rank),
        float(alpha),
        '|'.join(found),
        bool(written.get('use_rslora')),
      )
      return lora, {'layers': _read(file, names, config, lora, directory)}
  except (OSError, safetensors.SafetensorError) as error:
    raise ValueError(
      f'{directory / _WEIGHTS} cannot be read as safetensors ({error}); the '
      'file is missing, truncated or damaged.'
    ) from error


def _read(file, names, config, lora, directory):
  want = {}
  for name in lora.projections:
    inputs, outputs = sizes(config, name)
    for i in range(config.num_layers):
      want[_name(i, name, 'A')] = [lora.rank, inputs]
      want[_name(i, name, 'B')] = [outputs, lora.rank]
  for what, these in (
    ('lacks', want.keys() - names),
    ('has no place for', names - want.keys()),
  ):
    if these:
      raise ValueError(
        f'{directory / _WEIGHTS}: a {config.family} model of '
        f'{config.num_layers} layers with adapters of '
        f'{", ".join(lora.projections)} {what} {sorted(these)[:5]}.'
      )
  for name, shape in want.items():
    opened = file.get_slice(name)
    if opened.get_shape() != shape or opened.get_dtype() not in (
      'F32',
      'F16',
      'BF16',
    ):
      raise ValueError(
        f'{directory / _WEIGHTS}: {name!r} is {opened.get_dtype()} of shape '
        f'{opened.get_shape()}, expected a float of shape {shape}.'
      )

  def stack(name, matrix):
    layers = [
      file.get_tensor(_name(i, name, matrix)).astype(np.float32).T
      for i in range(config.num_layers)
    ]
    return jax.device_put(np.stack(layers))

  tree: dict[str, Any] = {}
  for name in lora.projections:
    part, leaf = name.split('/')
    tree.setdefault(part, {})[leaf] = {
      key: stack(name, matrix) for key, matrix in (('a', 'A'), ('b', 'B'))
    }
  return tree


def _name(layer, projection, matrix):
  return (
    f'base_model.model.model.layers.{layer}.{_MODULES[projection]}'
    f'.lora_{matrix}.weight'
  )
