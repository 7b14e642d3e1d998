"""Rollouts, updates and whole steps beside transformers and TRL, in one run.

  python -m experiments.benchmark --out=experiments/results  # twelve minutes
  python -m experiments.benchmark --what=rollout --repeats=5
  python -m experiments.benchmark --what=memory,scaling

The same weights, prompts and lengths on all sides: SmolLM2-135M (random weights
of its shape where the real ones are not fetched), 8 prompts x 4, 64 prompt and
128 new tokens. Sides are warmed up, then take turns; the page has medians and
spread. Needs the [bench] extra. Times mean little on busy cores, so the load is
printed as well, and stands on the page.

  rollout  all rows to the length limit
  ragged   rows end at random, each token with about the same probability
  update   gradients, clip by global norm, AdamW
  step     one whole GRPO step, each side in a process of its own (bench_step)
  memory   of the log-prob step, by size of the vocabulary (compiled, not run)
  scaling  rollouts by group size, rows, prompt and length
"""

import copy
import dataclasses
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
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
from gdpo_jax.train import accounting
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_train_step
from gdpo_jax.types import Batch, Prompts, Rollout

_WHAT = flags.DEFINE_list(
  'what',
  ['rollout', 'ragged', 'update', 'step', 'memory'],
  'What to measure: these, or scaling.',
)
_DTYPES = flags.DEFINE_list(
  'compute_dtypes',
  ['float32', 'bfloat16'],
  'Inputs of products: ours in rollouts, updates and steps; peers in rollouts.',
)
_REPEATS = flags.DEFINE_integer('repeats', 2, 'Timed turns of each side.')
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


def models(directory):
  """(config, params, torch model, where the weights come from).

  Weights, and the tokenizer where there is one, are left in the directory.
  """
  tokenizer = None
  if weights.path('smollm2-135m') is None:
    config, source = SMOLLM2, 'random weights'
    params = make_policy(config).init(jax.random.key(0))
  else:
    config, params, tokenizer = weights.load('smollm2-135m')
    source = 'SmolLM2-135M-Instruct'
  hf.save(directory, config, params, tokenizer, dtype='float32')
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32
  )
  return config, params, model, source


def take_turns(sides, repeats=None):
  """{name: seconds of each turn}; every side runs once before the clock."""
  for run in sides.values():
    run()
  seconds = {name: [] for name in sides}
  for turn in range(repeats or _REPEATS.value):
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


def random_prompts(config, num_prompts=PROMPTS, prompt_tokens=PROMPT_TOKENS):
  rng = np.random.default_rng(0)
  tokens = rng.integers(3, config.vocab_size, (num_prompts, prompt_tokens))
  return Prompts(tokens.astype(np.int32), np.ones(tokens.shape, bool), [])


def ours(config, params, prompts, sampling):
  """A function that samples with another key at every call."""
  policy, keys = make_policy(config), iter(range(10**6))

  def run():
    key = jax.random.key(next(keys))
    return jax.block_until_ready(
      generate(policy, params, prompts, key, sampling)
    )

  return run


def theirs(config, model, prompts, eos_ids=()):
  rows = torch.tensor(prompts.tokens.repeat(GROUP, axis=0))
  ends = {'eos_token_id': list(eos_ids)} if eos_ids else {}
  least = 1 if eos_ids else NEW_TOKENS

  @torch.no_grad()
  def run():
    out = model.generate(
      rows,
      attention_mask=torch.ones_like(rows),
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_new_tokens=least,
      max_new_tokens=NEW_TOKENS,
      pad_token_id=config.pad_id,
      **ends,
    )
    assert eos_ids or out.shape == (ROWS, PROMPT_TOKENS + NEW_TOKENS)
    return out[:, PROMPT_TOKENS:]

  return run


def rounded(model):
  """A copy of the torch model in bfloat16."""
  return copy.deepcopy(model).to(torch.bfloat16)


def measure_rollout(config, params, model):
  """Seconds for ROWS x NEW_TOKENS tokens, sampled at temperature 1."""
  prompts, sides = random_prompts(config), {}
  for dtype in _DTYPES.value:
    sampling = Sampling(GROUP, NEW_TOKENS, dtype=dtype)
    sides[f'gdpo_jax {dtype}'] = ours(config, params, prompts, sampling)
  first = next(iter(sides.values()))
  if 'bfloat16' in _DTYPES.value:
    sides['transformers bfloat16'] = theirs(config, rounded(model), prompts)
  sides['transformers float32'] = theirs(config, model, prompts)
  return take_turns(sides), first()


