import contextlib
import gzip
import json
import math
import os
import pathlib
import subprocess
import sys
import time

import pytest

from gdpo_jax.rewards import code

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
QUICK = code.Limits(wall_s=5)

if code.run('', (), QUICK).status == 'unavailable':
  pytest.skip('this machine grants no sandbox', allow_module_level=True)


def score(program, tests, limits=QUICK):
  return code.run(program, tests, limits).score


def test_share_of_tests_passed():
  program = 'def f(x):\n  return x + 1'
  result = code.run(program, ['assert f(1) == 2', 'assert f(1) == 3'])
  assert (result.status, result.passed, result.total) == ('ok', 1, 2)
  assert result.score == 0.5
  assert result.messages == ('AssertionError: ',)
  # One piece of source is one test, however many lines it has.
  assert score(program, 'assert f(1) == 2\nassert f(1) == 3') == 0
  assert math.isnan(score(program, []))


@pytest.mark.parametrize(
  'program, test, status',
  [
    ('raise ValueError', 'assert True', 'error'),
    ('def f(:', 'assert True', 'error'),
    ('import sys; sys.exit(0)', 'assert True', 'error'),
    ('import os; os._exit(0)', 'assert True', 'died'),
    ('import os\ndef f(x): os._exit(0)', 'assert f(1) == 5', 'died'),
    ('import sys\ndef f(x): sys.exit(0)', 'assert f(1) == 5', 'ok'),
    # Caught by the test, and yet the program is gone.
    ('import os\ndef f(x): os._exit(0)', 'try: f(1)\nexcept: pass', 'died'),
    (
      'class Yes:\n'
      '  __eq__ = __ne__ = __lt__ = __gt__ = __contains__ = lambda *_: True\n'
      '  __abs__ = __sub__ = __rsub__ = __round__ = lambda self, *_: self\n'
      'def f(x): return Yes()',
      'assert f(1) == 5',
      'ok',
    ),
    ('def f(x): print("PASSED token ok 1/1"); return 0', 'assert f(1) == 5', 'ok'),
    (
      'import builtins\nbuiltins.AssertionError = builtins.isinstance = None\n'
      'def f(x): return 0',
      'assert f(1) == 5',
      None,  # it breaks its own end of the line, too
    ),
    (
      'import sys\n'
      'def f(x):\n'
      '  frame = sys._getframe()\n'
      '  while frame:\n'
      '    for value in list(frame.f_locals.values()):\n'
      '      if "f(1) == " + "5" in repr(value): return 5\n'
      '    frame = frame.f_back',
      'assert f(1) == 5',
      'ok',
    ),
    (
      'import gc\n'
      'def f(x):\n'
      '  texts = [o for o in gc.get_objects() if isinstance(o, (list, dict))]\n'
      '  return 5 if any("== " + "5" in repr(t) for t in texts) else 0',
      'assert f(1) == 5',
      'ok',
    ),
    # Names that would decide what the tests compare with.
    (
      'def abs(x): return 0\ndef f(x): return 9',
      'assert abs(f(1) - 5) < 1e-6',
      'ok',
    ),
    (
      'class math: isclose = staticmethod(lambda *_: True)\n'
      'def f(x): return 9',
      'assert math.isclose(f(1), 5)',
      'ok',
    ),
    (
      'import sys\n'
      'def pack(self, value):\n'
      '  names = [["__builtins__", {"dict": [["f", 5]]}], ["f", 5]]\n'
      '  tables = [["names", {"dict": names}], ["modules", {"dict": []}]]\n'
      '  return {"dict": tables}\n'
      'sys.modules["gdpo_jax.rewards.exchange"].Link.pack = pack',
      'assert f(1) == 5',
      'ok',
    ),
    # Answers that no request asked for, on every descriptor there is.
    (
      'import os\n'
      'def f(x):\n'
      '  for file in range(3, 60):\n'
      '    try: os.write(file, b"\\0" * 7 + b"\\x0d" + b\'["value", 5] \')\n'
      '    except OSError: pass\n'
      '  return 0',
      'f(1)\nf(1)\nassert f(1) == 0 and f(1) == 6',
      None,
    ),
  ],
)  # fmt: skip
def test_failure_never_looks_like_success(program, test, status):
  result = code.run(program, test, QUICK)
  assert result.score == 0
  assert status is None or result.status == status


