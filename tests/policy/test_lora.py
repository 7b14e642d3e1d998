"""LoRA against a dense update of the same product, merged, and through PEFT."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from small_models import small_config

from gdpo_jax.policy import hf, lora, peft
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Rollout

SPEC = lora.Lora(4, alpha=6.0)


@pytest.fixture(scope='module')
def policy():
  return make_policy(small_config())


@pytest.fixture(scope='module')
def adapted(policy):
  return lora.adapt(policy, SPEC)


@pytest.fixture(scope='module')
def params(adapted):
  """Adapters that do something: B is not zero."""
  return stirred(adapted.init(jax.random.key(0)))


def stirred(params):
  def stir(path, x):
    key = jax.random.key(len(jax.tree_util.keystr(path)))
    return x + 0.1 * jax.random.normal(key, x.shape)

  return {
    **params,
    'lora': jax.tree_util.tree_map_with_path(stir, params['lora']),
  }


@pytest.fixture(scope='module')
def rollout():
  rng = np.random.default_rng(0)
  n, tp, tc = 8, 4, 6
  return Rollout(
    prompt=jnp.asarray(rng.integers(2, 48, (n, tp)), jnp.int32),
    prompt_mask=jnp.ones((n, tp), bool),
    tokens=jnp.asarray(rng.integers(2, 48, (n, tc)), jnp.int32),
    mask=jnp.asarray(np.arange(tc) < rng.integers(1, tc + 1, (n, 1))),
    logp=jnp.zeros((n, tc)),
    ended=jnp.ones(n, bool),
  )


def test_a_new_adapter_changes_nothing_and_a_stirred_one_does(
  policy, adapted, params, rollout
):
  _, base = lora.split(params)
  fresh = adapted.init(jax.random.key(0))
  expected = policy.log_probs(base, rollout)[0]
  np.testing.assert_array_equal(adapted.log_probs(fresh, rollout)[0], expected)
  # without adapters: the reference policy, for free
  np.testing.assert_array_equal(adapted.log_probs(base, rollout)[0], expected)
  moved = adapted.log_probs(params, rollout)[0]
  assert float(jnp.max(jnp.abs(moved - expected))) > 0.1


def test_merged_equals_unmerged(policy, adapted, params, rollout):
  merged = lora.merge(params, SPEC)
  assert 'lora' not in merged
  np.testing.assert_allclose(
    adapted.log_probs(params, rollout)[0],
    policy.log_probs(merged, rollout)[0],
    atol=1e-5,
  )
  tokens, mask = rollout.prompt, rollout.prompt_mask
  np.testing.assert_allclose(
    adapted.prefill(adapted.rollout_params(params), tokens, mask)[0],
    adapted.logits(params, tokens, mask)[:, -1],
    atol=1e-5,
  )


def test_equals_a_dense_update_of_the_same_product(
  policy, adapted, params, rollout
):
  """dA = s dW B^T and dB = s A^T dW, with dW of the dense policy; five steps.

  The dense side writes W + s A B out and differentiates through the product.
  """
  trained, frozen = lora.split(params)

  def dense(trained):
    """Every product written out, on the tree of a plain policy."""
    layers = jax.tree.map(lambda x: x, frozen['layers'])
    for name in lora.PROJECTIONS:
      part, leaf = name.split('/')
      own = trained['lora']['layers'][part][leaf]
      product = jnp.einsum('lir,lro->lio', own['a'], own['b'])
      kernel = frozen['layers'][part][leaf]['kernel']
      layers[part][leaf]['kernel'] = kernel + 6.0 / 4 * product
    return {**frozen, 'layers': layers}

  def step(log_probs):
    def loss(trained):
      logp, entropy = log_probs(trained)
      return -jnp.sum(logp) + 0.1 * jnp.sum(entropy)

    return jax.jit(
      lambda t: optax.apply_updates(
        t, jax.tree.map(lambda g: -1e-3 * g, jax.grad(loss)(t))
      )
    )

  ours = step(lambda t: adapted.log_probs({**frozen, **t}, rollout))
  theirs = step(lambda t: policy.log_probs(dense(t), rollout))
  a = b = trained
  for _ in range(5):
    a, b = ours(a), theirs(b)
  moved = jax.tree.map(lambda x, y: float(abs(x - y).max()), a, trained)
  assert min(jax.tree.leaves(moved)) > 1e-4
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6, rtol=1e-4), a, b
  )


def test_no_gradient_of_a_kernel_is_computed(adapted, params, rollout):
  """The compiled program has no product of a kernel's shape [D, F]."""
  trained, frozen = lora.split(params)

  def products(loss, *args):
    text = jax.jit(jax.grad(loss)).lower(*args).compile().as_text()
    return len(re.findall(r'= f32\[(?:32,40|40,32)\]\S* dot\(', text))

  def total(params):
    return jnp.sum(adapted.log_probs(params, rollout)[0])

  assert products(lambda t, f: total({**f, **t}), trained, frozen) == 0
  assert products(lambda f: total(f), frozen) == 3


