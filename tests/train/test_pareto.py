"""Fronts and volumes by hand, and against counting random points."""

import numpy as np
import pytest

from gdpo_jax.train import pareto


def test_front_by_hand():
  points = np.array([[1, 3], [2, 2], [3, 1], [1, 1], [2, 2], [3, 0.5]])
  assert pareto.front(points).tolist() == [True, True, True, False, True, False]


def test_hypervolume_by_hand():
  points = np.array([[1, 3], [2, 2], [3, 1]])
  # 1x3 + 1x2 + 1x1
  assert pareto.hypervolume(points, np.zeros(2)) == 6
  assert pareto.hypervolume(points, np.array([3.0, 3.0])) == 0
  cube = np.array([[1.0, 2, 3]])
  assert pareto.hypervolume(cube, np.zeros(3)) == 6
  # two boxes that share 1x1x1
  two = np.array([[1.0, 1, 3], [2, 2, 1]])
  assert pareto.hypervolume(two, np.zeros(3)) == 3 + 4 - 1


@pytest.mark.parametrize('axes', (2, 3, 4))
def test_hypervolume_is_the_share_of_points_below(axes):
  rng = np.random.default_rng(axes)
  points = rng.random((6, axes))
  probes = rng.random((200_000, axes))
  below = (probes[:, None] <= points).all(-1).any(-1).mean()
  assert pareto.hypervolume(points, np.zeros(axes)) == pytest.approx(
    below, abs=0.005
  )


def rows(*means):
  return [
    {'step': i, 'eval/rewards/a/mean': a, 'eval/rewards/b/mean': b}
    for i, (a, b) in enumerate(means)
  ]


def test_archive_takes_the_first_evaluation_as_reference():
  found = pareto.archive(
    rows((0.2, 0.2), (0.6, 0.1), (0.4, 0.5)), {'a': 1.0, 'b': 2.0}
  )
  assert found.front.tolist() == [False, True, True]
  np.testing.assert_allclose(found.hypervolume, [0, 0, 0.2 * 0.3])


def test_archive_turns_costs_round_and_leaves_weight_0_out():
  found = pareto.archive(
    rows((0.2, 0.5), (0.3, 0.1)), {'a': 1.0, 'b': -1.0, 'c': 0.0}
  )
  assert found.names == ('a', 'b')
  assert found.front.tolist() == [False, True]
  np.testing.assert_allclose(found.hypervolume, [0, 0.1 * 0.4])
  assert pareto.archive([], {'a': 1.0}) is None
