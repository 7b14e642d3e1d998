"""off_policy_steps=1: the next batch is gathered beside the update."""

import functools
import json

import jax
import numpy as np
import pytest
from tiny_runs import byte_model, settings, train

from gdpo_jax import sharding
from gdpo_jax.train.settings import Settings

BY_CLOCK = ('time/', 'throughput/', 'memory/')


@pytest.fixture(scope='module')
def model():
  return byte_model()


@pytest.fixture
def one_device(monkeypatch):
  """The tests have four; a thread of its own needs the only one."""
  monkeypatch.setattr(
    sharding,
    'make_mesh',
    functools.partial(sharding.make_mesh, devices=jax.devices()[:1]),
  )


def run(model, directory, after_step=None, **changes):
  """The rows without what a clock decides, and the final parameters."""
  s = settings(**{'mesh_data': -1, 'off_policy_steps': 1, **changes})
  result = train(model, directory, s, heldout=[], after_step=after_step)
  rows = [
    {k: v for k, v in row.items() if not k.startswith(BY_CLOCK)}
    for row in result.history
  ]
  return rows, jax.device_get(result.state.params)


def texts(directory, step):
  """What was sampled for a step, as samples.jsonl has it."""
  lines = (directory / 'samples.jsonl').read_text().splitlines()
  records = map(json.loads, lines)
  return [r['completion'] for r in records if r['step'] == step]


def test_a_batch_is_one_update_older_and_its_ratio_says_so(
  model, tmp_path, one_device
):
  common = {'num_steps': 3, 'samples_every': 1, 'learning_rate': 1e-2}
  rows, _ = run(model, tmp_path / 'ahead', **common)
  on_policy, _ = run(model, tmp_path / 'on', **common | {'off_policy_steps': 0})
  still, _ = run(
    model,
    tmp_path / 'still',
    **common | {'off_policy_steps': 0, 'learning_rate': 1e-30},
  )
  # Batches 1 and 2 both come from the first parameters, batch 3 does not.
  assert texts(tmp_path / 'ahead', 1) == texts(tmp_path / 'on', 1)
  assert texts(tmp_path / 'ahead', 2) == texts(tmp_path / 'still', 2)
  assert texts(tmp_path / 'ahead', 2) != texts(tmp_path / 'on', 2)
  assert texts(tmp_path / 'ahead', 3) != texts(tmp_path / 'still', 3)
  # An update of this rate moves the policy far from the sampler.
  assert rows[0]['kl/to_sampler'] < 1e-6 < 1e-4 < rows[1]['kl/to_sampler']
  assert on_policy[1]['kl/to_sampler'] < 1e-6
  assert len(still) == 3


class Killed(Exception):
  pass


@pytest.mark.parametrize(
  'devices, changes',
  [
    ('one_device', {}),
    ('four_devices', {}),  # gathered in turn
    (
      'one_device',
      {'max_rounds': 3, 'algorithm': 'dapo', 'normalizers': 'running'},
    ),
    # prompts that wait for slots, in the order of what was long before
    ('one_device', {'prompts_per_rollout': 2, 'num_steps': 10}),
  ],
  ids=['beside', 'in_turn', 'rounds', 'waiting'],
)
def test_a_killed_run_trains_on_the_batch_that_was_in_flight(
  model, tmp_path, devices, changes, request
):
  if devices == 'one_device':
    request.getfixturevalue(devices)
  changes = {'num_steps': 5, 'save_every': 2, **changes}
  rows, params = run(model, tmp_path / 'whole', **changes)

  def kill(step, row):
    del row
    if step == 3:
      raise Killed

  with pytest.raises(Killed):
    run(model, tmp_path / 'killed', after_step=kill, **changes)
  again, final = run(model, tmp_path / 'killed', **changes)
  assert again == rows and len(rows) == changes['num_steps']
  jax.tree.map(np.testing.assert_array_equal, final, params)


def test_prompts_that_wait_make_the_same_batches(model, tmp_path, one_device):
  """Two of eight in flight, over more than one epoch of 64 problems."""
  found = []
  for size in (None, 2):
    rows, params = run(
      model,
      tmp_path / str(size),
      num_steps=10,
      prompts_per_rollout=size,
      off_policy_steps=0,
    )
    found.append((rows, params))
  (whole, expected), (parts, got) = found
  for a, b in zip(whole, parts, strict=True):
    for name in ('rewards/digits/mean', 'rewards/short/mean', 'num_tokens'):
      assert a[name] == pytest.approx(b[name], abs=1e-6), name
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), got, expected
  )


def test_the_truncated_weight_takes_the_place_of_the_ratio(
  model, tmp_path, one_device
):
  rows, _ = run(
    model, tmp_path, num_steps=2, importance_cap=2.0, learning_rate=1e-2
  )
  assert rows[0]['importance/weight_mean'] == pytest.approx(1, abs=1e-4)
  assert abs(rows[1]['importance/weight_mean'] - 1) > 1e-3


@pytest.mark.parametrize(
  'changes, said',
  [
    ({'off_policy_steps': 2}, 'one step behind'),
    ({'off_policy_steps': 1, 'snapshot_every': 2}, 'exclude each other'),
  ],
)
def test_what_cannot_work_is_refused(changes, said):
  with pytest.raises(ValueError, match=said):
    Settings(**changes).resolve()
