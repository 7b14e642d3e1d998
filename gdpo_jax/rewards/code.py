"""Code as an answer: run it against tests in a sandbox, and rewards on that.

  completion --extract--> program --run(program, tests, limits)--> Result

What the sandbox covers, on Linux:
- The solution runs in a process of its own, separate from the tests, which
  compare plain values (see `trial`). It cannot see the tests, and neither
  exits, patched builtins, printed markers nor objects with their own `__eq__`
  pass for success. A run counts only with the random token that the side with
  the tests gives back after the last of them.
- CPU time, address space, file size, open files and number of processes are
  limited; everything that was started is killed at the end of the run,
  daemons included.
- Started by root it becomes a user that owns nothing; capabilities are dropped.
- Where the kernel grants namespaces (root, or unprivileged user namespaces): no
  network, not even the machine's own; no other processes in sight; a file tree
  with the system's and Python's own directories, read-only, and a scratch
  directory in memory. /etc, /proc and home directories are not there.

`Result.granted` says which of 'network', 'files', 'processes' and 'user' held,
and `Limits.require` refuses to run without. With neither 'processes' nor 'user'
a program could kill the trainer, so nothing is run.

What it does not cover: faults of the kernel; reading what is installed with
Python; memory of all processes together (the limit is for each, so the worst
case is `memory_bytes * processes`); noise in measured time; helper functions
that the tests take from the program instead of defining or importing them;
without namespaces also the network, and files that everybody may read. It is
made for the code that a policy under training writes, not for determined
attackers.
"""

import concurrent.futures
import json
import math
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.rewards import calls, workers

_PROGRAM = os.path.join(
  os.path.dirname(os.path.abspath(__file__)), 'sandbox.py'
)
_START_TIMEOUT_S = 30.0  # for the sandbox itself, on a loaded machine
_TOOL_TIMEOUT_S = 60.0

Test = str | Mapping[str, str]


class Limits(NamedTuple):
  """What one run may use; seconds and bytes."""

  wall_s: float = 10.0  # program and all its tests together
  cpu_s: int = 10  # of each process
  memory_bytes: int = 1 << 30  # address space of each process
  file_bytes: int = 16 << 20  # of each file, standard output included
  scratch_bytes: int = 64 << 20  # of all files together
  processes: int = 16  # threads count as well
  require: frozenset[str] = frozenset()  # of 'network', 'files', ...


class Result(NamedTuple):
  """Outcome of one run."""

  status: str  # 'ok', 'error', 'timeout', 'died' or 'unavailable'
  passed: int  # tests
  total: int
  messages: tuple[str, ...] = ()  # of what failed, in order
  output: str = ''  # the end of what the program printed
  seconds: float = 0.0  # spent in the program
  granted: frozenset[str] = frozenset()  # which isolation held

  @property
  def score(self) -> float:
    """Share of tests passed; NaN where there is none or no sandbox."""
    if self.status == 'unavailable' or not self.total:
      return math.nan
    return self.passed / self.total


def run(
  program: str,
  tests: Test | Sequence[Test] = (),
  limits: Limits | None = None,
) -> Result:
  r"""Runs a program against tests; returns within `limits.wall_s` and a little.

  Args:
    program: Python source.
    tests: each is Python source that calls what the program defines and raises
      if it is wrong (`assert f(1) == 2`, any number of lines; several share
      their names), or `{'stdin': ..., 'stdout': ...}` for a program that reads
      and prints. A single test need not be in a list. Without tests the program
      is only run.
    limits: what the run may use.
  Returns:
    status 'ok': everything ran to its end, whether or not tests failed;
    'error': the program itself raised; 'timeout'; 'died': it ended before its
    tests did; 'unavailable': there was no sandbox, which says nothing about
    the program. Tests that did not get their turn have not passed.
  """
  limits = limits or Limits()
  tests = [tests] if isinstance(tests, (str, Mapping)) else list(tests)
  for _ in range(2):  # a machine short of processes may have some a bit later
    result = _run_once(program, tests, limits)
    if result.status != 'unavailable':
      break
  return result


def _run_once(program: str, tests: list[Test], limits: Limits) -> Result:
  def unavailable(why: str, granted: frozenset[str] = frozenset()) -> Result:
    return Result('unavailable', 0, len(tests), (why,), granted=granted)

  with tempfile.TemporaryDirectory(
    prefix='gdpo-sandbox-', ignore_cleanup_errors=True
  ) as directory:
    spec = _spec(program, limits, directory)
    try:
      process = workers.Process(_PROGRAM, _environment(spec), quiet=True)
    except OSError as error:
      return unavailable(f'cannot start a process: {error}')
    try:
      deadline = time.monotonic() + _START_TIMEOUT_S
      process.send(json.dumps(spec).encode(), deadline)
      started = json.loads(process.receive(deadline))
      granted = frozenset(started['granted'])
      if 'problem' in started:
        return unavailable(started['problem'], granted)
      if lacking := limits.require - granted:
        return unavailable(f'not granted here: {sorted(lacking)}', granted)
      if not granted & {'user', 'processes'}:
        return unavailable(
          'the program would run as the same user in sight of the trainer, and '
          'could end it; start as root or allow user namespaces'
        )
      token = secrets.token_hex(16)
      deadline = time.monotonic() + limits.wall_s
      request = {'tests': tests, 'token': token}
      process.send(json.dumps(request).encode(), deadline)
      result = _follow(process, deadline, token, len(tests))
      return result._replace(granted=granted)
    except (OSError, EOFError) as error:
      return unavailable(f'the sandbox did not start: {error}')
    finally:
      process.kill()


