"""The training loop, to be read like the algorithm box of a paper."""

import contextlib
import dataclasses
import json
import logging
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import gdpo_jax
from gdpo_jax import sampler, sharding
from gdpo_jax.policy import lora
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks.base import PromptIterator, Task
from gdpo_jax.train import metrics as metrics_lib
from gdpo_jax.train import policies
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.advantage import diagnosis, make_gradient_cosines
from gdpo_jax.train.checkpoint import Checkpointer
from gdpo_jax.train.controllers import Controllers
from gdpo_jax.train.evaluate import Evaluation, evaluate
from gdpo_jax.train.experience import Collector, minibatches
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_loss, make_train_step
from gdpo_jax.train.watch import Watch
from gdpo_jax.types import TrainState

_log = logging.getLogger(__name__)


class Result(NamedTuple):
  """What a finished run leaves behind."""

  state: TrainState
  history: list[dict[str, Any]]  # the rows of metrics.jsonl
  final: Evaluation | None  # held-out answers, where this call evaluated last
  directory: pathlib.Path


def train(
  policy,
  params: Any,
  tokenizer,
  task: Task,
  settings: Settings,
  directory: pathlib.Path,
  *,
  heldout: list[dict[str, Any]] | None = None,
  eval_batch_size: int = 64,
  progress: Progress | None = None,
  after_step: Callable[[int, dict[str, float]], None] | None = None,
) -> Result:
  """Trains `params` on `task`; continues a run that `directory` holds.

  Args:
    policy, params, tokenizer: what is trained; `params` is also the reference
      policy where `settings.kl_coef` is not 0. Under LoRA it stays as it is,
      and the result's state has the part beside it.
    settings: plain or resolved.
    directory: report.html, metrics.jsonl and the files beside it (see
      `watch`), checkpoints/ and heldout/STEP.jsonl (answers to held-out
      problems) are written here.
    heldout: problems for evaluation, the task's own by default; [] for none.
    after_step: called with (step, row) when a step is written.
  Raises:
    ValueError: settings that cannot work, or a checkpoint of another run.
  """
  settings = settings.resolve()
  mesh = sharding.make_mesh(
    settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor
  )
  _check_rows(settings, mesh)
  progress = progress or Progress()
  heldout = task.heldout if heldout is None else heldout
  declared = tuple(reward.name for reward in task.rewards)
  sampling = sampler.Sampling(
    group_size=settings.group_size,
    max_new_tokens=settings.max_new_tokens,
    temperature=settings.temperature,
    eos_ids=tuple(tokenizer.eos_ids),
    pad_id=tokenizer.pad_id,
    dtype=settings.rollout_dtype,
  )
  greedy = dataclasses.replace(sampling, group_size=1, temperature=0.0)
  iterator = PromptIterator(
    task.train,
    tokenizer,
    settings.prompts_per_step,
    settings.max_prompt_tokens,
    settings.seed,
    task.curriculum,
  )
  policy = policies.adapted(policy, settings)
  params = policies.complete(policy, params, settings.seed)
  optimizer = state_lib.make_optimizer(settings)
  controllers = Controllers(
    settings, declared, [r.weight for r in task.rewards]
  )
  state = state_lib.init_state(params, optimizer, settings, mesh, controllers)
  # Under LoRA the base, which is a reference policy for free; else nothing.
  _, base = lora.split(params)
  base = jax.device_put(base, sharding.shardings(mesh, base))
  start = base
  if settings.kl_coef and not base and 'reference' not in state.controllers:
    start = jax.device_put(params, sharding.shardings(mesh, params))
  frozen = (base,) if base else ()
  train_step = make_train_step(policy, optimizer, settings, mesh)
  num_params = sum(x.size for x in jax.tree.leaves(params))

  with contextlib.ExitStack() as stack:
    pipeline = stack.enter_context(
      Pipeline(task.rewards, sum_counts=_sum_over_processes)
    )
    pipeline.check_columns(set(task.train[0]) - {'prompt'})
    checkpointer = Checkpointer(
      directory / 'checkpoints', settings.keep_checkpoints, settings.save_every
    )
    stack.callback(checkpointer.close)
    restored = checkpointer.restore_latest(state)
    if restored:
      state, record = restored
      _same_run(record['settings'], settings)
      if base:
        policies.check_base(record['base'], base)
      iterator.restore(record['cursor'])
      _log.info('continuing %s at step %d', directory, int(state.step))
    collect = Collector(
      policy,
      tokenizer,
      iterator,
      pipeline,
      sampling,
      controllers,
      settings,
      mesh,
    )
    names = collect.names
    watch = Watch(
      directory,
      task.rewards,
      names,
      settings,
      progress,
      resume_step=int(state.step) if restored else -1,
    )
    stack.callback(watch.close)
    plain = dataclasses.replace(
      settings, kl_coef=0.0, entropy_coef=0.0, advantage='grpo'
    )
    gradient_cosines = make_gradient_cosines(
      make_loss(policy, plain), settings, names
    )
    stop = stack.enter_context(_finish_on_sigterm())
    progress.start(settings.num_steps, int(state.step), names)
    stack.callback(progress.stop)

    def held_out(step: int, label: str) -> Evaluation | None:
      if not heldout:
        return None
      progress.note(f'evaluating {len(heldout)} held-out problems, {label}')
      result = evaluate(
        policy,
        {**base, **state.params},
        tokenizer,
        pipeline,
        heldout,
        greedy,
        settings.max_prompt_tokens,
        min(eval_batch_size, len(heldout)),
        step,
        stop,
      )
      if result is None:  # SIGTERM: save and go, the next run evaluates
        return None
      watch.held_out(step, result.summary())
      result.write(directory / 'heldout' / f'{step}.jsonl')
      return result

    if not restored:
      held_out(0, 'before training')
    for step in range(int(state.step), settings.num_steps):
      timer = metrics_lib.Timer()
      key = jax.random.fold_in(state.key, step)
      reference = state.controllers.get('reference')
      experience = collect(
        {**base, **state.params},
        start if reference is None else {**base, **reference},
        state.controllers,
        key,
        step,
        timer,
      )
      row = watch.row(experience, timer)
      g = experience.groups
      shaped = (g.rewards, g.valid, experience.weights)
      with timer('diagnosis'):
        row |= diagnosis(settings, names, *shaped, g.held)
        every = settings.gradient_cosine_every
        if every and step % every == 0:
          row |= gradient_cosines(
            state.params, base, state.controllers, experience.batch, *shaped
          )
      new: dict[str, Any] = {}
      with timer('update'):
        for minibatch in minibatches(experience.batch, settings, key, mesh):
          state, update = train_step(state, minibatch, *frozen)
          new = metrics_lib.merge(new, update)
        row |= metrics_lib.to_host(new)
      row |= metrics_lib.controller_metrics(settings, state.controllers)
      k = len(declared)
      state = state._replace(
        step=state.step + 1,
        controllers=controllers.advance(
          state.controllers,
          state.params,
          state.step + 1,
          g.values[..., :k],
          g.conditioned[..., :k],
          g.valid[..., :k],
          None if experience.kl_nats is None else experience.kl_nats.mean(),
        ),
      )
      row |= timer.summary()
      cursor = iterator.cursor
      row['epoch'] = (
        cursor['epoch'] + cursor['position'] / iterator.num_examples
      )
      row |= metrics_lib.throughput_metrics(
        row, experience, num_params, settings
      )
      done = step + 1
      watch.step(done, row, experience)
      state = watch.adjust(state)
      if settings.eval_every and done % settings.eval_every == 0:
        held_out(done, f'step {done}')
      last = done == settings.num_steps or stop() or watch.should_stop
      if checkpointer.due(done) or last:
        checkpointer.save(
          done,
          state,
          {
            'cursor': cursor,
            'settings': dataclasses.asdict(settings),
            'base': policies.fingerprint(base) if base else None,
            'versions': {
              'gdpo_jax': gdpo_jax.__version__,
              'jax': jax.__version__,
            },
          },
        )
      if after_step:
        after_step(done, row)
      if last:
        break
    checkpointer.wait()
    history = metrics_lib.read_jsonl(directory / metrics_lib.JSONL)
    evaluated = any(
      row['step'] == settings.num_steps
      and 'eval/completions/mean_length' in row
      for row in history
    )
    final = None
    if not (stop() or watch.should_stop or evaluated):
      final = held_out(int(state.step), 'after training')
      history = metrics_lib.read_jsonl(directory / metrics_lib.JSONL)
  return Result(state, history, final, directory)


