"""One whole GRPO step in a process of its own, for time and peak memory.

  python -m experiments.bench_step gdpo_jax DIRECTORY DTYPE 3
  python -m experiments.bench_step trl DIRECTORY float32 3

Samples 8 prompts x 4 rows x 128 tokens, scores them with a function that costs
nothing, and makes one AdamW step in micro-batches of 8 rows, without KL. The
directory holds weights and tokenizer in Hugging Face format. The last line is
JSON: seconds of so many steps (the first, in which ours compiles, is said
apart), those of sampling where known, and the peak of the resident size in GiB,
compilation and loading left out: from the end of the first step on, both sides.
`experiments.benchmark` calls it for both sides.
"""

import json
import pathlib
import sys
import time

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS, MICRO_ROWS = 8, 4, 61, 128, 8
LEARNING_RATE = 1e-6


def forget_peak():
  """The peak of the resident size begins anew (Linux: man 5 proc)."""
  pathlib.Path('/proc/self/clear_refs').write_text('5')


def texts(encode):
  """PROMPTS texts of about PROMPT_TOKENS tokens each."""
  out = []
  for i in range(PROMPTS):
    text = f'Problem {i}.'
    while len(encode(text)) < PROMPT_TOKENS:
      text += f' A box holds {len(text) % 7 + i} red balls.'
    out.append(text)
  return out


def gdpo_jax(directory: str, dtype: str, repeats: int):
  import jax
  import jax.numpy as jnp
  import numpy as np

  from gdpo_jax import sampler, sharding
  from gdpo_jax.objectives import advantages
  from gdpo_jax.policy import hf
  from gdpo_jax.policy.policy import make_policy
  from gdpo_jax.policy.tokenizer import Tokenizer
  from gdpo_jax.train import accounting
  from gdpo_jax.train import state as state_lib
  from gdpo_jax.train.settings import Settings
  from gdpo_jax.train.step import make_train_step
  from gdpo_jax.types import Batch, Prompts

  config, params = hf.load(directory)
  tokenizer = Tokenizer.from_hf(directory)
  settings = Settings(
    algorithm='grpo',
    prompts_per_step=PROMPTS,
    group_size=GROUP,
    prompts_per_micro_batch=MICRO_ROWS // GROUP,
    max_new_tokens=NEW_TOKENS,
    learning_rate=LEARNING_RATE,
    compute_dtype=dtype,
    rollout_dtype=dtype,
    remat='dots',
  ).resolve()
  ids = [tokenizer.encode(t)[-PROMPT_TOKENS:] for t in texts(tokenizer.encode)]
  prompts = Prompts(np.array(ids, np.int32), np.ones((PROMPTS, 61), bool), [])
  policy = make_policy(config, dtype, settings.remat)
  mesh = sharding.make_mesh()
  optimizer = state_lib.make_optimizer(settings)
  state = state_lib.init_state(params, optimizer, settings, mesh)
  del params
  step = make_train_step(policy, optimizer, settings, mesh)
  sampling = sampler.Sampling(GROUP, NEW_TOKENS, dtype=dtype)
  out = {'seconds': [], 'sampling': []}
  for turn in range(repeats + 1):
    start = time.perf_counter()
    rollout = sampler.generate(
      policy, state.params, prompts, jax.random.key(turn), sampling
    )
    jax.block_until_ready(rollout)
    sampled = time.perf_counter() - start
    rewards = (
      jnp.asarray(rollout.tokens).mean(axis=1).reshape(PROMPTS, GROUP, 1)
    )
    a = advantages.grpo(rewards, jnp.ones(rewards.shape, bool), jnp.ones(1))
    batch = Batch(
      rollout,
      a.reshape(-1),
      rollout.logp,
      None,
      np.ones(len(rollout.mask), bool),
    )
    accounting.give_back()  # as train.loop does
    state, _ = step(state, jax.device_put(batch, sharding.rows(mesh)))
    jax.block_until_ready(state)
    spent = time.perf_counter() - start
    if turn:
      out['seconds'].append(spent)
      out['sampling'].append(sampled)
    else:
      out['first'] = spent
      forget_peak()
  out['peak_gib'] = accounting.peak_memory()['memory/host_peak']
  return out


def trl(directory: str, dtype: str, repeats: int):
  import torch
  import transformers
  from datasets import Dataset
  from trl import GRPOConfig, GRPOTrainer

  from gdpo_jax.train import accounting

  seconds = []

  class Clock(transformers.TrainerCallback):
    def on_step_begin(self, *args, **kwargs):
      seconds.append(-time.perf_counter())

    def on_step_end(self, *args, **kwargs):
      seconds[-1] += time.perf_counter()
      if len(seconds) == 1:
        forget_peak()

  tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=getattr(torch, dtype)
  )
  trainer = GRPOTrainer(
    model=model,
    processing_class=tokenizer,
    reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
    train_dataset=Dataset.from_dict({'prompt': texts(tokenizer.encode)}),
    args=GRPOConfig(
      output_dir=f'{directory}/trl',
      use_cpu=True,
      bf16=False,
      per_device_train_batch_size=MICRO_ROWS,
      gradient_accumulation_steps=PROMPTS * GROUP // MICRO_ROWS,
      num_generations=GROUP,
      max_completion_length=NEW_TOKENS,
      generation_kwargs={'min_new_tokens': NEW_TOKENS},
      learning_rate=LEARNING_RATE,
      beta=0.0,
      max_steps=repeats + 1,  # the first is left out, as of ours
      save_strategy='no',
      report_to='none',
      disable_tqdm=True,
    ),
    callbacks=[Clock()],
  )
  trainer.train()
  peak = accounting.host_peak() / 2**30
  return {'first': seconds[0], 'seconds': seconds[1:], 'peak_gib': peak}


if __name__ == '__main__':
  side, where, precision, turns = sys.argv[1:]
  sides = {'gdpo_jax': gdpo_jax, 'trl': trl}
  print(json.dumps(sides[side](where, precision, int(turns))))