def test_an_object_equal_to_everything_fails_every_kind_of_test():
  program = (
    'class Yes(int):\n'
    '  __eq__ = __lt__ = __contains__ = lambda *_: True\n'
    '  __hash__ = lambda self: 5\n'
    'class Any:\n'
    '  __eq__ = __lt__ = __le__ = __contains__ = lambda *_: True\n'
    '  __sub__ = __abs__ = __getattr__ = __call__ = lambda self, *_: self\n'
    '  __float__ = lambda self: 0.0\n'
    'def number(x): return Yes(0)\n'
    'def thing(x): return Any()'
  )
  tests = [
    test.replace('f(', name)
    for name in ('number(', 'thing(')
    for test in (
      'assert f(1) == 5',
      'assert 5 == f(1)',
      'assert abs(f(1) - 5) < 1e-6',
      'assert f(1) in [5, 6]',
      'assert {5: 1}[f(1)]',
      'assert [f(1)] == [5]',
      'assert f(1).real == 5',
      'import math\nassert math.isclose(f(1), 5)',
    )
  ]
  result = code.run(program, tests, QUICK)
  assert (result.passed, result.total) == (0, 16)


@pytest.mark.parametrize(
  'program, tests',
  [
    ('import math\nPI = 3\ndef f(x): return math.floor(x)', 'assert f(PI + 0.5) == PI'),
    ('def sum(a, b): return a + b', 'assert sum(10, 15) == 25'),
    ('def f(x): return x', 'value = [1, (2, {3: {4}}), b"5", 6j, None, 1 << 70]\n'
     'assert f(value) == value and type(f(value)[1]) is tuple'),
    ('def f(x): x.append(1); x[0]["k"] = 2',
     'inner = {}\nlist_ = [inner]\nf(list_)\nassert list_ == [{"k": 2}, 1]\n'
     'assert inner == {"k": 2}'),
    ('def f(g, x): return [g(i) for i in x]', 'assert f(lambda i: i * 2, [1, 2]) == [2, 4]'),
    ('def f(x):\n  if x < 0: raise ValueError("negative")\n  yield from range(x)',
     'assert list(f(3)) == [0, 1, 2]\n'
     'try: next(f(-1))\nexcept ValueError as error: assert str(error) == "negative"\n'
     'else: assert False'),
    ('class Mine(KeyError): pass\ndef f(): raise Mine("k")',
     'try: f()\nexcept KeyError: pass\nelse: assert False'),
    ('class Stack:\n'
     '  def __init__(self): self.items = []\n'
     '  def push(self, x): self.items.append(x); return self\n'
     '  def __len__(self): return len(self.items)\n'
     '  def __add__(self, other): return self.items + other.items\n'
     '  def __eq__(self, other): return self.items == other.items',
     's = Stack().push(1).push(2)\n'
     'assert len(s) == 2 and s.items == [1, 2] and isinstance(s, Stack)\n'
     'assert s + s == [1, 2, 1, 2] and s == Stack().push(1).push(2)\n'
     'assert s != Stack()'),
    ('from dataclasses import dataclass\n@dataclass\nclass P:\n  x: int',
     'assert P(3).x == 3 and str(P(3)) == "P(x=3)"'),
    ('from fractions import Fraction\nfrom collections import Counter\n'
     'def f(x): return Fraction(x, 3)\ndef c(x): return Counter(x)',
     'from fractions import Fraction\nassert f(2) == Fraction(2, 3)\n'
     'assert c("aab") == {"a": 2, "b": 1}'),
    ('def f(x): return float("nan"), float("inf")', 'a, b = f(1)\nassert a != a and b > 1e308'),
    ('def f(n): x = []; x.append(x); return x', 'assert f(1) is not None'),
    ('import sys\nprint(sys.stdin.readline().strip()[::-1])', {'stdin': 'abc\n', 'stdout': 'cba'}),
    ('if __name__ == "__main__": print(int(input()) + 1, " ")', {'stdin': '1', 'stdout': '2\n'}),
  ],
)  # fmt: skip
def test_honest_programs_pass(program, tests):
  assert score(program, tests) == 1


def test_arrays_cross_as_values():
  pytest.importorskip('numpy')
  program = (
    'import numpy as np\ndef f(n): return np.arange(n) / 2, np.float32(n)'
  )
  test = 'a, n = f(3)\nassert a.tolist() == [0, 0.5, 1] and n == 3'
  assert score(program, test) == 1


def test_programs_that_read_and_print():
  tests = [{'stdin': '1', 'stdout': '1'}, {'stdin': '2', 'stdout': '4'}]
  assert score('print(int(input()) ** 2)', tests) == 1
  assert score('print(1)', tests) == 0.5
  nothing = {'stdin': '', 'stdout': ''}
  assert score('raise ValueError', nothing) == 0
  assert score('import sys; sys.exit(3)', nothing) == 0
  assert (
    score('import sys; print(1); sys.exit(0)', {'stdin': '', 'stdout': '1'})
    == 1
  )
  # Each test has a process of its own.
  assert (
    score('import os\nprint(1, flush=True); os._exit(0)', [nothing] * 2) == 0
  )


