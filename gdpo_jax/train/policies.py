"""The policy of a run: the given one, with what the settings put beside it."""

import math
from typing import Any

import jax
import optax

from gdpo_jax.policy import lora
from gdpo_jax.policy.policy import Policy
from gdpo_jax.train.settings import Settings


def adapted(policy: Policy, settings: Settings) -> Policy:
  """`policy` with the adapters of the settings, or itself."""
  return lora.adapt(policy, settings.lora) if settings.lora else policy


def complete(policy: Policy, params: Any, seed: int) -> Any:
  """`params` and, drawn from `seed`, what an adapted policy has beside them."""

  def missing(key):
    fresh = policy.init(key)
    return {n: tree for n, tree in fresh.items() if n not in params}

  abstract = jax.eval_shape(missing, jax.random.key(0))
  if not abstract:
    return params
  return {**params, **jax.jit(missing)(jax.random.key(seed))}


def plain(start: Any, trained: Any, settings: Settings) -> Any:
  """The tree of the plain policy that a run ended with.

  Args:
    start: what the run started from.
    trained: what its state holds: all of it, or the adapters over `start`.
  Returns:
    adapters merged, a value head left out; a tree like `start`.
  """
  whole = {**start, **trained}
  if settings.lora:
    whole = lora.merge(whole, settings.lora)
  return {name: whole[name] for name in start}


def fingerprint(base: Any) -> float:
  """The norm of frozen parameters, to tell whether a run goes on over its own.

  A checkpoint under LoRA does not hold the base.
  """
  return float(optax.tree.norm(base))


def check_base(saved: float, base: Any) -> None:
  """Raises ValueError where `base` is not what the checkpoint was beside."""
  now = fingerprint(base)
  if not math.isclose(saved, now, rel_tol=1e-5):
    raise ValueError(
      f'the checkpoint was made over a base of norm {saved:.6g}, this one has '
      f'{now:.6g}; give the same model, or choose another directory.'
    )
