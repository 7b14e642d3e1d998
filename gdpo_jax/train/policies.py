"""The policy of a run: the given one, with what the settings put beside it."""

import dataclasses
import math
from typing import Any

import jax
import optax

from gdpo_jax.policy import decoupled, lora
from gdpo_jax.policy.policy import Policy
from gdpo_jax.train import subpolicies
from gdpo_jax.train.settings import Settings


def adapted(
  policy: Policy, settings: Settings, names: tuple[str, ...]
) -> Policy:
  """`policy` with the sub-policies and adapters of the settings.

  Args:
    names: of the declared rewards.
  """
  if settings.subpolicy_rank and not policy.heads:
    subpolicies.check(settings, names)
    spec = decoupled.Decoupled(
      names,
      settings.subpolicy_rank,
      settings.fusion_width,
      settings.subpolicy_isolation,
    )
    policy = decoupled.adapt(policy, spec)
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
  Raises:
    ValueError: there are sub-policies, whose mixture is no plain policy.
  """
  if 'heads' in trained:
    raise ValueError(
      'the run has sub-policies, and their mixture is no single model; go on '
      'with the policy that `train` returns, or take one of them '
      '(policy.decoupled.alone).'
    )
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


def finished(
  given: Policy, policy: Policy, params: Any, settings: Settings
) -> tuple[Policy, Any]:
  """(policy, parameters) to go on with: adapters merged, no value head.

  Args:
    given: before `adapted`.
    params: the whole tree of `policy`.
  """
  params = {name: tree for name, tree in params.items() if name != 'value'}
  if not settings.lora:
    return policy, params
  merged = jax.jit(lora.merge, static_argnums=1)(params, settings.lora)
  if policy.heads:
    without = dataclasses.replace(settings, lora_rank=0)
    return adapted(given, without, policy.heads), merged
  return given, merged
