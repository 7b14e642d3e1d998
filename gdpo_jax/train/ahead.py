"""The next batch is gathered while this one is trained on (off_policy_steps=1).

  step n  finish(n) | launch: copy of the parameters --thread--> gather(n + 1)
                    | update(n), diagnosis, metrics
          take(n + 1) <-- rollouts, rewards

Batch n + 1 comes from the parameters before update n, the first two batches
from those of the start; the importance ratio of the loss, or its truncated
weight (`importance_cap`), is against what was sampled from. A thread needs the
only device of the only process. On a mesh two programs that talk across devices
must not race: there the batch is gathered in turn, before the update, from the
same parameters.

A checkpoint keeps the rollouts of the batch in flight. The run that continues
scores them again, and trains on them as the uninterrupted one does.
"""

from collections.abc import Mapping
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import processes, sharding
from gdpo_jax.train.experience import Collector, Gathered
from gdpo_jax.train.metrics import Timer
from gdpo_jax.types import Rollout

# What rewards are shaped with when they come in.
_SHAPING = ('weights', 'normalizer')
# Adapters or all parameters: a training step donates what it is given.
_copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


class Ahead:
  """At most one batch in flight; a context that waits for it at the end."""

  def __init__(self, collect: Collector, base: Any, mesh):
    """`base` is frozen and lies beside the parameters, {} where nothing is."""
    self._collect, self._base = collect, base
    self._flight: futures.Future | None = None
    self._began: dict[str, Any] = {}  # what the flight was launched with
    self._threads = None
    if mesh.size == 1 and processes.count() == 1:
      self._threads = futures.ThreadPoolExecutor(1, 'gather')

  def __enter__(self):
    return self

  def __exit__(self, *_):
    if self._threads:
      self._threads.shutdown(wait=True)

  def launch(
    self,
    step: int,
    params: Any,
    controllers: Mapping[str, Any],
    key: jax.Array,
    replay: tuple[Rollout, ...] = (),
  ) -> None:
    """Starts to gather the batch of `step`.

    Args:
      params: trained parameters, which may be donated from now on.
      controllers: of the state, at this moment.
      replay: rollouts of a checkpoint; nothing is sampled then.
    """
    shaping = _copy({name: controllers[name] for name in _SHAPING})
    params = {} if replay else {**self._base, **_copy(params)}
    self._began = {
      'step': step,
      'controllers': shaping,
      'mutes': self._collect.pipeline.mutes,
    }

    def gather():
      timer = Timer()
      return self._collect.gather(
        params, shaping, key, step, timer, replay
      ), timer

    if self._threads:
      self._flight = self._threads.submit(gather)
    else:
      self._flight = futures.Future()
      self._flight.set_result(gather())

  def take(self, timer: Timer) -> Gathered | None:
    """The batch in flight, its seconds to `timer`; None where there is none."""
    if self._flight is None:
      return None
    with timer('wait'):
      gathered, own = self._flight.result()
    timer.seconds |= own.seconds
    self._flight = None
    return gathered

  def settle(self) -> None:
    """Until nothing runs: rewards are asked about one batch at a time."""
    if self._flight is not None:
      self._flight.result()

  def record(self) -> dict[str, Any] | None:
    """What a checkpoint keeps beside `arrays`, plain JSON; None: no flight."""
    if self._flight is None:
      return None
    gathered, own = self._flight.result()
    return {
      'step': self._began['step'],
      'seconds': own.seconds,
      'mutes': self._began['mutes'],
      'rounds': len(gathered.rollouts),
    }

  def arrays(self) -> dict[str, Any] | None:
    """Rollouts [rounds, N, ...] and controllers of the flight, on the host."""
    if self._flight is None:
      return None
    gathered, _ = self._flight.result()
    rollouts = jax.tree.map(lambda *xs: np.stack(xs), *gathered.rollouts)
    met = jax.tree.leaves(sharding.to_host(self._began['controllers']))
    return {
      'rollouts': rollouts._asdict(),
      'controllers': {str(i): x for i, x in enumerate(met)},
    }

  def relaunch(
    self,
    record: Mapping[str, Any],
    arrays: Mapping[str, Any],
    controllers: Mapping[str, Any],
    key: jax.Array,
  ) -> None:
    """Takes up the batch that was in flight; afterwards nothing runs.

    Args:
      record, arrays: what the methods of these names gave.
      controllers: of the state, for their structure.
    """
    met, tree = jax.tree.flatten({name: controllers[name] for name in _SHAPING})
    met = [
      jax.device_put(arrays['controllers'][str(i)], x.sharding)
      for i, x in enumerate(met)
    ]
    rollouts = Rollout(**arrays['rollouts'])
    replay = tuple(
      jax.tree.map(lambda x, r=r: np.asarray(x)[r], rollouts)
      for r in range(record['rounds'])
    )
    pipeline = self._collect.pipeline
    now = pipeline.mutes
    pipeline.restore_mutes(record['mutes'])
    self.launch(record['step'], {}, jax.tree.unflatten(tree, met), key, replay)
    _, own = self._flight.result()
    own.seconds = dict(record['seconds'])  # what sampling took at the time
    pipeline.restore_mutes(now)
