"""Runs in which only adapters are trained."""

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from tiny_runs import byte_model, settings, train

from gdpo_jax import sharding
from gdpo_jax.policy import lora
from gdpo_jax.train import metrics, step
from gdpo_jax.train.policies import adapted, complete
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.state import init_state, make_optimizer

LORA = {'lora_rank': 2, 'lora_targets': 'attn/.*|mlp/up', 'kl_coef': 0.1}


@pytest.fixture(scope='module')
def model():
  return byte_model()


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  directory = tmp_path_factory.mktemp('lora')
  return train(model, directory, settings(**LORA), heldout=[]), directory


def rows_of(result):
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in result.history
  ]


def test_state_optimizer_and_checkpoint_hold_the_small_tree(finished, model):
  result, directory = finished
  assert set(result.state.params) == {'lora'}
  small = sum(x.size for x in jax.tree.leaves(result.state.params))
  moments = [x for x in jax.tree.leaves(result.state.opt) if x.ndim]
  assert sum(x.size for x in moments) == 2 * small
  saved = ocp.StandardCheckpointer().restore(
    directory.absolute() / 'checkpoints/4/state'
  )
  assert set(saved['params']) == {'lora'}
  b = result.state.params['lora']['layers']['mlp']['up']['b']
  assert float(abs(b).max()) > 0  # it has learned


def test_the_base_is_the_reference_and_the_sampler_runs_merged(finished):
  rows = [row for row in finished[0].history if 'loss' in row]
  assert rows[0]['kl'] == pytest.approx(0, abs=1e-8)
  assert rows[-1]['kl'] > 1e-6
  assert all(row['sampler_mismatch'] < 1e-4 for row in rows)


def test_resumed_equals_uninterrupted(finished, model, tmp_path):
  half = train(model, tmp_path, settings(num_steps=2, **LORA), heldout=[])
  assert int(half.state.step) == 2
  policy, params = model
  scaled = jax.tree.map(lambda x: 1.01 * x, params)
  with pytest.raises(ValueError, match='made over a base of norm'):
    train((policy, scaled), tmp_path, settings(**LORA), heldout=[])
  resumed = train(model, tmp_path, settings(**LORA), heldout=[])
  jax.tree.map(
    np.testing.assert_array_equal,
    resumed.state.params,
    finished[0].state.params,
  )
  assert rows_of(resumed) == rows_of(finished[0])


@pytest.mark.parametrize('shape', [(1, 2, 2)], ids=str)
def test_meshes_agree_with_one_device(policy, params, batch, shape):
  s = Settings(
    prompts_per_step=8,
    group_size=4,
    max_prompt_tokens=6,
    max_new_tokens=10,
    lora_rank=2,
    learning_rate=1e-2,
  ).resolve()
  policy = adapted(policy, s, ('a', 'b'))
  params = complete(policy, params, 0)
  _, base = lora.split(params)
  optimizer = make_optimizer(s)

  def run(mesh):
    state = init_state(params, optimizer, s, mesh)
    fn = step.make_train_step(policy, optimizer, s, mesh)
    frozen = jax.device_put(base, sharding.shardings(mesh, base))
    for _ in range(2):
      state, out = fn(state, batch, frozen)
    jax.tree.map(np.testing.assert_array_equal, frozen, base)  # not donated
    return jax.device_get(state.params), metrics.to_host(out)

  one, one_row = run(sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1]))
  many, row = run(sharding.make_mesh(*shape))
  assert row['loss'] == pytest.approx(one_row['loss'], rel=1e-4, abs=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5),
    many,
    one,
  )
