"""The table of shardings refuses what it does not know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from gdpo_jax import sharding


def test_sizes_must_use_all_devices():
  assert dict(sharding.make_mesh().shape) == {'data': 4, 'fsdp': 1, 'tensor': 1}
  assert sharding.make_mesh(-1, 2, 1).shape['data'] == 2
  with pytest.raises(ValueError, match='does not use exactly the 4 devices'):
    sharding.make_mesh(3, 1, 1)
  with pytest.raises(ValueError, match='at most one of them -1'):
    sharding.make_mesh(-1, -1, 1)


def test_parameters_and_moments_share_their_rule():
  mesh = sharding.make_mesh(1, 2, 2)
  leaf = jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)
  tree = {
    'layers': {'mlp': {'up': {'kernel': leaf}}},
    'mu': {'layers': {'mlp': {'up': {'kernel': leaf}}}},
    'count': jax.ShapeDtypeStruct((), jnp.int32),
  }
  specs = jax.tree.map(lambda s: s.spec, sharding.shardings(mesh, tree))
  expected = PartitionSpec(None, 'fsdp', 'tensor')
  assert specs['layers']['mlp']['up']['kernel'] == expected
  assert specs['mu']['layers']['mlp']['up']['kernel'] == expected
  assert specs['count'] == PartitionSpec()


def test_an_unknown_leaf_is_named_with_its_shape():
  tree = {'layers': {'router': {'kernel': jnp.zeros((2, 3))}}}
  with pytest.raises(
    ValueError, match=r"'layers/router/kernel' of shape \(2, 3\)"
  ):
    sharding.shardings(sharding.make_mesh(), tree)


def test_a_leaf_that_does_not_divide_is_refused():
  tree = {'embed': {'embedding': jnp.zeros((30, 8))}}
  with pytest.raises(
    ValueError, match="30 is not a multiple of mesh axis 'tensor'"
  ):
    sharding.shardings(sharding.make_mesh(1, 1, 4), tree)


def test_two_rules_that_contradict_each_other_are_both_shown(monkeypatch):
  rule = (r'up/kernel$', PartitionSpec('data'))
  monkeypatch.setattr(sharding, 'RULES', (*sharding.RULES, rule))
  tree = {'layers': {'mlp': {'up': {'kernel': jnp.zeros((2, 8, 16))}}}}
  with pytest.raises(ValueError, match='collide') as error:
    sharding.shardings(sharding.make_mesh(), tree)
  for part in ('layers/mlp/up/kernel', '(2, 8, 16)', "'data'", "'tensor'"):
    assert part in str(error.value)


def test_one_mesh_axis_cannot_split_two_axes(monkeypatch):
  rule = (r'router$', PartitionSpec('fsdp', 'fsdp'))
  monkeypatch.setattr(sharding, 'RULES', (rule,))
  with pytest.raises(ValueError, match="'fsdp' on axis 0 and on axis 1"):
    sharding.shardings(sharding.make_mesh(), {'router': jnp.zeros((8, 8))})
  with pytest.raises(ValueError, match='splits 2 axes'):
    sharding.shardings(sharding.make_mesh(), {'router': jnp.zeros(8)})


def test_parameters_are_born_where_they_stay():
  mesh = sharding.make_mesh(1, 2, 2)

  def init(key):
    return {'embed': {'embedding': jax.random.normal(key, (8, 16))}}

  key = jax.random.key(0)
  born = sharding.born_sharded(mesh, init, key)['embed']['embedding']
  assert {s.data.shape for s in born.addressable_shards} == {(4, 8)}
  np.testing.assert_array_equal(born, init(key)['embed']['embedding'])


def test_constraints_split_what_they_can():
  mesh = sharding.make_mesh(1, 2, 2)

  def spec(shape, *axes):
    def f(x):
      with sharding.use(mesh):
        return sharding.constrain(x * 1, *axes)

    x = jax.device_put(jnp.zeros(shape), sharding.replicated(mesh))
    return jax.jit(f)(x).sharding.shard_shape(shape)

  assert spec((4, 6), 'rows', 'tensor') == (2, 3)
  assert spec((3, 6), 'rows', 'tensor') == (3, 3)  # 3 rows stay whole
  assert spec((4, 5), None, 'tensor') == (4, 5)
  x = jnp.zeros(4)
  assert sharding.constrain(x, 'rows') is x  # no mesh: nothing to say


def test_rows_go_to_devices_and_come_back():
  mesh = sharding.make_mesh(2, 2, 1)
  x = np.arange(24.0).reshape(8, 3)
  placed = sharding.put_rows(mesh, {'x': x})['x']
  assert {s.data.shape for s in placed.addressable_shards} == {(2, 3)}
  np.testing.assert_array_equal(sharding.to_host(placed), x)
  assert sharding.local_rows(mesh, 8) == slice(0, 8)
  with pytest.raises(ValueError, match='10 rows cannot be split over 4'):
    sharding.local_rows(mesh, 10)
