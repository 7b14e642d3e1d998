"""What `experiments.benchmark` times: ours, transformers, torch and the peers.

Every side is a function of no arguments that does the whole work once more. The
work is a `Shape`: P prompts x G rows, Tp prompt and Tc new tokens, or as many
new tokens per row as `lengths` says.
"""

import copy
import dataclasses
import os
import pathlib
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers

from experiments import bench_peers, shapes
from gdpo_jax import sharding
from gdpo_jax.policy import hf, packing, weights
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.sampler import generate, stream
from gdpo_jax.sampling import Sampling
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.step import make_train_step
from gdpo_jax.types import Batch, Prompts, Rollout

MICRO_BATCH_PROMPTS = 2  # 8 rows at once, on both sides
SMOLLM2 = PolicyConfig(**shapes.SMOLLM2)

Side = Callable[[], object]


@dataclasses.dataclass(frozen=True)
class Shape:
  prompts: int = 8
  group: int = 4
  prompt_tokens: int = 64
  new_tokens: int = 128

  @property
  def rows(self) -> int:
    return self.prompts * self.group

  def ragged(self) -> np.ndarray:
    """i[N], uniform from 16 to the limit."""
    rng = np.random.default_rng(2)
    return rng.integers(16, self.new_tokens, self.rows, endpoint=True)


def models(directory):
  """(config, params, torch model, where the weights come from).

  Weights are left in the directory for the peers, and the tokenizer where there
  is one.
  """
  tokenizer, given = None, weights.path('smollm2-135m')
  if given is None:
    config, source = SMOLLM2, 'random weights'
    params = make_policy(config).init(jax.random.key(0))
  else:
    config, params, tokenizer = weights.load('smollm2-135m')
    source = 'SmolLM2-135M-Instruct'
    bench_peers.write_float16(given, pathlib.Path(directory, 'float16.gguf'))
  hf.save(directory, config, params, tokenizer, dtype='float32')
  model = transformers.AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32
  )
  return config, params, model, source


def take_turns(sides: dict[str, Side], repeats: int) -> dict[str, list[float]]:
  """Seconds of each turn; every side runs once before the clock."""
  seconds = {name: [] for name in sides}
  for turn in range(repeats + 1):
    for name, run in sides.items():
      start = time.perf_counter()
      run()
      spent = time.perf_counter() - start
      if turn:
        seconds[name].append(spent)
      print(
        f'  {f"turn {turn}" if turn else "warm-up"}  {name:28}{spent:8.2f} s   '
        f'load {os.getloadavg()[0]:.1f}',
        flush=True,
      )
  return seconds


def random_prompts(config, shape: Shape) -> Prompts:
  rng = np.random.default_rng(0)
  size = (shape.prompts, shape.prompt_tokens)
  tokens = rng.integers(3, config.vocab_size, size)
  return Prompts(tokens.astype(np.int32), np.ones(size, bool), [])


def ours(config, params, shape: Shape, dtype: str, lengths=None) -> Side:
  """Samples with another key at every call."""
  policy, keys = make_policy(config), iter(range(10**6))
  prompts = random_prompts(config, shape)
  sampling = Sampling(shape.group, shape.new_tokens, dtype=dtype)
  limits = None if lengths is None else np.asarray(lengths, np.int32)

  def run():
    key = jax.random.key(next(keys))
    out = generate(policy, params, prompts, key, sampling, limits=limits)
    return jax.block_until_ready(out)

  return run


