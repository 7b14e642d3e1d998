"""Rollout and update side by side with transformers on torch, in one run.

  python -m experiments.benchmark                  # both, float32 and bfloat16
  python -m experiments.benchmark --what=rollout --repeats=5 --out=DIR

The same weights, prompts and lengths on both sides: SmolLM2-135M (random
weights of its shape where the real ones are not fetched), 8 prompts x 4, 64
prompt and 128 new tokens, no early stop. Both sides are warmed up, then take
turns; the table has medians. Needs the [bench] extra. About ten minutes on two
idle cores; times mean little on busy ones, so the load is printed as well.
"""

import json
import os
import pathlib
import platform
import statistics
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags

from gdpo_jax import sharding
from gdpo_jax.policy import hf, weights
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.sampler import Sampling, generate
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_train_step
from gdpo_jax.types import Batch, Prompts, Rollout

_WHAT = flags.DEFINE_list('what', ['rollout', 'update'], 'What to measure.')
_DTYPES = flags.DEFINE_list(
  'compute_dtypes', ['float32', 'bfloat16'], 'Product inputs of our update.'
)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'Timed turns of each side.')
_OUT = flags.DEFINE_string(
  'out', None, 'Directory for benchmark.json and benchmark.md.'
)

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 4, 64, 128
MICRO_BATCH_PROMPTS = 2  # 8 rows at once, on both sides
ROWS = PROMPTS * GROUP
SMOLLM2 = PolicyConfig(
  family='llama',
  vocab_size=49152,
  width=576,
  num_layers=30,
  num_heads=9,
  num_kv_heads=3,
  head_dim=64,
  mlp_width=1536,
  max_positions=8192,
  rope_base=1e5,
  norm_eps=1e-5,
  tied=True,
  eos_ids=(2,),
)


def models():
  """(config, params, torch model, where the weights come from)."""
  if weights.path('smollm2-135m') is None:
    config, source = SMOLLM2, 'random weights'
    params = make_policy(config).init(jax.random.key(0))
  else:
    config, params, _ = weights.load('smollm2-135m')
    source = 'SmolLM2-135M-Instruct'
  with tempfile.TemporaryDirectory() as directory:
    hf.save(directory, config, params, dtype='float32')
    model = transformers.AutoModelForCausalLM.from_pretrained(
      directory, dtype=torch.float32
    )
  return config, params, model, source


def take_turns(sides):
  """{name: seconds of each turn}; every side runs once before the clock."""
  for run in sides.values():
    run()
  seconds = {name: [] for name in sides}
  for turn in range(_REPEATS.value):
    for name, run in sides.items():
      start = time.perf_counter()
      run()
      seconds[name].append(time.perf_counter() - start)
      print(
        f'  turn {turn}  {name:28}{seconds[name][-1]:8.2f} s   '
        f'load {os.getloadavg()[0]:.1f}',
        flush=True,
      )
  return seconds


