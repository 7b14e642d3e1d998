"""FLOPs by hand, the peak, the sentence about memory."""

import pathlib
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.train import accounting
from gdpo_jax.train.settings import Settings

CONFIG = PolicyConfig(
  family='llama',
  vocab_size=10,
  width=4,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=2,
  mlp_width=6,
)


def test_forward_by_hand():
  """qkv 4 x 8, o 4 x 4, mlp 3 x 4 x 6: 120 per layer; scores and mix 4 each."""
  assert accounting.forward_flops(CONFIG, 3, 0, 0) == 2 * 2 * 120 * 3
  assert accounting.forward_flops(CONFIG, 0, 5, 0) == 2 * 2 * (4 + 4) * 5
  assert accounting.forward_flops(CONFIG, 0, 0, 7) == 2 * 10 * 4 * 7


def test_step_by_hand():
  """One prompt of 2 tokens, answers of 1 and 3: it is read once for both."""
  settings = Settings(prompts_per_step=1, group_size=2).resolve()
  args = (CONFIG, settings, np.array([2]), np.array([[1, 3]]))
  # prompt 1 + 2; answers 3, and 3 + 4 + 5
  flops = accounting.forward_flops(CONFIG, 6, 3 + 3 + 12, 4)
  assert accounting.step_work(*args) == (flops, 0, 3 * flops)
  assert accounting.step_work(*args, 2, 0.5) == (2 * flops, 0, 1.5 * flops)


def test_xla_counts_the_same():
  """Within 2% of the compiler's own count for a pass without a mask."""
  from gdpo_jax.policy.policy import make_policy

  config = PolicyConfig(
    family='llama',
    vocab_size=64,
    width=64,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=256,
  )
  policy = make_policy(config)
  params = jax.eval_shape(policy.init, jax.random.key(0))
  tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
  mask = jax.ShapeDtypeStruct((2, 32), jnp.bool)
  cost = policy.logits.lower(params, tokens, mask).cost_analysis()
  # it computes what causality masks: every token sees all 32
  flops = accounting.forward_flops(config, 64, 64 * 32, 64)
  assert flops == pytest.approx(cost['flops'], rel=0.1)


def test_peak_and_utilisation():
  peak = accounting.matrix_peak(64, 96, 'float32')
  assert 1e8 < peak < 1e16
  assert accounting.matrix_peak(64, 96, 'float32') == peak  # measured once
  config = PolicyConfig(**{**vars(CONFIG), 'width': 64, 'mlp_width': 96})
  work = accounting.Work(rollout=peak, score=0.0, update=2 * peak)
  seconds = {'step': 10.0, 'generate': 4.0, 'update': 5.0}
  row = accounting.utilisation(config, Settings().resolve(), work, seconds)
  n = jax.device_count()
  assert row['throughput/mfu'] == pytest.approx(0.3 / n)
  assert row['throughput/mfu_rollout'] == pytest.approx(0.25 / n)
  assert row['throughput/mfu_update'] == pytest.approx(0.4 / n)


def test_peak_memory_grows_with_what_is_held():
  before = accounting.peak_memory()['memory/host_peak']
  held = np.ones(2**26, np.float32)  # 0.25 GiB
  after = accounting.peak_memory()['memory/host_peak']
  assert 0.01 < before <= after and held.sum() > 0
  assert after > 0.25


@pytest.mark.parametrize(
  ('part', 'changes', 'said'),
  [
    ('update', {}, 'lower prompts_per_micro_batch .now 8.*remat.*block'),
    ('update', {'prompts_per_micro_batch': 1}, 'lower group_size .now 4'),
    (
      'generate',
      {'prompts_per_rollout': 2},
      'lower prompts_per_rollout .now 2',
    ),
    ('generate', {'prompts_per_rollout': 1}, 'group_size.*rollout_dtype'),
  ],
)
def test_out_of_memory_says_what_to_lower(part, changes, said):
  """A real refusal of the device: 4 PiB."""
  settings = Settings(**changes).resolve()
  with (
    pytest.raises(MemoryError, match=said) as caught,
    accounting.out_of_memory_named(part, settings),
  ):
    jnp.ones((2**50,), jnp.float32).block_until_ready()
  assert isinstance(caught.value.__cause__, jax.errors.JaxRuntimeError)


def test_other_errors_pass():
  with (
    pytest.raises(jax.errors.JaxRuntimeError, match='on purpose'),
    accounting.out_of_memory_named('update', Settings().resolve()),
  ):
    raise jax.errors.JaxRuntimeError('INTERNAL: on purpose')


def test_trace(tmp_path):
  with accounting.trace(tmp_path / 'no', False):
    pass
  assert not (tmp_path / 'no').exists()
  with accounting.trace(tmp_path / 'yes', True):
    jnp.ones(3).sum().block_until_ready()
  assert list((tmp_path / 'yes').rglob('*.xplane.pb'))


def printed_by(code):
  """What a process of its own prints."""
  done = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=pathlib.Path(__file__).parents[2],
  )
  return done.stdout


def test_the_peak_is_of_this_process_and_not_of_its_parent():
  """A child of a large process starts with nothing of it."""
  held = np.ones(2**27)  # 1 GiB
  code = 'from gdpo_jax.train import accounting as a; print(a.host_peak())'
  assert held.nbytes < accounting.host_peak()
  assert 0 < int(printed_by(code)) < held.nbytes


@pytest.mark.skipif(
  sys.platform != 'linux' or 'glibc' not in platform.libc_ver()[0],
  reason='malloc_trim is of glibc',
)
def test_freed_memory_goes_back():
  """64 MiB in blocks that glibc does not map by themselves, one kept on top."""
  code = """
import ctypes
from gdpo_jax.train import accounting
def resident():
  status = open('/proc/self/status').read()
  return int(status.split('VmRSS:')[1].split()[0]) / 1024
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [c.malloc(1 << 16) for _ in range(1024)]
for b in blocks:
  ctypes.memset(ctypes.c_void_p(b), 1, 1 << 16)
for b in blocks[:-1]:
  c.free(b)
held = resident()
accounting.give_back()
print(held - resident())
"""
  assert float(printed_by(code)) > 50