def waves(
  config, params, shape: Shape, dtype: str, in_flight: int, refilled: bool
) -> Side:
  """Ragged rows, of which the device holds `in_flight` prompts at a time.

  Refilled: a prompt enters where rows have ended. Else part by part, each until
  its longest row has ended. Longest first both times, as in training.
  """
  policy, keys = make_policy(config), iter(range(10**6))
  given, lengths = random_prompts(config, shape), shape.ragged()
  by_prompt = lengths.reshape(-1, shape.group)
  order = np.argsort(-by_prompt.max(axis=1), kind='stable')
  prompts = Prompts(given.tokens[order], given.mask[order], [])
  limits = by_prompt[order].reshape(-1)
  sampling = Sampling(shape.group, shape.new_tokens, dtype=dtype)

  def run():
    key = jax.random.key(next(keys))
    size = shape.prompts if refilled else in_flight
    for first in range(0, shape.prompts, size):
      at = slice(first, first + size)
      rows = np.arange(shape.rows).reshape(-1, shape.group)[at].reshape(-1)
      part = Prompts(prompts.tokens[at], prompts.mask[at], [])
      for out in stream(
        policy, params, part, key, sampling, rows, in_flight, None, limits[rows]
      ):
        jax.block_until_ready(out)

  return run


def rollout_megabytes(config, params) -> dict[str, float]:
  """MB of the weights that a rollout holds, by their dtype."""
  policy, out = make_policy(config), {}
  for dtype in ('float32', 'bfloat16', 'int8'):
    held = jax.eval_shape(
      lambda p, d=dtype: policy.rollout_params(p, d), params
    )
    sizes = [x.size * x.dtype.itemsize for x in jax.tree.leaves(held)]
    out[dtype] = sum(sizes) / 1e6
  return out


def with_transformers(config, model, shape: Shape, lengths=None) -> Side:
  """A batch runs until its longest row has ended."""
  prompts = random_prompts(config, shape)
  rows = torch.tensor(prompts.tokens.repeat(shape.group, axis=0))
  steps = shape.new_tokens if lengths is None else int(max(lengths))

  @torch.no_grad()
  def run():
    out = model.generate(
      rows,
      attention_mask=torch.ones_like(rows),
      do_sample=True,
      temperature=1.0,
      top_k=0,
      top_p=1.0,
      min_new_tokens=steps,
      max_new_tokens=steps,
      pad_token_id=config.pad_id,
    )
    assert out.shape == (shape.rows, shape.prompt_tokens + steps)

  return run


def rounded(model):
  """A copy of the torch model in bfloat16."""
  return copy.deepcopy(model).to(torch.bfloat16)


def peers(config, directory, shape: Shape, lengths=None) -> dict[str, Side]:
  """Those that install here; what is left out is said."""
  prompts = random_prompts(config, shape).tokens.repeat(shape.group, axis=0)
  if lengths is None:
    lengths = np.full(shape.rows, shape.new_tokens)
  job = {
    'prompts': prompts.tolist(),
    'lengths': np.asarray(lengths).tolist(),
    'config': dataclasses.asdict(config),
  }
  sides = {}
  for name, dtype in (('tunix', 'float32'), ('llama.cpp', 'float16')):
    try:
      sides[f'{name} {dtype}'] = bench_peers.Peer(name, directory, job)
    except bench_peers.Missing as error:
      print(f'  left out: {error}', flush=True)
  return sides


def update_settings(shape: Shape, dtype: str) -> Settings:
  return Settings(
    algorithm='grpo',
    prompts_per_step=shape.prompts,
    group_size=shape.group,
    prompts_per_micro_batch=MICRO_BATCH_PROMPTS,
    max_prompt_tokens=shape.prompt_tokens,
    max_new_tokens=shape.new_tokens,
    compute_dtype=dtype,
    remat='dots',
  ).resolve()


def our_update(
  config, params, shape: Shape, rollout, dtype, losses, pack_tokens=0
) -> Side:
  """Gradients in micro-batches, clip by global norm, AdamW."""
  mesh, settings = sharding.make_mesh(), update_settings(shape, dtype)
  settings = dataclasses.replace(settings, pack_tokens=pack_tokens)
  place = None
  if pack_tokens:
    lengths = rollout.mask.sum(1).reshape(-1, shape.group)
    place = packing.pack(lengths, shape.new_tokens, pack_tokens)
    print(f'  {shape.group} rows of a group in {place.shape[1]} lines')
  batch = Batch(
    rollout,
    gains(shape),
    rollout.logp,
    None,
    np.ones(shape.rows, bool),
    place=place,
  )
  batch = jax.device_put(batch, sharding.rows(mesh))
  policy = make_policy(config, jnp.dtype(dtype), settings.remat)
  optimizer = state_lib.make_optimizer(settings)
  state = state_lib.init_state(params, optimizer, settings, mesh)
  step = make_train_step(policy, optimizer, settings, mesh)

  def run():
    nonlocal state
    state, metrics = step(state, batch)
    jax.block_until_ready(state)
    losses.setdefault(f'gdpo_jax {dtype}', float(metrics['loss'].total))

  return run