def _sum_over_processes(counts: np.ndarray) -> np.ndarray:
  """Failed calls of all processes, so that each mutes the same rewards."""
  if jax.process_count() == 1:
    return counts
  return np.asarray(multihost_utils.process_allgather(counts)).sum(axis=0)


def _check_rows(settings: Settings, mesh) -> None:
  shards = sharding.num_row_shards(mesh)
  rows = settings.prompts_per_update * settings.group_size
  if rows % shards:
    raise ValueError(
      f'an update of {rows} rows (prompts_per_update '
      f'{settings.prompts_per_update} * group_size {settings.group_size}) '
      f'cannot be spread over {shards} devices; make it a multiple, or lower '
      'mesh_data * mesh_fsdp.'
    )


def _same_run(saved: dict[str, Any], settings: Settings) -> None:
  """Only what a longer run changes may differ from the checkpoint's settings."""
  free = {
    'num_steps',
    'eval_every',
    'save_every',
    'keep_checkpoints',
    'samples_every',
    'monitor_actions',
    'trackers',
  }
  now = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
  saved = json.loads(json.dumps(saved, default=str))
  changed = [
    f'{name}: {saved.get(name)!r} -> {value!r}'
    for name, value in now.items()
    if name not in free and saved.get(name) != value
  ]
  if changed:
    raise ValueError(
      'the run directory holds a checkpoint with other settings '
      f'({"; ".join(changed)}); choose another directory, or set them back.'
    )


@contextlib.contextmanager
def _finish_on_sigterm():
  """Yields a function that says whether SIGTERM asked the run to end.

  The step in flight is finished and saved. Off the main thread, where Python
  allows no handler, SIGTERM keeps its usual meaning.
  """
  asked = []
  try:
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(time.time()))
  except ValueError:
    yield lambda: False
    return
  try:
    yield lambda: bool(asked)
  finally:
    signal.signal(signal.SIGTERM, before)