def measure_ragged(config, params, model):
  """Seconds per 1,000 tokens that count, where rows end at random.

  One in 64 tokens of the vocabulary ends a row, so that about one row in eight
  runs into the limit; every side waits for its last row.
  """
  prompts = random_prompts(config)
  ends = np.random.default_rng(2).permutation(config.vocab_size)
  ends = tuple(ends[: config.vocab_size // 64].tolist())
  speeds = {}

  def counted(name, run, lengths):
    def measured():
      start = time.perf_counter()
      tokens = lengths(run())
      spent = time.perf_counter() - start
      speeds.setdefault(name, []).append(1000 * spent / tokens)

    return measured

  def real(tokens):
    ended = np.isin(tokens.numpy(), ends)
    first = np.where(ended.any(1), ended.argmax(1) + 1, tokens.shape[1])
    return int(first.sum())

  sides = {}
  for dtype in _DTYPES.value:
    sampling = Sampling(GROUP, NEW_TOKENS, eos_ids=ends, dtype=dtype)
    run = ours(config, params, prompts, sampling)
    name = f'gdpo_jax {dtype}'
    sides[name] = counted(name, run, lambda out: int(out.mask.sum()))
  name = 'transformers float32'
  sides[name] = counted(name, theirs(config, model, prompts, ends), real)
  take_turns(sides, 1)
  return {name: values[1:] for name, values in speeds.items()}


def measure_step(directory):
  """Seconds, and peak GiB, of one GRPO step: ours in the last dtype, TRL's."""
  seconds, memory = {}, {}
  sides = ('gdpo_jax', _DTYPES.value[-1]), ('trl', 'float32')
  for side, dtype in sides:
    name = f'{side} {dtype}'
    command = [sys.executable, '-m', 'experiments.bench_step', side]
    done = subprocess.run(
      [*command, directory, dtype], capture_output=True, text=True
    )
    if done.returncode:
      print(f'  {name} failed: {done.stderr.strip().splitlines()[-1]}')
      continue
    out = json.loads(done.stdout.splitlines()[-1])
    print(f'  {name:28}', out, flush=True)
    seconds[name], memory[name] = [out['seconds']], out['peak_gib']
  return seconds, memory


def measure_memory():
  """MiB that a gradient of log-probs needs beside parameters, by vocabulary.

  From the compiler's plan for two layers of SmolLM2's width, 8 rows of 64 + 128
  tokens; the gradient of the head and the embedding are taken off.
  """
  out = {}
  for size in (2_000, 49_152, 150_000):
    config = dataclasses.replace(SMOLLM2, vocab_size=size, num_layers=2)
    policy = make_policy(config, jnp.float32, 'block')
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    rollout = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype),
      jax.tree.map(lambda x: x[None, :8], random_rollout(config)),
    )

    def loss(params, rollout, policy=policy):
      return policy.log_probs(params, rollout, group_size=GROUP)[0].sum()

    plan = jax.jit(jax.grad(loss)).lower(shapes, rollout).compile()
    temporary = plan.memory_analysis().temp_size_in_bytes
    table = 4 * size * config.width
    out[str(size)] = {
      'whole': temporary / 2**20,
      'in tables': temporary / table,
    }
  return out


def measure_scaling(config, params):
  """New tokens/s of rollouts of other shapes, the second of two calls."""
  out = {}
  for num_prompts, group, prompt_tokens, new_tokens in (
    (8, 4, 64, 128),
    (4, 8, 64, 128),
    (2, 16, 64, 128),
    (8, 4, 512, 128),
    (2, 4, 64, 128),
    (16, 4, 64, 128),
    (8, 4, 64, 512),
  ):
    for dtype in _DTYPES.value:
      prompts = random_prompts(config, num_prompts, prompt_tokens)
      run = ours(
        config, params, prompts, Sampling(group, new_tokens, dtype=dtype)
      )
      run()
      start = time.perf_counter()
      run()
      speed = num_prompts * group * new_tokens / (time.perf_counter() - start)
      name = f'{num_prompts} x {group}, {prompt_tokens} + {new_tokens}, {dtype}'
      out[name] = speed
      print(f'  {name:36}{speed:8.0f} tokens/s', flush=True)
  return out


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


UNITS = {
  'rollout': ('new tokens/s', lambda seconds: ROWS * NEW_TOKENS / seconds),
  'ragged': ('new tokens/s', lambda seconds: 1000 / seconds),
  'update': ('rows/s', lambda seconds: ROWS / seconds),
  'step': ('steps/min', lambda seconds: 60 / seconds),
}


