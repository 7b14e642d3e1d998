"""Rows as a run would write them, for the tests of what reads them."""

from gdpo_jax.train.rules import About, RewardInfo

ABOUT = About(
  rewards=(
    RewardInfo('right', 1.0, (0.0, 1.0)),
    RewardInfo('short', 1.0, None, 'right>=1', 'right'),
  ),
  prompts_per_step=64,
  group_size=4,
  kl_target=6.0,
)


def row(step, **changes):
  """A healthy step; 'right/mean' is short for 'rewards/right/mean'."""
  out = {
    'step': step,
    'loss': 1e-3,
    'skipped_updates': 0.0,
    'grad_norm': 1.0,
    'entropy/sampled': 1.0,
    'kl/nats_per_sequence': 3.0,
    'completions/distinct': 0.9,
    'completions/mean_length': 20.0,
    'num_tokens': 5000.0,
    'time/step': 2.0,
    'time/generate': 1.0,
  }
  for i, name in enumerate(('right', 'short')):
    # up and down by less than chance
    mean = 0.5 + 0.01 * (-1) ** (step + i)
    out |= {
      f'rewards/{name}/mean': mean,
      f'rewards/{name}/std': 0.5,
      f'rewards/{name}/stderr': 0.06,
      f'rewards/{name}/group_std': 0.4,
      f'rewards/{name}/zero_variance': 0.2,
      f'rewards/{name}/missing': 0.0,
      f'rewards/{name}/weight': 1.0,
      f'advantage_share/{name}': 0.5,
    }
  out['condition/short/held'] = 0.5
  for key, value in changes.items():
    key = key if key in out or '/' not in key else _full(key)
    out[key] = value
  return {k: v for k, v in out.items() if v is not None}


def _full(key):
  return f'rewards/{key}' if key.split('/')[0] in ('right', 'short') else key


def run(num_steps, **changes):
  """`changes`: metric -> value, or a function of the step."""
  return [
    row(
      step,
      **{k: v(step) if callable(v) else v for k, v in changes.items()},
    )
    for step in range(1, num_steps + 1)
  ]
