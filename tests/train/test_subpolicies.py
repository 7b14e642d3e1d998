"""Each head on its own reward, in its turn, and everything else standing still."""

import jax
import numpy as np
import pytest
from tiny_runs import byte_model, settings, train

from gdpo_jax import sharding
from gdpo_jax.train import metrics, step, subpolicies
from gdpo_jax.train.policies import adapted, complete
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.state import init_state, make_optimizer

NAMES = ('digits', 'short')
SUB = {
  'subpolicy_rank': 2,
  'subpolicy_every': 2,
  'fusion_entropy_coef': 0.01,
  'kl_coef': 0.05,
}


def one_step_settings(**changes):
  base = {
    'prompts_per_step': 8,
    'group_size': 4,
    'max_prompt_tokens': 6,
    'max_new_tokens': 10,
    'learning_rate': 1e-2,
    'subpolicy_rank': 2,
  }
  return Settings(**{**base, **changes}).resolve()


def start(policy, params, s, mesh=None):
  policy = adapted(policy, s, NAMES)
  optimizer = make_optimizer(s, policy.heads)
  mesh = mesh or sharding.make_mesh(1, 1, 1, devices=jax.devices()[:1])
  state = init_state(complete(policy, params, 0), optimizer, s, mesh)
  return state, step.make_train_step(policy, optimizer, s, mesh)


@pytest.fixture(scope='module')
def own_batch(batch):
  own = np.random.default_rng(2).standard_normal((32, 2)).astype(np.float32)
  return batch._replace(head_advantages=own)


def parts_of(params):
  """Host copies: head 0, head 1, fusion, trunk."""
  params = jax.device_get(params)
  heads = params['heads']
  return {
    'digits': {name: x[0] for name, x in heads.items()},
    'short': {name: x[1] for name, x in heads.items()},
    'fusion': params['fusion'],
    'trunk': {n: x for n, x in params.items() if n not in ('heads', 'fusion')},
  }


def same(a, b):
  return all(
    np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
  )


def test_turns_cold_start_and_a_frozen_head(policy, params, own_batch):
  """50 updates: two cold ones, then the heads at every third."""
  s = one_step_settings(
    subpolicy_cold_start=2, subpolicy_frozen='short', weight_decay=0.1
  )
  state, train_step = start(policy, params, s)
  first = before = parts_of(state.params)
  moved = {name: [] for name in before}
  rows = []
  for _ in range(50):
    state, out = train_step(state, own_batch)
    now = parts_of(state.params)
    for name, part in now.items():
      moved[name].append(not same(part, before[name]))
    rows.append(metrics.to_host(out))
    before = now
  turns = [u < 2 or (u - 2) % 3 == 0 for u in range(50)]
  assert moved['digits'] == turns and sum(turns) == 18
  assert moved['trunk'] == [u >= 2 for u in range(50)]
  assert moved['fusion'] == moved['trunk']
  assert same(before['short'], first['short'])  # bit for bit
  # a gradient is reported in the heads' turn, and only then
  assert ['heads/short/grad_norm' in row for row in rows] == turns
  shares = [rows[2][f'heads/{name}/grad_share'] for name in NAMES]
  assert sum(shares) == pytest.approx(1)


def test_a_head_on_its_turn_gets_adam_as_if_it_were_alone(
  policy, params, own_batch
):
  """Off-turn updates leave no trace in its moments or their correction."""
  frozen = {'subpolicy_frozen': 'trunk, fusion', 'clip_norm': 1e9}
  seldom = one_step_settings(subpolicy_every=3, **frozen)
  always = one_step_settings(subpolicy_every=1, **frozen)
  state, train_step = start(policy, params, seldom)
  for _ in range(6):
    state, _ = train_step(state, own_batch)
  other, train_step = start(policy, params, always)
  for _ in range(2):
    other, _ = train_step(other, own_batch)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
    state.params['heads'],
    other.params['heads'],
  )


def test_rates_are_per_head(policy, params, own_batch):
  """Adam's first step is the rate in size, whatever the gradient."""
  s = one_step_settings(subpolicy_rates='1,0.5')
  state, train_step = start(policy, params, s)
  first = parts_of(state.params)
  state, _ = train_step(state, own_batch)
  now = parts_of(state.params)
  for name, rate in (('digits', 1e-2), ('short', 5e-3)):
    change = np.abs(now[name]['up'] - first[name]['up'])
    assert np.median(change) == pytest.approx(rate, rel=1e-3)


