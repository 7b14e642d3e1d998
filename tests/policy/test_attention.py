"""Flash kernels give what plain attention gives; they are not run on a CPU.

The code around them is: the kernel of the TPU interpreted, that of the GPU by
the plain implementation behind the same function.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from gdpo_jax import sharding
from gdpo_jax.policy import attention
from gdpo_jax.policy.attention import Shared
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.types import Rollout

P, L, T, C, H, KV, HD = 2, 3, 7, 5, 4, 2, 8


def inputs(num_lines=L):
  keys = jax.random.split(jax.random.key(0), 5)
  size = num_lines * T
  q = jax.random.normal(keys[0], (P, size, H, HD)) * HD**-0.5
  k, v = (jax.random.normal(key, (P, size, KV, HD)) for key in keys[1:3])
  known = [jax.random.normal(key, (P, C, KV, HD)) for key in keys[3:]]
  mask = jnp.array([[False, False, True, True, True], [True] * C])
  return (q, k, v), Shared(*known, mask)


def by_hand(q, k, v, num_lines, segments, shared):
  """Softmax over the keys that each token sees, one token at a time."""
  size = q.shape[1]
  out = np.zeros((P, size, H, HD))
  for p in range(P):
    for i in range(size):
      line = i // T
      seen = [
        j
        for j in range(line * T, i + 1)
        if segments is None or segments[p, j] == segments[p, i]
      ]
      for h in range(H):
        keys, values = k[p, seen, h // 2], v[p, seen, h // 2]
        if shared is not None:
          m = np.asarray(shared.mask[p])
          keys = np.concatenate([keys, shared.k[p, m, h // 2]])
          values = np.concatenate([values, shared.v[p, m, h // 2]])
        scores = np.exp(keys @ q[p, i, h])
        out[p, i, h] = scores @ values / scores.sum()
  return out.reshape(P, size, H * HD)


def all_at_once(q, k, v, num_lines, segments, shared):
  """The same as one softmax over [L * T, C + L * T], for its gradient."""
  size = q.shape[1]
  line = jnp.arange(size) // T
  seen = (line[:, None] == line) & (
    jnp.arange(size)[:, None] >= jnp.arange(size)
  )
  seen = jnp.broadcast_to(seen, (P, size, size))
  if segments is not None:
    seen &= segments[:, :, None] == segments[:, None]
  if shared is not None:
    k = jnp.concatenate([shared.k, k], axis=1)
    v = jnp.concatenate([shared.v, v], axis=1)
    known = jnp.broadcast_to(shared.mask[:, None], (P, size, C))
    seen = jnp.concatenate([known, seen], axis=-1)
  k, v = (jnp.repeat(x, H // KV, axis=2) for x in (k, v))
  scores = jnp.einsum('pthd,pshd->phts', q, k)
  weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf))
  return jnp.einsum('phts,pshd->pthd', weights, v).reshape(P, size, H * HD)


SEGMENTS = {
  'one': None,
  'padded': np.array([[0, 0, 1, 1, 1, 1, 1] * L, [1] * 7 * L], np.int32),
  'packed': np.array(
    [[0, 0, 0, 1, 1, 1, -1, *([2] * 7), 3, 3, 4, 4, 5, -1, -1], [7] * 21],
    np.int32,
  ),
}
GPU = functools.partial(
  attention._cudnn, dtype=jnp.float32, implementation='xla'
)
TPU = functools.partial(attention._splash, dtype=jnp.float32, interpret=True)
CASES = [
  (how, segments, with_shared)
  for how in ('plain', 'blocks', 'gpu', 'tpu')
  for segments in SEGMENTS
  for with_shared in (False, True)
  if not (how == 'tpu' and with_shared and segments != 'one')
]


@pytest.mark.parametrize('how, segments, with_shared', CASES)
def test_every_kernel_and_its_gradient(how, segments, with_shared, monkeypatch):
  run = {
    'plain': attention._plain,
    'blocks': attention._plain,
    'gpu': GPU,
    'tpu': TPU,
  }[how]
  if how == 'blocks':
    monkeypatch.setattr(attention, 'BLOCK', 2)  # 2, 2, 2 and 1 of T
  own, shared = inputs()
  shared = shared if with_shared else None
  segments = SEGMENTS[segments]
  ids = None if segments is None else jnp.array(segments)

  def out_of(run, own, known):
    with_mask = shared and Shared(*known, shared.mask)
    return run(*own, L, ids, with_mask)

  known = shared[:2] if with_shared else ()
  got = jax.jit(functools.partial(out_of, run))(own, known)
  expected = by_hand(*map(np.asarray, own), L, segments, shared)
  np.testing.assert_allclose(got, expected, atol=1e-5)

  def loss(run, own, known):
    return jnp.sum(jnp.sin(out_of(run, own, known)))

  grads = [
    jax.jit(jax.grad(functools.partial(loss, r), argnums=(0, 1)))(own, known)
    for r in (run, all_at_once)
  ]
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), *grads)


def test_long_lines_keep_no_scores():
  """What is kept for the backward pass grows with the length, not its square."""
  sizes = []
  for length in (512, 1024):
    array = jax.ShapeDtypeStruct
    q = array((1, length, H, HD), jnp.float32)
    k = array((1, length, KV, HD), jnp.float32)
    _, pullback = jax.eval_shape(
      lambda *x: jax.vjp(lambda *x: attention.attend(*x, 1), *x), q, k, k
    )
    sizes.append(sum(x.size for x in jax.tree.leaves(pullback)))
  assert sizes[1] <= 2 * sizes[0]


def test_the_kernel_follows_the_device_of_the_mesh():
  """A program for TPUs may be compiled on a machine without one."""
  q, k = jnp.zeros((4, 8, 4, 8)), jnp.zeros((4, 8, 2, 8))

  def chosen(platform, dtype=jnp.bfloat16, packed=False, sizes=(1, 1, 1)):
    device = jax.sharding.AbstractDevice(platform, None, platform=platform)
    mesh = jax.sharding.AbstractMesh(
      sizes,
      ('data', 'fsdp', 'tensor'),
      axis_types=(jax.sharding.AxisType.Auto,) * 3,
      abstract_device=device,
    )
    with jax.sharding.use_abstract_mesh(mesh):
      return attention._flash(jnp.dtype(dtype), packed, q, k)

  assert chosen('cpu') is None
  assert chosen('gpu') is attention._cudnn
  assert chosen('gpu', packed=True) is attention._cudnn
  assert chosen('gpu', jnp.float32) is None  # the kernel has no float32
  assert chosen('tpu') is attention._splash
  assert chosen('tpu', packed=True) is None
  assert chosen('tpu', sizes=(2, 2, 2)) is attention._splash
  assert chosen('tpu', sizes=(8, 1, 1)) is None  # half a text on a device
  assert chosen('tpu', sizes=(1, 1, 4)) is None  # half a group of heads


def test_the_kernel_compiles_for_tpus_on_every_mesh():
  pytest.importorskip(
    'libtpu', reason='libtpu is in the [tpu] extra; it takes over jax.devices'
  )
  devices = topologies.get_topology_desc(
    platform='tpu', topology_name='v5e:2x2'
  ).devices
  config = PolicyConfig(
    family='llama',
    vocab_size=512,
    width=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_width=512,
    tied=True,
  )
  policy = make_policy(config, jnp.bfloat16, 'block')
  array = jax.ShapeDtypeStruct
  rollout = Rollout(
    prompt=array((16, 100), jnp.int32),
    prompt_mask=array((16, 100), bool),
    tokens=array((16, 200), jnp.int32),
    mask=array((16, 200), bool),
    logp=array((16, 200), jnp.float32),
    ended=array((16,), bool),
  )
  params = jax.eval_shape(policy.init, jax.random.key(0))
  for sizes in ((4, 1, 1), (2, 1, 2), (1, 2, 2)):
    mesh = sharding.make_mesh(*sizes, devices=devices)

    def loss(params, rollout, mesh=mesh):
      with sharding.use(mesh):
        return policy.log_probs(params, rollout, group_size=4)[0].sum()

    placed = sharding.shardings(mesh, params)
    program = jax.jit(
      jax.grad(loss),
      in_shardings=(placed, sharding.rows(mesh)),
      out_shardings=placed,
    )
    text = program.lower(params, rollout).compile().as_text()
    assert 'tpu_custom_call' in text and 'splash' in text
