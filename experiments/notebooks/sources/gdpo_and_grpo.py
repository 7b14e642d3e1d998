# %% [markdown]
# # GDPO against GRPO on a tiny model
#
# A byte-level model of 10^5 parameters adds two-digit numbers. It starts from
# demonstrations in three styles (the sum alone, with column totals, with all the
# working), a fifth of them wrong. Three rewards: *correct*, *length* (at most 11
# tokens, counts only where correct) and *format*. Everything but the way in
# which rewards become advantages is the same in both runs.
#
# About five minutes on two CPU cores. One seed and a small task: this shows how
# the two are run and read, not which is better.

# %%
# On Colab: installs the package. SOURCE may be a wheel, or git+https://... of
# the repository.
import importlib.util
import subprocess
import sys

SOURCE = 'gdpo_jax'
if importlib.util.find_spec('gdpo_jax') is None:
  subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', SOURCE])

# %%
import pathlib

import jax
import matplotlib.pyplot as plt
import numpy as np

from gdpo_jax import sharding
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.tasks.math_len import math_len
from gdpo_jax.train import loop, metrics, warm_start
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

# %% [markdown]
# ## The task and the model

# %%
task = math_len(
  'tiny', limit_tokens=11, conditioned=True, with_format=True, num_heldout=256
)
print(task.train[0])
for prompt, completion in task.demonstrate(0, 4):
  print(prompt + completion)

tokenizer = byte_tokenizer()
config = PolicyConfig(
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
  eos_ids=tokenizer.eos_ids,
  pad_id=tokenizer.pad_id,
)
policy = make_policy(config)
print(f'{config.num_params:,} parameters')

# %% [markdown]
# ## A supervised start
#
# RL can only strengthen what is sampled now and then.

# %%
settings = Settings(
  num_steps=60,
  prompts_per_step=16,
  group_size=8,
  max_prompt_tokens=8,
  max_new_tokens=26,
  learning_rate=1e-4,
  save_every=0,
)


def batches():
  seed = 0
  while True:
    yield task.demonstrate(seed, 128)
    seed += 1


params = warm_start.warm_start(
  policy,
  policy.init(jax.random.key(0)),
  batches(),
  tokenizer,
  settings,
  sharding.make_mesh(),
  num_updates=500,
  learning_rate=5e-3,
  report=lambda i, loss: i % 100 or print(f'{i}  {loss:.3f} nats per token'),
)
start = jax.device_get(params)

# %% [markdown]
# ## Both algorithms, one line apart

# %%
import dataclasses

runs = {}
for algorithm in ('grpo', 'gdpo'):
  runs[algorithm] = loop.train(
    policy,
    start,
    tokenizer,
    task,
    dataclasses.replace(settings, algorithm=algorithm),
    pathlib.Path('runs') / algorithm,
    eval_batch_size=256,
    progress=Progress(quiet=True),
  )
  print(algorithm, 'done')

# %%
names = [reward.name for reward in task.rewards]
figure, axes = plt.subplots(1, 3, figsize=(11, 3), layout='constrained')
for axis, name in zip(axes, names):
  for algorithm, result in runs.items():
    rows, _ = metrics.split_history(result.history)
    values = [row[f'rewards/{name}/mean'] for row in rows]
    smooth = np.convolve(values, np.ones(5) / 5, 'valid')
    axis.plot(smooth, label=algorithm)
  axis.set_title(name)
  axis.set_xlabel('step')
  axis.grid(alpha=0.3)
axes[0].legend()
plt.show()

# %% [markdown]
# Held-out problems, greedy, before and after (with standard errors):

# %%
for algorithm, result in runs.items():
  _, held_out = metrics.split_history(result.history)
  for name in names:
    cells = [
      f'{row[f"eval/rewards/{name}/mean"]:.3f} '
      f'± {row[f"eval/rewards/{name}/stderr"]:.3f}'
      for row in (held_out[0], held_out[-1])
    ]
    print(f'{algorithm:5s} {name:8s}', ' → '.join(cells))

# %% [markdown]
# More algorithms, several seeds, intervals and paired differences:
# `python experiments/compare.py --config=experiments/configs/math_len.py:tiny`.
