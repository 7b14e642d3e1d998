import asyncio
import math
import pathlib
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from gdpo_jax.rewards import memory, pipeline
from gdpo_jax.rewards.pipeline import Pipeline, Reward, score

PROMPTS, COMPLETIONS = ['p'] * 8, list('abcdefgh')


def ones(completions, **_):
  return [1.0] * len(completions)


def one(fn, **options):
  return score(PROMPTS, COMPLETIONS, {}, [Reward(fn, name='r', **options)])


@pytest.mark.parametrize(
  'returned, kind, said',
  [
    ([1.0], 'length', 'expected 8 values, got 1'),
    ([1.0] * 7, 'length', 'expected 8 values, got 7'),
    ([1.0] * 9, 'length', 'expected 8 values, got 9'),
    (np.ones((8, 8)), 'length', 'expected 8 values, got shape'),
    ('abcdefgh', 'type', 'expected 8 values, got str'),
    (dict.fromkeys(range(8), 1.0), 'type', 'expected 8 values, got dict'),
    (1.0, 'type', 'not a sequence of numbers'),
    (None, 'type', 'not a sequence of numbers'),
    (np.float32(1.0), 'type', 'not a sequence of numbers'),
    (iter([1.0] * 8), 'type', 'not a sequence of numbers'),
  ],
)
def test_what_is_not_n_numbers_makes_the_whole_call_missing(
  returned, kind, said
):
  scores = one(lambda completions: returned)
  assert np.isnan(scores.values).all()
  assert scores.reasons == {'r': {kind: 8}}
  assert [failure.row for failure in scores.failures] == list(range(8))
  assert said in scores.failures[0].reason
  assert scores.failures[0].reason.startswith('r: ')


@pytest.mark.parametrize(
  'returned',
  [
    [1.0] * 8,
    (1,) * 8,
    [True] * 8,
    np.ones(8),
    np.ones((8, 1)),
    jnp.ones((8, 1)),
    [np.float16(1.0)] * 8,
    [np.array(1.0)] * 8,
    jnp.ones(8),
    jnp.ones(8, jnp.bfloat16),
    list(jnp.ones(8)),
  ],
)
def test_numbers_of_any_make_count(returned):
  scores = one(lambda completions: returned)
  np.testing.assert_array_equal(scores.values, np.ones((8, 1), np.float32))
  assert scores.reasons == {} and scores.failures == []


def test_single_rows_are_missing_by_reason():
  row = [1.0, None, math.nan, math.inf, -math.inf, '1.0', 1e20, 10**400]
  scores = one(lambda completions: row)
  assert scores.values[0, 0] == 1.0
  assert np.isnan(scores.values[1:]).all()
  assert scores.reasons['r'] == {'none': 1, 'nan': 1, 'inf': 4, 'type': 1}
  assert [failure.text for failure in scores.failures] == list('bcdefgh')
  assert scores.summary()['rewards/r/missing'] == 7 / 8
  assert scores.summary()['rewards/r/missing/inf'] == 0.5


@pytest.mark.parametrize(
  'error', [ValueError('x'), SystemExit(0), KeyboardInterrupt()]
)
def test_an_exception_stays_with_its_reward(error):
  def bad(completions):
    raise error

  scores = score(PROMPTS, COMPLETIONS, {}, [Reward(bad), Reward(ones)])
  assert np.isnan(scores.values[:, 0]).all()
  assert (scores.values[:, 1] == 1).all()
  assert scores.reasons == {'bad': {'exception': 8}}
  assert type(error).__name__ in scores.failures[0].reason


def test_a_hung_call_costs_its_time_out_and_nothing_else():
  release = threading.Event()

  def hang(completions):
    release.wait(30)
    return ones(completions)

  async def hang_async(completions):
    await asyncio.sleep(30)

  rewards = [
    Reward(hang, timeout_s=0.3),
    Reward(hang_async, timeout_s=0.3),
    Reward(ones),
  ]
  with Pipeline(rewards) as pipe:
    start = time.monotonic()
    scores = pipe.score(PROMPTS, COMPLETIONS)
    assert time.monotonic() - start < 1.5
    assert scores.reasons == {
      'hang': {'timeout': 8},
      'hang_async': {'timeout': 8},
    }
    assert (scores.values[:, 2] == 1).all()
    for _ in range(3):
      pipe.score(PROMPTS, COMPLETIONS)
    # Threads cannot be killed, but they do not pile up either.
    assert pipe.score(PROMPTS, COMPLETIONS).reasons['hang'] == {'stuck': 8}
    release.set()
    time.sleep(0.1)
    assert (pipe.score(PROMPTS, COMPLETIONS).values[:, 0] == 1).all()


