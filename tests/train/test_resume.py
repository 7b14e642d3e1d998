"""A run that stops in the middle of an epoch goes on with what came next."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_runs import byte_model, settings, task, train

from gdpo_jax.rewards.pipeline import Reward

STEPS, ITEMS, BATCH = 15, 10, 2  # three epochs of five steps
MESHES = [(4, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2)]


def run(model, directory, mesh, num_steps):
  """The rows without what a clock decides, the final state, and the prompts."""
  asked = []

  def look(prompts, completions, **_):
    asked.append([str(prompt) for prompt in prompts[:: len(prompts) // BATCH]])
    return [float(len(text)) for text in completions]

  few = task(Reward(look))
  few = dataclasses.replace(few, train=few.train[:ITEMS])
  data, fsdp, tensor = mesh
  s = settings(
    num_steps=num_steps,
    prompts_per_step=BATCH,
    mesh_data=data,
    mesh_fsdp=fsdp,
    mesh_tensor=tensor,
    save_every=0,
    samples_every=0,
  )
  result = train(model, directory, s, the_task=few, heldout=[])
  rows = [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in result.history
  ]
  return rows, jax.device_get(result.state.params), asked


@pytest.fixture(scope='module')
def model():
  return byte_model()


@pytest.fixture(scope='module')
def whole(model, tmp_path_factory):
  """The uninterrupted run on each mesh, made when it is first asked for."""
  done = {}

  def get(mesh):
    if mesh not in done:
      directory = tmp_path_factory.mktemp('whole')
      done[mesh] = run(model, directory, mesh, STEPS)
    return done[mesh]

  return get


def check(model, whole, directory, mesh, stop):
  rows, params, asked = whole(mesh)
  before = run(model, directory, mesh, stop)[2] if stop else []
  continued, final, after = run(model, directory, mesh, STEPS)
  assert before + after == asked and len(after) == STEPS - stop
  # Every epoch has each item once, in an order of its own.
  epochs = [sum(asked[i : i + 5], []) for i in (0, 5, 10)]
  assert len({tuple(epoch) for epoch in epochs}) == 3
  assert all(len(set(epoch)) == ITEMS for epoch in epochs)
  assert continued == rows
  jax.tree.map(np.testing.assert_array_equal, final, params)


def test_a_resume_in_the_middle_of_an_epoch(model, whole, tmp_path):
  check(model, whole, tmp_path, MESHES[0], 7)


@pytest.mark.slow
@pytest.mark.parametrize('stop', [0, 5, 7, 10])
@pytest.mark.parametrize('mesh', MESHES, ids=str)
def test_a_resume_anywhere_on_every_mesh(model, whole, tmp_path, mesh, stop):
  check(model, whole, tmp_path, mesh, stop)
