"""A run that is killed or stopped, and started again, ends bit for bit the same."""

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from gdpo_jax import sharding
from gdpo_jax.train import metrics
from gdpo_jax.train.checkpoint import read_state

ROOT = pathlib.Path(__file__).parents[2]
TINY = [
  sys.executable,
  'experiments/math_len.py',
  '--config=experiments/configs/math_len.py:tiny',
  '--config.heldout=0',
  '--config.warm_start_updates=2',
]
# The limit within which the others must stop when a process has died.
HEARTBEAT_S = 20


def start(directory, steps, *more, save_every=2, processes=1, devices=1):
  """The same run, begun or gone on with; `more` are further settings."""
  command = [
    *TINY,
    f'--config.num_steps={steps}',
    f'--config.save_every={save_every}',
    *more,
    f'--run_dir={directory}',
  ]
  flags = f'--xla_force_host_platform_device_count={devices}'
  env = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': flags}
  if processes > 1:
    command = ['launch/local_processes.sh', str(processes), *command]
    env |= {
      'XLA_FLAGS': '',
      'DEVICES': '2',
      'GDPO_HEARTBEAT_S': str(HEARTBEAT_S),
      'GRACE': '60',
    }
  return subprocess.Popen(
    command,
    cwd=ROOT,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  )


def finish(process, timeout=900):
  try:
    output, _ = process.communicate(timeout=timeout)
  except subprocess.TimeoutExpired:
    os.killpg(process.pid, signal.SIGKILL)
    raise
  assert process.returncode == 0, output
  return output


def wait_for_rows(process, directory, num_rows, timeout=900):
  log, deadline = directory / metrics.JSONL, time.monotonic() + timeout
  while not (log.exists() and len(log.read_text().splitlines()) >= num_rows):
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline
    time.sleep(0.01)


def final(directory, steps):
  _, state = read_state(directory / 'checkpoints', steps)
  flat, _ = jax.tree_util.tree_flatten_with_path(state)
  return {sharding.path_name(path): leaf for path, leaf in flat}


def rows(directory):
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in metrics.read_jsonl(directory / metrics.JSONL)
  ]


def assert_same(directory, whole, steps):
  """Parameters, optimizer, keys, rows, and with them the order of the data."""
  assert rows(directory) == rows(whole)
  assert [row['step'] for row in rows(directory)] == list(range(1, steps + 1))
  a, b = final(directory, steps), final(whole, steps)
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_array_equal(a[key], b[key], err_msg=str(key))


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  directory = tmp_path_factory.mktemp('whole')
  finish(start(directory, 6))
  return directory


def test_killed_and_restarted_equals_uninterrupted(tmp_path, whole):
  process = start(tmp_path, 6)
  wait_for_rows(process, tmp_path, 3)
  process.send_signal(signal.SIGKILL)
  process.wait()
  finish(start(tmp_path, 6))
  assert_same(tmp_path, whole, 6)


def test_sigterm_saves_the_step_in_flight_and_ends(tmp_path, whole):
  process = start(tmp_path, 6, save_every=100)
  wait_for_rows(process, tmp_path, 2)
  asked = time.monotonic()
  process.send_signal(signal.SIGTERM)
  finish(process)
  assert time.monotonic() - asked < 30
  done = len(rows(tmp_path))
  saved = [p.name for p in (tmp_path / 'checkpoints').iterdir()]
  assert saved == [str(done)] and done < 6
  finish(start(tmp_path, 6, save_every=100))
  assert_same(tmp_path, whole, 6)


@pytest.mark.slow
def test_killed_at_twenty_random_moments(tmp_path):
  whole, killed, steps = tmp_path / 'whole', tmp_path / 'killed', 45
  began = time.monotonic()
  finish(start(whole, steps, save_every=1))
  spent = [
    row['time/step'] for row in metrics.read_jsonl(whole / metrics.JSONL)
  ]
  step_s = float(np.median(spent))
  rng = random.Random(0)
  for _ in range(20):
    process = start(killed, steps, save_every=1)
    log = killed / metrics.JSONL
    had = len(log.read_text().splitlines()) if log.exists() else 0
    # Every second time after a new step, wherever in the next one; else at any
    # moment of start, restore and first steps.
    if rng.random() < 0.5:
      wait_for_rows(process, killed, min(had + 1, steps - 1))
      time.sleep(rng.uniform(0, 2 * step_s))
    else:
      time.sleep(rng.uniform(0, (time.monotonic() - began) / steps + 15))
    process.send_signal(signal.SIGKILL)
    process.communicate()
  finish(start(killed, steps, save_every=1))
  assert_same(killed, whole, steps)


@pytest.mark.slow
@pytest.mark.parametrize('off_policy', [0, 1])
def test_one_of_two_processes_dies(tmp_path, off_policy):
  """With off_policy 1 a batch that is sampled and not yet trained on as well."""
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  more = f'--config.off_policy_steps={off_policy}'
  finish(start(whole, 6, more, processes=2))
  process = start(killed, 6, more, processes=2)
  wait_for_rows(process, killed, 3)
  children = subprocess.run(
    ['pgrep', '-P', str(process.pid), '-f', 'experiments/math_len.py'],
    capture_output=True,
    text=True,
    check=True,
  ).stdout.split()
  assert len(children) == 2
  os.kill(int(children[1]), signal.SIGKILL)
  died = time.monotonic()
  output, _ = process.communicate(timeout=300)
  assert time.monotonic() - died < 2 * HEARTBEAT_S + 30
  assert process.returncode == 128 + signal.SIGKILL
  assert 'another process' in output or 'another task died' in output
  finish(start(killed, 6, more, processes=2))
  assert_same(killed, whole, 6)


@pytest.mark.slow
def test_saved_on_eight_devices_opened_on_two_and_on_one(tmp_path):
  saved = tmp_path / 'saved'
  finish(start(saved, 3, devices=8))
  found = {}
  for devices in (8, 2, 1):
    copy = tmp_path / str(devices)
    shutil.copytree(saved, copy)
    finish(start(copy, 4, devices=devices))
    found[devices] = rows(copy)[-1]
  asked = subprocess.run(
    [sys.executable, 'experiments/run.py', 'sample', saved, '--prompt=12+34:'],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
  )
  assert asked.returncode == 0, asked.stderr
  for devices in (2, 1):
    assert found[devices].keys() == found[8].keys()
    for name, value in found[8].items():
      if isinstance(value, float):
        assert found[devices][name] == pytest.approx(value, rel=1e-3, abs=1e-5)