def report(results) -> str:
  """The page: medians, spread, ratios to the last side of each part."""
  lines = [
    '# Measured speed',
    '',
    f'{results["weights"]}, {PROMPTS} prompts x {GROUP}, {PROMPT_TOKENS} + '
    f'{NEW_TOKENS} tokens, {results["cores"]} cores ({results["processor"]}); '
    f'jax {jax.__version__}, torch {torch.__version__}, transformers '
    f'{transformers.__version__}; load at start '
    f'{results["load_at_start"][0]:.1f}. Medians of {_REPEATS.value} turns '
    '(ragged and steps: one) after a warm-up, by `python -m experiments.benchmark '
    f'--what={",".join(_WHAT.value)} --repeats={_REPEATS.value}`. What is measured '
    'stands in its docstring.',
  ]
  for what, sides in results['seconds'].items():
    unit, speed = UNITS[what]
    of = 'seconds per 1,000 tokens' if what == 'ragged' else 'seconds'
    lines += [
      '',
      f'## {what.capitalize()}',
      '',
      f'| | {of} | spread | {unit} | times as fast |',
      '|---|---|---|---|---|',
    ]
    *_, base = (statistics.median(values) for values in sides.values())
    for name, values in sides.items():
      middle = statistics.median(values)
      lines.append(
        f'| {name} | {middle:.2f} | {min(values):.2f} to {max(values):.2f} | '
        f'{speed(middle):.3g} | {base / middle:.2f} |'
      )
  if peaks := results.get('peak_gib_of_step'):
    lines += ['', '| peak of a step | GiB |', '|---|---|']
    lines += [f'| {name} | {peak:.1f} |' for name, peak in peaks.items()]
  if shares := results.get('share_of_peak'):
    lines += [
      '',
      '| | TFLOP/s at the matrix peak | share of it |',
      '|---|---|---|',
    ]
    lines += [
      f'| {name} | {peak:.3f} | {share:.2f} |'
      for name, (peak, share) in shares.items()
    ]
  if memory := results.get('memory'):
    lines += [
      '',
      '## Memory of the log-prob step',
      '',
      '| vocabulary | MiB beside the parameters | in sizes of one table |',
      '|---|---|---|',
    ]
    lines += [
      f'| {size} | {row["whole"]:.0f} | {row["in tables"]:.2f} |'
      for size, row in memory.items()
    ]
  if scaling := results.get('scaling'):
    lines += [
      '',
      '## Rollouts of other shapes',
      '',
      '| prompts x group, prompt + new tokens | new tokens/s |',
      '|---|---|',
    ]
    lines += [f'| {name} | {speed:.0f} |' for name, speed in scaling.items()]
  return '\n'.join(lines) + '\n'


def share_of_peak(config, results):
  """{side: (TFLOP/s of a large product now, share that the side reached)}."""
  settings = Settings(algorithm='grpo', prompts_per_step=PROMPTS).resolve()
  work = accounting.step_work(
    config,
    settings,
    np.full(PROMPTS, PROMPT_TOKENS),
    np.full((PROMPTS, GROUP), NEW_TOKENS),
  )
  out = {}
  for what, flops in (('rollout', work.rollout), ('update', work.update)):
    for name, values in results['seconds'].get(what, {}).items():
      if name.startswith('gdpo_jax'):
        dtype = name.split()[1]
        peak = accounting.matrix_peak(config.width, config.mlp_width, dtype)
        share = flops / statistics.median(values) / peak
        out[f'{what}, {name}'] = peak / 1e12, share
  return out


def main(_):
  # Compilation is not measured: programs are kept between runs.
  cache = os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
  jax.config.update(
    'jax_compilation_cache_dir', str(pathlib.Path(cache) / 'gdpo_jax' / 'xla')
  )
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  with tempfile.TemporaryDirectory() as directory:
    results = measure(directory)
  table = report(results)
  print('\n' + table)
  if _OUT.value:
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    (out / 'benchmark.json').write_text(json.dumps(results, indent=2) + '\n')
    (out / 'benchmark.md').write_text(table)


def measure(directory):
  """All that was asked for, by name."""
  config, params, model, source = models(directory)
  results = {
    'weights': source,
    'cores': os.cpu_count(),
    'processor': platform.processor() or platform.machine(),
    'load_at_start': os.getloadavg(),
    'seconds': {},
  }
  seconds, rollout = results['seconds'], None
  for what in _WHAT.value:
    print(what, flush=True)
    if what == 'rollout':
      seconds[what], rollout = measure_rollout(config, params, model)
    elif what == 'ragged':
      seconds[what] = measure_ragged(config, params, model)
    elif what == 'update':
      if rollout is None:
        rollout = random_rollout(config)
      seconds[what], losses = measure_update(config, params, model, rollout)
      results['loss_of_first_update'] = losses
    elif what == 'step' and source == 'random weights':
      print('  left out: TRL needs a tokenizer; fetch the weights first')
    elif what == 'step':
      seconds[what], results['peak_gib_of_step'] = measure_step(directory)
    elif what == 'memory':
      results['memory'] = measure_memory()
    elif what == 'scaling':
      results['scaling'] = measure_scaling(config, params)
    else:
      raise app.UsageError(f'--what={what}: see the docstring')
  results['share_of_peak'] = share_of_peak(config, results)
  return results


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