def _spec(program: str, limits: Limits, directory: str) -> dict[str, Any]:
  """What the sandbox needs to know, the tests not among it."""
  spec = limits._asdict()
  del spec['require'], spec['wall_s']
  prefixes = [os.path.realpath(p) for p in (sys.prefix, sys.base_prefix)]
  trees = [
    os.path.join(prefix, part)
    for prefix in prefixes
    for part in ('bin', 'lib', 'lib64', 'pyvenv.cfg')
  ]
  packages = [
    os.path.realpath(entry)
    for entry in sys.path
    if entry.endswith(('site-packages', 'dist-packages'))
  ]
  for name in ('root', 'scratch'):
    os.mkdir(os.path.join(directory, name))
    spec[name] = os.path.join(os.path.realpath(directory), name)
  os.chmod(directory, 0o711)
  return {
    **spec,
    'program': program,
    'trees': trees + packages,
    'path': packages,
  }


def _environment(spec: Mapping[str, Any]) -> dict[str, str]:
  """Nothing of the trainer's own, which may hold keys."""
  passed = {
    key: os.environ[key] for key in ('LD_LIBRARY_PATH',) if key in os.environ
  }
  return {
    'PATH': '/usr/local/bin:/usr/bin:/bin',
    'LANG': 'C.UTF-8',
    'HOME': spec['scratch'],
    'TMPDIR': spec['scratch'],
    'OMP_NUM_THREADS': '1',  # numpy would start a thread per core
    'OPENBLAS_NUM_THREADS': '1',
    **passed,
  }


def _follow(
  process: workers.Process, deadline: float, token: str, total: int
) -> Result:
  """Collects the reports on the tests until the token comes or time is up."""
  passed, messages, status = 0, [], 'ok'
  start = time.monotonic()
  try:
    while True:
      record = json.loads(process.receive(deadline))
      if 'token' in record:
        break
      if record['message'] is not None:
        messages.append(record['message'])
      if record['died']:
        status = 'died'
      elif record.get('loaded') is False:
        status = 'error'
      passed += bool(record.get('passed'))
  except TimeoutError:
    messages.append('time is up')
    seconds = time.monotonic() - start
    return Result('timeout', passed, total, tuple(messages), seconds=seconds)
  except (OSError, EOFError, ValueError) as error:
    messages.append(f'the tests ended early: {error}')
    return Result('died', passed, total, tuple(messages))
  if not secrets.compare_digest(str(record['token']), token):
    return Result('died', 0, total, ('the completion token is wrong',))
  return Result(
    status, passed, total, tuple(messages), record['output'], record['seconds']
  )


# Reward functions.

_FENCE = re.compile(
  r'```(?:python|py)?[ \t]*\n(.*?)```', re.DOTALL | re.IGNORECASE
)


def extract(text: str) -> str:
  """The program in a completion: the last fenced block, or else all of it."""
  blocks = _FENCE.findall(text)
  return blocks[-1] if blocks else text


def tests_passed(
  completions: Sequence[Any],
  tests: Sequence[Any],
  program_prefix: Sequence[str] | None = None,
  *,
  limits: Limits | None = None,
  **_: Any,
) -> list[float | None]:
  """Share of the row's `tests` that the program passes.

  A row without a sandbox is missing (None), not a failure.

  Args:
    tests: column of what `run` takes.
    program_prefix: column of source put before the program, such as the
      function header that a completion continues.
  """
  return _over_rows(
    lambda program, row: run(program, row, limits).score,
    _programs(completions, program_prefix),
    tests,
  )


def compiles(completions: Sequence[Any], **_: Any) -> list[float | None]:
  """1.0 where the program is valid Python, else 0.0; nothing of it is run."""
  return _over_rows(
    lambda program: _status_ok(f'compile({program!r}, "solution.py", "exec")'),
    _programs(completions, None),
  )


def runs_clean(
  completions: Sequence[Any],
  program_prefix: Sequence[str] | None = None,
  *,
  limits: Limits | None = None,
  **_: Any,
) -> list[float | None]:
  """1.0 where the program, imported as a module, ends without an exception."""
  return _over_rows(
    lambda program: _status_ok(program, limits),
    _programs(completions, program_prefix),
  )


