"""Draws G completions of every prompt, all on the device.

  Prompts [P] --begin--> State [B rows] --stage, move--> ... --> Rollout [N]
                           ^-- waiting prompts

1. The weights are unstacked. What all prompts begin with is read once, then
   the rest of each; the G rows of a group share the cache of their prompt.
2. A stage draws one token per row and step. It ends when its slots are used up,
   and the rows' own cache grows; or when enough of its rows are done: then
   waiting prompts take their places, and where none waits, the others go on as
   a batch of half the size.

All rows have their last token in the same slot, whenever they began, so that a
step writes one slot of the cache. The host is asked once per stage.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gdpo_jax import sharding
from gdpo_jax.policy.policy import Cache, Policy
from gdpo_jax.sampling import Sampling, sample
from gdpo_jax.types import Array, Prompts, Rollout

# The rows' own cache starts with as many slots, and grows by at least as many:
# early steps attend over few slots, and few sizes are compiled.
BUCKET = 64
# A smaller batch is hardly faster: reading the weights is all that it does.
FEWEST_ROWS = 8
# A shared prefix is worth a program of its own from this many tokens on.
SHORTEST_PREFIX = 32
# Waiting prompts enter when this share of the rows is done: rarely enough to
# move the caches, and to read several prompts at once.
ENTER = 1 / 4
# Where prompts wait, the largest cache has so many slots to spare, or one row
# after the other would reach its limit at the end of the cache.
SPARE = 32


class State(NamedTuple):
  """B rows in flight, between two stages."""

  slot: Array  # i32[], of the rows' own cache, that takes the next token
  row: Array  # i32[B], number in the rollout
  start: Array  # i32[B], position of the first new token
  limit: Array  # i32[B], new tokens at most
  ended: Array  # bool[B], by an end token
  length: Array  # i32[B], tokens drawn
  last: Array  # i32[B], the newest token, not in the cache yet
  uniforms: Array  # f32[B, Tc]
  tokens: Array  # i32[B, Tc]
  logp: Array  # f32[B, Tc]
  cache: Cache  # the last level that is shared holds the prompts

  @property
  def done(self) -> Array:
    """bool[B], True on rows that take no more tokens."""
    return self.ended | (self.length >= self.limit)


def generate(
  policy: Policy,
  params,
  prompts: Prompts,
  key: Array,
  sampling: Sampling,
  row_ids: Array | None = None,
  mesh: jax.sharding.Mesh | None = None,
  timer: Callable[[str], contextlib.AbstractContextManager] | None = None,
  limits: Array | None = None,
) -> Rollout:
  """Samples `sampling.group_size` completions of each prompt.

  The sample of a row depends on its prompt, `key` and its row id alone: not on
  the other rows, nor on the padding, nor on the stages.

  Args:
    policy: from `make_policy`.
    params: its parameters.
    prompts: tokens i32[P, Tp] and mask bool[P, Tp], left-padded; the examples
      are not read.
    key: the caller folds in what must differ (step, round).
    sampling: see Sampling.
    row_ids: i32[N], folded into the key of each row; row numbers by default.
    mesh: splits the rows over its devices, all of which have to get as many.
      Every process then gives all prompts, and holds its rows of the result.
    timer: times the blocks 'prefill' and 'decode', on one device.
    limits: i32[N], new tokens of each row at most; None: `max_new_tokens` for
      all. A row that runs into its limit has not `ended`.
  Returns:
    Rollout of N = P * G rows, on the host if the prompts are there and one
    device has them all. `logp` is of the distribution drawn from, after
    temperature and filters.
  Raises:
    ValueError: where prompt and completion exceed the model's positions, a
      limit is not in [1, max_new_tokens], or the devices of the mesh do not
      divide the prompts.
  """
  num_prompts, width = prompts.tokens.shape
  _check_positions(policy, width, sampling)
  if row_ids is None:
    row_ids = np.arange(num_prompts * sampling.group_size)
  row_ids = np.asarray(row_ids, np.int32)
  limits = _checked_limits(limits, len(row_ids), sampling.max_new_tokens)
  if isinstance(prompts.tokens, jax.Array) or (mesh and mesh.size > 1):
    # One program: moving rows would send them from one device to another.
    arrays = (prompts.tokens, prompts.mask, row_ids, limits)
    if mesh is not None:
      sharding.local_rows(mesh, num_prompts)  # or an error
      arrays = sharding.put_rows(mesh, arrays)
    return generate_arrays(policy, params, *arrays, key, sampling, mesh)

  [rollout] = stream(
    policy, params, prompts, key, sampling, row_ids, num_prompts, timer, limits
  )
  return rollout


def stream(
  policy: Policy,
  params,
  prompts: Prompts,
  key: Array,
  sampling: Sampling,
  row_ids: Array,
  in_flight: int,
  timer: Callable[[str], contextlib.AbstractContextManager] | None = None,
  limits: Array | None = None,
) -> Iterator[Rollout]:
  """`generate` on one device, with at most `in_flight` prompts at a time.

  The others wait, and enter in their order as rows are done.

  Args:
    in_flight: prompts; memory grows with them.
    prompts, row_ids, ...: as in `generate`; on the host.
  Yields:
    Rollouts of `in_flight` prompts each (the last of what is left), in order,
    on the host, each as soon as all of its rows are done.
  """
  group, num_prompts = sampling.group_size, len(prompts.tokens)
  _check_positions(policy, prompts.tokens.shape[1], sampling)
  in_flight = min(in_flight, num_prompts)
  limits = _checked_limits(limits, len(row_ids), sampling.max_new_tokens)
  timer = timer or contextlib.nullcontext
  drawn = _Drawn.empty(len(row_ids), sampling)
  row_ids = np.asarray(row_ids, np.int32)

  def enter(first, count):
    """State of the prompts from `first` on; beyond the last, rows of none."""
    which = np.minimum(np.arange(first, first + count), num_prompts - 1)
    rows = (which[:, None] * group + np.arange(group)).reshape(-1)
    real = np.arange(count * group) + first * group < len(row_ids)
    return _begin(
      policy,
      weights,
      shared,
      tokens[which],
      mask[which],
      key,
      sampling,
      row_ids[rows],
      np.where(real, limits[rows], 0),
      np.where(real, rows, len(row_ids)),
    )

  def part(first):
    rows = slice(first * group, (first + in_flight) * group)
    whole = slice(first, first + in_flight)
    return drawn.rollout(prompts.tokens[whole], prompts.mask[whole], rows)

  with timer('prefill'):
    weights = policy.rollout_params(params, sampling.dtype)
    prefix, tokens, mask = split_prefix(prompts)
    shared = () if prefix is None else (_read(policy, weights, prefix),)
    state = enter(0, in_flight)
    jax.block_until_ready(state.last)
  entered, given = in_flight, 0
  fresh = max(1, round(in_flight * ENTER))  # prompts that enter at once
  sizes = bucket_sizes(sampling.max_new_tokens)
  if sizes and num_prompts > in_flight:
    sizes.append(sizes[-1] + SPARE)
  while True:
    seen = drawn.take(state)
    while given < num_prompts and drawn.complete(
      slice(given * group, (given + in_flight) * group)
    ):
      yield part(given)
      given += in_flight
    if given >= num_prompts:
      return
    waiting = entered < num_prompts
    order, newcomers, num_rows = None, None, len(seen.done)
    if waiting and seen.alive <= num_rows - fresh * group:
      order = seen.alive_first()[: num_rows - fresh * group]
      with timer('prefill'):
        newcomers = enter(entered, fresh)
        jax.block_until_ready(newcomers.last)
      entered += fresh
      waiting = entered < num_prompts
    elif not waiting and seen.alive <= _halves(num_rows):
      while seen.alive <= _halves(num_rows):
        num_rows = _halves(num_rows)
      order = seen.alive_first()[:num_rows]
    with timer('decode'):
      slots, shift = seen.slots(sizes, newcomers is not None)
      if order is not None or (slots, shift) != (seen.num_slots, 0):
        state = _move(state, order, shift or None, slots, newcomers)
      fewer = num_rows - fresh * group if waiting else _halves(num_rows)
      state = _stage(policy, weights, state, sampling, fewer)
      jax.block_until_ready(state.last)


class _Seen(NamedTuple):
  """What the host looks at after a stage."""

  done: np.ndarray  # bool[B]
  left: np.ndarray  # i32[B], tokens to the limit
  used: np.ndarray  # i32[B], slots
  slot: int
  num_slots: int

  @property
  def alive(self) -> int:
    return int((~self.done).sum())

  def alive_first(self) -> np.ndarray:
    """i64[B], a permutation."""
    return np.argsort(self.done, kind='stable')

  def slots(self, sizes: list[int], joined: bool) -> tuple[int, int]:
    """(how many slots the next stage has, how many are dropped in front)."""
    alive = ~self.done
    used = int(self.used[alive].max(initial=0))
    if not sizes or (not joined and self.slot < self.num_slots):
      return self.num_slots, 0
    left = int(self.left[alive].max(initial=0))
    if joined:
      left = sizes[-1]
    wanted = used + min(left, SPARE)
    if used < self.slot and wanted <= self.num_slots:
      return self.num_slots, self.slot - used
    larger = next((n for n in sizes if n >= wanted), sizes[-1])
    return max(larger, self.num_slots), self.slot - used


class _Drawn(NamedTuple):
  """What all N rows have so far, on the host."""

  ended: np.ndarray  # bool[N]
  length: np.ndarray  # i32[N], 0 while a row is not done
  tokens: np.ndarray  # i32[N, Tc]
  logp: np.ndarray  # f32[N, Tc]

  @classmethod
  def empty(cls, num_rows: int, sampling: Sampling) -> '_Drawn':
    shape = (num_rows, sampling.max_new_tokens)
    return cls(
      np.zeros(num_rows, bool),
      np.zeros(num_rows, np.int32),
      np.full(shape, sampling.pad_id, np.int32),
      np.zeros(shape, np.float32),
    )

  def take(self, state: State) -> _Seen:
    """Keeps the rows that are done."""
    now = jax.device_get(state._replace(uniforms=None, cache=None))
    done = now.ended | (now.length >= now.limit)
    new = done & (now.row < len(self.length))
    rows = now.row[new]
    self.ended[rows] = now.ended[new]
    self.length[rows] = now.length[new]
    self.tokens[rows] = now.tokens[new]
    self.logp[rows] = now.logp[new]
    return _Seen(
      done,
      now.limit - now.length,
      now.length - 1,
      int(now.slot),
      state.cache.own.num_slots,
    )

  def complete(self, rows: slice) -> bool:
    return bool(self.length[rows].all())

  def rollout(self, prompt, prompt_mask, rows: slice) -> Rollout:
    tokens, length = self.tokens[rows], self.length[rows]
    group = len(tokens) // len(prompt)
    return Rollout(
      prompt=np.repeat(np.asarray(prompt, np.int32), group, axis=0),
      prompt_mask=np.repeat(np.asarray(prompt_mask, bool), group, axis=0),
      tokens=tokens,
      mask=np.arange(tokens.shape[1]) < length[:, None],
      logp=self.logp[rows],
      ended=self.ended[rows],
    )


@functools.partial(jax.jit, static_argnames=('policy', 'sampling', 'mesh'))
def generate_arrays(
  policy, params, tokens, mask, row_ids, limits, key, sampling, mesh=None
):
  """All stages as one program; one for each shape of tokens i32[P, Tp]."""
  on_mesh = contextlib.nullcontext() if mesh is None else sharding.use(mesh)
  with on_mesh:
    weights = policy.rollout_params(params, sampling.dtype)
    rows = jnp.arange(len(row_ids))
    state = _begin(
      policy, weights, (), tokens, mask, key, sampling, row_ids, limits, rows
    )
    for num_slots in bucket_sizes(sampling.max_new_tokens):
      state = _move(state, None, None, num_slots)
      state = _stage(policy, weights, state, sampling, 0)
    repeat = functools.partial(jnp.repeat, repeats=sampling.group_size, axis=0)
    return Rollout(
      prompt=repeat(jnp.asarray(tokens, jnp.int32)),
      prompt_mask=repeat(jnp.asarray(mask, bool)),
      tokens=state.tokens,
      mask=jnp.arange(sampling.max_new_tokens) < state.length[:, None],
      logp=state.logp,
      ended=state.ended,
    )


def _check_positions(policy, width, sampling):
  if width + sampling.max_new_tokens > policy.config.max_positions:
    raise ValueError(
      f'{width} prompt tokens + max_new_tokens {sampling.max_new_tokens} exceed '
      f'the {policy.config.max_positions} positions of the model; lower either.'
    )


def _checked_limits(limits, num_rows, max_new_tokens):
  """i32[N] on the host."""
  if limits is None:
    return np.full(num_rows, max_new_tokens, np.int32)
  limits = np.asarray(limits, np.int32)
  if limits.shape != (num_rows,):
    raise ValueError(
      f'limits has the shape {limits.shape}; give one for each of the '
      f'{num_rows} rows.'
    )
  if limits.min() < 1 or limits.max() > max_new_tokens:
    raise ValueError(
      f'limits are from {limits.min()} to {limits.max()} tokens; keep them in '
      f'[1, max_new_tokens], which is {max_new_tokens}.'
    )
  return limits


def _halves(num_rows):
  """Rows of the next smaller batch, 0 where that is not worth it."""
  return num_rows // 2 if num_rows // 2 >= FEWEST_ROWS else 0


def split_prefix(prompts: Prompts):
  """(prefix i32[C] or None, tokens i32[P, T], mask bool[P, T]).

  The prefix is what all prompts begin with, where that is worth it: at least
  half of the longest one, in whole multiples of SHORTEST_PREFIX. `tokens` are
  what follows it, without columns in which all prompts are padded; both widths
  are rounded, so that few are compiled.
  """
  tokens, mask = np.asarray(prompts.tokens), np.asarray(prompts.mask, bool)
  num_prompts, width = tokens.shape
  lengths = np.maximum(mask.sum(axis=1), 1)
  # Left-aligned, up to the last token but one of the shortest.
  begin = np.arange(lengths.min() - 1) + (width - lengths)[:, None]
  begin = np.take_along_axis(tokens, begin, axis=1)
  common = int((begin == begin[0]).all(axis=0).cumprod().sum())
  common -= common % SHORTEST_PREFIX
  if num_prompts == 1 or common < lengths.max() / 2:
    common = 0
  keep = next(w for w in _widths(width) if w >= lengths.max() - common)
  inside = np.arange(width) >= (width - lengths + common)[:, None]
  return (
    begin[0, :common].astype(np.int32) if common else None,
    tokens[:, width - keep :].astype(np.int32),
    (mask & inside)[:, width - keep :],
  )


def _widths(limit):
  """16, 24, 32, 48, 64, 96, ..., limit."""
  width = 16
  while width < limit:
    yield width
    if width * 3 // 2 < limit:
      yield width * 3 // 2
    width *= 2
  yield limit


@functools.partial(jax.jit, static_argnames='policy')
def _read(policy, weights, prefix):
  """Level of what all prompts begin with, i32[C]."""
  mask = jnp.ones((1, len(prefix)), bool)
  return policy.prefill(weights, prefix[None], mask)[1]


@functools.partial(jax.jit, static_argnames=('policy', 'sampling'))
def _begin(
  policy, weights, shared, tokens, mask, key, sampling, row_ids, limits, rows
):
  """State after the first token of every row; no slots of its own yet."""
  tokens, mask = jnp.asarray(tokens, jnp.int32), jnp.asarray(mask, bool)
  known = sum(level.num_slots for level in shared)
  logits, level = policy.prefill(weights, tokens, mask, *shared)
  repeat = functools.partial(jnp.repeat, repeats=sampling.group_size, axis=0)
  limit, (num_rows,) = sampling.max_new_tokens, row_ids.shape
  uniforms = jax.vmap(
    lambda row: jax.vmap(
      lambda t: jax.random.uniform(jax.random.fold_in(row, t))
    )(jnp.arange(limit)),
  )(jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids))
  state = State(
    slot=jnp.int32(0),
    row=jnp.asarray(rows, jnp.int32),
    start=repeat(known + jnp.maximum(mask.sum(axis=1, dtype=jnp.int32), 1)),
    limit=jnp.asarray(limits, jnp.int32),
    ended=jnp.zeros((num_rows,), bool),
    length=jnp.zeros((num_rows,), jnp.int32),
    last=jnp.zeros((num_rows,), jnp.int32),
    uniforms=uniforms,
    tokens=jnp.full((num_rows, limit), sampling.pad_id, jnp.int32),
    logp=jnp.zeros((num_rows, limit), jnp.float32),
    cache=policy.new_cache((*shared, level), num_rows, 0),
  )
  return _draw(state, repeat(logits), sampling)


def _draw(state, logits, sampling):
  """One more token of every row that is not done."""
  done = state.done
  place = jnp.where(done, sampling.max_new_tokens, state.length)
  # row by row: rows that lie on several devices stay where they are
  uniform = jax.vmap(lambda x, t: x[t])(state.uniforms, place)
  token, logp = sample(logits, uniform, sampling)
  put = jax.vmap(lambda x, t, new: x.at[t].set(new, mode='drop'))
  eos = jnp.array(sampling.eos_ids, jnp.int32)
  return state._replace(
    ended=state.ended | ~done & jnp.any(token[:, None] == eos, axis=1),
    length=state.length + ~done,
    last=jnp.where(done, sampling.pad_id, token),
    tokens=put(state.tokens, place, token),
    logp=put(state.logp, place, logp),
  )


@functools.partial(
  jax.jit, static_argnames=('policy', 'sampling'), donate_argnames='state'
)
def _stage(policy, weights, state, sampling, fewer):
  """State when slots are used up, or at most `fewer` rows are not done."""
  num_slots = state.cache.own.num_slots
  shared = state.cache.shared

  def go_on(state):
    return (state.slot < num_slots) & (jnp.sum(~state.done) > fewer)

  def step(state):
    logits, cache = policy.decode(
      weights,
      state.cache._replace(shared=shared),
      state.last,
      state.start + state.length - 1,
      state.slot,
    )
    cache = cache._replace(shared=())
    state = state._replace(cache=cache, slot=state.slot + 1)
    return _draw(state, logits, sampling)

  # What the rows share is not part of what the loop carries.
  state = state._replace(cache=state.cache._replace(shared=()))
  state = jax.lax.while_loop(go_on, step, state)
  return state._replace(cache=state.cache._replace(shared=shared))


@functools.partial(jax.jit, static_argnames='num_slots')
def _move(state, order, shift, num_slots, newcomers=None):
  """The rows of `order` (None: all), then those of another State.

  Their own cache loses `shift` slots in front (None: no slot is moved), which
  none of them uses, and has `num_slots` in all. A prompt that rows shared is from now on kept for each.
  """
  cache, slot = state.cache, state.slot
  if shift is not None:
    slot -= shift
  if order is None:
    own = cache.own if shift is None else cache.own.drop(shift)
    own = own.grow(num_slots)
    return state._replace(slot=slot, cache=cache._replace(own=own))

  count = len(state.row)

  def pick(x):
    return x[order]

  def join(x, y):
    return jnp.concatenate([x, y])

  *prefix, asked = cache.shared
  own = jax.tree.map(pick, cache.own)
  own = (own if shift is None else own.drop(shift)).grow(num_slots)
  if newcomers is not None or len(asked.mask) > 1:
    each = order // (count // len(asked.mask))
    asked = jax.tree.map(lambda x: x[each], asked)
  rest = state._replace(slot=None, cache=None)
  rest = jax.tree.map(pick, rest)
  if newcomers is not None:
    new = newcomers.cache
    group = len(newcomers.row) // len(new.shared[-1].mask)
    own = jax.tree.map(join, own, new.own.grow(num_slots))
    asked = jax.tree.map(
      lambda x, y: join(x, jnp.repeat(y, group, axis=0)), asked, new.shared[-1]
    )
    rest = jax.tree.map(join, rest, newcomers._replace(slot=None, cache=None))
  return rest._replace(slot=slot, cache=Cache((*prefix, asked), own))


def bucket_sizes(max_new_tokens: int) -> list[int]:
  """Numbers of slots for new tokens, growing by 64 or by half, if that is more.

  Multiples of 16, the width of a vector. The last token drawn is never read
  again and needs no slot, so that [] is the answer where only one is drawn.
  """
  end = max_new_tokens - 1
  sizes, size = [], 0
  while size < end:
    size = -(-max(size + BUCKET, size * 3 // 2) // BUCKET) * BUCKET
    sizes.append(min(size, -(-end // 16) * 16))
  return sizes
