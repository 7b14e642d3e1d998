"""The decoder against transformers, and what padding must not change."""

import collections
import importlib.util
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.policy.config import PolicyConfig, RopeScaling
from gdpo_jax.policy.decoder import Groups, Past, Slots, rope_table
from gdpo_jax.policy.policy import make_policy

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CASES = sorted(path.stem for path in GOLDEN.glob('*.npz'))


def tree_from_hf(config, weights):
  """The parameter tree for tensors as transformers names them."""

  def stack(name, transpose=False):
    arrays = [
      weights[f'model.layers.{i}.{name}'] for i in range(config.num_layers)
    ]
    return np.stack([x.T if transpose else x for x in arrays])

  def dense(name, bias=False):
    tree = {'kernel': stack(f'{name}.weight', transpose=True)}
    return tree | ({'bias': stack(f'{name}.bias')} if bias else {})

  attn = {
    name: dense(f'self_attn.{name}_proj', bias=config.qkv_bias and name != 'o')
    for name in 'qkvo'
  }
  if config.qk_norm:
    for name in ('q_norm', 'k_norm'):
      attn[name] = {'scale': stack(f'self_attn.{name}.weight')}
  tree = {
    'embed': {'embedding': weights['model.embed_tokens.weight']},
    'layers': {
      'attn_norm': {'scale': stack('input_layernorm.weight')},
      'attn': attn,
      'mlp_norm': {'scale': stack('post_attention_layernorm.weight')},
      'mlp': {n: dense(f'mlp.{n}_proj') for n in ('gate', 'up', 'down')},
    },
    'norm': {'scale': weights['model.norm.weight']},
  }
  if not config.tied:
    tree['head'] = {'embedding': weights['lm_head.weight']}
  return jax.tree.map(jnp.asarray, tree)


def check(config, weights, tokens, mask, expected):
  config = PolicyConfig.from_hf(config)
  policy = make_policy(config)
  params = tree_from_hf(config, weights)
  shapes = jax.eval_shape(policy.init, jax.random.key(0))
  assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
  logits = policy.logits(params, tokens, mask)
  np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-4, rtol=0)
  last, _ = policy.prefill(policy.rollout_params(params), tokens, mask)
  np.testing.assert_allclose(last, expected[:, -1], atol=1e-4, rtol=0)


def test_every_feature_has_a_golden_file():
  assert len(CASES) == 6


@pytest.mark.parametrize('case', CASES)
def test_golden_logits(case):
  with np.load(GOLDEN / f'{case}.npz') as file:
    weights = {
      name.removeprefix('weight:'): file[name]
      for name in file.files
      if name.startswith('weight:')
    }
    config = json.loads(str(file['config']))
    check(config, weights, file['tokens'], file['mask'], file['logits'])


@pytest.mark.parametrize('case', CASES)
def test_live_transformers(case):
  pytest.importorskip('torch', reason='torch is not installed')
  pytest.importorskip('transformers')
  spec = importlib.util.spec_from_file_location('make', GOLDEN / 'make.py')
  make = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(make)
  check(*make.run(case, seed=1))


TINY = PolicyConfig(
  family='qwen3',
  vocab_size=50,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=24,
  tied=True,
  qk_norm=True,
)


def large_params(policy, seed=0, scale=10.0):
  """Random weights whose attention is far from uniform."""
  params = policy.init(jax.random.key(seed))
  return jax.tree.map(lambda x: x * scale if x.ndim == 3 else x, params)


def test_positions_under_left_padding():
  policy = make_policy(TINY)
  params = large_params(policy)
  real = jnp.array([[7, 8, 9]])
  padded = jnp.array([[1, 1, 7, 8, 9]])
  mask = jnp.array([[False, False, True, True, True]])
  plain = policy.logits(params, real, jnp.ones((1, 3), bool))
  np.testing.assert_allclose(
    policy.logits(params, padded, mask)[:, 2:], plain, atol=1e-4
  )
  # RoPE sees distances only and would hide a shift, so the angles themselves:
  from gdpo_jax.policy.policy import _positions

  assert _positions(mask).tolist() == [[0, 0, 0, 1, 2]]


def test_pad_tokens_are_never_seen():
  policy = make_policy(TINY)
  params = large_params(policy)
  mask = jnp.array([[False, False, True, True, True]])
  a = policy.logits(params, jnp.array([[1, 1, 7, 8, 9]]), mask)
  b = policy.logits(params, jnp.array([[33, 4, 7, 8, 9]]), mask)
  np.testing.assert_array_equal(a[:, 2:], b[:, 2:])


