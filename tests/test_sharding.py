"""The table of shardings refuses what it does not know."""

import jax
import jax.numpy as jnp
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