def test_a_missing_sandbox_is_not_a_zero(monkeypatch):
  strict = code.Limits(require=frozenset({'teleport'}))
  result = code.run('def f(): return 1', 'assert f() == 1', strict)
  assert result.status == 'unavailable' and math.isnan(result.score)
  assert "'teleport'" in result.messages[0]
  assert code.tests_passed(['x = 1'], ['assert x'], limits=strict) == [None]
  monkeypatch.setattr(code.sys, 'executable', '/nowhere/python')
  result = code.run('def f(): return 1', 'assert f() == 1')
  assert result.status == 'unavailable' and 'cannot start' in result.messages[0]


def test_a_look_alike_of_the_completion_token_is_refused(monkeypatch):
  class Liar:
    def receive(self, deadline):
      return json.dumps({'token': 'guess', 'output': '', 'seconds': 0}).encode()

  result = code._follow(Liar(), time.monotonic() + 1, 'secret', 1)
  assert result.status == 'died' and result.score == 0


# Hostile programs, each alone in a process that sets its own limits.

DRIVER = """
import json, os, resource, sys, time
sys.path.insert(0, {root!r})
for kind, value in ((resource.RLIMIT_AS, 1 << 30), (resource.RLIMIT_NPROC, 64)):
  resource.setrlimit(kind, (value, value))
from gdpo_jax.rewards import code, workers
workers.become_subreaper()  # whatever escapes is ours to count
program, tests, wall_s = json.load(sys.stdin)
start = time.monotonic()
result = code.run(program, tests, code.Limits(wall_s=wall_s, processes=16))
seconds = time.monotonic() - start
left = workers.descendants(os.getpid())
print(json.dumps([result.status, result.score, result.messages, seconds, left,
                  sorted(result.granted)]))
"""


@contextlib.contextmanager
def bounded_pids(limit=64):
  """A control group with few processes, where this machine lets us make one."""
  for parent in ('/sys/fs/cgroup/pids', '/sys/fs/cgroup'):
    group = pathlib.Path(parent, f'gdpo-test-{os.getpid()}')
    try:
      group.mkdir()
    except OSError:
      continue
    if (group / 'pids.max').exists():
      (group / 'pids.max').write_text(str(limit))
      try:
        yield group / 'cgroup.procs'
      finally:
        for _ in range(100):  # the group is empty a moment after its processes
          with contextlib.suppress(OSError):
            group.rmdir()
            break
          time.sleep(0.02)
      return
    group.rmdir()
  yield None


def hostile(program, tests=('assert f(1) == 1',), wall_s=2):
  with bounded_pids() as procs:
    join = f'open({str(procs)!r}, "w").write("0")\n' if procs else ''
    done = subprocess.run(
      [sys.executable, '-c', join + DRIVER.format(root=str(ROOT))],
      input=json.dumps([program, tests, wall_s]),
      capture_output=True,
      text=True,
      timeout=60,
    )
  assert done.returncode == 0, done.stderr
  status, value, messages, seconds, left, granted = json.loads(done.stdout)
  assert left == [], 'something is left running'
  assert seconds < wall_s + 4
  return status, value, ' '.join(messages), granted


RIGHT = '\ndef f(x): return x'


@pytest.mark.parametrize(
  'program, status',
  [
    ('raise ValueError', 'error'),
    ('while True: pass', 'timeout'),
    ('import time\ntime.sleep(1000)', 'timeout'),
    (
      'import signal, time\n'
      'for number in range(1, 65):\n'
      '  try: signal.signal(number, signal.SIG_IGN)\n'
      '  except (OSError, ValueError): pass\n'
      'while True: time.sleep(1)',
      'timeout',
    ),
    ('import sys\nsys.exit(0)', 'error'),
    ('import os\nos._exit(0)', 'died'),
    ('import os\nwhile True: os.fork()', None),
    (
      'import os\n'
      'while True:\n'
      '  try: os.fork()\n'
      '  except OSError: pass',
      'timeout',
    ),
    # These fill a limit on output or memory, which on a slow machine takes
    # longer than the time they have.
    ('for _ in range(1000): print("x" * 10**6)', 'error timeout'),
    ('data = bytearray(10 << 30)', 'error'),
    ('data = [0]\nwhile True: data = data + data', 'error timeout'),
    ('import os\nos.kill(-1, 9)\nos.kill(os.getppid(), 9)', None),
    ('import ctypes\nctypes.string_at(0)', 'died'),
    ('def f(x): return f(x)\nimport sys\nsys.setrecursionlimit(10**9)\nf(1)', None),
  ],
)  # fmt: skip
def test_hostile_programs_score_zero_in_time_and_leave_nothing(program, status):
  # Right answers after the hostile part: reaching them is no success either.
  program += RIGHT if status is not None else ''
  got, value, said, _ = hostile(program)
  assert value == 0, said
  assert status is None or got in status.split(), said