def gains(shape: Shape) -> np.ndarray:
  """f32[N], advantages."""
  return np.random.default_rng(1).standard_normal(shape.rows).astype('f4')


def torch_update(model, shape: Shape, rollout, losses) -> Side:
  """The same update, written plainly."""
  tokens = torch.tensor(
    np.concatenate([rollout.prompt, rollout.tokens], axis=1), dtype=torch.long
  )
  old_logp = torch.tensor(np.asarray(rollout.logp))
  gain = torch.tensor(gains(shape))[:, None]
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-6, betas=(0.9, 0.999), weight_decay=0.0
  )
  rows = MICRO_BATCH_PROMPTS * shape.group

  def run():
    total = 0.0
    for i in range(0, shape.rows, rows):
      part = slice(i, i + rows)
      logits = model(
        tokens[part], logits_to_keep=shape.new_tokens + 1, use_cache=False
      ).logits[:, :-1]
      targets = tokens[part, -shape.new_tokens :, None]
      logp = logits.log_softmax(-1).gather(-1, targets)[..., 0]
      ratio = (logp - old_logp[part]).exp()
      clipped = ratio.clamp(0.8, 1.2)
      surrogate = torch.minimum(ratio * gain[part], clipped * gain[part])
      loss = -surrogate.mean(dim=1).sum() / shape.rows
      loss.backward()
      total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    losses.setdefault('torch float32', total)

  return run


def random_rollout(config, shape: Shape, lengths=None) -> Rollout:
  """Random tokens, and behaviour log-probs near those of a random model."""
  rng = np.random.default_rng(0)
  prompt = random_prompts(config, shape).tokens.repeat(shape.group, axis=0)
  size = (shape.rows, shape.new_tokens)
  tokens = rng.integers(3, config.vocab_size, size, np.int32)
  return Rollout(
    prompt=prompt,
    prompt_mask=np.ones(prompt.shape, bool),
    tokens=tokens,
    mask=np.ones(size, bool)
    if lengths is None
    else np.arange(shape.new_tokens) < lengths[:, None],
    logp=np.full(size, -np.log(config.vocab_size), np.float32),
    ended=np.ones(shape.rows, bool),
  )


def log_prob_memory() -> dict[str, dict[str, float]]:
  """MiB that a gradient of log-probs needs beside parameters, by vocabulary.

  From the compiler's plan for two layers of SmolLM2's width, 8 rows of 64 + 128
  tokens.
  """
  out = {}
  for size in (2_000, 49_152, 150_000):
    config = dataclasses.replace(SMOLLM2, vocab_size=size, num_layers=2)
    policy = make_policy(config, jnp.float32, 'block')
    shapes = jax.eval_shape(policy.init, jax.random.key(0))
    shape = Shape(prompts=2)
    rollout = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
      random_rollout(config, shape),
    )

    def loss(params, rollout, policy=policy, group=shape.group):
      return policy.log_probs(params, rollout, group_size=group)[0].sum()

    plan = jax.jit(jax.grad(loss)).lower(shapes, rollout).compile()
    temporary = plan.memory_analysis().temp_size_in_bytes
    out[str(size)] = {
      'MiB': temporary / 2**20,
      'tables': temporary / (4 * size * config.width),
    }
  return out


def median_of(run: Side, turns: int) -> float:
  """Seconds, after one call that may compile."""
  run()
  seconds = []
  for _ in range(turns):
    start = time.perf_counter()
    run()
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)
