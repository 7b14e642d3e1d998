"""Rewards in worker processes, and many faults at once."""

import asyncio
import collections
import functools
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.rewards import workers
from gdpo_jax.rewards.pipeline import Pipeline, Reward, score

ROOT = pathlib.Path(__file__).parents[2]
PROMPTS, COMPLETIONS = ['p'] * 8, list('abcdefgh')
FACTOR = 3  # a global of the user's file, used by functions in workers


def process(fn, **options):
  return Reward(fn, **{'isolation': 'process', 'timeout_s': 5, **options})


def children():
  return set(workers.descendants(os.getpid()))


def scaled(k):
  def closure(completions, **_):
    return [k * FACTOR * len(text) for text in completions]

  return closure


def raises(completions):
  raise ValueError('no')


def sys_exit(completions):
  sys.exit(0)


def os_exit(completions):
  os._exit(0)


def hangs(completions):
  for number in range(1, 65):
    try:
      signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
      continue
  while True:
    pass


def leaves_a_grandchild(completions):
  if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
      time.sleep(1000)
    os._exit(0)
  return [1.0] * len(completions)


def allocates(completions):
  return [float(len(bytearray(10 << 40)))] * len(completions)


def unpicklable(completions):
  return threading.Lock()


async def sleeps(completions):
  await asyncio.sleep(1000)


def test_faults_stay_in_their_process_and_the_pool_is_back_at_full_size():
  before = children()
  rewards = [
    process(scaled(2), name='good'),
    process(raises),
    process(sys_exit),
    process(os_exit),
    process(hangs, timeout_s=1),
    process(sleeps, timeout_s=1),
    process(allocates),
    process(unpicklable),
    process(leaves_a_grandchild),
  ]
  with Pipeline(rewards) as pipe:
    for step in range(2):
      start = time.monotonic()
      scores = pipe.score(PROMPTS, COMPLETIONS, step=step)
      assert time.monotonic() - start < 8
      assert scores.reasons == {
        'raises': {'exception': 8},
        'sys_exit': {'exception': 8},
        'os_exit': {'died': 8},
        'hangs': {'timeout': 8},
        'sleeps': {'timeout': 8},
        'allocates': {'exception': 8},
        'unpicklable': {'type': 8},
      }
      np.testing.assert_array_equal(scores.values[:, 0], 6.0)
      np.testing.assert_array_equal(scores.values[:, 8], 1.0)
    for lane in pipe._lanes:
      for worker in lane._runner._workers:  # alive, and fresh where killed
        assert worker._process._process.poll() is None
  assert children() == before  # grandchildren too


def test_workers_never_import_jax_even_for_functions_from_a_file_that_does():
  def loaded(completions):
    return ['jax' in sys.modules] * len(completions)

  assert jnp is not None  # this file has imported it
  scores = score(PROMPTS, COMPLETIONS, {}, [process(loaded)])
  np.testing.assert_array_equal(scores.values[:, 0], 0.0)


def test_process_rewards_get_and_give_everything():
  def asks(
    prompts, completions, answer, completion_ids, step, log_metric, log_extra
  ):
    log_metric('ids', sum(map(len, completion_ids)))
    log_extra('note', [f'{text}{step}' for text in completions])
    return [float(a) for a in answer]

  scores = score(
    PROMPTS[:2],
    [[{'role': 'assistant', 'content': 'x'}]] * 2,
    {'answer': ['1', '2']},
    [process(asks)],
    completion_ids=[[1], [2, 3]],
    step=5,
  )
  np.testing.assert_array_equal(scores.values[:, 0], [1, 2])
  assert scores.metrics == {'ids': 3.0}
  assert scores.extra['note'][0].endswith('5')


def test_what_cannot_be_sent_is_found_when_the_pipeline_is_made():
  lock = threading.Lock()

  def holds(completions):
    with lock:
      return [1.0] * len(completions)

  before = children()
  with pytest.raises(ValueError, match="'holds'.*cannot be sent to a worker"):
    Pipeline([process(scaled(1), name='good'), process(holds)])
  assert children() == before


