"""Token log-probs: hand numbers, shifts, groups, chunks, and the gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as Spec

from gdpo_jax.policy import attention, heads
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Rollout

CONFIG = PolicyConfig(
  family='qwen2',
  vocab_size=50,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=24,
  qkv_bias=True,
)
POLICY = make_policy(CONFIG)


@pytest.fixture(scope='module')
def params():
  params = POLICY.init(jax.random.key(0))
  return jax.tree.map(lambda x: x * 10 if x.ndim == 3 else x, params)


def rollout_of(prompts, prompt_mask, tokens, mask):
  """A rollout with zero behaviour log-probs; prompts repeat to fill N rows."""
  repeats = len(tokens) // len(prompts)
  return Rollout(
    prompt=jnp.repeat(jnp.asarray(prompts), repeats, axis=0),
    prompt_mask=jnp.repeat(jnp.asarray(prompt_mask), repeats, axis=0),
    tokens=jnp.asarray(tokens),
    mask=jnp.asarray(mask),
    logp=jnp.zeros(np.shape(tokens), jnp.float32),
    ended=jnp.ones(len(tokens), bool),
  )


@pytest.fixture(scope='module')
def ragged():
  """3 prompts of 5, 2 and 0 tokens, 4 completions of differing lengths each."""
  rng = np.random.default_rng(0)
  lengths = rng.integers(1, 8, 12)
  return rollout_of(
    rng.integers(0, 50, (3, 5)),
    np.arange(5) >= np.array([[0], [3], [5]]),
    rng.integers(0, 50, (12, 7)),
    np.arange(7) < lengths[:, None],
  )


def test_temperature_by_hand():
  """Logits [2, 1, 0] at temperature 0.5: log_softmax([4, 2, 0])[0]."""
  hidden, head = jnp.ones((1, 1, 1)), jnp.array([[2.0], [1.0], [0.0]])
  logp, entropy = heads.token_log_probs(
    hidden, head, jnp.array([[0]]), temperature=0.5
  )
  np.testing.assert_allclose(logp, [[-0.142932]], atol=1e-6)
  p = np.array([0.866814, 0.117310, 0.015876])
  np.testing.assert_allclose(entropy, [[-(p * np.log(p)).sum()]], atol=1e-5)
  with pytest.raises(ValueError, match='temperature is 0.0'):
    heads.token_log_probs(hidden, head, jnp.array([[0]]), temperature=0.0)


def test_tied_head_by_hand():
  """E = [[1, 2], [3, 4]] and h = [1, 1] give logits [3, 7]."""
  table = jnp.array([[1.0, 2.0], [3.0, 4.0]])
  np.testing.assert_array_equal(
    heads.logits(jnp.ones((1, 2)), table), [[3.0, 7.0]]
  )


def test_log_prob_k_belongs_to_token_k(params):
  """[BOS, p | a, b, EOS, PAD]: three log-probs, each from the token before."""
  sequence = jnp.array([[1, 9, 11, 12, 2, 0]])
  rollout = rollout_of(
    sequence[:, :2],
    jnp.ones((1, 2), bool),
    sequence[:, 2:],
    jnp.array([[True, True, True, False]]),
  )
  logp, _ = POLICY.log_probs(params, rollout)
  logits = POLICY.logits(params, sequence, jnp.ones((1, 6), bool))
  full = jax.nn.log_softmax(logits)[0]
  expected = [full[1, 11], full[2, 12], full[3, 2], 0.0]
  np.testing.assert_allclose(logp[0], expected, atol=1e-5)


@pytest.mark.parametrize('padding', [0, 3])
def test_padding_changes_nothing(params, padding):
  """Left pads of the prompt and right pads of the completion."""
  rng = np.random.default_rng(1)
  prompt, tokens = rng.integers(0, 50, (1, 4)), rng.integers(0, 50, (1, 5))
  plain, plain_entropy = POLICY.log_probs(
    params,
    rollout_of(prompt, prompt == prompt, tokens, tokens == tokens),
    temperature=0.7,
  )
  padded = rollout_of(
    np.pad(prompt, ((0, 0), (padding, 0)), constant_values=7),
    np.pad(prompt == prompt, ((0, 0), (padding, 0))),
    np.pad(tokens, ((0, 0), (0, padding)), constant_values=7),
    np.pad(tokens == tokens, ((0, 0), (0, padding))),
  )
  logp, entropy = POLICY.log_probs(params, padded, temperature=0.7)
  np.testing.assert_allclose(logp[:, :5], plain, atol=1e-4)
  np.testing.assert_allclose(entropy[:, :5], plain_entropy, atol=1e-4)
  assert not jnp.any(logp[:, 5:]) and not jnp.any(entropy[:, 5:])


def surrogate(params, rollout, group_size, policy=POLICY):
  logp, entropy = policy.log_probs(
    params, rollout, group_size=group_size, temperature=0.7
  )
  weights = jnp.sin(jnp.arange(logp.size)).reshape(logp.shape)
  return jnp.sum(weights * logp) + 0.1 * jnp.sum(entropy), logp


GRADIENT = jax.jit(
  jax.value_and_grad(surrogate, has_aux=True),
  static_argnames=('group_size', 'policy'),
)


def assert_trees_close(a, b, rtol):
  """Every leaf within `rtol` of the size of that leaf."""
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert jnp.isfinite(x).all()
    np.testing.assert_allclose(x, y, atol=rtol * float(jnp.abs(y).max()))


def test_a_shared_prompt_changes_nothing(params, ragged):
  """Computing the prompt of a group once: same numbers, same gradient."""
  (_, apart), gradient_apart = GRADIENT(params, ragged, group_size=1)
  (_, shared), gradient_shared = GRADIENT(params, ragged, group_size=4)
  np.testing.assert_allclose(shared, apart, atol=1e-5)
  assert_trees_close(gradient_shared, gradient_apart, rtol=1e-5)


def test_siblings_do_not_see_each_other(params, ragged):
  before, _ = POLICY.log_probs(params, ragged, group_size=4)
  changed = ragged._replace(tokens=ragged.tokens.at[1].set(3))
  after, _ = POLICY.log_probs(params, changed, group_size=4)
  rows = np.arange(12) != 1
  np.testing.assert_array_equal(before[rows], after[rows])
  assert jnp.any(before[1] != after[1])


def test_rows_that_do_not_divide_are_refused(params, ragged):
  with pytest.raises(ValueError, match='12 rows.*groups of 5'):
    POLICY.log_probs(params, ragged, group_size=5)


def test_blocks_change_nothing():
  """One block, even, uneven, and single tokens, forward and backward."""
  keys = jax.random.split(jax.random.key(0), 4)
  hidden = jax.random.normal(keys[0], (3, 7, 8))
  head = jax.random.normal(keys[1], (53, 8))  # a prime: no even blocks
  targets = jax.random.randint(keys[2], (3, 7), 0, 53)
  weights = jax.random.normal(keys[3], (2, 3, 7))

  def loss(hidden, head, block_bytes):
    out = heads.token_log_probs(
      hidden, head, targets, temperature=0.7, block_bytes=block_bytes
    )
    return sum(jnp.sum(w * x) for w, x in zip(weights, out)), out

  def plain(hidden, head):
    logp = jax.nn.log_softmax(hidden @ head.T / 0.7)
    entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
    picked = jnp.take_along_axis(logp, targets[..., None], -1)[..., 0]
    out = picked, entropy
    return sum(jnp.sum(w * x) for w, x in zip(weights, out)), out

  gradient = jax.jit(
    jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=2
  )
  expected = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, head)
  for columns in (53, 25, 17, 1):
    got = gradient(hidden, head, columns * 3 * 7 * 4)
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, expected
    )


def test_even_blocks_where_there_are_some():
  """150,000 and the vocabularies of Llama 3 and Qwen, about 1,024 at once."""
  for size, block in ((150_000, 1000), (128_256, 1002), (151_936, 1187)):
    assert heads.block_size(size, 1024) == block
  assert heads.block_size(1009 * 1013, 100) == 100  # no divisor near it
  assert heads.block_size(50, 1024) == 50


def test_no_array_of_rows_by_tokens_by_vocabulary():
  """The compiled gradient needs less memory than one such array would."""
  config = PolicyConfig(**vars(CONFIG) | {'vocab_size': 50_000})
  policy = make_policy(config)
  params = jax.eval_shape(policy.init, jax.random.key(0))
  tokens = np.zeros((8, 256), np.int32)
  rollout = rollout_of(tokens, tokens == 0, tokens, tokens == 0)
  compiled = GRADIENT.lower(params, rollout, 1, policy).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 8 * 256 * 50_000 * 4


def test_zero_loss_but_a_gradient():
  """Vocabulary of 2, logits [0, 0], token 0 with A=+1 and token 1 with A=-1.

  On policy the ratio is 1, so the loss -mean(A) is 0; its gradient in the
  shared logits is [-0.5, 0.5].
  """
  hidden = jnp.ones((2, 1, 1))
  targets = jnp.array([[0], [1]])
  advantages = jnp.array([[1.0], [-1.0]])

  def loss(head):
    logp, _ = heads.token_log_probs(hidden, head, targets)
    ratio = jnp.exp(logp - jax.lax.stop_gradient(logp))
    return -jnp.mean(advantages * ratio)

  value, gradient = jax.value_and_grad(loss)(jnp.zeros((2, 1)))
  np.testing.assert_allclose(value, 0.0, atol=1e-7)
  np.testing.assert_allclose(gradient, [[-0.5], [0.5]], atol=1e-6)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sharded_rows_and_weights(params, ragged, dtype):
  """Four devices: rows split over one axis, the kernels as well."""
  policy = make_policy(CONFIG, jnp.dtype(dtype), remat='dots')
  mesh = jax.make_mesh((4,), ('data',), axis_types=(AxisType.Auto,))
  four = jax.tree.map(lambda x: x[:4].repeat(4, 0), ragged)

  def place(x):
    spec = Spec(None, 'data') if x.ndim == 3 else Spec()
    return jax.device_put(x, NamedSharding(mesh, spec))

  rows = jax.device_put(four, NamedSharding(mesh, Spec('data')))
  tree = jax.tree.map(place, params)
  expected, expected_gradient = GRADIENT(params, four, 4, policy)
  got, gradient = GRADIENT(tree, rows, 4, policy)
  close = 1e-4 if dtype == 'float32' else 5e-2
  np.testing.assert_allclose(got[1], expected[1], atol=close)
  assert_trees_close(gradient, expected_gradient, rtol=close)


def test_blocks_of_queries_change_nothing(params, ragged, monkeypatch):
  """Of 4 prompt tokens and 7 of each completion, at most 2 attend at once."""

  def loss(params, rollout):
    logp, entropy = POLICY.log_probs.__wrapped__(params, rollout, group_size=4)
    return jnp.sum(jnp.sin(logp) + entropy), logp

  def run():
    return jax.jit(jax.grad(loss, has_aux=True))(params, ragged)

  expected = run()
  monkeypatch.setattr(attention, 'BLOCK', 2)
  assert_trees_close(run(), expected, rtol=1e-5)
