"""SIGKILL between two steps: the restarted run ends bit for bit the same."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import orbax.checkpoint as ocp

from gdpo_jax.train import metrics

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = [
  sys.executable,
  'experiments/math_len.py',
  '--config=experiments/configs/math_len.py:tiny',
  '--config.num_steps=6',
  '--config.save_every=2',
  '--config.heldout=0',
  '--config.warm_start_updates=2',
]


def start(directory):
  env = {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''}
  return subprocess.Popen(
    [*COMMAND, f'--run_dir={directory}'],
    cwd=ROOT,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def finish(process):
  output, _ = process.communicate(timeout=300)
  assert process.returncode == 0, output


def parameters(directory):
  checkpointer = ocp.StandardCheckpointer()
  state = checkpointer.restore(directory.absolute() / 'checkpoints/6/state')
  return state['params'], state['opt']


def rows(directory):
  return [
    {k: v for k, v in row.items() if not k.startswith(('time/', 'throughput/'))}
    for row in metrics.read_jsonl(directory / metrics.JSONL)
  ]


def test_killed_and_restarted_equals_uninterrupted(tmp_path):
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  finish(start(whole))

  process = start(killed)
  deadline = time.monotonic() + 300
  log = killed / metrics.JSONL
  while not (log.exists() and len(log.read_text().splitlines()) >= 3):
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  finish(start(killed))

  assert rows(killed) == rows(whole)
  assert [row['step'] for row in rows(killed)] == [1, 2, 3, 4, 5, 6]
  flat = [
    ocp.tree.to_flat_dict(tree)
    for directory in (whole, killed)
    for tree in parameters(directory)
  ]
  for a, b in ((flat[0], flat[2]), (flat[1], flat[3])):
    assert a.keys() == b.keys()
    for key in a:
      np.testing.assert_array_equal(a[key], b[key], err_msg=str(key))
