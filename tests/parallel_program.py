"""One step of everything on a mesh; run by test_parallel in processes of its own.

  python tests/parallel_program.py OUT DATA,FSDP,TENSOR [DATA,FSDP,TENSOR ...]

Writes what must not depend on the mesh: sampled tokens, teacher-forced logits,
advantages, gradients, and parameters after three steps of plain SGD at rate 1.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdpo_jax import processes, sampler, sharding
from gdpo_jax.objectives import advantages
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.train import state as state_lib
from gdpo_jax.train import step as step_lib
from gdpo_jax.train.settings import Settings
from gdpo_jax.types import Batch, Prompts, Rollout

PROMPTS, GROUP = 8, 4
# The shape of `:tiny`: 260 tokens, which four devices divide.
SHAPE = PolicyConfig(
  family='llama',
  vocab_size=260,
  width=64,
  num_layers=2,
  num_heads=4,
  num_kv_heads=4,
  head_dim=16,
  mlp_width=192,
  max_positions=128,
  tied=True,
)


@optax.inject_hyperparams
def _sgd(learning_rate, factor):
  return optax.sgd(learning_rate * factor)


def settings(**changes) -> Settings:
  base = {
    'prompts_per_step': PROMPTS,
    'group_size': GROUP,
    'max_prompt_tokens': 8,
    'max_new_tokens': 12,
  }
  return Settings(**{**base, **changes}).resolve()


def measure(mesh) -> dict[str, np.ndarray]:
  """The numbers by name; the same on every process."""
  policy = make_policy(SHAPE)
  params = sharding.born_sharded(mesh, policy.init, jax.random.key(0))
  # Of a size at which three steps of rate 1 neither vanish nor amplify rounding.
  params = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree))(params)
  rng = np.random.default_rng(0)
  tokens = rng.integers(2, 256, (PROMPTS, 8)).astype(np.int32)
  lengths = rng.integers(3, 9, PROMPTS)
  mask = np.arange(8) >= 8 - lengths[:, None]
  prompts = Prompts(np.where(mask, tokens, 0).astype(np.int32), mask, [])
  sampling = sampler.Sampling(GROUP, 12, eos_ids=tuple(range(100, 108)))
  rollout = sampler.generate(
    policy, params, prompts, jax.random.key(1), sampling, mesh=mesh
  )
  out = {'sampled': rollout}
  host = Rollout(*sharding.to_host(rollout))

  rewards = rng.integers(0, 3, (PROMPTS, GROUP, 2)).astype(np.float32)
  rewards[1, 2, 0] = np.nan
  valid = np.isfinite(rewards)
  grouped = sharding.put_rows(mesh, (rewards, valid))
  a = jax.jit(advantages.gdpo)(*grouped, jnp.float32([1.0, 0.5]))
  out['advantages'] = a
  batch = Batch(
    rollout=host,
    advantages=np.asarray(sharding.to_host(a)).reshape(-1),
    old_logp=host.logp,
    ref_logp=None,
    row_valid=np.ones(PROMPTS * GROUP, bool),
  )
  batch = sharding.put_rows(mesh, batch)

  s = settings()
  tokens = np.concatenate([host.prompt, host.tokens], axis=1)
  seen = np.concatenate([host.prompt_mask, host.mask], axis=1)

  def logits(params, tokens, seen):
    with sharding.use(mesh):
      return policy.logits(params, tokens, seen)

  out['logits'] = jax.jit(logits)(
    params, *sharding.put_rows(mesh, (tokens, seen))
  )

  def loss(params, controllers, batch):
    with sharding.use(mesh):
      denominator = step_lib.loss_denominator(s, step_lib.row_mask(batch))
      return step_lib.make_loss(policy, s)(
        params, controllers, batch, denominator
      )[0]

  optimizer = optax.chain(optax.identity(), _sgd(learning_rate=1.0, factor=1.0))
  state = state_lib.init_state(params, optimizer, s, mesh)
  out['gradients'] = jax.jit(jax.grad(loss))(params, state.controllers, batch)

  traces = []

  def log_probs(*args, **kwargs):
    traces.append(1)
    return policy.log_probs(*args, **kwargs)

  counted = policy._replace(log_probs=log_probs)
  train_step = step_lib.make_train_step(counted, optimizer, s, mesh)
  for i in range(3):
    state, metrics = train_step(state, batch)
    if i == 0:
      first = len(traces)
  out |= {'traces_after_first': len(traces) - first, 'metrics': metrics}
  out['params'] = state.params
  placed = sharding.shardings(mesh, state.params)
  out['as_the_table_says'] = jax.tree.map(
    lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), state.params, placed
  )
  flat, _ = jax.tree_util.tree_flatten_with_path(sharding.to_host(out))
  return {sharding.path_name(path): np.asarray(leaf) for path, leaf in flat}


def main(out, *meshes):
  with processes.together():
    for sizes in meshes:
      data, fsdp, tensor = map(int, sizes.split(','))
      devices = jax.devices()[: data * fsdp * tensor]
      found = measure(sharding.make_mesh(data, fsdp, tensor, devices=devices))
      if processes.is_first():
        np.savez(f'{out}.{sizes}.npz', **found)


if __name__ == '__main__':
  main(*sys.argv[1:])
