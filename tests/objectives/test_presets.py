"""Presets against the implementations they are named after."""

import json
import pathlib

import numpy as np
import pytest
from objective_batches import NAN, E, call, columns, extras

GOLDEN = json.loads(
  pathlib.Path(__file__).with_name('trl_golden.json').read_text()
)
CASES = {case['name']: case for case in GOLDEN['cases']}


def arrays(case):
  rewards = np.array(case['rewards'], np.float32)  # None becomes NaN
  return rewards, np.array(case['weights'], np.float32)


# --- TRL: what its own trainer logged ----------------------------------------


@pytest.mark.parametrize('name', list(CASES))
def test_trl_preset_gives_the_numbers_of_trl(name):
  rewards, weights = arrays(CASES[name])
  got = call('trl', rewards, weights, eps=1e-4)
  expected = CASES[name]['normalize_then_sum']
  np.testing.assert_allclose(got, expected, atol=3e-6)


@pytest.mark.parametrize('name', [n for n in CASES if n != 'weight_zero'])
def test_the_default_gdpo_is_that_of_trl(name):
  rewards, weights = arrays(CASES[name])
  got = call('gdpo', rewards, weights, eps=1e-4)
  expected = CASES[name]['normalize_then_sum']
  np.testing.assert_allclose(got, expected, atol=3e-6)


@pytest.mark.parametrize('scale', ['group', 'batch', 'none'])
@pytest.mark.parametrize('name', [n for n in CASES if n != 'weight_zero'])
def test_grpo_gives_the_numbers_of_trl(name, scale):
  rewards, weights = arrays(CASES[name])
  got = call('grpo', rewards, weights, eps=1e-4, scale=scale)
  expected = CASES[name][f'sum_then_normalize/{scale}']
  np.testing.assert_allclose(got, expected, atol=3e-6)


# --- independent float64 versions of the others ------------------------------


def random_rewards(missing=0.0):
  rng = np.random.default_rng(0)
  rewards = rng.normal(size=(3, 4, 3)).astype(np.float32)
  rewards[1, :, 2] = 0.5
  rewards[rng.random(rewards.shape) < missing] = NAN
  return rewards, np.array([1, 0.5, 2]), extras(rewards.shape)['mask']


def paper(rewards, weights):
  std = rewards.std(axis=1, ddof=1, keepdims=True)
  z = (rewards - rewards.mean(axis=1, keepdims=True)) / np.where(std, std, 1)
  total = (z * weights).sum(-1)
  return (total - total.mean()) / (total.std(ddof=1) + 1e-8)


def test_paper():
  rewards, weights, _ = random_rewards()
  expected = paper(rewards.astype(np.float64), weights)
  got = call('paper', rewards, weights, eps=1e-8)
  np.testing.assert_allclose(got, expected, atol=3e-6)


def verl(rewards, weights, mask):
  """Loops over groups and whitens [N, Tc] token by token."""
  rewards = np.nan_to_num(rewards.astype(np.float64))
  total = np.zeros(rewards.shape[:2])
  for group, sums in zip(rewards, total):
    for k, weight in enumerate(weights):
      scores = group[:, k]
      mean, std = 0.0, 1.0
      if len(scores) > 1:
        mean, std = np.mean(scores), np.std(scores, ddof=1)
      sums += weight * (scores - mean) / (std + 1e-6)
  tokens = total.reshape(-1, 1) * np.ones(mask.shape)
  inside = tokens[mask]
  variance = np.mean((inside - inside.mean()) ** 2)
  variance *= inside.size / (inside.size - 1)
  out = (tokens - inside.mean()) / np.sqrt(variance + 1e-8)
  return out[:, 0].reshape(rewards.shape[:2])  # the first token is in the mask


@pytest.mark.parametrize('missing', [0.0, 0.2])
def test_verl(missing):
  rewards, weights, mask = random_rewards(missing)
  got = call('verl', rewards, weights, eps=1e-6, mask=mask)
  expected = verl(rewards, weights, mask)
  np.testing.assert_allclose(got, expected, atol=3e-6)


