"""What a step costs: FLOPs from shapes, the machine's peak, memory, a trace.

FLOPs are those that the step needs (model FLOPs, as in PaLM, arXiv:2204.02311),
counted on real tokens: padding, recomputation and rows kept for the shape are
work of the machine, not of the model. The prompt of a group counts once.
"""

import contextlib
import ctypes
import functools
import pathlib
import re
import resource
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.products import dense
from gdpo_jax.train.settings import Settings

# Rows of the product that measures the peak: as many as a micro-batch has
# tokens, and enough to fill the units of an accelerator.
PEAK_ROWS = 4096


class Work(NamedTuple):
  """FLOPs of one step, by what they are for."""

  rollout: float
  score: float  # log-probs of a reference, values, the trainer's own log-probs
  update: float


def forward_flops(
  config: PolicyConfig, tokens: float, attended: float, outputs: float
) -> float:
  """FLOPs of one pass, 2 for a multiplication and an addition.

  Args:
    tokens: that go through the layers.
    attended: sum over those tokens of the number of tokens that each sees.
    outputs: tokens whose logits are computed.
  """
  heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
  width, inner = config.width, config.num_heads * config.head_dim
  matrices = width * heads + inner * width + 3 * width * config.mlp_width
  return (
    2.0 * config.num_layers * (matrices * tokens + 2 * inner * attended)
    + 2.0 * config.vocab_size * width * outputs
  )


def step_work(
  config: PolicyConfig,
  settings: Settings,
  prompt_lengths: np.ndarray,
  lengths: np.ndarray,
  rounds: int = 1,
  groups_in_loss: float = 1.0,
) -> Work:
  """The work of one step on groups of prompts [P] and completions [P, G].

  Args:
    prompt_lengths: i[P], tokens.
    lengths: i[P, G], tokens, EOS included.
    rounds: of sampling; those that were not kept count as those that were.
    groups_in_loss: share of groups with a gradient.
  """
  prompt, answer = (
    np.asarray(x, np.float64) for x in (prompt_lengths, lengths)
  )
  # A prompt of n tokens sees 1 + ... + n; token t of an answer sees its prompt,
  # the tokens before it and itself.
  seen = (prompt * (prompt + 1) / 2).sum()
  seen += (answer * prompt[:, None] + answer * (answer + 1) / 2).sum()
  tokens = prompt.sum() + answer.sum()
  flops = forward_flops(config, tokens, seen, answer.sum())
  passes = int(bool(settings.kl_coef)) + int(settings.has_value_head)
  if settings.importance_cap is not None and settings.updates_per_step > 1:
    passes += 1
  # Backward is twice forward; LoRA needs no gradients of the weights.
  whole = 2 if settings.lora_rank else 3
  return Work(
    rollout=flops * rounds,
    score=flops * passes,
    update=flops * whole * settings.epochs_per_batch * groups_in_loss,
  )


@functools.cache
def matrix_peak(width: int, mlp_width: int, dtype: str) -> float:
  """FLOP/s of one device on a product of the model's own shape, measured.

  The best of ten [4096, D] x [D, F], inputs in `dtype`, float32 sums; once per
  process.
  """
  x = jnp.ones((PEAK_ROWS, width), jnp.float32)
  w = jnp.ones((width, mlp_width), jnp.float32)
  # The result goes where the last one was: memory that is new to the process
  # halved the peak of some runs.
  product = jax.jit(
    lambda x, w, last: dense(x, w, jnp.dtype(dtype)),
    donate_argnums=2,
    keep_unused=True,
  )
  y = product(x, w, jnp.zeros((PEAK_ROWS, mlp_width), jnp.float32))
  seconds = []
  for _ in range(10):
    y.block_until_ready()
    start = time.perf_counter()
    y = product(x, w, y).block_until_ready()
    seconds.append(time.perf_counter() - start)
  return 2.0 * PEAK_ROWS * width * mlp_width / min(seconds)