def test_scale_and_targets():
  assert lora.Lora(16, 8.0).scale == 0.5
  assert lora.Lora(16, 8.0, rank_stabilized=True).scale == 2.0
  assert lora.Lora(1, targets='attn/[qv]').projections == ('attn/q', 'attn/v')
  tree = lora.init(
    small_config(), lora.Lora(2, targets='mlp/down'), jax.random.key(0)
  )
  assert jax.tree.map(jnp.shape, tree) == {
    'layers': {'mlp': {'down': {'a': (2, 40, 2), 'b': (2, 2, 32)}}}
  }
  for wrong, words in (
    ({'rank': 0}, 'rank of at least 1'),
    ({'rank': 1, 'targets': 'q_proj'}, 'match no projection; there are attn/q'),
    ({'rank': 1, 'targets': '('}, 'no regular expression'),
  ):
    with pytest.raises(ValueError, match=words):
      lora.Lora(**wrong)


@pytest.mark.parametrize('stabilized', [False, True])
def test_adapters_come_back(params, tmp_path, stabilized):
  spec = lora.Lora(4, 6.0, 'attn/.*|mlp/up', stabilized)
  peft.save(tmp_path, small_config(), params['lora'], spec)
  read, tree = peft.load(tmp_path, small_config())
  assert read.projections == spec.projections and read.scale == spec.scale
  for part, leaf in (name.split('/') for name in spec.projections):
    jax.tree.map(
      np.testing.assert_array_equal,
      tree['layers'][part][leaf],
      params['lora']['layers'][part][leaf],
    )


def damage(directory, what):
  config = json.loads((directory / 'adapter_config.json').read_text())
  weights = directory / 'adapter_model.safetensors'
  tensors = safetensors.numpy.load_file(weights)
  name = 'base_model.model.model.layers.1.mlp.up_proj.lora_A.weight'
  if what in ('use_dora', 'bias', 'peft_type', 'r'):
    config[what] = {'use_dora': True, 'bias': 'all', 'r': '4'}.get(what, 'IA3')
    (directory / 'adapter_config.json').write_text(json.dumps(config))
    return
  if what == 'missing':
    del tensors[name]
  elif what == 'surplus':
    tensors['base_model.model.lm_head.lora_A.weight'] = tensors[name]
  elif what == 'shape':
    tensors[name] = np.zeros((4, 31), np.float32)
  safetensors.numpy.save_file(tensors, weights)
  if what == 'truncated':
    weights.write_bytes(weights.read_bytes()[:-10])


@pytest.mark.parametrize(
  ('what', 'words'),
  [
    ('use_dora', 'asks for use_dora'),
    ('bias', 'asks for bias'),
    ('peft_type', "type 'IA3'"),
    ('r', "r '4'"),
    ('missing', r'lacks .*layers.1.mlp.up_proj.lora_A'),
    ('surplus', 'no place for .*lm_head'),
    ('shape', r'shape \[4, 31\], expected a float of shape \[4, 32\]'),
    ('truncated', 'cannot be read as safetensors'),
  ],
)
def test_what_cannot_be_an_adapter_is_refused(params, tmp_path, what, words):
  peft.save(tmp_path, small_config(), params['lora'], SPEC)
  damage(tmp_path, what)
  with pytest.raises(ValueError, match=words):
    peft.load(tmp_path, small_config())


def test_peft_opens_the_export_and_gives_the_same_logits(tmp_path):
  torch = pytest.importorskip('torch', reason='needs the bench extra')
  theirs = pytest.importorskip('peft', reason='needs the bench extra')
  transformers = pytest.importorskip('transformers')
  config = small_config(family='qwen2', qkv_bias=True, tied=False)
  spec = lora.Lora(4, 6.0, 'attn/.*|mlp/down', rank_stabilized=True)
  policy = lora.adapt(make_policy(config), spec)
  params = stirred(policy.init(jax.random.key(1)))
  trained, base = lora.split(params)
  hf.save(tmp_path / 'base', config, base, dtype='float32')
  peft.save(tmp_path / 'adapter', config, trained['lora'], spec)
  model = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'base', dtype=torch.float32
  )
  tokens = np.random.default_rng(0).integers(2, 48, (3, 9))
  with torch.no_grad():
    plain = model(torch.tensor(tokens)).logits.numpy()
    opened = theirs.PeftModel.from_pretrained(model, tmp_path / 'adapter')
    expected = opened(torch.tensor(tokens)).logits.numpy()
  got = policy.logits(params, jnp.asarray(tokens), jnp.ones((3, 9), bool))
  np.testing.assert_allclose(got, expected, atol=1e-4)
  assert np.abs(expected - plain).max() > 0.05
  # and what PEFT writes is read
  opened.save_pretrained(tmp_path / 'again')
  read, tree = peft.load(tmp_path / 'again', config)
  assert read.scale == spec.scale and read.projections == spec.projections
  jax.tree.map(np.testing.assert_array_equal, tree, trained['lora'])