def test_time_outs_work_from_any_thread():
  results = []

  def work():
    results.append(one(lambda completions: time.sleep(5), timeout_s=0.2))

  thread = threading.Thread(target=work)
  thread.start()
  thread.join(timeout=3)
  assert results[0].reasons == {'r': {'timeout': 8}}


def test_functions_get_what_they_ask_for():
  seen = {}

  def picky(completions, answer, completion_ids, step, trainer_state):
    seen['picky'] = answer, completion_ids, step, trainer_state
    return answer

  def greedy(prompts, completions, **kwargs):
    seen['greedy'] = set(kwargs)
    kwargs['log_metric']('mean_length', 2)
    kwargs['log_metric']('mean_length', 4)
    kwargs['log_extra']('note', ['n'] * len(completions))
    return [0.5] * len(completions)

  async def later(prompts, answer):
    await asyncio.sleep(0.01)
    return answer

  rewards = [Reward(picky), Reward(greedy, weight=0.0), Reward(later)]
  scores = score(
    PROMPTS[:2],
    COMPLETIONS[:2],
    {'answer': [3, 4], 'other': ['u', 'v']},
    rewards,
    completion_ids=[[1], [2, 3]],
    step=7,
    trainer_state='state',
  )
  assert scores.names == ('picky', 'greedy', 'later')
  np.testing.assert_array_equal(scores.values, [[3, 0.5, 3], [4, 0.5, 4]])
  np.testing.assert_array_equal(scores.weights, [1, 0, 1])
  assert seen['picky'] == ([3, 4], [[1], [2, 3]], 7, 'state')
  assert seen['greedy'] == {
    'answer', 'other', 'completion_ids', 'step', 'trainer_state', 'log_metric',
    'log_extra',
  }  # fmt: skip
  assert scores.metrics == {'mean_length': 3.0}
  assert scores.extra == {'note': ['n', 'n']}


def test_rewards_run_side_by_side_and_beside_the_caller():
  def slow(completions):
    time.sleep(0.3)
    return ones(completions)

  with Pipeline([Reward(slow, name=f'r{i}') for i in range(4)]) as pipe:
    start = time.monotonic()
    pending = [pipe.submit(PROMPTS, COMPLETIONS, step=i) for i in range(2)]
    assert time.monotonic() - start < 0.1  # generation goes on meanwhile
    values = [later.result().values for later in pending]
    assert 0.5 < time.monotonic() - start < 1.0  # two in turn, four at once
  assert all((value == 1).all() for value in values)


@pytest.mark.parametrize(
  'make, said',
  [
    (lambda: Pipeline([]), 'at least one'),
    (lambda: Pipeline([ones]), 'wrap the function'),
    (
      lambda: Pipeline([Reward(ones), Reward(ones)]),
      "two rewards are called 'ones'",
    ),
    (
      lambda: Pipeline([Reward(ones, fallback='two')]),
      "'two', which is not among",
    ),
    (
      lambda: Pipeline(
        [
          Reward(ones, name='a', fallback='b'),
          Reward(ones, name='b', fallback='a'),
        ]
      ),
      'circle: a -> b -> a',
    ),
    (lambda: Reward(3), 'needs a function'),
    (lambda: Reward(ones, timeout_s=0), 'timeout_s'),
    (lambda: Reward(ones, isolation='fork'), "'process' or 'main'"),
    (lambda: Reward(ones, range=(1, 0)), 'range'),
    (lambda: Reward(ones, weight=math.nan), 'weight'),
    (lambda: Reward(ones, mute_after=0), 'mute_after'),
    (lambda: Reward(ones, workers=2), 'workers > 1'),
    (lambda: Reward(lambda step: 0, pure=True), "asks for \\['step'\\]"),
    (
      lambda: pipeline.reward_weights([Reward(ones), Reward(len)], [1, 2, 3]),
      '3 weights were given for 2 rewards',
    ),
    (
      lambda: pipeline.reward_weights([Reward(ones), Reward(len)], [1]),
      '1 weights were given for 2 rewards',
    ),
    (
      lambda: score(PROMPTS[:7], COMPLETIONS, {}, [Reward(ones)]),
      "'prompts': 7",
    ),
    (lambda: one(ones).grouped(3), '8 rows cannot be split into groups of 3'),
  ],
)
def test_only_wrong_configuration_raises(make, said):
  with pytest.raises(ValueError, match=said):
    make()


