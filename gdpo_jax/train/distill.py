"""One policy from teachers that are each good at one reward.

On-policy distillation: the student answers, the teachers score its tokens, and
the student moves towards them where it goes (the reverse KL, as in
arXiv:2306.13649). Per token the advantage is

  log p_teachers - log p_student,   log p_teachers = sum_k share_k log p_k

the log of the teachers' geometric mean, up to its constant: what all of them
find likely. Its mean over the batch is taken off, as a baseline. It goes through the training step of RL, clip and all; nothing else
is new.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import sampler, sharding
from gdpo_jax.policy import lora
from gdpo_jax.tasks.base import PromptIterator
from gdpo_jax.train import metrics, policies
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_train_step
from gdpo_jax.types import Batch


def distill(
  policy,
  params: Any,
  teachers: Sequence[tuple[Any, Any]],
  shares: Sequence[float],
  tokenizer,
  examples: Sequence[dict[str, Any]],
  settings: Settings,
  report: Callable[[int, dict[str, float]], None] = lambda step, row: None,
) -> Any:
  """Trains `params` on its own answers for `settings.num_steps` steps.

  Args:
    policy, params: the student.
    teachers: (policy, params) of each, over the same vocabulary.
    shares: of the teachers, not negative; their sum is made 1.
    examples: records with 'prompt'.
    settings: shapes, rates, loss, seed and mesh; one update per step. The
      choice of advantage and all about rewards is not looked at.
    report: called with (step, metrics); 'distill/gap' is the mean of
      log p_student - log p_teachers, in nats per token, which falls.
  Returns:
    the student's parameters, adapters merged.
  Raises:
    ValueError: teachers and shares that do not fit.
  """
  shares = np.asarray(shares, np.float32)
  if len(shares) != len(teachers) or not len(teachers):
    raise ValueError(
      f'{len(teachers)} teachers and {len(shares)} shares; give one for each.'
    )
  if (shares < 0).any() or not shares.sum() > 0:
    raise ValueError(f'shares are not negative and not all 0, got {shares}.')
  sizes = {p.config.vocab_size for p, _ in (*teachers, (policy, params))}
  if len(sizes) > 1:
    raise ValueError(f'student and teachers have vocabularies of {sizes}.')
  shares = shares / shares.sum()
  settings = dataclasses.replace(
    settings.resolve(),
    subpolicy_rank=0,
    epochs_per_batch=1,
    prompts_per_update=settings.prompts_per_step,
  ).resolve()
  mesh = sharding.make_mesh(
    settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor
  )
  given, policy = policy, policies.adapted(policy, settings, ())
  params = policies.complete(policy, params, settings.seed)
  optimizer = state_lib.make_optimizer(settings)
  state = state_lib.init_state(params, optimizer, settings, mesh)
  _, base = lora.split(params)
  base = jax.device_put(base, sharding.shardings(mesh, base))
  train_step = make_train_step(policy, optimizer, settings, mesh)
  sampling = sampler.Sampling(
    settings.group_size,
    settings.max_new_tokens,
    settings.temperature,
    eos_ids=tuple(tokenizer.eos_ids),
    pad_id=tokenizer.pad_id,
  )
  prompts = PromptIterator(
    list(examples),
    tokenizer,
    settings.prompts_per_step,
    settings.max_prompt_tokens,
    settings.seed,
  )

  @jax.jit
  def gaps(weights, rollout):
    taught = sum(
      share
      * teacher.log_probs(
        w,
        rollout,
        group_size=settings.group_size,
        temperature=settings.temperature,
      )[0]
      for share, (teacher, _), w in zip(shares, teachers, weights)
    )
    return jnp.where(rollout.mask, rollout.logp - taught, 0.0)

  weights = [
    jax.device_put(w, sharding.shardings(mesh, w)) for _, w in teachers
  ]
  frozen = (base,) if base else ()
  for step in range(settings.num_steps):
    key = jax.random.fold_in(state.key, step)
    rollout = sampler.generate(
      policy, {**base, **state.params}, prompts.next(), key, sampling
    )
    rollout = jax.device_put(rollout, sharding.rows(mesh))
    gap = gaps(weights, rollout)
    mean = jnp.sum(gap) / jnp.sum(rollout.mask)
    batch = Batch(
      rollout=rollout,
      advantages=jnp.where(rollout.mask, mean - gap, 0.0),
      old_logp=rollout.logp,
      ref_logp=None,
      row_valid=jnp.ones(len(rollout.mask), bool),
    )
    batch = jax.device_put(batch, sharding.rows(mesh))
    state, update = train_step(state, batch, *frozen)
    state = state._replace(step=state.step + 1)
    row = metrics.to_host(update)
    row['distill/gap'] = float(mean)
    row['completions/mean_length'] = float(rollout.mask.sum(-1).mean())
    report(step + 1, row)
  return policies.finished(given, policy, {**base, **state.params}, settings)[1]