def measure_rollout(config, params, model):
  """Seconds for ROWS x NEW_TOKENS tokens, sampled at temperature 1."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, config.vocab_size, (PROMPTS, PROMPT_TOKENS))
  prompts = Prompts(tokens.astype(np.int32), np.ones(tokens.shape, bool), [])
  policy, keys = make_policy(config), iter(range(10**6))
  sampling = Sampling(GROUP, NEW_TOKENS)

  def ours():
    rollout = generate(
      policy, params, prompts, jax.random.key(next(keys)), sampling
    )
    return jax.block_until_ready(rollout)

  rows = torch.tensor(tokens.repeat(GROUP, axis=0))

  @torch.no_grad()
  def theirs():
    out = model.generate(
      rows,
      attention_mask=torch.ones_like(rows),
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_new_tokens=NEW_TOKENS,
      max_new_tokens=NEW_TOKENS,
      pad_token_id=config.pad_id,
    )
    assert out.shape == (ROWS, PROMPT_TOKENS + NEW_TOKENS)

  sides = {'gdpo_jax float32': ours, 'transformers float32': theirs}
  return take_turns(sides), ours()


def measure_update(config, params, model, rollout: Rollout):
  """Seconds for one GRPO update: gradients, clip by global norm, AdamW."""
  mesh = sharding.make_mesh()
  advantages = np.random.default_rng(1).standard_normal(ROWS).astype('f4')
  batch = Batch(rollout, advantages, rollout.logp, None, np.ones(ROWS, bool))
  batch = jax.device_put(batch, sharding.rows(mesh))
  sides, losses = {}, {}
  for dtype in _DTYPES.value:
    settings = Settings(
      algorithm='grpo',
      prompts_per_step=PROMPTS,
      group_size=GROUP,
      prompts_per_micro_batch=MICRO_BATCH_PROMPTS,
      max_prompt_tokens=PROMPT_TOKENS,
      max_new_tokens=NEW_TOKENS,
      compute_dtype=dtype,
      remat='dots',
    ).resolve()
    policy = make_policy(config, jnp.dtype(dtype), settings.remat)
    optimizer = state_lib.make_optimizer(settings)
    state = state_lib.init_state(params, optimizer, settings, mesh)
    step = make_train_step(policy, optimizer, settings, mesh)
    sides[f'gdpo_jax {dtype}'] = _stateful(step, state, batch, losses, dtype)

  tokens = torch.tensor(
    np.concatenate([rollout.prompt, rollout.tokens], axis=1), dtype=torch.long
  )
  old_logp = torch.tensor(np.asarray(rollout.logp))
  gain = torch.tensor(advantages)[:, None]
  optimizer_t = torch.optim.AdamW(
    model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0
  )
  rows = MICRO_BATCH_PROMPTS * GROUP

  def theirs():
    total = 0.0
    for i in range(0, ROWS, rows):
      part = slice(i, i + rows)
      logits = model(
        tokens[part], logits_to_keep=NEW_TOKENS + 1, use_cache=False
      ).logits[:, :-1]
      targets = tokens[part, -NEW_TOKENS:, None]
      logp = logits.log_softmax(-1).gather(-1, targets)[..., 0]
      ratio = (logp - old_logp[part]).exp()
      clipped = ratio.clamp(0.8, 1.2)
      surrogate = torch.minimum(ratio * gain[part], clipped * gain[part])
      loss = -surrogate.mean(dim=1).sum() / ROWS
      loss.backward()
      total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer_t.step()
    optimizer_t.zero_grad()
    losses.setdefault('torch', total)

  sides['torch float32'] = theirs
  seconds = take_turns(sides)
  print('  loss of the first update', losses)
  return seconds, losses


def _stateful(step, state, batch, losses, name):
  def run():
    nonlocal state
    state, metrics = step(state, batch)
    jax.block_until_ready(state)
    losses.setdefault(name, float(metrics['loss'].total))

  return run


def report(results) -> str:
  """A Markdown table of medians and ratios to the last side of each part."""
  lines = [
    f'{results["weights"]}, {PROMPTS} prompts x {GROUP}, {PROMPT_TOKENS} + '
    f'{NEW_TOKENS} tokens, {results["cores"]} cores ({results["processor"]}); '
    f'jax {jax.__version__}, torch {torch.__version__}, transformers '
    f'{transformers.__version__}; medians of {_REPEATS.value}.',
    '',
    '| | seconds | spread | new tokens/s | times as fast |',
    '|---|---|---|---|---|',
  ]
  for what, sides in results['seconds'].items():
    *_, base = (statistics.median(values) for values in sides.values())
    for name, values in sides.items():
      middle = statistics.median(values)
      speed = f'{ROWS * NEW_TOKENS / middle:.0f}' if what == 'rollout' else ''
      lines.append(
        f'| {what}, {name} | {middle:.2f} | {min(values):.2f} to '
        f'{max(values):.2f} | {speed} | {base / middle:.2f} |'
      )
  return '\n'.join(lines) + '\n'


def main(_):
  config, params, model, source = models()
  results = {
    'weights': source,
    'cores': os.cpu_count(),
    'processor': platform.processor() or platform.machine(),
    'load_at_start': os.getloadavg(),
    'seconds': {},
  }
  rollout = None
  if 'rollout' in _WHAT.value:
    print('rollout')
    results['seconds']['rollout'], rollout = measure_rollout(
      config, params, model
    )
  if 'update' in _WHAT.value:
    print('update')
    if rollout is None:
      rollout = random_rollout(config)
    seconds, losses = measure_update(config, params, model, rollout)
    results['seconds']['update'] = seconds
    results['loss_of_first_update'] = losses
  table = report(results)
  print('\n' + table)
  if _OUT.value:
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / 'benchmark.json').write_text(json.dumps(results, indent=2) + '\n')
    (out / 'benchmark.md').write_text(table)


def random_rollout(config) -> Rollout:
  """Random tokens, and behaviour log-probs near those of a random model."""
  rng = np.random.default_rng(0)
  prompt = rng.integers(3, config.vocab_size, (PROMPTS, PROMPT_TOKENS))
  prompt = prompt.repeat(GROUP, axis=0).astype(np.int32)
  tokens = rng.integers(3, config.vocab_size, (ROWS, NEW_TOKENS), np.int32)
  return Rollout(
    prompt=prompt,
    prompt_mask=np.ones(prompt.shape, bool),
    tokens=tokens,
    mask=np.ones(tokens.shape, bool),
    logp=np.full(tokens.shape, -np.log(config.vocab_size), np.float32),
    ended=np.ones(ROWS, bool),
  )


if __name__ == '__main__':
  app.run(main)