def test_verl_adds_its_epsilon_to_the_variance():
  rewards, weights, mask = random_rewards()
  weights = weights * 1e-4  # a variance of about 1e-8
  got = call('verl', rewards, weights, eps=1e-6, mask=mask)
  np.testing.assert_allclose(got, verl(rewards, weights, mask), atol=3e-6)


def test_verl_keeps_the_raw_reward_of_a_group_of_one():
  rewards = np.array([[[1.0, 2]], [[0, 1]], [[5, 0.5]]], np.float32)
  mask = np.arange(3) < np.array([[3], [1], [2]])
  weights = np.array([1, 2])
  got = call('verl', rewards, weights, eps=1e-6, mask=mask)
  np.testing.assert_allclose(got, verl(rewards, weights, mask), atol=3e-6)
  raw = call('verl', rewards, weights, eps=1e-6, whiten='none')
  np.testing.assert_allclose(raw, [[5], [2], [6]], rtol=1e-5)


def nemo_rl(rewards, weights, leave_one_out):
  rewards = np.nan_to_num(rewards.astype(np.float64))
  total = np.zeros(rewards.shape[:2])
  for group, sums in zip(rewards, total):
    for k, weight in enumerate(weights):
      for row in range(len(group)):
        peers = np.delete(group[:, k], row) if leave_one_out else group[:, k]
        advantage = group[row, k] - peers.mean()
        std = peers.std(ddof=1) if peers.size > 1 else 0.0
        if std > 1e-12:
          advantage /= std + 1e-6
        sums[row] += weight * advantage
  return (total - total.mean()) / total.std(ddof=1)


@pytest.mark.parametrize('leave_one_out', [False, True])
@pytest.mark.parametrize('missing', [0.0, 0.2])
def test_nemo_rl(missing, leave_one_out):
  rewards, weights, _ = random_rewards(missing)
  got = call('nemo_rl', rewards, weights, eps=1e-6, leave_one_out=leave_one_out)
  expected = nemo_rl(rewards, weights, leave_one_out)
  np.testing.assert_allclose(got, expected, atol=3e-6)


@pytest.mark.parametrize('ddof, loser', [(1, -0.57735), (0, -0.70711)])
def test_sole_winner_does_not_explode_under_leave_one_out(ddof, loser):
  # the winner's siblings are all alike: it is left unscaled
  rewards = columns([1, 0, 0, 0])
  got = call('nemo_rl', rewards, whiten='none', leave_one_out=True, ddof=ddof)
  np.testing.assert_allclose(got, [[1, loser, loser, loser]], atol=1e-5)
  # and no rounding of the siblings' 0.1s either
  rewards = columns([0.7, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1])
  got = call('nemo_rl', rewards, whiten='none', leave_one_out=True, ddof=ddof)
  np.testing.assert_allclose(got[0, 0], 0.6, rtol=1e-5)
  assert np.abs(got).max() < 10


def test_leave_one_out_with_equal_rewards_is_zero():
  rewards = np.full((2, 8, 2), 0.1)
  assert not call('nemo_rl', rewards, leave_one_out=True).any()


def test_presets_agree_where_only_epsilon_differs():
  mask = np.ones((8, 5), bool)
  base = call('paper', E)
  for name, atol in [('trl', 1e-3), ('nemo_rl', 1e-4)]:
    got = call(name, E, eps=np.float32(1e-4 if name == 'trl' else 1e-6))
    np.testing.assert_allclose(got, base, atol=atol)
  # Bessel on 40 tokens, not on 8 rows
  ratio = np.sqrt((8 / 7) / (40 / 39))
  got = call('verl', E, eps=1e-6, mask=mask)
  np.testing.assert_allclose(got, base * ratio, atol=1e-4)
