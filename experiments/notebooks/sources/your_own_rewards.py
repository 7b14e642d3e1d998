# %% [markdown]
# # Your own reward functions
#
# A reward is a function in TRL's calling convention,
# `fn(prompts, completions, **columns) -> list[float | None]`. It gets the
# arguments that it names. `None` means *no opinion*: the value is missing, which
# is not 0, and leaves the statistics. A function that raises, hangs or returns
# nonsense is missing for those rows, is counted by reason, and does not stop
# the run.
#
# About two minutes on a CPU.

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
import tempfile

import jax

from gdpo_jax import GDPOConfig, GDPOTrainer, Reward, score
from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.train.progress import Progress


# %% [markdown]
# ## Three functions


# %%
def even(completions, **_):
  """Share of digits that are even; no opinion without digits."""
  values = []
  for text in completions:
    digits = [int(c) for c in text if c.isdigit()]
    even_ones = sum(d % 2 == 0 for d in digits)
    values.append(even_ones / len(digits) if digits else None)
  return values


def lower(completions, **_):
  """Share of lower-case letters."""
  return [sum(c.islower() for c in t) / max(len(t), 1) for t in completions]


def near(completions, wanted, **_):
  """1 at the wanted number of characters, a column of the data."""
  return [1 / (1 + abs(len(t) - n)) for t, n in zip(completions, wanted)]


# %% [markdown]
# Score some texts by hand before training on anything:

# %%
texts = ['a2', 'B', '135', 'abc']
scores = score(
  ['p'] * 4,
  texts,
  {'wanted': [2, 2, 2, 2]},
  [Reward(even), Reward(lower), Reward(near)],
)
for text, row in zip(texts, scores.values):
  print(f'{text:5s}', dict(zip(scores.names, row.round(2).tolist())))
print('missing, by reason:', scores.reasons)

# %% [markdown]
# ## When something goes wrong


# %%
def broken(completions, **_):
  return [1 / 0 for _ in completions]


def hanging(completions, **_):
  import time

  time.sleep(3600)


def wrong_number(completions, **_):
  return [1.0]


scores = score(
  ['p'] * 4,
  texts,
  None,
  [
    Reward(lower),
    Reward(broken),
    Reward(hanging, timeout_s=1.0, isolation='process'),
    Reward(wrong_number),
  ],
)
print(scores.values)
print(scores.reasons)
print(scores.failures[0].reason)

# %% [markdown]
# ## Weights and conditions
#
# A reward may count only where another is met: here *near* only where *lower* is
# at least a half. A toy model with random weights, to see it run; a real one is
# a directory, a GGUF file or an id on the hub.

# %%
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
params = make_policy(config).init(jax.random.key(0))
model = hf.Pretrained(config, params, tokenizer)

data = [{'prompt': f'{i}:', 'wanted': 4 + i % 4} for i in range(40)]
trainer = GDPOTrainer(
  model=model,
  reward_functions=[even, lower, near],
  reward_weights=[0.5, 1.0, 1.0],
  conditional_thresholds=[None, None, 'lower>=0.5'],
  train_dataset=data,
  args=GDPOConfig(
    output_dir=pathlib.Path(tempfile.mkdtemp()) / 'run',
    num_generations=8,
    per_device_train_batch_size=64,
    max_steps=40,
    max_prompt_length=4,
    max_completion_length=10,
    learning_rate=3e-3,
    lr_scheduler_type='constant',
  ),
  progress=Progress(quiet=True),
)
result = trainer.train()

# %%
rows = [row for row in result.history if 'rewards/lower/mean' in row]
for row in rows[::8] + rows[-1:]:
  cells = []
  for name in ('even', 'lower', 'near'):
    mean, missing = (
      row.get(f'rewards/{name}/{x}', float('nan')) for x in ('mean', 'missing')
    )
    cells.append(f'{name} {mean:.2f} ({missing:.0%} missing)')
  print(f'step {row["step"]:3d}  ', '  '.join(cells))

# %% [markdown]
# The columns `missing` and `missing/REASON` stand in `metrics.jsonl` for every
# reward and step.