def test_advantages_are_those_of_each_reward_alone():
  rewards = np.float32([[[0, 3], [1, 1], [0, 1], [1, np.nan]]])
  valid = np.isfinite(rewards)
  s = one_step_settings(advantage_eps=1e-9)
  own = subpolicies.advantages(s, rewards, valid, np.float32([2, -1]))
  # std of (0, 1, 0, 1) is 0.57735; of (3, 1, 1), whose sign is turned, 1.1547
  np.testing.assert_allclose(
    own[0, :, 0], [-0.866025, 0.866025, -0.866025, 0.866025], rtol=1e-5
  )
  np.testing.assert_allclose(
    own[0, :, 1], [-1.154701, 0.577350, 0.577350, 0], rtol=1e-5
  )


def rows_of(result):
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in result.history
    if 'loss' in row
  ]


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  s = settings(**SUB, lora_rank=2, mesh_data=1, mesh_fsdp=2, mesh_tensor=2)
  directory = tmp_path_factory.mktemp('sub')
  return train(byte_model(), directory, s, heldout=[]), s


@pytest.mark.slow
def test_a_run_over_adapters_on_a_mesh(finished):
  result, _ = finished
  rows = rows_of(result)
  assert all(row['sampler_mismatch'] < 1e-4 for row in rows)
  assert set(result.state.params) == {'heads', 'fusion', 'lora'}
  for name in NAMES:
    assert ['heads/' + name + '/grad_norm' in row for row in rows] == [
      True,
      False,
      True,
      False,
    ]
    assert rows[0][f'heads/{name}/kl'] == pytest.approx(0, abs=1e-9)
    assert rows[0]['kl'] == pytest.approx(0, abs=1e-8)  # to the trunk's base
    assert rows[-1][f'heads/{name}/kl'] > 0
  for row in rows:
    means = [row[f'fusion/{name}/weight'] for name in NAMES]
    assert sum(means) == pytest.approx(1, abs=1e-5)
    assert 0 < row['fusion/entropy'] <= np.log(2) + 1e-6
  # adapters are merged in what the run leaves behind, sub-policies are not
  assert result.policy.heads == NAMES and 'lora' not in result.params


@pytest.mark.slow
def test_resumed_equals_uninterrupted_and_one_device_agrees(finished, tmp_path):
  result, s = finished
  half = {**SUB, 'lora_rank': 2, 'num_steps': 2}
  mesh = {'mesh_data': 1, 'mesh_fsdp': 2, 'mesh_tensor': 2}
  train(byte_model(), tmp_path / 'a', settings(**half, **mesh), heldout=[])
  resumed = train(byte_model(), tmp_path / 'a', s, heldout=[])
  assert rows_of(resumed) == rows_of(result)
  jax.tree.map(
    np.testing.assert_array_equal, resumed.state.params, result.state.params
  )
  other = train(byte_model(), tmp_path / 'b', settings(**half), heldout=[])
  for row, want in zip(rows_of(other), rows_of(result)):
    for name in ('loss', 'fusion/entropy', 'rewards/digits/mean'):
      assert row[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
  ('changes', 'words'),
  [
    ({'subpolicy_rates': '1'}, "is '1'; give a number of at least 0 for each"),
    ({'subpolicy_frozen': 'long'}, r"names \['long'\]; there are digits"),
    ({'subpolicy_every': 0}, 'subpolicy_every is at least 1'),
    ({'subpolicy_isolation': 2.0}, r'subpolicy_isolation is in \[0, 1\]'),
    ({'algorithm': 'ppo'}, 'has a value head instead'),
  ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, changes, words):
  with pytest.raises(ValueError, match=words):
    train(byte_model(), tmp_path, settings(**{**SUB, **changes}))


def test_rules_raise_one_rate_and_the_bonus_and_take_them_back(params, policy):
  s = one_step_settings(fusion_entropy_coef=0.004)
  state, _ = start(policy, params, s, sharding.make_mesh(1, 2, 2))
  first = jax.device_get(state._replace(key=None))
  raised = subpolicies.adjusted(state, 0.01, [1.0, 1.1])
  assert float(raised.controllers['fusion_entropy_coef']) == np.float32(0.01)
  factors = [
    leaf
    for path, leaf in jax.tree_util.tree_leaves_with_path(raised.opt)
    if 'head_factor' in jax.tree_util.keystr(path)
  ]
  np.testing.assert_allclose(factors, [[1.0, 1.1]])
  back = subpolicies.adjusted(raised, 0.004, [1.0, 1.0])
  jax.tree.map(
    np.testing.assert_array_equal,
    jax.device_get(back._replace(key=None)),
    first,
  )
  places = [jax.tree.map(lambda x: x.sharding, x) for x in (back, state)]
  assert places[0] == places[1]
