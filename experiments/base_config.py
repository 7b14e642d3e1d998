"""The fields that every experiment's config has, as a locked ConfigDict."""

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping

import data_choice
import ml_collections
from ml_collections import config_dict

from gdpo_jax.train.settings import Settings


def base_config() -> ml_collections.ConfigDict:
  """Every field of `Settings`, and what a launcher needs beside them.

  Locked: a field that is not here can be neither read nor set.
  """
  config = ml_collections.ConfigDict()
  hints = typing.get_type_hints(Settings)
  for field in dataclasses.fields(Settings):
    config[field.name] = field.default
    if field.default is None:  # "as the algorithm says", but of a known type
      kinds = typing.get_args(hints[field.name])
      kind = next(k for k in kinds if k is not types.NoneType)
      config[field.name] = config_dict.placeholder(kind)
  # A known name, a GGUF file, a directory or an id in the hub's format; 'bytes'
  # is a byte-level model of `shape` with random weights.
  config.experiment = ''  # the launcher, so that a run can be opened again
  config.model = 'smollm2-135m'
  config.shape = ml_collections.ConfigDict()  # fields of PolicyConfig
  config.heldout = 200  # held-out problems in each evaluation
  config.eval_batch_size = 64  # rows answered at once
  config.warm_start_updates = 0  # supervised updates before the first step
  config.warm_start_rate = 1e-3  # the peak; see train/warm_start.py
  config.warm_start_batch = 128  # demonstrations per update
  config.data = data_choice.default()
  return config.lock()


def variant_config(
  experiment: str,
  variants: Mapping[str, Callable[[ml_collections.ConfigDict], None]],
  variant: str,
) -> ml_collections.ConfigDict:
  """The config of one variant; `config.task` is the variant's to fill.

  Args:
    experiment: name of the launcher, `experiments/NAME.py`.
    variants: functions that set what differs from the base.
  """
  if variant not in variants:
    raise ValueError(
      f'unknown variant {variant!r}; choose from {", ".join(variants)}.'
    )
  config = base_config()
  with config.unlocked():
    config.experiment = experiment
    config.task = ml_collections.ConfigDict()
    variants[variant](config)
  return config