def test_a_grandchild_does_not_outlive_the_run():
  status, value, said, _ = hostile(
    'import os, time\n'
    'if os.fork() == 0:\n'
    '  os.setsid()\n'
    '  if os.fork() == 0: time.sleep(1000)\n'
    '  os._exit(0)' + RIGHT
  )
  assert (status, value) == ('ok', 1), said


def test_files_and_network_are_out_of_reach():
  status, value, said, granted = hostile('open("/etc/passwd").read()' + RIGHT)
  if 'files' not in granted:
    pytest.skip('no mount namespace on this machine')
  assert (status, value) == ('error', 0)
  status, value, said, granted = hostile(
    'import os\n'
    'assert not os.path.exists("/proc/1") and not os.path.exists("/root/.ssh")\n'
    'for path in ("/x", "/usr/x", "/etc/x", os.path.dirname(os.__file__) + "/x"):\n'
    '  try: open(path, "w")\n'
    '  except OSError: continue\n'
    '  raise SystemError(path)\n'
    'open("scratch.txt", "w").write("here I may")\n'
    'try:\n'
    '  for i in range(100): open(f"{i}", "wb").write(b"0" * 10**7)\n'
    'except OSError: pass\n'
    'else: raise SystemError("no limit")' + RIGHT
  )
  assert (status, value) == ('ok', 1), said
  status, value, said, granted = hostile(
    'import socket\n'
    'server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()\n'
    'socket.create_connection(server.getsockname(), timeout=1)' + RIGHT
  )
  assert (status, value) == ('error', 0) and 'unreachable' in said


def test_the_trainers_environment_stays_outside(monkeypatch):
  monkeypatch.setenv('SECRET_KEY', 'hunter2')
  program = 'import os\ndef f(): return dict(os.environ)'
  assert score(program, 'assert "SECRET_KEY" not in f()') == 1


def test_nothing_is_left_in_the_temporary_directory(tmp_path, monkeypatch):
  monkeypatch.setattr(code.tempfile, 'tempdir', str(tmp_path))
  code.run('open("x", "w").write("y")', (), QUICK)
  assert list(tmp_path.iterdir()) == []


# Rewards.


def test_rewards_on_programs():
  good = 'Here:\n```python\ndef f(x):\n    return x + 1\n```\nDone.'
  wrong = '```\ndef f(x): return x\n```'
  broken = 'def f(x) return x'
  raises = [{'role': 'assistant', 'content': 'import os\nraise ValueError'}]
  rows = [good, wrong, broken, raises]
  test = ['assert f(1) == 2', 'assert f(0) in (0, 1)']
  assert code.tests_passed(rows, [test] * 4) == [1, 0.5, 0, 0]
  assert code.tests_passed(
    ['  return 1'], ['assert f() == 1'], ['def f():\n']
  ) == [1]
  assert code.compiles(rows) == [1, 1, 0, 1]
  assert code.runs_clean(rows) == [1, 1, 0, 0]


def test_speed_is_relative_to_the_reference():
  fast = 'def f(n): return n * (n - 1) // 2'
  slow = 'def f(n):\n  s = 0\n  for i in range(n): s += i\n  return s'
  test = 'assert f(2000000) == 1999999000000'
  quick, lame, wrong = code.speed(
    [fast, slow, 'f = abs'], [slow, fast, fast], [test] * 3
  )
  assert quick == 1.0 and 0 < lame < 0.5 and wrong == 0.0
  assert code.speed([fast], ['def f(n): return 0'], [test]) == [None]


def test_style_and_security():
  pytest.importorskip('ruff')
  rows = ['x = 1\n', 'import os\nx = 1\n', 'x = (', '']
  assert code.style(rows) == [1.0, 0.5, 0.0, 1.0]
  pytest.importorskip('bandit')
  rows = [
    'x = 1',
    'import subprocess\nsubprocess.run(input(), shell=True)',
    'x = (',
  ]
  assert code.security(rows) == [1.0, 0.5, 0.0]


def humaneval():
  path = SHARED / 'data' / 'HumanEval.jsonl.gz'
  if not path.exists():
    pytest.skip(f'needs {path} (set GDPO_SHARED)')
  with gzip.open(path, 'rt') as file:
    return [json.loads(line) for line in file]


def check_humaneval(rows):
  tests = [f'{row["test"]}\ncheck({row["entry_point"]})' for row in rows]
  prompts = [row['prompt'] for row in rows]
  right = [row['canonical_solution'] for row in rows]
  assert code.tests_passed(right, tests, prompts) == [1.0] * len(rows)
  assert code.tests_passed(['    pass\n'] * len(rows), tests, prompts) == [
    0.0
  ] * len(rows)


def test_humaneval_sample():
  check_humaneval(humaneval()[::8])


@pytest.mark.slow
def test_humaneval():
  start = time.monotonic()
  check_humaneval(humaneval())
  assert time.monotonic() - start < 120