def utilisation(
  config: PolicyConfig, settings: Settings, work: Work, seconds
) -> dict[str, float]:
  """TFLOP/s and share of the measured peak: the step, its rollout, its update.

  Args:
    seconds: by part, with 'step', 'generate' and 'update'.
  """
  shape = (config.width, config.mlp_width)
  # int8 weights are multiplied in bfloat16
  low = settings.rollout_dtype != 'float32'
  sampling = matrix_peak(*shape, 'bfloat16' if low else 'float32')
  training = matrix_peak(*shape, settings.compute_dtype)
  devices = jax.device_count()
  # The step at its peak: each part at the peak of its own dtype.
  at_peak = work.rollout / sampling + (work.score + work.update) / training
  return {
    'throughput/tflops': sum(work) / seconds['step'] / 1e12,
    'throughput/mfu': at_peak / devices / seconds['step'],
    'throughput/mfu_rollout': work.rollout
    / sampling
    / devices
    / seconds['generate'],
    'throughput/mfu_update': work.update
    / training
    / devices
    / seconds['update'],
    'flops/rollout': work.rollout,
    'flops/update': work.update,
  }


def host_peak() -> int:
  """Bytes that this process held at most so far."""
  try:
    # ru_maxrss of a child begins with that of the process that started it
    status = pathlib.Path('/proc/self/status').read_text()
    return int(re.search(r'VmHWM:\s*(\d+) kB', status)[1]) * 1024
  except (OSError, TypeError):
    unit = 1 if sys.platform == 'darwin' else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def give_back() -> None:
  """Freed memory to the operating system, where the C library would keep it.

  glibc keeps what a rollout has freed while the update asks for more elsewhere:
  1 GiB of a step of SmolLM2 on a CPU. Takes some 30 ms there.
  """
  if sys.platform == 'linux' and jax.default_backend() == 'cpu':
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)  # musl has none
    if trim is not None:
      trim(0)


def peak_memory() -> dict[str, float]:
  """GiB at most so far: of this process, and of its fullest device if known."""
  out = {'memory/host_peak': host_peak() / 2**30}
  stats = [d.memory_stats() or {} for d in jax.local_devices()]
  peaks = [s['peak_bytes_in_use'] for s in stats if 'peak_bytes_in_use' in s]
  if peaks:
    out['memory/device_peak'] = max(peaks) / 2**30
  return out


@contextlib.contextmanager
def trace(directory, wanted: bool):
  """Writes a JAX trace of what runs inside, for TensorBoard or Perfetto."""
  if not wanted:
    yield
    return
  options = jax.profiler.ProfileOptions()
  options.python_tracer_level = 0  # else a step of Python fills the trace
  with jax.profiler.trace(str(directory), profiler_options=options):
    yield


@contextlib.contextmanager
def out_of_memory_named(part: str, settings: Settings):
  """Ends an out-of-memory error in a sentence that names what to lower.

  Args:
    part: 'generate' or 'update'.
  Raises:
    MemoryError: from the error of XLA.
  """
  try:
    yield
  except (jax.errors.JaxRuntimeError, MemoryError) as error:
    if not re.search(
      'RESOURCE_EXHAUSTED|out of memory', str(error) or 'out of memory', re.I
    ):
      raise
    lower = {
      'generate': [
        ('prompts_per_rollout', settings.prompts_per_rollout, 1),
        ('group_size', settings.group_size, 2),
        ('max_new_tokens', settings.max_new_tokens, 1),
      ],
      'update': [
        ('prompts_per_micro_batch', settings.prompts_per_micro_batch, 1),
        ('group_size', settings.group_size, 2),
        ('max_new_tokens', settings.max_new_tokens, 1),
      ],
    }[part]
    name, value, _ = next(x for x in lower if x[1] > x[2] or x is lower[-1])
    advice = f'lower {name} (now {value})'
    if part == 'update' and settings.remat != 'block':
      advice += f", or set remat to 'block' (now {settings.remat!r})"
    if part == 'generate' and settings.rollout_dtype == 'float32':
      advice += ", or set rollout_dtype to 'bfloat16'"
    raise MemoryError(
      f'the device ran out of memory in the part {part!r} of a step; {advice}.'
    ) from error
