"""Packed completions: hand-packed lines, and the numbers of unpacked ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import small_config

from gdpo_jax import sharding
from gdpo_jax.policy import lora, packing
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Rollout

G, TC = 4, 8
# an empty row, rows at the limit, and short ones
LENGTHS = np.array([[8, 3, 5, 0], [2, 8, 1, 1], [4, 4, 4, 4], [1, 1, 1, 1]])


def test_lines_by_hand():
  place = packing.pack(np.array([[4, 3, 6, 1]]), 8, 0)
  # 6 then 4; 3 behind 4 (7 of 8); 1 behind 6, the first line with room
  np.testing.assert_array_equal(place, [[-1, 0], [-1, 4], [0, -1], [6, -1]])
  mask = np.arange(8) < np.array([4, 3, 6, 1])[:, None]
  lines = packing.lines(jnp.array(place), jnp.array(mask), 4, 0)
  row = [[2, 2, 2, 2, 2, 2, 3, -1, 0, 0, 0, 0, 1, 1, 1, -1]]
  np.testing.assert_array_equal(lines.segment, row)
  step = [[0, 1, 2, 3, 4, 5, 0, 0, 0, 1, 2, 3, 0, 1, 2, 0]]
  np.testing.assert_array_equal(lines.step, step)
  tokens = jnp.arange(32).reshape(1, 32)
  there = lines.take(tokens)
  back = lines.back(there, (4, 8))
  np.testing.assert_array_equal(
    np.where(mask, back, -1), np.where(mask, tokens.reshape(4, 8), -1)
  )


@pytest.mark.parametrize(
  'lengths, line_tokens, num_lines',
  [
    (LENGTHS, 0, 2),
    (LENGTHS, 16, 1),  # lines of two rows: one instead of two
    (LENGTHS[3:], 0, 1),
    (np.full((1, 4), 8), 0, None),  # nothing to gain
    (np.array([[5, 5, 5, 1]]), 0, 3),
    (np.array([[5, 5, 5, 5]]), 0, None),  # no two fit into a line
    (np.zeros((2, 4), int), 0, 1),
  ],
)
def test_few_sizes_of_lines(lengths, line_tokens, num_lines):
  place = packing.pack(lengths, TC, line_tokens)
  assert (place is None) if num_lines is None else place.shape[1] == num_lines


@pytest.fixture(scope='module')
def rollout():
  rng = np.random.default_rng(0)
  lengths = LENGTHS.reshape(-1)
  n, tp = len(lengths), 5
  prompt_mask = np.arange(tp) >= rng.integers(0, tp + 1, (n // G, 1))
  return Rollout(
    prompt=jnp.asarray(
      rng.integers(2, 48, (n // G, tp)).repeat(G, axis=0), jnp.int32
    ),
    prompt_mask=jnp.asarray(prompt_mask.repeat(G, axis=0)),
    tokens=jnp.asarray(rng.integers(2, 48, (n, TC)), jnp.int32),
    mask=jnp.asarray(np.arange(TC) < lengths[:, None]),
    logp=jnp.zeros((n, TC)),
    ended=jnp.ones(n, bool),
  )


def scores_and_gradient(policy, params, rollout, **options):
  """(logp, entropy, values) and the gradient of a function of all of them."""

  def loss(params, rollout):
    scores = policy.log_probs(
      params,
      rollout,
      group_size=G,
      temperature=0.7,
      with_values='value' in params,
      **options,
    )
    return sum(jnp.sum(jnp.sin(x)) for x in scores), scores

  return jax.jit(jax.grad(loss, has_aux=True))(params, rollout)


@pytest.mark.parametrize('line_tokens', [0, 12, 16])
@pytest.mark.parametrize('kind', ['plain', 'value', 'lora'])
def test_packed_is_unpacked(rollout, line_tokens, kind):
  policy = make_policy(small_config(), remat='dots')
  if kind == 'lora':
    policy = lora.adapt(policy, lora.Lora(2))
  params = policy.init(jax.random.key(0))
  if kind == 'value':
    kernel = jax.random.normal(jax.random.key(1), (policy.config.width,))
    params = {**params, 'value': {'kernel': kernel}}
  if kind == 'lora':
    params['lora'] = jax.tree.map(lambda x: x + 0.05, params['lora'])
  place = packing.pack(LENGTHS, TC, line_tokens)
  grads, scores = scores_and_gradient(
    policy, params, rollout, place=jnp.asarray(place), line_tokens=line_tokens
  )
  plain_grads, plain_scores = scores_and_gradient(policy, params, rollout)
  for got, expected in zip(scores, plain_scores, strict=True):
    assert got.shape == rollout.tokens.shape
    np.testing.assert_allclose(got, expected, atol=1e-5)
  largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(plain_grads))
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5 * largest),
    grads,
    plain_grads,
  )


def test_over_a_mesh_and_where_groups_are_split(rollout):
  policy = make_policy(small_config())
  params = policy.init(jax.random.key(0))
  place = jnp.asarray(packing.pack(LENGTHS, TC, 0))

  def on(mesh, count):
    def run(params, rollout, place):
      with sharding.use(mesh):
        return policy.log_probs.__wrapped__(
          params, rollout, group_size=G, place=place
        )[0]

    part = jax.tree.map(lambda x: x[:count], (rollout, place))
    placed = sharding.shardings(mesh, params), sharding.rows(mesh)
    return jax.jit(run, in_shardings=(*placed, placed[1]))(params, *part)

  expected = policy.log_probs(params, rollout, group_size=G)[0]
  for sizes in ((4, 1, 1), (1, 2, 2)):
    got = on(sharding.make_mesh(*sizes), len(rollout.tokens))
    np.testing.assert_allclose(got, expected, atol=1e-5)
  with pytest.raises(ValueError, match='several devices each'):
    on(sharding.make_mesh(4, 1, 1), 8)