def test_a_row_of_pads_is_finite():
  policy = make_policy(TINY)
  params = large_params(policy)
  tokens, mask = jnp.zeros((2, 4), jnp.int32), jnp.zeros((2, 4), bool)

  def total(params):
    return jnp.sum(policy.logits(params, tokens, mask))

  value, gradient = jax.jit(jax.value_and_grad(total))(params)
  assert jnp.isfinite(value)
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradient))
  last, _ = policy.prefill(policy.rollout_params(params), tokens, mask)
  assert jnp.isfinite(last).all()


def test_decoding_equals_one_pass():
  policy = make_policy(TINY)
  params = large_params(policy)
  tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 50)
  mask = jnp.arange(9) >= jnp.array([[0], [3]])
  expected = policy.logits(params, tokens, mask)
  weights = policy.rollout_params(params)
  logits, level = policy.prefill(weights, tokens[:, :5], mask[:, :5])
  np.testing.assert_allclose(logits, expected[:, 4], atol=1e-5)
  assert level.mask.tolist() == mask[:, :5].tolist()
  cache = policy.new_cache((level,), 2, 2)
  for slot in range(4):
    if slot == 2:
      cache = cache._replace(own=cache.own.grow(5))
    column = 5 + slot
    position = mask[:, :column].sum(axis=1)
    logits, cache = policy.decode(
      weights, cache, tokens[:, column], position, jnp.int32(slot)
    )
    np.testing.assert_allclose(logits, expected[:, column], atol=1e-5)
  assert cache.own.mask.tolist() == [[True] * 4 + [False]] * 2


def test_a_prefix_is_read_once():
  """Three texts that begin alike: prefix, then the rest, then two rows each."""
  policy = make_policy(TINY)
  params = large_params(policy)
  tokens = jax.random.randint(jax.random.key(1), (3, 9), 0, 50)
  tokens = tokens.at[:, :4].set(tokens[0, :4])
  # 4 + 4, 4 + 2 and 4 + 1 tokens, and one more to decode
  skipped = jnp.array([[0], [2], [3]])
  at = jnp.arange(9)
  mask = (at < 4) | (at >= 4 + skipped)
  expected = policy.logits(params, tokens, mask)
  weights = policy.rollout_params(params)
  _, prefix = policy.prefill(weights, tokens[:1, :4], mask[:1, :4])
  logits, level = policy.prefill(weights, tokens[:, 4:8], mask[:, 4:8], prefix)
  np.testing.assert_allclose(logits, expected[:, 7], atol=1e-5)
  cache = policy.new_cache((prefix, level), 6, 1)
  logits, _ = policy.decode(
    weights,
    cache,
    jnp.repeat(tokens[:, 8], 2),
    jnp.repeat(mask[:, :8].sum(axis=1), 2),
    jnp.int32(0),
  )
  np.testing.assert_allclose(
    logits, jnp.repeat(expected[:, 8], 2, axis=0), atol=1e-5
  )


def test_contexts_agree_on_the_last_token():
  """A token attends alike from inside a group and from a cache slot."""
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (1, 6, 4, 8))
  k, v = (jax.random.normal(key, (1, 6, 2, 8)) for key in keys[1:])
  mask = jnp.array([[False, True, True, True]])
  grouped, prompt = jax.jit(Groups.attend)(Groups(mask, num_lines=1), q, k, v)
  np.testing.assert_array_equal(prompt[0], k[:, :4].transpose(0, 2, 3, 1))
  np.testing.assert_array_equal(prompt[1], v[:, :4].transpose(0, 2, 1, 3))
  two, none = (0, 2), (0, 0)
  cache = [
    jnp.pad(prompt[0], (none, none, none, two)),
    jnp.pad(prompt[1], (none, none, two, none)),
  ]
  for slot in (4, 5):
    seen = jnp.array([[False, True, True, True, True, slot == 5]])
    out, cache = jax.jit(Slots.attend)(
      Slots((Past(*cache, seen),), jnp.int32(slot)),
      q[:, slot : slot + 1],
      k[:, slot],
      v[:, slot],
    )
    np.testing.assert_allclose(out[:, 0], grouped[:, slot], atol=1e-6)


