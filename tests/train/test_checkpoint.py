"""What is saved comes back bit for bit, also on other devices."""

import contextlib
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax import sharding
from gdpo_jax.train import state as state_lib
from gdpo_jax.train.checkpoint import Checkpointer, Retention, changed_fields
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
  restored, record, _ = Checkpointer(tmp_path, 2, 1).restore_latest(like)
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
  _, record, _ = again.restore_latest(make_state(params, mesh))
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
  _, record, _ = Checkpointer(tmp_path, 3, 1).restore_latest(
    make_state(params, mesh)
  )
  assert record == {'at': 1}
  assert 'checkpoint 2 ' in caplog.text
  # Out of the way: it neither counts as kept nor hinders a new step 2.
  assert (tmp_path / '2.unreadable').is_dir()
  for file in (tmp_path / '1' / 'state').rglob('*'):
    if file.is_file():
      file.write_bytes(b'')
  with pytest.raises(ValueError, match=r'no checkpoint in .* can be read: 1 '):
    Checkpointer(tmp_path, 3, 1).restore_latest(make_state(params, mesh))
  assert (tmp_path / '1').is_dir()  # what may be all there is stays in place


@pytest.fixture
def one_device():
  return sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])


def save_all(directory, params, mesh, steps, keep=5, **metrics):
  checkpointer = Checkpointer(directory, keep, 1)
  for step in steps:
    state = make_state(params, mesh)._replace(step=jnp.int32(step))
    here = {name: values[step] for name, values in metrics.items()}
    checkpointer.save(step, state, {'at': step, 'metrics': here})
  checkpointer.wait()
  return checkpointer


def test_what_is_not_whole_is_never_taken_and_never_displaces_the_whole(
  tmp_path, params, one_device, caplog
):
  save_all(tmp_path, params, one_device, [100, 200], keep=2).close()
  shutil.rmtree(tmp_path / '200' / 'state')  # the arrays are gone
  (tmp_path / '250').mkdir()
  (tmp_path / '300.tmp').mkdir()
  (tmp_path / '300.orbax-checkpoint-tmp-0').mkdir()
  (tmp_path / 'latest').write_text('300')
  checkpointer = Checkpointer(tmp_path, 2, 1)
  like = make_state(params, one_device)
  state, record, _ = checkpointer.restore_latest(like)
  assert record['at'] == 100 and int(state.step) == 100
  for name in ('200', '250', '300.tmp', '300.orbax-checkpoint-tmp-0', 'latest'):
    assert name in caplog.text
  # The broken ones do not count among the newest two: 100 stays until 200 and
  # 300 are complete.
  checkpointer.save(200, state, {'at': 'again'})
  checkpointer.wait()
  assert checkpointer.steps == [100, 200]
  checkpointer.save(300, state, {'at': 300})
  checkpointer.wait()
  assert checkpointer.steps == [200, 300]
  checkpointer.close()
  _, record, _ = Checkpointer(tmp_path, 2, 1).restore_latest(like)
  assert record['at'] == 300


@contextlib.contextmanager
def no_file_above(num_bytes):
  """A disk on which nothing larger fits, as far as this process can tell."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_earlier_checkpoint_and_the_run(
  tmp_path, params, one_device, caplog
):
  checkpointer = save_all(tmp_path, params, one_device, [1], keep=1)
  state = make_state(params, one_device)._replace(step=jnp.int32(2))
  with no_file_above(2000):
    checkpointer.save(2, state, {'at': 2})
    checkpointer.wait()
  assert 'checkpoint 2 was not written' in caplog.text
  assert 'continued from is step 1' in caplog.text
  assert sorted(p.name for p in tmp_path.iterdir()) == ['1']
  # There is room again: the same manager goes on, and only then is 1 dropped.
  checkpointer.save(3, state, {'at': 3})
  checkpointer.wait()
  assert checkpointer.steps == [3]
  checkpointer.close()
  _, record, _ = Checkpointer(tmp_path, 1, 1).restore_latest(state)
  assert record['at'] == 3


def test_retention_by_recency_period_metric_and_pareto_front():
  steps = [1, 2, 3, 4, 5, 6]
  metrics = {
    s: {'a': a, 'b': b}
    for s, a, b in zip(steps, [1, 3, 2, 2, 0, 0], [5, 1, 3, 3, 6, 0])
  }
  metrics[6] = {}
  assert Retention(last=1).keep(steps, metrics) == {6}
  assert Retention(last=1, every=2).keep(steps, metrics) == {2, 4, 6}
  assert Retention(last=1, best='a').keep(steps, metrics) == {2, 6}
  # 4 equals 3, which came first; 6 has no values.
  assert Retention(1, pareto=('a', 'b')).keep(steps, metrics) == {1, 2, 3, 5, 6}
  metrics[2] = {'a': float('nan'), 'b': 1.0}
  assert Retention(last=1, best='a').keep(steps, metrics) == {3, 6}


def test_the_best_is_kept_over_a_restart(tmp_path, params, one_device):
  keep = Retention(last=1, best='reward')
  reward = {1: 0.1, 2: 0.9, 3: 0.5, 4: 0.2}
  save_all(tmp_path, params, one_device, [1, 2, 3], keep, reward=reward).close()
  again = save_all(tmp_path, params, one_device, [4], keep, reward=reward)
  assert again.steps == [2, 4]


def test_changed_fields_are_named_one_by_one():
  saved = {'settings': {'seed': 1, 'rate': 0.1, 'old': 2}, 'rewards': ['a']}
  now = {'settings': {'seed': 2, 'rate': 0.1, 'new': 3}, 'rewards': ['a', 'b']}
  assert changed_fields(saved, now) == {
    'rewards': (['a'], ['a', 'b']),
    'settings.new': ('not there', 3),
    'settings.old': (2, 'not there'),
    'settings.seed': (1, 2),
  }
  assert changed_fields(saved, saved) == {}