def test_rows_of_a_pure_reward_are_shared_among_workers():
  def slow(completions):
    time.sleep(0.05 * len(completions))
    if 'h' in completions:
      os._exit(1)
    return [os.getpid()] * len(completions)

  with Pipeline([process(slow, pure=True, workers=2)]) as pipe:
    pipe.score(PROMPTS[:2], list('xy'))  # starts both
    scores = pipe.score(PROMPTS, COMPLETIONS)
  assert len(set(scores.values[:4, 0])) == 1
  assert np.isnan(scores.values[4:, 0]).all()  # the other worker's share
  assert scores.reasons == {'slow': {'died': 4}}
  assert scores.seconds['slow'] < 0.35


def test_a_users_own_script_with_closures_hangs_and_recovers(tmp_path):
  script = tmp_path / 'my_training.py'
  script.write_text(
    textwrap.dedent("""
      import os, time
      import jax.numpy as jnp
      from gdpo_jax.rewards import workers
      from gdpo_jax.rewards.pipeline import Pipeline, Reward

      OFFSET = 10

      class Scale:
        def __init__(self, k):
          self.k = k
        def __call__(self, completions, **_):
          return [self.k * len(text) for text in completions]

      def plus(k):
        return lambda completions, **_: [OFFSET + k for _ in completions]

      def hang_on(word):
        def hang(completions):
          while word in completions:
            time.sleep(1)
          return [1.0] * len(completions)
        return hang

      rewards = [
        Reward(plus(1), name='plus', isolation='process'),
        Reward(hang_on('stop'), isolation='process', timeout_s=1),
        Reward(Scale(2), isolation='process'),
      ]
      print(float(jnp.ones(()) + 1))
      with Pipeline(rewards) as pipe:
        for texts in (['a', 'stop'], ['b', 'c']):
          scores = pipe.score(['p', 'p'], texts)
          print(scores.values.tolist(), scores.reasons)
      print(workers.descendants(os.getpid()))
    """)
  )
  done = subprocess.run(
    [sys.executable, str(script)],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [
    '2.0',
    "[[11.0, nan, 2.0], [11.0, nan, 8.0]] {'hang': {'timeout': 2}}",
    '[[11.0, 1.0, 2.0], [11.0, 1.0, 2.0]] {}',
    '[]',
  ]


def test_workers_end_with_the_process_that_started_them(tmp_path):
  script = tmp_path / 'dies.py'
  script.write_text(
    textwrap.dedent("""
      import os, signal, subprocess, time
      from gdpo_jax.rewards import workers
      def target():
        child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
        return os.getpid(), child.pid
      worker = workers.Worker(target)
      print(*worker.call(timeout_s=30), flush=True)
      os.kill(os.getpid(), signal.SIGKILL)
    """)
  )
  done = subprocess.run(
    [sys.executable, str(script)],
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=60,
  )
  assert done.returncode == -signal.SIGKILL, done.stderr
  pids = [int(pid) for pid in done.stdout.split()]
  assert len(pids) == 2

  def alive(pid):
    try:
      state = pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2]
    except OSError:
      return False
    return state.split()[0] != 'Z'

  assert eventually(lambda: not any(map(alive, pids)))


def trl_rewards():
  return pytest.importorskip('trl.rewards', reason='TRL is not installed')


