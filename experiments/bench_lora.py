"""LoRA against full fine-tuning: memory and time of one update, as ratios.

  python -m experiments.bench_lora                     # SmolLM2-135M
  python -m experiments.bench_lora --prompts=2 --new_tokens=64 --repeats=1

Both sides update the same policy on the same batch, in turns. Memory is what
the compiler reports for the compiled step (arguments and temporaries), and what
a checkpoint holds. The load of the machine is printed: times mean little on a
busy one, the memory does not depend on it.
"""

import os
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from gdpo_jax import sharding
from gdpo_jax.policy import lora, weights
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.train import policies
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_train_step
from gdpo_jax.types import Batch, Rollout

_PROMPTS = flags.DEFINE_integer('prompts', 8, 'Of 4 rows each.')
_NEW = flags.DEFINE_integer('new_tokens', 128, 'Per row, after 64.')
_RANK = flags.DEFINE_integer('rank', 16, 'Of the adapters.')
_TARGETS = flags.DEFINE_string('targets', '.*', 'See policy/lora.py.')
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed turns of each side.')
GROUP, PROMPT_TOKENS = 4, 64


def main(argv):
  del argv
  mesh = sharding.make_mesh()
  config, params, _ = weights.load('smollm2-135m')
  rng = np.random.default_rng(0)
  rows, new = _PROMPTS.value * GROUP, _NEW.value
  prompt = rng.integers(3, config.vocab_size, (_PROMPTS.value, PROMPT_TOKENS))
  rollout = Rollout(
    prompt=np.repeat(prompt, GROUP, axis=0).astype(np.int32),
    prompt_mask=np.ones((rows, PROMPT_TOKENS), bool),
    tokens=rng.integers(3, config.vocab_size, (rows, new)).astype(np.int32),
    mask=np.ones((rows, new), bool),
    logp=np.full((rows, new), -10.0, np.float32),
    ended=np.ones(rows, bool),
  )
  advantages = rng.standard_normal(rows).astype(np.float32)
  batch = Batch(rollout, advantages, rollout.logp, None, np.ones(rows, bool))
  batch = jax.device_put(batch, sharding.rows(mesh))

  sides, kept = {}, {}
  for name, rank in (('full', 0), ('lora', _RANK.value)):
    settings = Settings(
      algorithm='grpo',
      prompts_per_step=_PROMPTS.value,
      group_size=GROUP,
      prompts_per_micro_batch=min(2, _PROMPTS.value),
      max_prompt_tokens=PROMPT_TOKENS,
      max_new_tokens=new,
      remat='dots',
      lora_rank=rank,
      lora_targets=_TARGETS.value,
    ).resolve()
    policy = make_policy(config, jnp.float32, settings.remat)
    policy = policies.adapted(policy, settings, ())
    whole = policies.complete(policy, params, 0)
    optimizer = state_lib.make_optimizer(settings)
    state = state_lib.init_state(whole, optimizer, settings, mesh)
    frozen = [base] if (base := lora.split(whole)[1]) else []
    step = make_train_step(policy, optimizer, settings, mesh)
    compiled = step.lower(state, batch, *frozen).compile()
    memory = compiled.memory_analysis()
    checkpoint = sum(
      x.nbytes for x in jax.tree.leaves((state.params, state.opt))
    )
    kept[name] = {
      'step, MiB': memory.argument_size_in_bytes + memory.temp_size_in_bytes,
      'checkpoint, MiB': checkpoint,
    }
    sides[name] = _stateful(compiled, state, batch, frozen)

  print('load average', os.getloadavg(), flush=True)
  seconds: dict[str, list[float]] = {name: [] for name in sides}
  for turn in range(_REPEATS.value + 1):
    for name, run in sides.items():
      start = time.perf_counter()
      run()
      if turn:  # the first warms up
        seconds[name].append(time.perf_counter() - start)
  print('load average', os.getloadavg())
  print('|  | full | LoRA | LoRA / full |\n|---|---|---|---|')
  for what in kept['full']:
    a, b = (kept[name][what] / 2**20 for name in ('full', 'lora'))
    print(f'| {what} | {a:.0f} | {b:.0f} | {b / a:.2f} |')
  a, b = (statistics.median(seconds[name]) for name in ('full', 'lora'))
  print(f'| update, s | {a:.2f} | {b:.2f} | {b / a:.2f} |')


def _stateful(compiled, state, batch, frozen):
  def run():
    nonlocal state
    state, _ = compiled(state, batch, *frozen)
    jax.block_until_ready(state)

  return run


if __name__ == '__main__':
  app.run(main)