def test_rope_scaling_by_hand():
  """Base 16 and head_dim 4: frequencies 1 and 1/4, wavelengths 2pi and 8pi.

  With 32 original positions those turn 5.09 and 1.27 times. Between factors 1
  and 4, the first is kept; the second is blended: (1.2732 - 1) / 3 = 0.0911 of
  1/4 and 0.9089 of 1/32.
  """
  config = PolicyConfig(
    **vars(TINY)
    | {
      'head_dim': 4,
      'rope_base': 16.0,
      'rope_scaling': RopeScaling(8.0, 1.0, 4.0, 32),
    }
  )
  cos, sin = rope_table(config, jnp.array([[1]]))
  angles = jnp.arctan2(sin, cos)[0, 0, 0]
  np.testing.assert_allclose(angles, [1.0, 0.0911 / 4 + 0.9089 / 32], atol=1e-4)


def test_parameter_count_and_tied_gradient():
  """Tied: 4 values count once, and their gradient is that of both uses."""
  tied = PolicyConfig(**vars(TINY) | {'tied': True})
  untied = PolicyConfig(**vars(TINY) | {'tied': False})
  tokens = jnp.array([[3, 4, 5]])
  mask = jnp.ones((1, 3), bool)

  def loss(policy, params):
    return jnp.sum(jnp.sin(policy.logits(params, tokens, mask)))

  one, two = make_policy(tied), make_policy(untied)
  params = large_params(one)
  both = params | {'head': params['embed']}
  count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # noqa: E731
  assert count(params) == tied.num_params
  assert count(both) == untied.num_params == tied.num_params + 50 * 16
  gradient = jax.jit(jax.grad(loss, argnums=1), static_argnums=0)
  shared, apart = gradient(one, params), gradient(two, both)
  np.testing.assert_allclose(
    shared['embed']['embedding'],
    apart['embed']['embedding'] + apart['head']['embedding'],
    atol=1e-5,
  )
  assert jnp.any(apart['embed']['embedding'])
  assert jnp.any(apart['head']['embedding'])


def test_remat_changes_nothing():
  tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 50)
  mask = jnp.ones((2, 9), bool)
  params = large_params(make_policy(TINY))

  def gradient(remat):
    policy = make_policy(TINY, remat=remat)

    def loss(params):
      return jnp.sum(jnp.sin(policy.logits(params, tokens, mask)))

    return jax.jit(jax.grad(loss))(params)

  plain = gradient('none')
  for remat in ('dots', 'block'):
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
      plain,
      gradient(remat),
    )


def test_unknown_names_are_refused():
  with pytest.raises(ValueError, match="'full'.*none.*dots.*block"):
    make_policy(TINY, remat='full')
  with pytest.raises(ValueError, match='float16.*float32.*bfloat16'):
    make_policy(TINY, compute_dtype=jnp.float16)


def products(jaxpr):
  """The input dtypes of every dot_general in a jaxpr, inner ones included."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield tuple(x.aval.dtype.name for x in eqn.invars)
    for inner in jax.tree.leaves(
      eqn.params, is_leaf=lambda x: hasattr(x, 'jaxpr')
    ):
      inner = getattr(inner, 'jaxpr', inner)
      if hasattr(inner, 'eqns'):
        yield from products(inner)


def test_bfloat16_products_in_both_directions():
  """Dense products have bf16 inputs, 3 of each; all results are float32."""
  config = PolicyConfig(**vars(TINY) | {'num_layers': 1})
  policy = make_policy(config, compute_dtype=jnp.bfloat16)
  params = policy.init(jax.random.key(0))
  tokens = jax.random.randint(jax.random.key(1), (2, 9), 0, 50)
  mask = jnp.ones((2, 9), bool)

  def loss(params, policy):
    return jnp.mean(policy.logits(params, tokens, mask) ** 2)

  gradient = jax.jit(jax.grad(loss), static_argnums=1)
  exact, rounded = (
    gradient(params, make_policy(config)),
    gradient(params, policy),
  )
  for a, b in zip(jax.tree.leaves(exact), jax.tree.leaves(rounded)):
    assert b.dtype == jnp.float32
    assert jnp.linalg.norm(a - b) <= 0.05 * jnp.linalg.norm(a)
  jaxpr = jax.make_jaxpr(jax.grad(loss), static_argnums=1)(params, policy)
  counts = collections.Counter(products(jaxpr.jaxpr))
  # q, k, v, o, gate, up, down and the head, each forward and twice backward,
  # in two versions, for CPU and for others
  assert counts.pop(('bfloat16', 'bfloat16')) == 8 * 3 * 2
  # attention, which `hidden` has in float32: scores and values, and backward
  # the scores again, and two products of each
  assert counts == {('float32', 'float32'): 2 + 1 + 2 * 2}