@pytest.mark.parametrize('isolation', ['thread', 'process'])
def test_rewards_written_for_trl_run_unchanged(isolation):
  trl = trl_rewards()
  make = functools.partial(Reward, isolation=isolation, timeout_s=60)
  rewards = [
    make(trl.accuracy_reward),
    make(trl.think_format_reward),
    make(trl.get_soft_overlong_punishment(100, 20)),
    make(trl.get_repetition_penalty_reward(ngram_size=2)),
  ]
  texts = [
    r'<think>half</think> It is \boxed{\frac{1}{2}}',
    r'no thinking: \boxed{\frac{1}{3}}',
  ]
  scores = score(
    ['What is a half?'] * 2,
    [[{'role': 'assistant', 'content': text}] for text in texts],
    {'solution': [r'$\frac{1}{2}$'] * 2},
    rewards,
    completion_ids=[list(range(90)), [5, 5, 5, 5, 5]],
  )
  assert scores.names == (
    'accuracy_reward',
    'think_format_reward',
    'soft_overlong_punishment_reward',
    'repetition_penalty_reward',
  )
  np.testing.assert_allclose(
    scores.values, [[1, 1, -0.5, 0], [0, 0, 0, -0.75]], atol=1e-6
  )
  assert scores.reasons == {} and set(scores.extra) >= {
    'solution',
    'gold_parsed',
  }


# The soak: every reward fails at random, and every fault is accounted for.

FAULTS = ('raise', 'hang', 'none', 'nan', 'length')
KINDS = {
  'raise': 'exception',
  'hang': 'timeout',
  'none': 'none',
  'nan': 'nan',
  'length': 'length',
}


def plan(reward: int, step: int) -> str | None:
  draw = random.Random(f'{reward}/{step}')
  return draw.choice(FAULTS) if draw.random() < 0.3 else None


def values(fault, completions):
  if fault == 'raise':
    raise RuntimeError('planned')
  if fault == 'none':
    return [None] * len(completions)
  if fault == 'nan':
    return [float('nan')] * len(completions)
  if fault == 'length':
    return [1.0] * (len(completions) + 1)
  return [1.0] * len(completions)


def faulty(reward: int):
  def fn(completions, step):
    fault = plan(reward, step)
    while fault == 'hang':
      time.sleep(1000)
    return values(fault, completions)

  return fn


def faulty_async(reward: int):
  async def fn(completions, step):
    fault = plan(reward, step)
    if fault == 'hang':
      await asyncio.sleep(1000)
    return values(fault, completions)

  return fn


def resources():
  """Processes, threads and open files."""
  files = len(os.listdir('/proc/self/fd'))
  return children(), threading.active_count(), files


def eventually(condition, limit_s=10.0):
  deadline = time.monotonic() + limit_s
  while not condition() and time.monotonic() < deadline:
    time.sleep(0.05)
  return condition()


def soak(num_calls, timeout_s=1.0, rows=4, ahead=8):
  """Six rewards in processes and two coroutines in threads."""
  before = resources()
  rewards = [
    process(faulty(i), name=f'r{i}', timeout_s=timeout_s) for i in range(6)
  ] + [
    Reward(faulty_async(i), name=f'r{i}', timeout_s=timeout_s) for i in (6, 7)
  ]
  got = collections.Counter()
  expected = collections.Counter()
  waiting = collections.deque()
  with Pipeline(rewards) as pipe:

    def take():
      step, pending = waiting.popleft()
      scores = pending.result()
      for i, name in enumerate(scores.names):
        fault = plan(i, step)
        if fault is not None:
          expected[name, KINDS[fault]] += rows
        assert np.isnan(scores.values[:, i]).all() == (fault is not None)
        for kind, count in scores.reasons.get(name, {}).items():
          got[name, kind] += count

    for step in range(num_calls):
      submitted = pipe.submit(['p'] * rows, ['c'] * rows, step=step)
      waiting.append((step, submitted))
      if len(waiting) == ahead:
        take()
    while waiting:
      take()
    # The pool is back at full size: six workers, each under a supervisor.
    assert eventually(lambda: len(children() - before[0]) == 12)
  assert got == expected
  assert eventually(lambda: resources() == before)
  return expected


def test_short_soak():
  assert len(soak(num_calls=24)) > 15


@pytest.mark.slow
def test_soak():
  counts = soak(num_calls=2000)
  failed = sum(counts.values()) / 4 / 8 / 2000
  assert 0.28 < failed < 0.32
