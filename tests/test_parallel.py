"""The same numbers on one device, on meshes, and on two processes."""

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


def start(arguments, devices, **more):
  return subprocess.Popen(
    [*PROGRAM, *arguments],
    env=environment(devices, **more),
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def two_processes(arguments, devices):
  with socket.socket() as free:
    free.bind(('localhost', 0))
    port = free.getsockname()[1]
  return [
    start(
      arguments,
      devices,
      GDPO_COORDINATOR=f'localhost:{port}',
      GDPO_NUM_PROCESSES='2',
      GDPO_PROCESS_ID=str(i),
    )
    for i in range(2)
  ]


@pytest.fixture(scope='module')
def measured(tmp_path_factory):
  """Numbers by name, for one device, two meshes of four, and two processes."""
  directory = tmp_path_factory.mktemp('parallel')
  run([start([str(directory / 'one'), '1,1,1', '1,4,1', '1,1,4'], 4)])
  run(two_processes([str(directory / 'two'), '2,2,1'], 2))
  return {
    path.name.removesuffix('.npz'): dict(np.load(path))
    for path in directory.iterdir()
  }


@pytest.fixture(scope='module')
def all_meshes(tmp_path_factory):
  directory = tmp_path_factory.mktemp('parallel')
  names = ['1,1,1', '4,1,1', '1,4,1', '1,1,4', '2,2,2']
  run([start([str(directory / 'one'), *names], 8)])
  run(two_processes([str(directory / 'two'), '4,1,1', '1,4,1', '2,1,2'], 2))
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


def test_a_mesh_and_two_processes_agree_with_one_device(measured):
  check(dict(measured))


@pytest.mark.slow
def test_every_mesh_agrees_with_one_device(all_meshes):
  check(dict(all_meshes))
