"""Sub-policies and fusion: a distribution, exact, and isolated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import small_config

from gdpo_jax import sampler
from gdpo_jax.policy import decoupled, hf
from gdpo_jax.policy import heads as lm_head
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Prompts, Rollout

SPEC = decoupled.Decoupled(('correct', 'short', 'polite'), rank=4)
N, TP, TC, V = 8, 4, 6, 48


@pytest.fixture(scope='module')
def trunk():
  return make_policy(small_config())


@pytest.fixture(scope='module')
def policy(trunk):
  return decoupled.adapt(trunk, SPEC)


@pytest.fixture(scope='module')
def fresh(policy):
  return policy.init(jax.random.key(0))


@pytest.fixture(scope='module')
def params(fresh):
  """Sub-policies that differ, and a fusion that chooses."""
  up = fresh['heads']['up']
  heads = {
    **fresh['heads'],
    'up': jax.random.normal(jax.random.key(7), up.shape),
  }
  tag = 3 * jax.random.normal(jax.random.key(8), fresh['fusion']['tag'].shape)
  return {**fresh, 'heads': heads, 'fusion': {**fresh['fusion'], 'tag': tag}}


@pytest.fixture(scope='module')
def rollout():
  rng = np.random.default_rng(0)
  prompt = np.repeat(rng.integers(2, V, (N // 4, TP)), 4, axis=0)
  mask = jnp.asarray(np.arange(TC) < rng.integers(1, TC + 1, (N, 1)))
  return Rollout(
    prompt=jnp.asarray(prompt, jnp.int32),
    prompt_mask=jnp.ones((N, TP), bool),
    tokens=jnp.asarray(rng.integers(2, V, (N, TC)), jnp.int32),
    mask=mask,
    logp=jnp.zeros((N, TC)),
    ended=jnp.ones(N, bool),
  )


def test_the_mixture_starts_as_the_policy_of_the_trunk(
  trunk, policy, fresh, rollout
):
  logp, entropy, parts = policy.log_probs(fresh, rollout, turn=jnp.array(True))
  base, base_entropy = trunk.log_probs(fresh, rollout)
  np.testing.assert_allclose(logp, base, atol=1e-6)
  np.testing.assert_allclose(entropy, base_entropy, atol=1e-5)
  for k in range(3):
    np.testing.assert_allclose(parts.own[..., k], base, atol=1e-6)
  got = policy.logits(fresh, rollout.prompt, rollout.prompt_mask)
  plain = {n: fresh[n] for n in fresh if n not in ('heads', 'fusion')}
  want = trunk.logits(plain, rollout.prompt, rollout.prompt_mask)
  np.testing.assert_allclose(got, jax.nn.log_softmax(want), atol=2e-6)


def written_out(policy, params, rollout, temperature=1.0):
  """(logp, entropy, own) by a [N, T, V] array, with loops over the rewards."""
  hidden, head = policy.hidden(params, rollout)
  states = decoupled.sub_states(params['heads'], hidden)
  w = jnp.exp(decoupled.log_fusion(params['fusion'], hidden, states))
  p = sum(
    w[..., k, None] * jax.nn.softmax(states[..., k, :] @ head.T)
    for k in range(3)
  )
  logp = jax.nn.log_softmax(jnp.log(p) / temperature)
  own = [
    jax.nn.log_softmax(states[..., k, :] @ head.T / temperature)
    for k in range(3)
  ]

  def pick(x):
    chosen = jnp.take_along_axis(x, rollout.tokens[..., None], axis=-1)[..., 0]
    return jnp.where(rollout.mask, chosen, 0)

  entropy = jnp.where(rollout.mask, -(jnp.exp(logp) * logp).sum(-1), 0)
  return pick(logp), entropy, jnp.stack([pick(x) for x in own], axis=-1)


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_mixture_equals_the_written_out_sum(
  policy, params, rollout, temperature, monkeypatch
):
  monkeypatch.setattr(lm_head, 'BLOCK_BYTES', 4)
  monkeypatch.setattr(lm_head, 'MIN_BLOCK', 20)  # three blocks
  jax.clear_caches()

  def scores(params):
    logp, entropy, parts = policy.log_probs(
      params, rollout, temperature=temperature, turn=jnp.array(True)
    )
    return logp, entropy, parts.own

  want = written_out(policy, params, rollout, temperature)
  for a, b in zip(scores(params), want):
    np.testing.assert_allclose(a, b, atol=2e-5)

  # ... and so do the gradients of trunk and fusion
  def total(f):
    def of(part):
      logp, entropy, _ = f({**params, **part})
      return jnp.sum(jnp.sin(logp)) + jnp.sum(entropy)

    return jax.grad(of)({n: params[n] for n in params if n != 'heads'})

  got = total(scores)
  want = total(lambda p: written_out(policy, p, rollout, temperature))
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4, rtol=2e-3),
    got,
    want,
  )


def test_no_array_of_rows_tokens_and_vocabulary(monkeypatch):
  """Of the loss and its gradients, with more tokens than K * D."""
  vocab_size = 2048
  monkeypatch.setattr(lm_head, 'BLOCK_BYTES', 4)
  monkeypatch.setattr(lm_head, 'MIN_BLOCK', 128)

  def loss(params, hidden, head):
    logp, entropy, parts = decoupled.token_scores(
      params,
      hidden,
      head,
      jnp.zeros((N, TC), jnp.int32),
      temperature=0.7,
      turn=jnp.array(True),
    )
    return jnp.sum(logp) + jnp.sum(entropy) + jnp.sum(parts.own)

  args = (
    decoupled.init(32, SPEC, jax.random.key(0)),
    jnp.zeros((N, TC, 32)),
    jnp.zeros((vocab_size, 32)),
  )
  text = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*args).as_text()
  shapes = set(re.findall(r'tensor<((?:\d+x)+)f32>', text))
  sizes = {s: np.prod([int(n) for n in s.split('x') if n]) for s in shapes}
  head = {s for s in shapes if sizes[s] == vocab_size * 32}
  assert head and max(sizes[s] for s in shapes - head) < N * TC * vocab_size / 4


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_sampler_and_trainer_agree(policy, params, temperature):
  prompts = Prompts(
    np.array([[3, 4, 5, 6], [0, 0, 9, 7]], np.int32),
    np.array([[1, 1, 1, 1], [0, 0, 1, 1]], bool),
    [],
  )
  sampling = sampler.Sampling(4, TC, temperature=temperature, eos_ids=(1,))
  rollout = sampler.generate(
    policy, params, prompts, jax.random.key(3), sampling
  )
  logp, _ = policy.log_probs(
    params, rollout, group_size=4, temperature=temperature
  )
  np.testing.assert_allclose(logp, rollout.logp, atol=1e-4)


def own_loss(trunk, isolation):
  spec = decoupled.Decoupled(SPEC.names, rank=4, isolation=isolation)
  policy = decoupled.adapt(trunk, spec)

  @jax.jit
  def loss(params, rollout):
    parts = policy.log_probs(params, rollout, turn=jnp.array(True))[-1]
    return jnp.sum(parts.own[..., 0]) - 0.5 * jnp.sum(parts.own[..., 1])

  return loss


def test_isolation_scales_what_enters_the_trunk(trunk, params, rollout):
  """Against the slope of the loss itself: 1 is plain, 0 nothing, 0.25 a quarter."""
  loss = own_loss(trunk, 1.0)
  gradients = {
    share: jax.jit(jax.grad(own_loss(trunk, share)))(params, rollout)
    for share in (0.0, 0.25, 1.0)
  }
  rng = np.random.default_rng(1)
  for name in ('embed', 'layers', 'norm', 'heads'):
    way = jax.tree.map(
      lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32),
      params[name],
    )

    def slope(tree, way=way):
      parts = jax.tree.map(lambda a, b: float(jnp.vdot(a, b)), tree, way)
      return sum(jax.tree.leaves(parts))

    def moved(h, name=name, way=way):
      step = jax.tree.map(lambda x, d: x + h * d, params[name], way)
      return float(loss({**params, name: step}, rollout))

    h = 1e-3
    measured = (moved(h) - moved(-h)) / (2 * h)
    assert abs(measured) > 0.3
    for share, gradient in gradients.items():
      factor = 1.0 if name == 'heads' else share
      got = slope(gradient[name])
      assert got == pytest.approx(factor * measured, rel=0.03), (name, share)
      if factor == 0:
        assert got == 0.0
  # a sub-policy does not teach its neighbour
  only_first = jax.grad(
    lambda p: jnp.sum(
      decoupled.adapt(trunk, SPEC)
      .log_probs(p, rollout, turn=jnp.array(True))[-1]
      .own[..., 0]
    )
  )(params)['heads']
  assert float(abs(only_first['up'][0]).max()) > 0
  assert float(abs(only_first['up'][1:]).max()) == 0


def test_the_mixture_teaches_trunk_and_fusion_alone(policy, params, rollout):
  gradient = jax.grad(lambda p: jnp.sum(policy.log_probs(p, rollout)[0]))(
    params
  )
  assert float(abs(gradient['fusion']['tag']).max()) > 0
  assert float(abs(gradient['embed']['embedding']).max()) > 0
  assert max(float(abs(x).max()) for x in gradient['heads'].values()) == 0


def test_one_sub_policy_is_a_plain_model_and_the_mixture_is_none(
  policy, params, rollout, tmp_path
):
  with pytest.raises(ValueError, match='a mixture of sub-policies is no'):
    hf.save(tmp_path, policy.config, params)
  with pytest.raises(ValueError, match="no sub-policy 'long'; there are corr"):
    decoupled.alone(policy.config, params, SPEC.names, 'long')
  config, plain = decoupled.alone(policy.config, params, SPEC.names, 'short')
  hf.save(tmp_path, config, plain, dtype='float32')
  config, read = hf.load(tmp_path)
  logp, _ = make_policy(config).log_probs(read, rollout)
  parts = policy.log_probs(params, rollout, turn=jnp.array(True))[-1]
  np.testing.assert_allclose(logp, parts.own[..., 1], atol=1e-4)


def test_wrong_shapes_are_refused():
  for wrong, words in (
    ({'names': ('a',)}, 'two rewards or more'),
    ({'isolation': 1.5}, r'isolation is in \[0, 1\]'),
    ({'rank': 0}, 'rank and fusion_width'),
  ):
    with pytest.raises(ValueError, match=words):
      decoupled.Decoupled(**{'names': ('a', 'b'), **wrong})
