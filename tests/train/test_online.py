"""A second process feeds a live run; one head learns, nothing else moves."""

import json
import math
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from tiny_runs import TOKENIZER, byte_model, settings, train

from gdpo_jax import sharding
from gdpo_jax.train import online
from gdpo_jax.train.policies import adapted, complete
from gdpo_jax.train.state import init_state, make_optimizer

# What another program would do: no import of this package, write and rename.
FEEDER = """
import json, os, pathlib, sys
directory, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
for i in range(count):
  sys.stdin.readline()  # the test says when
  lines = [
    {'prompt': f'{i}+{j}=', 'completion': 'x' * (2 + j % 4), 'score': 6 - j % 4}
    for j in range(6)
  ]
  text = ''.join(json.dumps(line) + chr(10) for line in lines) + 'no json' + chr(10)
  partial = directory / f'{i}.partial'
  partial.write_text(text)
  os.replace(partial, directory / f'{i:04d}.jsonl')
"""
# In this run RL moves nothing, so that whatever moves was moved online.
STILL = {
  'subpolicy_rank': 2,
  'subpolicy_frozen': 'digits,short,trunk,fusion',
  'online_head': 'short',
  'online_rows': 4,
  'online_rate': 1e-2,
  'max_prompt_tokens': 12,
}


def parts_of(state):
  state = jax.device_get(state._replace(key=None))
  heads = state.params['heads']
  own = {n: x[1] for n, x in heads.items()}
  rest = {n: x for n, x in state.params.items() if n != 'heads'}
  return own, (rest, {n: x[0] for n, x in heads.items()})


@pytest.mark.slow
def test_a_second_process_feeds_a_live_run(tmp_path):
  inbox = tmp_path / 'inbox'
  inbox.mkdir()
  feeder = subprocess.Popen(
    [sys.executable, '-c', FEEDER, str(inbox), '3'],
    stdin=subprocess.PIPE,
    text=True,
  )

  def feed(number):
    feeder.stdin.write('\n')
    feeder.stdin.flush()
    deadline = time.monotonic() + 60
    while not (inbox / f'{number:04d}.jsonl').exists():
      assert time.monotonic() < deadline and feeder.poll() in (None, 0)
      time.sleep(0.01)

  def after_step(step, row):
    if step in (1, 2, 4):  # the run is under way, and waits for nobody
      feed({1: 0, 2: 1, 4: 2}[step])

  s = settings(num_steps=6, online_dir=str(inbox), online_every=1, **STILL)
  result = train(
    byte_model(), tmp_path / 'run', s, heldout=[], after_step=after_step
  )
  feeder.wait(60)
  rows = [row for row in result.history if 'loss' in row]
  assert [row['online/files'] for row in rows] == [0, 1, 1, 0, 1, 0]
  assert [row['online/rows'] for row in rows] == [0, 6, 6, 0, 6, 0]
  assert [row['online/refused'] for row in rows] == [0, 1, 1, 0, 1, 0]

  # the same run, with an inbox in which nothing appears
  s = settings(num_steps=6, online_dir=str(tmp_path / 'none'), **STILL)
  alone = train(byte_model(), tmp_path / 'alone', s, heldout=[])
  own, rest = parts_of(result.state)
  own_alone, rest_alone = parts_of(alone.state)
  change = jax.tree.map(lambda a, b: float(abs(a - b).max()), own, own_alone)
  assert change['up'] > 1e-3
  jax.tree.map(np.testing.assert_array_equal, rest, rest_alone)

  # a restart reads nothing twice
  s = settings(num_steps=7, online_dir=str(inbox), **STILL)
  again = train(byte_model(), tmp_path / 'run', s, heldout=[])
  assert again.history[-1]['online/files'] == 0
  jax.tree.map(np.testing.assert_array_equal, parts_of(again.state)[0], own)


def test_one_look_changes_one_head_and_its_own_optimizer(tmp_path):
  """Bit for bit, RL's moments and counters included."""
  s = settings(online_dir=str(tmp_path), **STILL).resolve()
  model, params = byte_model()
  policy = adapted(model, s, ('digits', 'short'))
  mesh = sharding.make_mesh(1, 2, 2)
  optimizer = make_optimizer(s, policy.heads)
  state = init_state(complete(policy, params, 0), optimizer, s, mesh)
  line = {'prompt': '1+1=', 'completion': '2', 'score': 1.0}
  lines = [line, {**line, 'completion': 'two', 'score': 0.0}]
  lines.append({**line, 'prompt': 'x' * 13})  # too long for this run
  text = '\n'.join(json.dumps(one) for one in lines)
  (tmp_path / 'a.jsonl').write_text(text)
  watcher = online.Online(policy, TOKENIZER, s, mesh)
  new, row = watcher.step(1, state, {})
  assert row == {'online/files': 1, 'online/rows': 2, 'online/refused': 1}
  own, rest = parts_of(new)
  own_before, rest_before = parts_of(state)
  assert max(float(abs(own[n] - own_before[n]).max()) for n in own) > 1e-3
  jax.tree.map(np.testing.assert_array_equal, rest, rest_before)
  jax.tree.map(np.testing.assert_array_equal, new.opt, state.opt)
  for name in state.controllers.keys() - {'online'}:
    jax.tree.map(
      np.testing.assert_array_equal,
      new.controllers[name],
      state.controllers[name],
    )
  places = [jax.tree.map(lambda x: x.sharding, x.params) for x in (new, state)]
  assert places[0] == places[1]
  # and nothing is read twice
  assert watcher.step(2, new, {})[1]['online/files'] == 0


def test_advantages_are_within_a_prompt_where_it_has_rows():
  make = online.Record
  got = online.advantages(
    [make('a', '', 1.0), make('a', '', 3.0), make('b', '', 8.0)]
  )
  # (1, 3): +- 1 / sqrt(2); 8 against (1, 3, 8): mean 4, std 3.6056
  np.testing.assert_allclose(got, [-0.7071, 0.7071, 1.1094], atol=1e-3)
  assert online.advantages([make('a', '', 1.0)]).tolist() == [0]


@pytest.mark.parametrize(
  'line',
  [
    '[]',
    '{"prompt": "a", "completion": "b", "score": NaN}',
    '{"prompt": "a", "completion": "b", "score": "1"}',
    '{"prompt": "a", "completion": ["b"], "score": 1}',
    '{"prompt": [{"role": "user"}], "completion": "b", "score": 1}',
    '{"completion": "b", "score": 1}',
    '[' * 5000,
    f'{{"prompt": "a", "completion": "b", "score": 1{"0" * 400}}}',
    '\x00\xff',
  ],
  ids=range(9),
)
def test_what_is_no_record_is_counted(tmp_path, line):
  good = json.dumps({'prompt': 'p', 'completion': 'c', 'score': 2})
  path = tmp_path / 'x.jsonl'
  path.write_text(f'{line}\n{good}\n\n', encoding='utf-8')
  records, refused = online.read(path)
  assert records == [online.Record('p', 'c', 2.0)] and refused == 1
  assert math.isfinite(records[0].score)


def test_links_directories_and_large_files_are_left_out(tmp_path, monkeypatch):
  real = tmp_path / 'secret'
  real.write_text('{"prompt": "p", "completion": "c", "score": 1}')
  (tmp_path / 'link.jsonl').symlink_to(real)
  (tmp_path / 'folder.jsonl').mkdir()
  monkeypatch.setattr(online, 'MAX_BYTES', 10)
  for path in (tmp_path / 'link.jsonl', tmp_path / 'folder.jsonl', real):
    assert online.read(pathlib.Path(path)) == ([], 1)
