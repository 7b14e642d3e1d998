"""The same numbers on one device, on meshes, and on two processes."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = [sys.executable, str(ROOT / 'tests' / 'parallel_program.py')]


def environment(devices, **more):
  return {
    **os.environ,
    'PYTHONPATH': str(ROOT),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}',
    **more,
  }


def run(processes, timeout=900):
  """Waits for all; every one has to end well."""
  try:
    outputs = [process.communicate(timeout=timeout)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
  for process, output in zip(processes, outputs):
    assert process.returncode == 0, output[-4000:]
  return outputs


def start(command, devices, **more):
  return subprocess.Popen(
    command,
    env=environment(devices, **more),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def two_processes(arguments, devices):
  return two_processes_of([*PROGRAM, *arguments], devices)


def two_processes_of(command, devices):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  return [
    start(
      command,
      devices,
      GDPO_COORDINATOR=f'localhost:{port}',
      GDPO_NUM_PROCESSES='2',
      GDPO_PROCESS_ID=str(i),
    )
    for i in range(2)
  ]


@pytest.fixture(scope='module')
def all_meshes(tmp_path_factory):
  """Numbers by name, for every mesh of one process, and of two."""
  directory = tmp_path_factory.mktemp('parallel')
  names = ['1,1,1', '4,1,1', '1,4,1', '1,1,4', '2,2,2']
  run([start([*PROGRAM, str(directory / 'one'), *names], 8)])
  run(two_processes([str(directory / 'two'), '4,1,1', '2,2,1', '2,1,2'], 2))
  return {
    path.name.removesuffix('.npz'): dict(np.load(path))
    for path in directory.iterdir()
  }


def relative(x, expected):
  return np.linalg.norm(x - expected) / np.linalg.norm(expected)


def check(measured):
  expected = measured.pop('one.1,1,1')
  assert expected['sampled/tokens'].shape == (32, 12)
  lengths = expected['sampled/mask'].sum(1)
  assert 0 < lengths.min() < lengths.max()  # some rows ended, some did not
  for mesh, found in measured.items():
    assert found.keys() == expected.keys()
    for name, value in found.items():
      where = f'{name} on {mesh}'
      want = expected[name]
      if name.startswith('as_the_table_says/'):
        assert value.all(), where
      elif name == 'traces_after_first':
        assert value == 0, where
      elif name in ('sampled/tokens', 'sampled/mask', 'sampled/ended'):
        np.testing.assert_array_equal(value, want, err_msg=where)
      elif name == 'advantages':
        np.testing.assert_allclose(value, want, rtol=1e-6, err_msg=where)
      elif name == 'logits' or name.startswith('gradients/'):
        assert relative(value, want) < 1e-5, where
      elif name.startswith('params/'):
        assert relative(value, want) < 1e-4, where


@pytest.mark.slow
def test_every_mesh_and_two_processes_agree_with_one_device(all_meshes):
  check(dict(all_meshes))


TALK = """
import json, sys
import jax, numpy as np
from gdpo_jax import processes, sharding
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Pipeline, Reward
from gdpo_jax.train.scoring import Scoring
from gdpo_jax.types import Prompts, Rollout

def spell(completions, log_metric, **_):
  log_metric('rows', len(completions))
  return [None if text == 'b' else float(ord(text[0])) for text in completions]

def score(pipeline, tokenizer, letters, group):
  tokens = np.array([tokenizer.encode(x) for x in letters], np.int32)
  full = np.ones(tokens.shape, bool)
  rollout = Rollout(tokens, full, tokens, full, tokens * 0.0, full[:, 0])
  examples = [{'prompt': 'p'}] * (len(letters) // group)
  prompts = Prompts(tokens, full, examples)
  return Scoring(pipeline, tokenizer, prompts, rollout, 0).result()

with processes.together():
  me = jax.process_index()
  out = {}
  mine = processes.share(5)
  out['shares'] = processes.gather_shares(
    np.arange(10.0).reshape(5, 2)[mine], 5).tolist()
  raw = np.float32([[0, 0, 1, 1], [10, 10, 11, 11]][me])
  out['std'] = float(processes.gather_shares(raw, 8).std(ddof=1))
  out['total'] = processes.total(np.array([1, me])).tolist()
  out['any'] = [processes.any_of(me == 1), processes.any_of(False)]
  out['json'] = processes.gather_json({'me': me, 'text': 'x' * me})
  mesh = sharding.make_mesh()
  x = sharding.put_rows(mesh, np.arange(8.0))
  out['local'] = [s.data.tolist() for s in x.addressable_shards]
  out['rows'] = str(sharding.local_rows(mesh, 8))
  out['host'] = sharding.to_host(x).tolist()
  with Pipeline([Reward(spell)], sum_counts=processes.total) as pipeline:
    for name, letters in (('three', 'abcdef'), ('one', 'ab')):
      texts, scores = score(pipeline, byte_tokenizer(), letters, 2)
      out[name] = [texts, str(scores.values[:, 0].tolist()), scores.reasons,
                   scores.metrics]
  print('said ' + json.dumps(out))
"""


def test_two_processes_share_and_gather_unevenly():
  """Five rows over two, three prompts over two, and one prompt for both."""
  talking = two_processes_of([sys.executable, '-c', TALK], 2)
  outputs = run(talking, timeout=300)
  said = [
    json.loads(line.removeprefix('said '))
    for output in outputs
    for line in output.splitlines()
    if line.startswith('said ')
  ]
  local, rows = zip(*((out.pop('local'), out.pop('rows')) for out in said))
  assert local == ([[0, 1], [2, 3]], [[4, 5], [6, 7]])
  assert rows == ('slice(0, 4, None)', 'slice(4, 8, None)')
  assert said[0] == said[1]
  out = said[0]
  assert out['shares'] == np.arange(10.0).reshape(5, 2).tolist()
  # of all rows, not a mean of the 0.577 that each process would see
  assert out['std'] == pytest.approx(5.3719, abs=1e-4)
  assert out['total'] == [2, 1] and out['any'] == [True, False]
  assert out['json'] == [{'me': 0, 'text': ''}, {'me': 1, 'text': 'x'}]
  assert out['host'] == list(range(8))
  texts, values, reasons, metrics = out['three']
  assert texts == list('abcdef')
  assert values == '[97.0, nan, 99.0, 100.0, 101.0, 102.0]'
  assert reasons == {'spell': {'none': 1}}
  assert metrics == {'rows': pytest.approx((4 * 4 + 2 * 2) / 6)}
  texts, values, reasons, _ = out['one']
  assert (texts, values) == (['a', 'b'], '[97.0, nan]')
  assert reasons == {'spell': {'none': 1}}
