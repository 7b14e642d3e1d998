# %% [markdown]
# # Reading a finished run
#
# A run directory holds `metrics.jsonl` (a row per step and per evaluation),
# `samples.jsonl` (completions with rewards and advantages), `heldout/STEP.jsonl`
# (answers to held-out problems), `settings.json` and checkpoints. This notebook
# makes a small run and then reads it like anybody else's: set `RUN` to the
# directory of your own instead.
#
# About three minutes on a CPU.

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
import json
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
from gdpo_jax.train.metrics import read_jsonl
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

RUN = pathlib.Path('runs/small')

# %%
if not RUN.exists():
  task = math_len(
    'tiny', limit_tokens=11, conditioned=True, with_format=True, num_heldout=128
  )
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
    tied=True,
    eos_ids=tokenizer.eos_ids,
    pad_id=tokenizer.pad_id,
  )
  policy = make_policy(config)
  settings = Settings(
    num_steps=60,
    prompts_per_step=16,
    group_size=8,
    max_prompt_tokens=8,
    max_new_tokens=26,
    learning_rate=1e-4,
    save_every=0,
    samples_every=5,
    eval_every=20,
  )
  params = warm_start.warm_start(
    policy,
    policy.init(jax.random.key(0)),
    (task.demonstrate(seed, 128) for seed in range(10**6)),
    tokenizer,
    settings,
    sharding.make_mesh(),
    num_updates=500,
    learning_rate=5e-3,
  )
  loop.train(
    policy,
    params,
    tokenizer,
    task,
    settings,
    RUN,
    eval_batch_size=128,
    progress=Progress(quiet=True),
  )
print(sorted(path.name for path in RUN.iterdir()))

# %% [markdown]
# ## The rewards, and whether they still say anything
#
# `zero_variance` is the share of groups in which all samples got the same value:
# there the reward teaches nothing, however high it is.

# %%
settings = json.loads((RUN / 'settings.json').read_text())
print(settings['algorithm'], settings['num_steps'], 'steps')
history = read_jsonl(RUN / 'metrics.jsonl')
training, held_out = metrics.split_history(history)
names = sorted(
  key.split('/')[1] for key in training[0] if key.endswith('/group_std')
)
steps = [row['step'] for row in training]
figure, axes = plt.subplots(1, 2, figsize=(10, 3), layout='constrained')
for name in names:
  for axis, key in zip(axes, ('mean', 'zero_variance')):
    values = [row.get(f'rewards/{name}/{key}', np.nan) for row in training]
    axis.plot(steps, values, label=name)
    axis.set_title(key)
    axis.set_xlabel('step')
    axis.grid(alpha=0.3)
axes[0].legend()
plt.show()

# %% [markdown]
# ## Is training healthy?
#
# The sampler and the trainer should agree (`sampler_mismatch` near 0 with one
# update per batch), the gradient should be finite and of one size, and little
# should be cut off.

# %%
last = training[-1]
for key in (
  'grad_norm',
  'entropy',
  'sampler_mismatch',
  'completions/mean_length',
  'completions/clipped_ratio',
  'frac_reward_zero_std',
  'groups/informative',
  'time/step',
):
  if key in last:
    print(f'{key:28s} {training[0][key]:10.4f} → {last[key]:10.4f}')

# %% [markdown]
# ## Held-out problems, before and after, paired
#
# The same problems are answered each time, so the difference per problem tells
# more than two means with their errors.

# %%
answered = {
  int(path.stem): read_jsonl(path) for path in (RUN / 'heldout').glob('*.jsonl')
}
first, final = min(answered), max(answered)
for name in names:
  before, after = (
    np.array([row['rewards'][name] for row in answered[step]], float)
    for step in (first, final)
  )
  change = after - before
  error = change.std(ddof=1) / np.sqrt(len(change))
  print(
    f'{name:8s} {before.mean():.3f} → {after.mean():.3f}   '
    f'change {change.mean():+.3f} ± {error:.3f}'
  )

# %% [markdown]
# ## Why did this row get this advantage?

# %%
samples = read_jsonl(RUN / 'samples.jsonl')
step = samples[-1]['step']
for row in [row for row in samples if row['step'] == step][:8]:
  print(
    f'{row["prompt"]}{row["completion"]:26s} {row["rewards"]} '
    f'advantage {row["advantage"]:+.2f}'
  )

# %% [markdown]
# ## Where it fails
#
# Problems that were right before and are wrong now are worth more than an
# average.

# %%
for old, new in zip(answered[first], answered[final]):
  if old['rewards']['correct'] > new['rewards']['correct']:
    print(old['prompt'], old['completion'], ' now ', new['completion'])

# %% [markdown]
# The run directory also has `report.html`, which a browser opens. From the
# shell: `python experiments/inspect_run.py RUN` tells the story of a run,
# `python experiments/run.py evaluate RUN` gives pass@k and maj@k with intervals,
# `python experiments/run.py sample RUN` talks to it.
