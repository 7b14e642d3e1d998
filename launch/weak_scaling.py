"""Work and traffic of one device when devices and batch grow together.

  python -m launch.weak_scaling

Compiles the real train step for 2 to 64 forced CPU devices, with the same
number of prompts on each, and counts in the compiled programs: time on one
machine says nothing about many. Printed as a Markdown table; the last line says
how far the figures are from flat.
"""

import jax

from gdpo_jax import sharding
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.train.settings import Settings
from launch import hlo
from launch.plan import Plan, table

DEVICES = (2, 8, 64)
# Small, but 64 devices divide its width.
SHAPE = PolicyConfig(
  family='llama',
  vocab_size=512,
  width=128,
  num_layers=2,
  num_heads=4,
  num_kv_heads=4,
  head_dim=32,
  mlp_width=512,
  tied=True,
)
PROMPTS_PER_DEVICE = 2
MESHES = {
  'data': lambda n: (n, 1, 1),
  'fsdp': lambda n: (1, n, 1),
}


def settings(num_row_shards: int, mesh) -> Settings:
  prompts = PROMPTS_PER_DEVICE * num_row_shards
  return Settings(
    prompts_per_step=prompts,
    prompts_per_micro_batch=prompts // PROMPTS_PER_DEVICE,
    group_size=4,
    max_prompt_tokens=16,
    max_new_tokens=48,
    kl_coef=0.1,  # then every micro-batch is computed, whatever the rewards
    remat='block',
    mesh_data=mesh[0],
    mesh_fsdp=mesh[1],
    mesh_tensor=mesh[2],
  ).resolve()


def counts(sizes) -> hlo.Counts:
  data, fsdp, tensor = sizes
  devices = jax.devices()[: data * fsdp * tensor]
  mesh = sharding.make_mesh(*sizes, devices=devices)
  plan = Plan(SHAPE, settings(data * fsdp, sizes), mesh)
  lowered, _ = plan.lower_train_step()
  return hlo.count(lowered.compile().as_text())


def main():
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', max(DEVICES))
  rows = [
    ('mesh', 'devices', 'MFLOP', 'collectives, KiB', 'sent in a ring, KiB')
  ]
  worst = 0.0
  for name, mesh in MESHES.items():
    found = []
    for n in DEVICES:
      c = counts(mesh(n))
      found.append((c.flops, c.buffer_bytes))
      rows.append(
        (
          name,
          str(n),
          f'{c.flops / 1e6:.2f}',
          f'{c.buffer_bytes / 1024:.1f}',
          f'{c.total_bytes / 1024:.1f}',
        )
      )
      print(' '.join(rows[-1]), flush=True)
    for values in zip(*found):
      worst = max(worst, max(values) / min(values) - 1)
  print(table(rows))
  print(f'\nLargest spread of FLOPs and collectives over a mesh: {worst:.1%}.')


if __name__ == '__main__':
  main()
