"""One sub-policy learns from a directory that others write into, while it runs.

  DIR/*.jsonl, one record a line:
    {"prompt": TEXT or [messages], "completion": TEXT, "score": NUMBER}

Every `online_every` steps new files are read in the order of their names, each
once in the life of a run, restarts included. Write a file under another name
and rename it: a file is taken as it is found. What cannot be used (no JSON, a
score that is not finite, a prompt that is too long, a file that is too large or
no plain file) is counted and left out.

The head of `online_head` moves by the policy gradient of its own sub-policy
with scores normalized over the rows of one prompt, or of the file where a
prompt has one row. Adam's state is its own. Nothing else changes by a bit: not
the trunk, the fusion, another head, or the optimizer of the run.
"""

import json
import logging
import math
import pathlib
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gdpo_jax import sharding
from gdpo_jax.objectives import losses
from gdpo_jax.tasks.base import encode_prompts
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.warm_start import encode_demonstrations
from gdpo_jax.types import Array, Rollout, TrainState

_log = logging.getLogger(__name__)
MAX_BYTES = 2**24
_NAME = re.compile(r'[A-Za-z0-9][\w.-]*\.jsonl')


class Record(NamedTuple):
  """A completion that somebody has scored."""

  prompt: Any
  completion: str
  score: float


def make_optimizer(settings: Settings) -> optax.GradientTransformation:
  """Of the one head, apart from that of the run."""
  return optax.chain(
    optax.clip_by_global_norm(settings.clip_norm),
    optax.adam(settings.online_rate),
  )


def own_part(heads: Any, index: int) -> Any:
  """The block of one sub-policy."""
  return jax.tree.map(lambda x: x[index], heads)


def read(path: pathlib.Path) -> tuple[list[Record], int]:
  """(records, lines that were refused) of one file, which is not trusted."""
  try:
    if path.is_symlink() or not path.is_file():
      return [], 1
    if path.stat().st_size > MAX_BYTES:
      _log.warning('%s has more than %d bytes and is left out', path, MAX_BYTES)
      return [], 1
    lines = path.read_text(encoding='utf-8', errors='replace').split('\n')
  except OSError as error:  # taken away again
    _log.warning('%s cannot be read: %s', path, error)
    return [], 1
  records, refused = [], 0
  for line in filter(str.strip, lines):
    try:
      record = _record(json.loads(line))
    except (ValueError, RecursionError, OverflowError):
      record = None
    if record:
      records.append(record)
    else:
      refused += 1
  return records, refused


def _record(found: Any) -> Record | None:
  if not isinstance(found, dict):
    return None
  prompt, completion, score = (
    found.get(name) for name in ('prompt', 'completion', 'score')
  )
  if isinstance(prompt, list):
    good = bool(prompt) and all(
      isinstance(m, dict)
      and isinstance(m.get('role'), str)
      and isinstance(m.get('content'), str)
      for m in prompt
    )
  else:
    good = isinstance(prompt, str)
  number = isinstance(score, int | float) and math.isfinite(score)
  if good and number and isinstance(completion, str):
    return Record(prompt, completion, float(score))
  return None


def advantages(records: list[Record]) -> np.ndarray:
  """f32[n]: z-scores within a prompt, or over all where it has one row."""
  scores = np.array([r.score for r in records], np.float64)
  prompts = [json.dumps(r.prompt, sort_keys=True) for r in records]
  by_prompt: dict[str, list[int]] = {}
  for i, prompt in enumerate(prompts):
    by_prompt.setdefault(prompt, []).append(i)
  out = _normalized(scores)
  for rows in by_prompt.values():
    if len(rows) > 1:
      out[rows] = _normalized(scores[rows])
  return out.astype(np.float32)


def _normalized(x: np.ndarray) -> np.ndarray:
  if x.size < 2 or x.max() == x.min():
    return np.zeros(x.size)
  return (x - x.mean()) / (x.std(ddof=1) + 1e-4)


