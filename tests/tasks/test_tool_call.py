import os
import pathlib

import pytest

from gdpo_jax.rewards import tool_calls
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.tasks.tool_call import tool_call

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
RLLA = SHARED / 'data' / 'rlla_sft.json'
SMALL = {'num_train': 60, 'num_heldout': 20}


def score(task, examples, completions):
  columns = {'answer': [e['answer'] for e in examples]}
  with Pipeline(task.rewards) as pipeline:
    return pipeline.score(
      [e['prompt'] for e in examples], completions, columns
    ).values.tolist()


def test_the_right_answer_gets_the_most_and_each_fault_its_price():
  task = tool_call(**SMALL)
  example = next(e for e in task.train if e['tool'] == 'get_weather')
  right = example['answer']
  [call] = tool_calls.parse(right)
  wrong_value = right.replace(call['parameters']['day'], 'never')
  no_think = right.partition('</think>\n')[2]
  texts = [right, wrong_value, no_think, 'It rains.']
  assert score(task, [example] * 4, texts) == [
    [1, 3],
    # names 1, parameter names 1, 1 of 2 values: 6 * 3 / 4 - 3
    [1, 1.5],
    [0, 3],
    [0, -3],
  ]


def test_worked_examples_are_right_and_not_asked():
  task = tool_call(**SMALL)
  for example in task.train[:20]:
    roles = [m['role'] for m in example['prompt']]
    assert roles == ['system', *['user', 'assistant'] * 2, 'user']
    shown = example['prompt'][2]['content']
    assert tool_calls.format_reward(shown, example['answer']) == 1
    assert example['answer'] not in {m['content'] for m in example['prompt']}
    assert example['tool'] in example['prompt'][0]['content']
    values = tool_calls.parse(example['answer'])[0]['parameters'].values()
    assert all(str(v) in example['prompt'][-1]['content'] for v in values)


def test_sides_share_no_call_and_the_seed_decides():
  one, two = tool_call(**SMALL), tool_call(**SMALL, seed=1)
  trained = {e['answer'] for e in (*one.train, *two.train)}
  assert not trained & {e['answer'] for e in (*one.heldout, *two.heldout)}
  assert one.train == tool_call(**SMALL).train != two.train
  pairs = one.demonstrate(3, 5)
  assert pairs == one.demonstrate(3, 5) and len(pairs) == 5
  by_answer = {e['answer']: e for e in one.train}
  assert all(by_answer[a]['prompt'] == p for p, a in pairs)


@pytest.mark.parametrize(
  'settings, message',
  [
    ({'source': 'web'}, "one of .*'generated', 'public'.*, got 'web'"),
    ({'num_tools': 2}, 'num_tools 3 to 5'),
    ({'num_train': 9999}, 'asked for 9999 and 100'),
    ({'tools': 3}, r"no setting \['tools'\]"),
    ({'weights': {'length': 1}}, r"are for \['length'\]"),
    ({'source': 'public', 'train': 'no.json'}, 'Download rlla_sft.json'),
  ],
)
def test_what_cannot_be_is_refused(settings, message):
  with pytest.raises(ValueError, match=message):
    tool_call(**settings)


@pytest.mark.skipif(not RLLA.is_file(), reason=f'needs {RLLA}; set GDPO_SHARED')
def test_toolrls_file():
  task = tool_call('public', train=RLLA, max_prompt_chars=6000)
  assert len(task.train) > 5 * len(task.heldout) > 0
  examples = task.heldout[:20]
  gold = [e['answer'] for e in examples]
  values = score(task, examples, gold)
  assert all(correct == 3 for _, correct in values)
  # the file holds a few answers that break its own form
  assert sum(form for form, _ in values) >= 18
