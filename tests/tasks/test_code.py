import json
import os
import pathlib

import pytest

from gdpo_jax.rewards import code as programs
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks import code
from gdpo_jax.tasks.code import code_task

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
HUMANEVAL = SHARED / 'data' / 'HumanEval.jsonl.gz'


def score(task, examples, completions, lengths=None):
  columns = {
    k: [e[k] for e in examples]
    for k in ('tests', 'reference', 'program_prefix')
  }
  ids = [[1] * n for n in lengths or [5] * len(examples)]
  with Pipeline(task.rewards) as pipeline:
    return pipeline.score(
      [e['prompt'] for e in examples], completions, columns, completion_ids=ids
    ).values.tolist()


def test_rewards_of_right_wrong_and_broken_programs():
  task = code_task(limit_tokens=10)
  assert [r.name for r in task.rewards] == ['passed', 'length', 'no_bug']
  assert task.rewards[1].condition == 'passed>=1'
  example = next(e for e in task.train if 'def add_' in e['reference'])
  name = example['reference'].split('(')[0].removeprefix('def ')
  right = code.fenced(example['reference'])
  wrong = code.fenced(f'def {name}(x):\n    return 1000')
  raises = code.fenced(f'def {name}(x):\n    return y')
  values = score(
    task, [example] * 5, [right, wrong, raises, 'def (', ''], [10, 11, 5, 5, 5]
  )
  assert values[0] == [1, 1, 1]
  assert values[1] == [0, 0, 1]  # wrong, but no bug
  assert values[2] == [0, 1, 0]
  assert values[3] == [0, 1, 0]
  assert values[4][0] == 0 and values[4][2] == 0


def test_all_references_pass_their_tests_and_the_sides_are_apart():
  task = code_task(limit_tokens=50)
  both = [*task.train, *task.heldout]
  assert len({e['reference'] for e in both}) == len(both) == 100
  sample = both[::9]
  right = [code.fenced(e['reference']) for e in sample]
  tests = [e['tests'] for e in sample]
  assert programs.tests_passed(right, tests) == [1.0] * len(sample)
  # the tests stay hidden
  assert all(t not in str(e['prompt']) for e in both for t in e['tests'])


def test_a_humaneval_record_becomes_single_tests(tmp_path):
  record = {
    'task_id': 'x/0',
    'prompt': 'import math\n\ndef half(x: int) -> int:\n    """Half."""\n',
    'entry_point': 'half',
    'canonical_solution': '    return math.floor(x / 2)\n',
    'test': 'BIG = 10**6\n\ndef check(candidate):\n'
    '    assert candidate(4) == 2\n    y = 7\n'
    '    for x in (1, BIG):\n        assert candidate(x) == x // 2\n'
    '    assert candidate(y) == 3\n',
  }
  other = {**record, 'prompt': record['prompt'].replace('half', 'h')}
  path = tmp_path / 'a.jsonl'
  path.write_text(f'{json.dumps(record)}\n{json.dumps(other)}\n')
  held = tmp_path / 'b.jsonl'
  held.write_text(json.dumps({'prompt': 'Add.', 'tests': ['assert f(1) == 2']}))
  task = code_task('public', train=path, heldout=held, limit_tokens=9)
  [example] = [e for e in task.train if 'def half' in e['reference']]
  assert len(example['tests']) == 3
  assert task.heldout[0]['tests'] == ['assert f(1) == 2']
  completions = [
    # the import is the header's: a completion may leave it out
    code.fenced('def half(x):\n    return math.floor(x / 2)'),
    code.fenced('def half(x):\n    return 2 if x == 4 else 3'),
  ]
  values = score(task, [example] * 2, completions)
  assert values[0][0] == 1 and values[0][2] == 1
  assert values[1][0] == pytest.approx(2 / 3)


def test_eurus_has_inputs_and_outputs(tmp_path):
  truth = {'inputs': ['2 3\n'], 'outputs': ['5\n']}
  call = {'fn_name': 'add', 'inputs': [[2, 3]], 'outputs': [5]}
  rows = [
    {
      'prompt': f'{i}',
      'ability': ability,
      'reward_model': {'ground_truth': json.dumps(t)},
    }
    for i, (ability, t) in enumerate(
      [('code', truth), ('math', 7), ('code', call)]
    )
  ]
  path = tmp_path / 'a.json'
  path.write_text(json.dumps(rows))
  found, _ = code.public(path, path)
  assert [e['tests'] for e in found] == [
    [{'stdin': '2 3\n', 'stdout': '5\n'}],
    ['assert add(*[2, 3]) == 5'],
  ]
  reads = code.fenced('print(sum(map(int, input().split())))')
  adds = code.fenced('def add(a, b):\n    return a + b')
  tests = [e['tests'] for e in found]
  assert programs.tests_passed([reads, adds], tests) == [1.0, 1.0]


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'extras': ['beauty']}, "extras are of .*, got .'beauty'"),
    ({'num_train': 200}, 'asked for 200 and 20'),
    ({'worked': 3}, 'worked must be 0 to 2'),
    ({'source': 'public', 'train': 'no.jsonl'}, 'Download HumanEval'),
    ({'limit_tokens': 0}, 'at least 1'),
  ],
)
def test_what_cannot_be_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    code_task(**{'limit_tokens': 9, **settings})


def humaneval():
  if not HUMANEVAL.is_file():
    pytest.skip(f'needs {HUMANEVAL}; set GDPO_SHARED')
  found, held = code.public(HUMANEVAL)
  return found + held


def check_references(examples):
  right = [code.fenced(e['reference']) for e in examples]
  empty = [code.fenced('pass')] * len(examples)
  tests = [e['tests'] for e in examples]
  assert programs.tests_passed(right, tests) == [1.0] * len(examples)
  assert programs.tests_passed(empty, tests) == [0.0] * len(examples)


def test_humaneval_sample():
  check_references(humaneval()[::20])


@pytest.mark.slow
def test_humaneval():
  examples = humaneval()
  assert len(examples) == 164
  check_references(examples)