def no_bug(
  completions: Sequence[Any],
  tests: Sequence[Any],
  program_prefix: Sequence[str] | None = None,
  *,
  limits: Limits | None = None,
  **_: Any,
) -> list[float | None]:
  """1.0 where program and tests end with no error but wrong results, else 0.0.

  A wrong result is a failed assertion of the tests. Time-outs, exits, syntax
  errors and every other exception count as bugs.
  """

  def clean(program, row):
    result = run(program, row, limits)
    if result.status == 'unavailable':
      return None
    wrong = all(m.startswith('AssertionError') for m in result.messages)
    return float(result.status == 'ok' and wrong)

  return _over_rows(clean, _programs(completions, program_prefix), tests)


def speed(
  completions: Sequence[Any],
  reference: Sequence[str],
  tests: Sequence[Any],
  program_prefix: Sequence[str] | None = None,
  *,
  limits: Limits | None = None,
  **_: Any,
) -> list[float | None]:
  """min(1, seconds of the reference / seconds of the program).

  Both run the same tests, one after the other; 0 unless the program passes all
  of them, missing where the reference does not.
  """

  def compare(program, model, row):
    result = run(program, row, limits)
    if result.status == 'unavailable':
      return None
    if result.score < 1:
      return 0.0
    expected = run(model, row, limits)
    if expected.score != 1:
      return None
    return min(1.0, expected.seconds / max(result.seconds, 1e-6))

  return _over_rows(
    compare, _programs(completions, program_prefix), reference, tests
  )


def style(completions: Sequence[Any], **_: Any) -> list[float]:
  """Share of lines without a complaint of ruff's E, W and F rules.

  0 where the program cannot be parsed. Needs the `[code]` extra.
  """
  programs = _programs(completions, None)
  arguments = ['check', '--isolated', '--no-cache', '--exit-zero']
  arguments += ['--select', 'E,W,F', '--output-format', 'json']
  complaints = json.loads(_tool('ruff', arguments, programs))
  lines: list[set[int]] = [set() for _ in programs]
  broken = set()
  for complaint in complaints:
    row = _row_of(complaint['filename'])
    lines[row].add(complaint['location']['row'])
    if complaint['code'] in (None, 'invalid-syntax', 'E999'):
      broken.add(row)
  return [
    0.0 if row in broken else 1.0 - len(bad) / max(len(program.splitlines()), 1)
    for row, (program, bad) in enumerate(zip(programs, lines))
  ]


def security(completions: Sequence[Any], **_: Any) -> list[float]:
  """1 / (1 + number of bandit's findings of medium or high severity).

  0 where the program cannot be parsed. Needs the `[code]` extra.
  """
  programs = _programs(completions, None)
  arguments = ['-q', '-r', '--exit-zero', '-ll', '-f', 'json']
  report = json.loads(_tool('bandit', arguments, programs))
  found = [0] * len(programs)
  for finding in report['results']:
    found[_row_of(finding['filename'])] += 1
  broken = {_row_of(error['filename']) for error in report['errors']}
  return [
    0.0 if row in broken else 1.0 / (1 + count)
    for row, count in enumerate(found)
  ]


def _programs(completions, prefixes) -> list[str]:
  programs = [extract(calls.text_of(text)) for text in completions]
  if prefixes is None:
    return programs
  return [prefix + program for prefix, program in zip(prefixes, programs)]


def _status_ok(program: str, limits: Limits | None = None) -> float | None:
  result = run(program, (), limits)
  if result.status == 'unavailable':
    return None
  return float(result.status == 'ok')


def _over_rows(fn: Callable, *columns: Sequence[Any]) -> list[float | None]:
  """Runs rows side by side, one sandbox per core; NaN becomes None."""
  with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    values = list(pool.map(fn, *columns))
  return [
    None if value is None or math.isnan(value) else value for value in values
  ]


def _tool(name: str, arguments: list[str], programs: list[str]) -> str:
  """Standard output of a checker that looks at all programs at once."""
  with tempfile.TemporaryDirectory(prefix='gdpo-check-') as directory:
    for row, program in enumerate(programs):
      path = os.path.join(directory, f'row{row}.py')
      with open(path, 'w', encoding='utf-8', errors='replace') as file:
        file.write(program)
    done = subprocess.run(
      [sys.executable, '-m', name, *arguments, directory],
      capture_output=True,
      text=True,
      timeout=_TOOL_TIMEOUT_S,
      stdin=subprocess.DEVNULL,
    )
  if done.returncode:
    raise RuntimeError(
      f'{name} failed ({done.stderr.strip()[-200:]}); is it installed? '
      'pip install gdpo_jax[code]'
    )
  return done.stdout


def _row_of(path: str) -> int:
  return int(re.search(r'row(\d+)\.py$', path).group(1))
