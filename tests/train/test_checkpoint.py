"""What is saved comes back bit for bit, also on other devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax import sharding
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.checkpoint import Checkpointer
from gdpo_jax.train.settings import Settings


def make_state(params, mesh):
  settings = Settings(seed=3).resolve()
  optimizer = state_lib.make_optimizer(settings)
  return state_lib.init_state(params, optimizer, settings, mesh)


def assert_equal(a, b):
  def equal(x, y):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      x, y = jax.random.key_data(x), jax.random.key_data(y)
    np.testing.assert_array_equal(x, y)

  jax.tree.map(equal, jax.device_get(a), jax.device_get(b))


def test_nothing_there(tmp_path, params):
  state = make_state(params, sharding.make_mesh(-1, 1, 1))
  assert Checkpointer(tmp_path / 'c', 2, 1).restore_latest(state) is None


@pytest.mark.parametrize('shape', [(1, 4, 1), (2, 1, 2)], ids=str)
def test_opens_on_another_mesh(tmp_path, params, shape):
  one = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  state = make_state(params, one)._replace(step=jnp.int32(7))
  checkpointer = Checkpointer(tmp_path, 2, 1)
  checkpointer.save(7, state, {'cursor': {'epoch': 1}})
  checkpointer.wait()
  mesh = sharding.make_mesh(*shape)
  like = make_state(jax.tree.map(jnp.zeros_like, params), mesh)
  restored, record = Checkpointer(tmp_path, 2, 1).restore_latest(like)
  assert record == {'cursor': {'epoch': 1}}
  assert_equal(restored, state)
  kernel = restored.params['layers']['mlp']['up']['kernel']
  assert (
    kernel.sharding == like.params['layers']['mlp']['up']['kernel'].sharding
  )
  assert restored.key.dtype == state.key.dtype


def test_the_newest_is_taken_and_old_ones_go(tmp_path, params):
  mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  checkpointer = Checkpointer(tmp_path, 2, 1)
  for step in (8, 9, 10):
    state = make_state(params, mesh)._replace(step=jnp.int32(step))
    checkpointer.save(step, state, {'at': step})
  checkpointer.wait()
  checkpointer.close()
  again = Checkpointer(tmp_path, 2, 1)
  _, record = again.restore_latest(make_state(params, mesh))
  assert record == {'at': 10}
  assert {p.name for p in tmp_path.iterdir() if p.name.isdigit()} == {'9', '10'}


def test_a_broken_newest_is_skipped_with_a_warning(tmp_path, params, caplog):
  mesh = sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  checkpointer = Checkpointer(tmp_path, 3, 1)
  for step in (1, 2):
    checkpointer.save(step, make_state(params, mesh), {'at': step})
  checkpointer.wait()
  checkpointer.close()
  for file in (tmp_path / '2' / 'state').rglob('*'):
    if file.is_file():
      file.write_bytes(b'')  # a truncated write
  _, record = Checkpointer(tmp_path, 3, 1).restore_latest(
    make_state(params, mesh)
  )
  assert record == {'at': 1}
  assert 'checkpoint 2 ' in caplog.text
  for file in (tmp_path / '1' / 'state').rglob('*'):
    if file.is_file():
      file.write_bytes(b'')
  with pytest.raises(ValueError, match=r'no checkpoint in .* can be read: 2 '):
    Checkpointer(tmp_path, 3, 1).restore_latest(make_state(params, mesh))
