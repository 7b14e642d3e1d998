"""Samples per second by kind of reward: called in turn, and in the pipeline.

  python experiments/bench_rewards.py --rows=128

For every kind: the function called directly, the same through a `Pipeline` in a
thread, and in two worker processes that share the rows (pure functions that
work in the process that calls them). The last lines take several kinds at once,
one after the other and side by side; among them a reward that only waits, as a
remote judge does. Needs no data and no accelerator; about a minute.
"""

import time
from collections.abc import Callable, Sequence

from absl import app, flags

from gdpo_jax.rewards import answers, code, text, tool_calls
from gdpo_jax.rewards.pipeline import Pipeline, Reward

_ROWS = flags.DEFINE_integer(
  'rows', 128, 'completions in a batch', lower_bound=1
)
_REPEATS = flags.DEFINE_integer('repeats', 3, 'batches; the best one counts')

_CALL = (
  '<think> t </think>\n<tool_call>\n{"name": "f", "parameters": {"x": %d}}\n'
  '</tool_call>'
)


def remote_judge(completions: Sequence[str], **_) -> list[float]:
  """Stands for a judge behind a network: waits, and uses no processor."""
  time.sleep(0.05)
  return [0.5] * len(completions)


def kinds(n: int, batch: int) -> dict[str, tuple[Callable, dict[str, list]]]:
  """Name -> (function, its columns); `batch` keeps caches from helping."""
  rows = range(batch * n, batch * n + n)
  return {
    'format (regex)': (
      answers.think_answer_format,
      {
        'completions': [f'<think>{i}</think><answer>{i}</answer>' for i in rows]
      },
    ),
    'answer, number': (
      answers.correctness,
      {
        'completions': [rf'so it is \boxed{{{i},000}}' for i in rows],
        'answer': [f'{i}000' for i in rows],
      },
    ),
    'answer, symbolic': (
      answers.correctness,
      {
        'completions': [rf'so it is \boxed{{(x-{i})(x+1)}}' for i in rows],
        'answer': [f'x^2-{i - 1}x-{i}' for i in rows],
      },
    ),
    'tool calls': (
      tool_calls.correct_calls,
      {
        'completions': [_CALL % i for i in rows],
        'answer': [_CALL % (i // 2) for i in rows],
      },
    ),
    'novelty': (
      text.novelty(),
      {
        'completions': [f'{i} and ' * 50 for i in rows],
        'prompts': [str(i // 8) for i in rows],
      },
    ),
    'code, 3 tests': (
      code.tests_passed,
      {
        'completions': [f'def f(x): return x + {i}' for i in rows],
        'tests': [
          [f'assert f({j}) == {i + j}' for j in range(3)] for i in rows
        ],
      },
    ),
    'remote judge': (remote_judge, {'completions': [str(i) for i in rows]}),
  }


def best_of(run: Callable[[int], None], batches: range) -> float:
  """Seconds of the fastest batch; the first starts workers, not counted."""
  times = []
  for batch in batches:
    start = time.perf_counter()
    run(batch)
    times.append(time.perf_counter() - start)
  return min(times[1:])


def in_turn(names: Sequence[str], data: list, batches: range) -> float:
  """The functions called directly, one after the other."""

  def run(batch):
    for name in names:
      function, columns = data[batch][name]
      function(**columns)

  return best_of(run, batches)


def side_by_side(names: Sequence[str], data: list, batches: range) -> float:
  """All in one pipeline, in threads; each kind finds its own columns."""

  def reward(name):
    def fn(completions, step):
      function, columns = data[step][name]
      return function(**columns)

    return Reward(fn, name=name, timeout_s=300)

  with Pipeline([reward(name) for name in names]) as pipeline:
    return best_of(lambda batch: score(pipeline, {}, batch), batches)


def two_processes(name: str, data: list, batches: range) -> float:
  """One pure kind, its rows shared by two worker processes."""
  options = {'isolation': 'process', 'pure': True, 'workers': 2}
  reward = Reward(data[0][name][0], timeout_s=300, **options)
  with Pipeline([reward]) as pipeline:
    return best_of(
      lambda batch: score(pipeline, data[batch][name][1], batch), batches
    )


def score(pipeline: Pipeline, columns: dict[str, list], batch: int):
  n = _ROWS.value
  columns = {'prompts': ['p'] * n, 'completions': [''] * n, **columns}
  prompts, completions = columns.pop('prompts'), columns.pop('completions')
  scores = pipeline.score(prompts, completions, columns, step=batch)
  assert not scores.reasons, scores.failures[0]


def main(_):
  n, size = _ROWS.value, _REPEATS.value + 1
  # Every measurement has batches of its own, so that no cache helps.
  data = [kinds(n, batch) for batch in range(3 * size)]
  thirds = [range(start, start + size) for start in range(0, 3 * size, size)]
  names = list(data[0])
  pure = ('format (regex)', 'answer, number', 'tool calls')

  def line(label, *times):
    cells = [f'{n / t:,.0f}' if t else '-' for t in times]
    print(f'| {label} |', ' | '.join(cells), '|', flush=True)

  print(f'{n} rows a batch, best of {_REPEATS.value}; samples/s\n')
  print('| reward | in turn | pipeline | pipeline, 2 processes |')
  print('|---|---|---|---|')
  for name in names:
    line(
      name,
      in_turn([name], data, thirds[0]),
      side_by_side([name], data, thirds[1]),
      two_processes(name, data, thirds[2]) if name in pure else None,
    )
  fresh = [kinds(n, batch) for batch in range(3 * size, 7 * size)]
  for at, (label, chosen) in enumerate(
    (
      ('all but code', [name for name in names if 'code' not in name]),
      ('all together', names),
    )
  ):
    halves = [range(k * size, (k + 1) * size) for k in (2 * at, 2 * at + 1)]
    line(
      label,
      in_turn(chosen, fresh, halves[0]),
      side_by_side(chosen, fresh, halves[1]),
      None,
    )


if __name__ == '__main__':
  app.run(main)
