"""Batches and callers that several tests of the advantages share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax.objectives import advantages

NAN = float('nan')
PADDED = (4, 8, 3)  # the shape of every batch that `call_every` runs
METHODS = advantages.ADVANTAGES | advantages.PRESETS

# One batch for every worked example: P=2, G=4, K=2.
E = np.array(
  [
    [[1, 1], [1, 0], [0, 0.5], [0, 0.5]],
    [[1, 1], [0, 1], [0, 1], [0, 0.5]],
  ],
  np.float32,
)
UNIT = np.array([[0, 1], [0, 1]], np.float32)  # bounds for E


def groups(*rows):
  """[P, G, K] from one list of K-tuples per group."""
  return np.array(rows, np.float32)


def columns(*rewards):
  """[1, G, K] from one list per reward."""
  return np.array(rewards, np.float32).T[None]


@functools.cache
def _jitted(name, settings):
  return jax.jit(functools.partial(METHODS[name], **dict(settings)))


def call(name, rewards, weights=None, **kwargs):
  """The named method on rewards in which NaN is missing; eps 0; f32[P, G]."""
  rewards = jnp.asarray(rewards, jnp.float32)
  weights = jnp.ones(rewards.shape[-1]) if weights is None else weights
  kwargs = {'eps': 0.0} | kwargs
  arrays = {k: v for k, v in kwargs.items() if hasattr(v, 'shape')}
  settings = tuple((k, v) for k, v in kwargs.items() if k not in arrays)
  return np.asarray(
    _jitted(name, settings)(
      rewards, ~jnp.isnan(rewards), jnp.asarray(weights, jnp.float32), **arrays
    )
  )


def extras(shape):
  """What some methods need beside rewards of shape [P, G, K]."""
  rows = np.arange(shape[0] * shape[1])
  return {
    'bounds': np.tile(np.array([-4, 4], np.float32), (shape[2], 1)),
    'mask': np.arange(3) < (1 + rows % 3)[:, None],
  }


def every(rewards, valid, weights, bounds, mask, eps, axis_name=None):
  """{method: f32[P, G]}, every method as it is meant to be used."""
  out = {}
  for name, method in METHODS.items():
    needs = {
      'sa_mrpo': {'bounds': bounds},
      'saw': {'bounds': bounds},
      'ddca': {'threshold': 1.0},  # rewards up to 1 are not yet correct
    }
    out[name] = method(
      rewards,
      valid,
      weights,
      eps=eps,
      mask=mask,
      axis_name=axis_name,
      **needs.get(name, {}),
    )
  return out


every_jitted = jax.jit(every, static_argnames=['axis_name'])


def pad(x, shape, fill):
  """`x` in the corner of an array of `shape`."""
  out = np.full(shape, fill, x.dtype)
  out[tuple(slice(size) for size in x.shape)] = x
  return out


def call_every(rewards, weights=None, eps=0.0, bounds=None, mask=None):
  """`every` on rewards in which NaN is missing; {method: f32[P, G]}.

  The batch is padded with prompts, rows and rewards that are missing, so that
  one compilation serves all tests. Methods leave these out; only `verl` and
  `nemo_rl`, which read them as 0, see the rows of a padded group.
  """
  rewards = np.asarray(rewards, np.float32)
  prompts, group, count = rewards.shape
  weights = np.ones(count) if weights is None else np.asarray(weights)
  own = extras(rewards.shape)
  bounds = own['bounds'] if bounds is None else bounds
  mask = own['mask'] if mask is None else mask
  mask = mask.reshape(prompts, group, -1)
  padded = pad(rewards, PADDED, NAN)
  out = every_jitted(
    padded,
    ~np.isnan(padded),
    pad(weights.astype(np.float32), PADDED[2:], 1),
    eps=np.float32(eps),
    bounds=pad(bounds.astype(np.float32), (PADDED[2], 2), 0),
    mask=pad(mask, (*PADDED[:2], mask.shape[-1]), True),
  )
  return {
    name: np.asarray(values)[:prompts, :group] for name, values in out.items()
  }
