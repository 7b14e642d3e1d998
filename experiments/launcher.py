"""What the launchers share: config -> model, task, settings -> run -> table.

The only place where `ml_collections` and `absl` meet the library. A config is
one flat, locked `ConfigDict`: every field of `train.settings.Settings`, then
the experiment's own (model, task, warm start).
"""

import dataclasses
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import data_choice
import jax
import ml_collections
import numpy as np
from absl import app, flags, logging
from ml_collections import config_flags

from gdpo_jax import processes, sampler, sharding
from gdpo_jax.policy import hf, lora, weights
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.hf import Pretrained
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.tasks.base import Task
from gdpo_jax.train import loop, policies, report, state, step, warm_start
from gdpo_jax.train.controllers import Controllers
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import Batch, Prompts, Rollout

# Of rewards, where a step is only built and sub-policies need some.
NAMES = ('first', 'second')
SETTINGS = tuple(field.name for field in dataclasses.fields(Settings))


def use_compilation_cache() -> None:
  """Compiled programs are kept between runs, so that the second starts fast."""
  root = os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
  jax.config.update(
    'jax_compilation_cache_dir', str(pathlib.Path(root) / 'gdpo_jax' / 'xla')
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def settings_of(config: ml_collections.ConfigDict) -> Settings:
  """The library's part of a config, resolved and checked."""
  return Settings(**{name: config[name] for name in SETTINGS}).resolve()


def model_config(config: ml_collections.ConfigDict) -> PolicyConfig | None:
  """The model's shape where the config states it (`config.shape`)."""
  shape = config.shape.to_dict()
  return PolicyConfig(**shape) if shape else None


def task_function(
  experiment: str,
) -> Callable[[ml_collections.ConfigDict], Task]:
  """`task_of` of `experiments/NAME.py`, found by path: `code` is also a module
  of the standard library."""
  here = pathlib.Path(__file__).parent
  path = here / f'{experiment}.py'
  known = sorted(p.stem for p in (here / 'configs').glob('*.py'))
  if experiment not in known:
    raise ValueError(
      f'no experiment {experiment!r}; there are {", ".join(known)}.'
    )
  spec = importlib.util.spec_from_file_location(f'{experiment}_launcher', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.task_of


def mesh_of(settings: Settings) -> jax.sharding.Mesh:
  return sharding.make_mesh(
    settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor
  )


def load_model(config: ml_collections.ConfigDict) -> Pretrained:
  """Pretrained weights, or a byte-level model of the config's shape.

  Read or made in the parts that each device keeps: no process ever holds the
  whole of a model that is split.
  """
  mesh = mesh_of(settings_of(config))
  if config.model != 'bytes':
    return weights.load(
      config.model, lambda shapes: sharding.shardings(mesh, shapes)
    )
  tokenizer = byte_tokenizer()
  shape = dataclasses.replace(
    model_config(config), eos_ids=tokenizer.eos_ids, pad_id=tokenizer.pad_id
  )
  params = sharding.born_sharded(
    mesh, make_policy(shape).init, jax.random.key(config.seed)
  )
  return Pretrained(shape, params, tokenizer)


def policy_of(config: PolicyConfig, settings: Settings):
  return make_policy(
    config, compute_dtype=settings.compute_dtype, remat=settings.remat
  )


def run(
  model: Pretrained,
  task: Task,
  settings: Settings,
  config: ml_collections.ConfigDict,
  directory: pathlib.Path,
  progress: Progress | None = None,
) -> loop.Result:
  """Warm start where asked, train, then the table and the curves."""
  first = processes.is_first()
  progress = (progress if first else None) or Progress(quiet=not first)
  directory.mkdir(parents=True, exist_ok=True)
  if first:
    (directory / 'config.json').write_text(config.to_json(indent=2))
  policy = policy_of(model.config, settings)
  params = model.params
  if config.warm_start_updates:
    params = warm_started(
      policy, model, task, settings, config, directory, progress
    )
  result = loop.train(
    policy,
    params,
    model.tokenizer,
    task,
    settings,
    directory,
    heldout=task.heldout[: config.heldout],
    eval_batch_size=config.eval_batch_size,
    progress=progress,
  )
  if not first:
    return result
  names = [reward.name for reward in task.rewards]
  report.curves(result.history, names, directory / 'curves.png')
  progress.finish(report.table(result.history, names), directory)
  return result


def warm_started(policy, model, task, settings, config, directory, progress):
  """Supervised start, kept beside the run so that a restart does not repeat it."""
  kept, mesh = directory / 'warm_start', mesh_of(settings)
  if processes.any_of(kept.exists()):
    return hf.load(kept, lambda shapes: sharding.shardings(mesh, shapes))[1]

  def batches() -> Iterator[list[tuple[Any, str]]]:
    rng = np.random.default_rng((settings.seed, 1))
    while True:
      yield task.demonstrate(int(rng.integers(2**31)), config.warm_start_batch)

  params = warm_start.warm_start(
    policy,
    model.params,
    batches(),
    model.tokenizer,
    settings,
    mesh,
    num_updates=config.warm_start_updates,
    learning_rate=config.warm_start_rate,
    report=lambda i, loss: progress.note(
      f'warm start {i}/{config.warm_start_updates}  {loss:.3f} nats/token'
    ),
  )
  whole = sharding.to_host(params)
  if processes.is_first():
    partial = directory / 'warm_start.partial'
    hf.save(partial, model.config, whole, dtype='float32')
    partial.rename(kept)
  processes.barrier('the warm start is saved')
  return params


def experiment(
  task_of: Callable[[ml_collections.ConfigDict], Task],
) -> None:
  """The whole of a launcher: its flags, then `main`."""
  config = config_flags.DEFINE_config_file(
    'config',
    None,
    'FILE[:VARIANT], such as experiments/configs/math_len.py:tiny.',
  )
  run_dir = flags.DEFINE_string(
    'run_dir', '', 'Where everything is written; runs/TASK by default.'
  )
  only_build = flags.DEFINE_bool(
    'dry_run', False, 'Only build the whole step abstractly, print its sizes.'
  )
  quiet = flags.DEFINE_bool(
    'quiet', False, 'Say nothing but alarms and where the run is.'
  )
  as_json = flags.DEFINE_bool(
    'json', False, 'Say everything as JSON, one object per line.'
  )
  flags.mark_flag_as_required('config')

  def run_it(argv):
    if len(argv) > 1:
      raise app.UsageError(f'unexpected arguments {argv[1:]}.')
    main(
      config.value,
      task_of,
      run_dir.value,
      only_build.value,
      Progress(quiet=quiet.value, as_json=as_json.value),
    )

  start(run_it)


def start(main: Callable[[list[str]], None]) -> None:
  """`app.run`, in which a mistake of the user is a sentence, not a traceback."""

  def guarded(argv):
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file
    # transformers is here for tokenizers and templates, which need no torch
    os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')
    try:
      with processes.together():
        main(argv)
    except ValueError as error:
      if os.environ.get('GDPO_TRACEBACK'):
        raise
      print(f'error: {error}', file=sys.stderr)
      sys.exit(2)

  try:
    app.run(guarded)
  except (AttributeError, KeyError) as error:
    # a field that no config has; ml_collections names the nearest one
    told = str(error.args[0]).replace('\\n', '\n').replace("\\'", "'")
    told = told.strip('"\'').replace("'\n", '\n')
    print(f'error: no such setting: {told}', file=sys.stderr)
    sys.exit(2)


def main(
  config: ml_collections.ConfigDict,
  task_of: Callable[[ml_collections.ConfigDict], Task],
  run_dir: str,
  only_build: bool,
  progress: Progress | None = None,
) -> None:
  """Checks everything that can be checked, then loads, then runs."""
  settings = settings_of(config)
  if only_build:
    shape = model_config(config) or load_model(config).config
    for name, value in dry_run(shape, settings).items():
      print(f'{name:24s} {value:12.2f}')
    return
  use_compilation_cache()
  task = data_choice.apply(task_of(config), config.data)
  # schedules and constraints name rewards: what they cannot be is told now
  Controllers(
    settings,
    [reward.name for reward in task.rewards],
    [reward.weight for reward in task.rewards],
  )
  directory = pathlib.Path(run_dir or f'runs/{task.name}')
  run(load_model(config), task, settings, config, directory, progress)


def dry_run(config: PolicyConfig, settings: Settings) -> dict[str, float]:
  """Builds the whole step abstractly: no weights, no memory, no accelerator.

  Sampler, log-probs and optimizer step are traced for the settings' own
  shapes on a mesh of this machine's devices; returns sizes in GiB (whole job,
  not per device).
  """
  policy = policies.adapted(policy_of(config, settings), settings, NAMES)
  optimizer = state.make_optimizer(settings, policy.heads)
  mesh = sharding.make_mesh(
    settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor
  )
  params = jax.eval_shape(policy.init, jax.random.key(0))
  train_state = state.abstract_state(policy, optimizer, settings)
  rows = settings.prompts_per_update * settings.group_size
  batch = abstract_batch(settings, rows)
  _, frozen = lora.split(params)
  jax.eval_shape(
    step.make_train_step(policy, optimizer, settings, mesh),
    train_state,
    batch,
    *([frozen] if frozen else []),
  )
  sampling = sampler.Sampling(
    settings.group_size, settings.max_new_tokens, settings.temperature
  )
  prompt = (settings.prompts_per_rollout, settings.max_prompt_tokens)
  jax.eval_shape(
    lambda params, tokens, mask, key: sampler.generate(
      policy, params, Prompts(tokens, mask, []), key, sampling
    ),
    params,
    jax.ShapeDtypeStruct(prompt, np.int32),
    jax.ShapeDtypeStruct(prompt, np.bool_),
    jax.random.key(0),
  )

  def gib(tree):
    leaves = jax.tree.leaves(tree)
    return sum(x.size * x.dtype.itemsize for x in leaves) / 2**30

  cache = (
    2
    * config.num_layers
    * config.num_kv_heads
    * config.head_dim
    * settings.prompts_per_rollout
    * settings.group_size
    * (settings.max_prompt_tokens + settings.max_new_tokens)
    * 4
    / 2**30
  )
  return {
    'parameters, millions': config.num_params / 1e6,
    'parameters, GiB': gib(params),
    'optimizer, GiB': gib(train_state.opt),
    'cache of the sampler, GiB': cache,
    'rows sampled at once': settings.prompts_per_rollout * settings.group_size,
    'rows of a step': settings.prompts_per_step * settings.group_size,
    'updates per step': settings.updates_per_step,
  }


def abstract_batch(settings: Settings, rows: int) -> Batch:
  """Shapes of one mini-batch."""
  prompt, new = settings.max_prompt_tokens, settings.max_new_tokens

  def array(*shape, dtype='float32'):
    return jax.ShapeDtypeStruct(shape, dtype)

  logp = array(rows, new)
  return Batch(
    rollout=Rollout(
      prompt=array(rows, prompt, dtype='int32'),
      prompt_mask=array(rows, prompt, dtype='bool'),
      tokens=array(rows, new, dtype='int32'),
      mask=array(rows, new, dtype='bool'),
      logp=logp,
      ended=array(rows, dtype='bool'),
    ),
    advantages=array(rows),
    old_logp=logp,
    ref_logp=logp if settings.kl_coef else None,
    row_valid=array(rows, dtype='bool'),
    old_values=logp if settings.has_value_head else None,
    returns=logp if settings.has_value_head else None,
    head_advantages=array(rows, len(NAMES))
    if settings.subpolicy_rank
    else None,
  )
