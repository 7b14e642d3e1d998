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

import gdpo_jax
from gdpo_jax import processes, sampler, sharding
from gdpo_jax.policy import lora
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks.base import PromptIterator, Task
from gdpo_jax.train import accounting, policies
from gdpo_jax.train import metrics as metrics_lib
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.advantage import diagnosis, make_gradient_cosines
from gdpo_jax.train.ahead import Ahead
from gdpo_jax.train.checkpoint import Checkpointer, Retention, changed_fields
from gdpo_jax.train.controllers import Controllers
from gdpo_jax.train.evaluate import Evaluation, evaluate
from gdpo_jax.train.experience import Collector, minibatches
from gdpo_jax.train.online import Online
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.snapshots import Snapshots
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
  policy: Any  # with sub-policies, where the settings have them
  params: Any  # all of them, adapters merged


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

  With several processes all of them call this together, with the same
  arguments; they sample and score their shares of each batch, and the first
  one writes what is not a checkpoint.

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
  first = processes.is_first()
  progress = progress or Progress(quiet=not first)
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
  given = policy
  policy = policies.adapted(policy, settings, declared)
  params = policies.complete(policy, params, settings.seed)
  optimizer = state_lib.make_optimizer(settings, policy.heads)
  controllers = Controllers(
    settings, declared, [r.weight for r in task.rewards]
  )
  params = sharding.place(mesh, params)
  state = state_lib.init_state(params, optimizer, settings, mesh, controllers)
  # Under LoRA the base, which is a reference policy for free; else nothing.
  _, base = lora.split(params)
  start = base
  if settings.kl_coef and not base and 'reference' not in state.controllers:
    start = params
  frozen = (base,) if base else ()
  train_step = make_train_step(policy, optimizer, settings, mesh)

  with contextlib.ExitStack() as stack:
    pipeline = stack.enter_context(
      Pipeline(task.rewards, sum_counts=processes.total)
    )
    pipeline.check_columns(set(task.train[0]) - {'prompt'})
    checkpointer = Checkpointer(
      directory / 'checkpoints',
      _retention(settings, declared),
      settings.save_every,
    )
    stack.callback(checkpointer.close)
    snapshots = Snapshots(directory, settings, mesh)
    online = None
    if settings.online_head:
      online = Online(policy, tokenizer, settings, mesh)
    restored = checkpointer.restore_latest(state)
    if restored:
      state, record, flight = restored
      _same_run(record['run'], _run(settings, policy, task))
      if base:
        policies.check_base(record['base'], base)
      if online:
        online.consumed = record['online']
      iterator.restore(record['cursor'])
      pipeline.restore_mutes(record['mutes'])
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
    ahead = stack.enter_context(Ahead(collect, base, mesh))
    if restored and record.get('flight'):
      key = jax.random.fold_in(state.key, record['flight']['step'])
      ahead.relaunch(record['flight'], flight, state.controllers, key)
    snapshots.rewind(int(state.step))
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
      ahead.settle()
      result = evaluate(
        policy,
        {**base, **state.params},
        tokenizer,
        pipeline,
        heldout,
        greedy,
        settings.max_prompt_tokens,
        min(eval_batch_size, len(heldout)),
        mesh,
        step,
        stop,
      )
      if result is None:  # SIGTERM: save and go, the next run evaluates
        return None
      watch.held_out(step, result.summary())
      if first:
        result.write(directory / 'heldout' / f'{step}.jsonl')
      return result

    if not restored:
      held_out(0, 'before training')
    for step in range(int(state.step), settings.num_steps):
      timer = metrics_lib.Timer()
      key = jax.random.fold_in(state.key, step)
      reference = state.controllers.get('reference')
      if reference is None:
        reference = snapshots.reference(step, state.params, start)
      traced = settings.profile == step + 1
      with accounting.trace(directory / 'trace' / 'collect', traced):
        behaviour = {**base, **snapshots.behaviour(step, key, state.params)}
        gathered = ahead.take(timer) or collect.gather(
          behaviour, state.controllers, key, step, timer
        )
        experience = collect.finish(
          gathered,
          {**base, **state.params} if settings.off_policy_steps else behaviour,
          {**base, **reference},
          state.controllers,
          timer,
        )
      if settings.off_policy_steps and step + 1 < settings.num_steps:
        ahead.launch(
          step + 1,
          state.params,
          state.controllers,
          jax.random.fold_in(state.key, step + 1),
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
      accounting.give_back()
      with (
        timer('update'),
        accounting.trace(directory / 'trace' / 'update', traced),
        accounting.out_of_memory_named('update', settings),
      ):
        for minibatch in minibatches(experience.batch, settings, key, mesh):
          state, update = train_step(state, minibatch, *frozen)
          new = metrics_lib.merge(new, update)
        row |= metrics_lib.to_host(new)
      if online:
        state, seen = online.step(step + 1, state, base)
        row |= seen
      row |= snapshots.after(step + 1, state.params)
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
      cursor = gathered.cursor
      row['epoch'] = (
        cursor['epoch'] + cursor['position'] / iterator.num_examples
      )
      row |= metrics_lib.throughput_metrics(
        row, experience, policy.config, settings
      )
      done = step + 1
      watch.step(done, row, experience)
      state = watch.adjust(state)
      evaluation = None
      if settings.eval_every and done % settings.eval_every == 0:
        evaluation = held_out(done, f'step {done}')
      last = done == settings.num_steps or watch.should_stop or stop()
      if checkpointer.due(done) or last:
        checkpointer.save(
          done,
          state,
          {
            'cursor': cursor,
            'flight': ahead.record(),
            'online': online.consumed if online else None,
            'base': policies.fingerprint(base) if base else None,
            'mutes': pipeline.mutes,
            'metrics': row | _prefixed('eval/', evaluation),
            'run': _run(settings, policy, task),
            'versions': {
              'gdpo_jax': gdpo_jax.__version__,
              'jax': jax.__version__,
            },
          },
          ahead.arrays(),
        )
      if after_step:
        after_step(done, row)
      if last:
        break
    checkpointer.wait()
    final, log, history = None, directory / metrics_lib.JSONL, []
    evaluated = first and any(
      row['step'] == settings.num_steps
      and 'eval/completions/mean_length' in row
      for row in metrics_lib.read_jsonl(log)
    )
    if not (watch.should_stop or stop() or processes.any_of(evaluated)):
      final = held_out(int(state.step), 'after training')
    if first:
      history = metrics_lib.read_jsonl(log)
  return Result(
    state,
    history,
    final,
    directory,
    *policies.finished(given, policy, {**base, **state.params}, settings),
  )


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


def _retention(settings: Settings, rewards: tuple[str, ...]) -> Retention:
  return Retention(
    last=settings.keep_checkpoints,
    every=settings.keep_every,
    best=settings.keep_best,
    pareto=tuple(f'rewards/{name}/mean' for name in rewards)
    if settings.keep_pareto
    else (),
  )


def _prefixed(prefix: str, evaluation: Evaluation | None) -> dict[str, float]:
  summary = evaluation.summary() if evaluation else {}
  return {prefix + name: value for name, value in summary.items()}


def _run(settings: Settings, policy, task: Task) -> dict[str, Any]:
  """What makes a run this run and no other, as plain JSON."""
  run = {
    'settings': dataclasses.asdict(settings),
    'model': dataclasses.asdict(policy.config),
    'rewards': {
      reward.name: {'weight': reward.weight, 'condition': reward.condition}
      for reward in task.rewards
    },
  }
  return json.loads(json.dumps(run, default=str))


# What a longer run, another machine or another way to look at it changes.
_FREE = (
  'num_steps',
  'eval_every',
  'save_every',
  'keep_checkpoints',
  'keep_every',
  'keep_best',
  'keep_pareto',
  'samples_every',
  'monitor_actions',
  'trackers',
  'profile',
  'mesh_data',
  'mesh_fsdp',
  'mesh_tensor',
)


def _same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
  """Compares field by field; refuses what would make it another run."""
  changed = changed_fields(saved, now)
  refused = []
  for name, (old, new) in changed.items():
    said = f'{name}: {old!r} -> {new!r}'
    if name.removeprefix('settings.') in _FREE:
      _log.warning('continuing with another setting, %s', said)
    else:
      refused.append(said)
  if refused:
    raise ValueError(
      'the run directory holds a checkpoint of another run '
      f'({"; ".join(refused)}); choose another directory, or set them back.'
    )


@contextlib.contextmanager
def _finish_on_sigterm():
  """Yields a function that says whether SIGTERM asked the run to end.

  Asked by one of several processes, all of them end: they call it together.
  The step in flight is finished and saved. Off the main thread, where Python
  allows no handler, SIGTERM keeps its usual meaning.
  """
  asked = []
  try:
    before = signal.signal(signal.SIGTERM, lambda *_: asked.append(time.time()))
  except ValueError:
    yield lambda: processes.any_of(False)
    return
  try:
    yield lambda: processes.any_of(bool(asked))
  finally:
    signal.signal(signal.SIGTERM, before)
