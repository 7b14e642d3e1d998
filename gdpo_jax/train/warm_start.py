"""A short supervised start: log-likelihood of demonstrations.

RL can only strengthen what is sampled now and then; for a model that cannot
reach the format at all, some steps on demonstrations come first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdpo_jax import sharding
from gdpo_jax.tasks.base import encode_prompts
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import Rollout


def encode_demonstrations(
  pairs: list[tuple[Any, str]], tokenizer, settings: Settings
) -> Rollout:
  """Prompts and completions as a `Rollout` whose behaviour log-probs are 0.

  Completions get an EOS; those that do not fit are cut, without one.
  """
  prompts = encode_prompts(
    [{'prompt': prompt} for prompt, _ in pairs],
    tokenizer,
    settings.max_prompt_tokens,
  )
  limit = settings.max_new_tokens
  tokens = np.full((len(pairs), limit), tokenizer.pad_id, np.int32)
  mask = np.zeros((len(pairs), limit), bool)
  for i, (_, completion) in enumerate(pairs):
    ids = [*tokenizer.encode(completion), tokenizer.eos_id][:limit]
    tokens[i, : len(ids)], mask[i, : len(ids)] = ids, True
  return Rollout(
    prompt=prompts.tokens,
    prompt_mask=prompts.mask,
    tokens=tokens,
    mask=mask,
    logp=np.zeros((len(pairs), limit), np.float32),
    ended=mask.any(-1),
  )


def warm_start(
  policy,
  params: Any,
  batches: Iterator[list[tuple[Any, str]]],
  tokenizer,
  settings: Settings,
  mesh,
  *,
  num_updates: int,
  learning_rate: float,
  report: Callable[[int, float], None] = lambda step, loss: None,
) -> Any:
  """Adam on the mean negative log-likelihood per token.

  The rate rises to `learning_rate` over the first 20 updates at most, then
  falls along a cosine to a tenth of it.

  Args:
    batches: yields lists of (prompt, completion), all of one length.
    report: called with (update, nats per token) every 50 updates.
  Returns:
    The new parameters; `params` is donated.
  """
  schedule = optax.warmup_cosine_decay_schedule(
    0.0,
    learning_rate,
    warmup_steps=min(20, num_updates // 2),
    decay_steps=max(2, num_updates),
    end_value=learning_rate / 10,
  )
  optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

  def loss_fn(params, rollout):
    with sharding.use(mesh):
      logp, _ = policy.log_probs(params, rollout)
    return -jnp.sum(jnp.where(rollout.mask, logp, 0.0)) / jnp.sum(rollout.mask)

  def update(params, opt, rollout):
    loss, grads = jax.value_and_grad(loss_fn)(params, rollout)
    step, opt = optimizer.update(grads, opt, params)
    return optax.apply_updates(params, step), opt, loss

  params = sharding.place(mesh, params)
  opt = jax.eval_shape(optimizer.init, params)
  placed = [sharding.shardings(mesh, tree) for tree in (params, opt)]
  opt = jax.jit(optimizer.init, out_shardings=placed[1])(params)
  update = jax.jit(
    update,
    donate_argnums=(0, 1),
    out_shardings=(*placed, sharding.replicated(mesh)),
  )
  for i in range(num_updates):
    rollout = encode_demonstrations(next(batches), tokenizer, settings)
    rollout = sharding.put_rows(mesh, rollout)
    params, opt, loss = update(params, opt, rollout)
    if i % 50 == 0 or i == num_updates - 1:
      report(i, float(loss))
  return params