class Online:
  """Watches the directory of the settings; `consumed` is in the checkpoint."""

  def __init__(self, policy, tokenizer, settings: Settings, mesh):
    if settings.online_head not in policy.heads:
      raise ValueError(
        f'online_head is {settings.online_head!r}; there are sub-policies for '
        f'{", ".join(policy.heads) or "nothing (set subpolicy_rank)"}.'
      )
    if sharding.num_processes(mesh) > 1:
      raise ValueError(
        'online mode reads its directory in one process, and the mesh has '
        'several; leave online_head out.'
      )
    self.consumed: list[str] = []
    self._tokenizer, self._settings, self._mesh = tokenizer, settings, mesh
    self._directory = pathlib.Path(settings.online_dir)
    self._update = _make_update(
      policy, settings, policy.heads.index(settings.online_head)
    )

  def step(
    self, step: int, state: TrainState, base: Any
  ) -> tuple[TrainState, dict[str, float]]:
    """The state after all new files, and what they were: a row of metrics.

    Args:
      step: steps that are done.
      base: what is frozen beside state.params.
    """
    if step % self._settings.online_every:
      return state, {}
    rows = refused = files = 0
    for path in self._new_files():
      records, bad = read(path)
      fitting = [r for r in records if self._fits(r)]
      refused += bad + len(records) - len(fitting)
      state = self._learn(state, base, fitting)
      rows, files = rows + len(fitting), files + 1
      self.consumed.append(path.name)
    return state, {
      'online/files': float(files),
      'online/rows': float(rows),
      'online/refused': float(refused),
    }

  def _new_files(self) -> list[pathlib.Path]:
    if not self._directory.is_dir():
      return []
    seen = set(self.consumed)
    return sorted(
      path
      for path in self._directory.iterdir()
      if _NAME.fullmatch(path.name) and path.name not in seen
    )

  def _fits(self, record: Record) -> bool:
    limit = self._settings.max_prompt_tokens
    try:
      encode_prompts([{'prompt': record.prompt}], self._tokenizer, limit)
      self._tokenizer.encode(record.completion)
    except Exception:  # a template or tokenizer may raise anything on it
      return False
    return True

  def _learn(self, state, base, records):
    size = self._settings.online_rows
    values = advantages(records)
    for start in range(0, len(records), size):
      part = records[start : start + size]
      pairs = [(r.prompt, r.completion) for r in part]
      pairs += [pairs[-1]] * (size - len(pairs))  # one shape; they do not count
      rollout = encode_demonstrations(pairs, self._tokenizer, self._settings)
      rollout.mask[len(part) :] = False
      own = np.zeros(size, np.float32)
      own[: len(part)] = values[start : start + size]
      old = state.params, state.controllers['online']
      new = self._update(old[0], base, old[1], rollout, own)
      # where the training step expects them
      places = jax.tree.map(lambda x: x.sharding, old)
      params, opt = jax.device_put(new, places)
      controllers = {**state.controllers, 'online': opt}
      state = state._replace(params=params, controllers=controllers)
    return state


def _make_update(policy, settings: Settings, index: int):
  """`(trained, base, opt, rollout, advantages) -> (trained, opt)`, jitted."""
  optimizer = make_optimizer(settings)

  def loss(own, params, rollout: Rollout, values: Array):
    heads = jax.tree.map(
      lambda x, one: x.at[index].set(one), params['heads'], own
    )
    *_, parts = policy.log_probs(
      {**params, 'heads': heads},
      rollout,
      temperature=settings.temperature,
      turn=jnp.array(True),
    )
    logp = parts.own[..., index]
    return losses.clipped(
      logp,
      jax.lax.stop_gradient(logp),
      values,
      rollout.mask,
      losses.token_denominator(rollout.mask),
    )

  @jax.jit
  def update(trained, base, opt, rollout, values):
    own = own_part(trained['heads'], index)
    gradient = jax.grad(loss)(own, {**base, **trained}, rollout, values)
    finite = jnp.isfinite(optax.tree.norm(gradient))
    change, moved = optimizer.update(gradient, opt, own)
    new = optax.apply_updates(own, change)
    new, moved = jax.tree.map(
      lambda a, b: jnp.where(finite, a, b), (new, moved), (own, opt)
    )
    heads = jax.tree.map(
      lambda x, one: x.at[index].set(one), trained['heads'], new
    )
    return {**trained, 'heads': heads}, moved

  return update