def test_seven_rows_are_no_groups_of_four():
  scores = score(PROMPTS[:7], COMPLETIONS[:7], {}, [Reward(ones)])
  with pytest.raises(ValueError, match='7 rows cannot be split'):
    scores.grouped(4)
  rows = one(lambda completions: list(range(8))).grouped(4)
  np.testing.assert_array_equal(rows[..., 0], [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_what_an_array_masks_is_missing():
  values = np.ma.array(np.arange(8), mask=[0, 1] + [0] * 6)
  scores = one(lambda completions: values)
  np.testing.assert_array_equal(
    scores.values[:, 0], [0, np.nan, 2, 3, 4, 5, 6, 7]
  )
  assert scores.reasons == {'r': {'nan': 1}}


def test_a_record_of_any_completion_can_be_written():
  message = {'role': 'assistant', 'content': 'x'}
  completions = ['t', [message], message, None, 7, [3, 'y']]
  scores = score(
    ['p'] * 6, completions, {}, [Reward(lambda completions: [None] * 6)]
  )
  texts = [failure.text for failure in scores.failures]
  assert texts == ['t', 'x', 'x', 'None', '7', '3\ny']


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32', 'int64', 'bool'])
def test_tensors_of_torch_count(dtype):
  torch = pytest.importorskip('torch')
  values = torch.ones(8, dtype=getattr(torch, dtype))
  if values.is_floating_point():
    values.requires_grad_()
  np.testing.assert_array_equal(one(lambda completions: values).values, 1)


def test_a_column_that_nobody_provides_is_found_before_the_run():
  def needs(completions, solution):
    return ones(completions)

  with Pipeline([Reward(needs)]) as pipe:
    with pytest.raises(ValueError, match="'needs' needs \\['solution'\\]"):
      pipe.check_columns(['answer'])
    pipe.check_columns(['solution'])
    scores = pipe.score(PROMPTS, COMPLETIONS, {'answer': list(range(8))})
    assert scores.reasons == {'needs': {'exception': 8}}


def test_a_fallback_answers_for_the_missing_rows():
  def some(completions):
    return [None if text in 'ab' else 0.0 for text in completions]

  def rule(completions):
    return [None if text == 'a' else 0.25 for text in completions]

  rewards = [
    Reward(some, fallback='rule'),
    Reward(rule, fallback='last', weight=0.0),
    Reward(
      lambda completions: [0.75] * len(completions), name='last', weight=0
    ),
  ]
  scores = score(PROMPTS, COMPLETIONS, {}, rewards)
  np.testing.assert_array_equal(scores.values[:3, 0], [0.75, 0.25, 0.0])
  assert scores.fallbacks == {'some': 2, 'rule': 1}
  assert scores.reasons == {'some': {'none': 2}, 'rule': {'none': 1}}
  assert scores.summary()['rewards/some/fallback'] == 0.25


def test_mute_decides_on_counts():
  def run(counts, **options):
    state, muted = memory.Mute(), []
    for num_calls, num_failed in counts:
      state = memory.next_mute(state, num_calls, num_failed, **options)
      muted.append(state.steps_until_retry > 0)
    return muted

  options = {'mute_after': 3, 'retry_after': 2}
  fails, works, rests = (1, 1), (1, 0), (0, 0)
  # Three in a row mute; two steps of rest; the retry fails; the next one works.
  assert run(
    [fails, fails, works, fails, fails, fails, rests, rests, fails, rests, rests,
     works, fails], **options
  ) == [False] * 5 + [True, True, False, True, True, False, False, False]  # fmt: skip
  # Sums over two processes: one success anywhere ends the row of failures.
  assert run([(2, 2), (2, 1), (2, 2), (2, 2)], **options) == [0, 0, 0, 1]
  assert not any(run([fails] * 10, mute_after=None, retry_after=2))


def test_mute_and_retry_with_an_alert():
  broken = [True]

  def flaky(completions):
    calls.append(1)
    if broken[0]:
      raise RuntimeError('server is down')
    return ones(completions)

  calls, rows = [], []
  rewards = [
    Reward(flaky, mute_after=2, retry_after=3, weight=2.0),
    Reward(ones),
  ]
  with Pipeline(rewards) as pipe:
    for step in range(6):
      rows.append(pipe.score(PROMPTS, COMPLETIONS, step=step))
      broken[0] = step < 3
  assert [row.weights[0] for row in rows] == [2, 2, 0, 0, 0, 2]
  assert len(calls) == 3
  assert rows[2].reasons == {'flaky': {'muted': 8}}
  assert (rows[5].values == 1).all()
  said = rows[1].alerts[0]
  assert 'step 1' in said and 'muted' in said and 'server is down' in said
  assert 'tried again' in rows[4].alerts[0]


def test_mute_agrees_between_processes():
  """Two pipelines in two threads stand for two training processes."""
  barrier, counts, muted = threading.Barrier(2), {}, {0: [], 1: []}
  broken = [[True] * 8, [False] * 3 + [True] * 5]

  def run(me):
    def sum_counts(mine):
      counts[me] = mine
      barrier.wait(10)
      total = counts[0] + counts[1]
      barrier.wait(10)
      return total

    def fn(completions, step):
      if broken[me][step]:
        raise ValueError
      return ones(completions)

    reward = Reward(fn, mute_after=4, retry_after=2)
    with Pipeline([reward], sum_counts=sum_counts) as pipe:
      for step in range(8):
        pipe.score(PROMPTS, COMPLETIONS, step=step)
        muted[me].append(pipe.muted)

  threads = [threading.Thread(target=run, args=(me,)) for me in (0, 1)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(30)
  # While one process does well nothing is muted; then two steps of two failures
  # each make four. Two steps of rest, and a retry that fails.
  assert muted[0] == muted[1]
  assert [len(names) for names in muted[0]] == [0, 0, 0, 0, 1, 1, 0, 1]


def test_pure_values_are_cached_by_what_the_function_sees():
  calls = []

  def pure(completions, answer):
    calls.append(list(zip(completions, answer)))
    return [
      None if text == 'c' else float(a) for text, a in zip(completions, answer)
    ]

  columns = {'answer': [1, 1, 2, 3], 'unused': [1, 2, 3, 4]}
  with Pipeline([Reward(pure, pure=True)]) as pipe:
    first = pipe.score(['p'] * 4, ['a', 'a', 'b', 'c'], columns)
    np.testing.assert_array_equal(first.values[:, 0], [1, 1, 2, np.nan])
    again = pipe.score(
      ['p'] * 4, ['a', 'b', 'c', 'a'], {'answer': [1, 2, 3, 5]}
    )
    np.testing.assert_array_equal(again.values[:, 0], [1, 2, np.nan, 5])
  # Equal rows once; what was missing is tried again; another answer is another row.
  assert calls == [[('a', 1), ('b', 2), ('c', 3)], [('c', 3), ('a', 5)]]


def test_the_cache_is_bounded():
  with Pipeline([Reward(ones, pure=True)], cache_rows=5) as pipe:
    pipe.score(PROMPTS, COMPLETIONS)
    assert len(pipe._cache._values) == 5


def test_records_are_bounded_and_hold_the_text():
  n = 200
  with Pipeline([Reward(lambda completions: [], name='r')]) as pipe:
    for step in range(100):
      scores = pipe.score(['p'] * n, ['x' * 5000] * n, step=step)
      assert scores.reasons == {'r': {'length': n}}
      assert len(scores.failures) <= 16
    assert len(pipe.failures) == 1000
    last = pipe.failures[-1]
  assert last.step == 99 and last.text == 'x' * 1000


def test_no_rows_and_a_closed_pipeline():
  pipe = Pipeline([Reward(ones)])
  assert pipe.score([], []).values.shape == (0, 1)
  pipe.close()
  with pytest.raises(RuntimeError, match='closed'):
    pipe.score(PROMPTS, COMPLETIONS)


def test_close_gives_up_calls_in_flight_and_leaves_no_thread():
  before = set(threading.enumerate())
  pipe = Pipeline([Reward(lambda completions: time.sleep(3), timeout_s=60)])
  pending = pipe.submit(PROMPTS, COMPLETIONS)
  start = time.monotonic()
  pipe.close()
  assert time.monotonic() - start < 2
  assert pending.result().values.shape == (8, 1)
  while set(threading.enumerate()) - before:
    assert time.monotonic() - start < 30
    time.sleep(0.1)


def test_the_host_side_never_imports_jax():
  modules = sorted(
    path.stem
    for path in pathlib.Path(pipeline.__file__).parent.glob('*.py')
    if path.stem != '__init__'
  )
  program = '\n'.join(
    [
      *(f'import gdpo_jax.rewards.{module}' for module in modules),
      'import sys',
      "print([m for m in sys.modules if m.partition('.')[0] in ('jax', 'jaxlib')])",
    ]
  )
  done = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=True
  )
  assert done.stdout.strip() == '[]'


def test_main_calls_run_in_result_in_the_order_of_the_rewards():
  seen = []

  def noted(name):
    def fn(completions):
      seen.append((name, threading.current_thread()))
      return ones(completions)

    return Reward(fn, name=name, isolation='main')

  rewards = [noted('b'), Reward(ones), noted('a')]
  with Pipeline(rewards) as pipe:
    first, second = (pipe.submit(PROMPTS, COMPLETIONS) for _ in range(2))
    assert seen == [], 'nothing runs before its result is asked for'
    scores = first.result()
    here = threading.current_thread()
    assert seen == [('b', here), ('a', here)]
    assert first.result() is scores and len(seen) == 2
    second.result()
    assert seen == [('b', here), ('a', here)] * 2
  assert (scores.values == 1).all() and set(scores.seconds) == {*'ab', 'ones'}


def test_main_calls_do_not_wait_for_slow_rewards():
  called = threading.Event()

  def slow(completions):
    return [float(called.wait(5))] * len(completions)

  def here(completions):
    called.set()
    return ones(completions)

  rewards = [Reward(slow), Reward(here, isolation='main')]
  scores = score(PROMPTS, COMPLETIONS, {}, rewards)
  assert (scores.values == 1).all()


@pytest.mark.parametrize('error', [ValueError('x'), SystemExit(0)])
def test_an_exception_of_a_main_call_stays_with_its_reward(error):
  def bad(completions):
    raise error

  rewards = [
    Reward(bad, isolation='main', fallback='ones'),
    Reward(ones, isolation='main'),
  ]
  scores = score(PROMPTS, COMPLETIONS, {}, rewards)
  assert (scores.values == 1).all() and scores.fallbacks == {'bad': 8}
  assert scores.reasons == {'bad': {'exception': 8}}


@pytest.mark.parametrize('returned', [[1.0], 'abcdefgh', [math.nan] * 8])
def test_what_a_main_call_returns_is_checked_like_any_other(returned):
  thread = one(lambda completions: returned)
  here = one(lambda completions: returned, isolation='main')
  assert here.reasons == thread.reasons and here.failures == thread.failures


def test_the_keyboard_reaches_the_run_through_a_main_call():
  def interrupted(completions):
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    one(interrupted, isolation='main')


def test_main_calls_are_muted_and_given_up_like_any_other():
  def bad(completions):
    raise ValueError('x')

  reward = Reward(bad, isolation='main', mute_after=1)
  with Pipeline([reward]) as pipe:
    pipe.score(PROMPTS, COMPLETIONS)
    assert pipe.muted == ('bad',)
    assert pipe.score(PROMPTS, COMPLETIONS).reasons == {'bad': {'muted': 8}}
  with Pipeline([Reward(ones, isolation='main')]) as pipe:
    pending = pipe.submit(PROMPTS, COMPLETIONS)
  assert pending.result().reasons == {'ones': {'closed': 8}}


def test_main_calls_cannot_be_pure():
  with pytest.raises(ValueError, match='processes'):
    Reward(ones, isolation='main', pure=True)


def test_mutes_survive_a_restart():
  """Stopped after two of three failures, the third one mutes all the same."""

  def fails(completions):
    raise OSError('server is down')

  rewards = [Reward(fails, mute_after=3, retry_after=4), Reward(ones)]
  with Pipeline(rewards) as before:
    for _ in range(2):
      before.score(PROMPTS, COMPLETIONS)
    saved = before.mutes
  assert saved == {'fails': [2, 0], 'ones': [0, 0]}
  with Pipeline(rewards) as after:
    after.restore_mutes(saved)
    assert after.score(PROMPTS, COMPLETIONS).alerts
    assert after.muted == ('fails',) and after.mutes['fails'] == [3, 4]
    with pytest.raises(ValueError, match=r"\['fails', 'ones'\]"):
      after.restore_mutes({'fails': [0, 0]})
