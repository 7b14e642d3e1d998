# %% [markdown]
# # The collapse, in numbers
#
# GRPO adds the rewards of a sample first and normalizes the sum within its
# group. Whatever has the same sum has the same advantage from then on: *right
# and long* is worth as much as *wrong and short*. GDPO
# ([arXiv 2601.05242](https://arxiv.org/abs/2601.05242)) normalizes each reward
# within its group, adds, and normalizes over the batch.
#
# No model here: rewards go in, advantages come out. Runs in seconds.

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
import itertools

import matplotlib.pyplot as plt
import numpy as np

from gdpo_jax.objectives import advantages
from gdpo_jax.objectives.diagnose import diagnose

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## One group, two rewards
#
# Four samples of one prompt: *correct* and *short*. One is right and short, one
# right and long, two are wrong and short. The last three have the same sum. A
# second prompt stands beside it, because with one group alone in a batch the
# batch step would hide what we look at.

# %%
rewards = np.float32(
  [
    [[1, 1], [1, 0], [0, 1], [0, 1]],
    [[1, 1], [0, 1], [0, 1], [0, 1]],
  ]
)
valid = np.ones(rewards.shape, bool)
weights = np.float32([1, 1])
for name in ('grpo', 'dr_grpo', 'mo_grpo', 'gdpo', 'dvao'):
  values = np.asarray(advantages.ADVANTAGES[name](rewards, valid, weights))
  print(f'{name:8s}', values[0], values[1])

# %% [markdown]
# For GRPO the two groups are one and the same: the best row against three equal
# ones. For GDPO *right and long* is not *wrong and short*, and a right answer
# in the second group, where nobody else has one and all are short, is worth what
# *correct* alone makes it. (Right and long lies lowest in the first group,
# because nearly everybody else is short: decoupling keeps rows apart, it does
# not know which reward matters more. Weights and conditions say that.)
#
# ## The unit of a reward
#
# Give *short* another unit, points from 0 to 10. GRPO now follows length; GDPO
# does not notice, as every reward is measured in its own standard deviations.

# %%
scaled = rewards * np.float32([1, 10])
for name in ('grpo', 'gdpo'):
  fn = advantages.ADVANTAGES[name]
  print(f'{name:5s} before', np.asarray(fn(rewards, valid, weights))[0])
  print(f'{name:5s} times 10', np.asarray(fn(scaled, valid, weights))[0])

# %% [markdown]
# ## How many different answers can a group give?
#
# All groups of G samples with two binary rewards, up to the order of the
# samples: how many distinct vectors of advantages are there? The batch step is
# off, as it moves all of them alike.


# %%
def distinct(name, group, num_rewards=2):
  rows = list(itertools.product((0, 1), repeat=num_rewards))
  groups = itertools.combinations_with_replacement(rows, group)
  values = np.float32(list(groups))
  mask = np.ones(values.shape, bool)
  fn = advantages.ADVANTAGES[name]
  out = fn(
    values, mask, np.ones(num_rewards, np.float32), eps=0.0, whiten='none'
  )
  return len({tuple(row) for row in np.sort(np.round(np.asarray(out), 4), 1)})


sizes = range(2, 7)
counts = {
  name: [distinct(name, g) for g in sizes]
  for name in ('grpo', 'dr_grpo', 'gdpo')
}
for name, row in counts.items():
  print(f'{name:8s}', row)

# %%
figure, axis = plt.subplots(figsize=(6, 3.5))
for name, row in counts.items():
  axis.plot(sizes, row, marker='o', label=name)
axis.set_xlabel('samples in a group')
axis.set_ylabel('distinct advantage vectors')
axis.grid(alpha=0.3)
axis.legend()
plt.show()

# %% [markdown]
# ## A batch of your own
#
# `diagnose` says for any batch how far the collapse goes, which rewards pull
# against each other, and how often GRPO and GDPO disagree about the sign.

# %%
rng = np.random.default_rng(0)
correct = rng.random((32, 8)) < 0.4
short = rng.random((32, 8)) < np.where(correct, 0.3, 0.8)  # wrong is shorter
batch = np.stack([correct, short], axis=-1).astype(np.float32)
found = diagnose(batch, np.ones(batch.shape, bool), weights)
print('distinct reward tuples  ', np.mean(found.distinct_rewards))
for name, number in found.distinct_advantages.items():
  print(f'distinct, {name:14s}', np.mean(number))
print('correlation of the two\n', np.asarray(found.conflict))
print('share of the say', {k: np.asarray(v) for k, v in found.shares.items()})
print('sign flips', {k: float(v) for k, v in found.sign_flips.items()})

# %% [markdown]
# ## Where GDPO does not help
#
# Two rewards with equal weights whose sum is constant in a group cancel after
# normalization too.

# %%
constant = np.float32([[[1, 0], [1, 0], [0, 1]]])
mask = np.ones(constant.shape, bool)
print('equal weights  ', advantages.gdpo(constant, mask, weights))
print('weights 2 and 1', advantages.gdpo(constant, mask, np.float32([2, 1])))
