import itertools
import json
import os
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdpo_jax.rewards import tool_calls

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))


def call(name, **parameters):
  return {'name': name, 'parameters': parameters}


def block(*calls):
  lines = '\n'.join(map(json.dumps, calls))
  return f'<think> t </think>\n<tool_call>\n{lines}\n</tool_call>'


@pytest.mark.parametrize(
  'text, expected',
  [
    (
      '<tool_call>{"name":"echo","arguments":{"s":"a </tool_call> b"}}</tool_call>',
      [{'name': 'echo', 'arguments': {'s': 'a </tool_call> b'}}],
    ),
    (
      '<tool_call>{"name":"f","arguments":{"k":{"x":1}}}</tool_call>',
      [{'name': 'f', 'arguments': {'k': {'x': 1}}}],
    ),
    (
      r'<tool_call>{"name":"f","arguments":"{\"city\":\"NY\"}"}</tool_call>',
      [{'name': 'f', 'arguments': {'city': 'NY'}}],
    ),
    (
      '<tool_call>{"name":"f",</tool_call> <tool_call>{"name":"g"}</tool_call>',
      [{'name': 'g'}],
    ),
    (
      '<tool_call>\n{"name": "f", oops}\n{"name": "g"}\n</tool_call>',
      [{'name': 'g'}],
    ),
    (
      '<tool_call>\n{"name": "f"}\n{"name": "f"}\n</tool_call>',
      [{'name': 'f'}, {'name': 'f'}],
    ),
    ('<tool_call>[{"name": "f"}, {"name": "g"}]', [{'name': 'f'}, {'name': 'g'}]),
    ('<tool_call>{"name":"f","arguments":{"a":1,"a":2}}</tool_call>', []),
    ("<tool_call>{'name': 'f', 'arguments': {'a': 1}}</tool_call>", []),
    ('<tool_call>{"name":"f","arguments":{"x": NaN}}</tool_call>', []),
    ('<tool_call>{"name":"f","arguments":[1]}</tool_call>', []),
    ('<tool_call>{"name":"f","arguments":"not json"}</tool_call>', []),
    ('<tool_call>{"name": 3}</tool_call>', []),
    ('<tool_call>[1, "x", null]</tool_call>', []),
    ('<tool_call>' + '[' * 100000, []),
    ('{"name": "f"}', []),
    ('', []),
  ],
)  # fmt: skip
def test_parse(text, expected):
  assert tool_calls.parse(text) == expected


def test_paper_score_by_hand():
  gold = [call('get', city='Rome', days=3), call('sum', x=1)]
  # Names 1, one Jaccard per call, three values: 6 of 6.
  assert tool_calls.score(gold, gold) == 3.0
  assert tool_calls.score(gold[::-1], gold) == 3.0
  # Names 1/2, parameters 1, values 2: 3.5 of 6.
  assert tool_calls.score(gold[:1], gold) == pytest.approx(6 * 3.5 / 6 - 3)
  # Names 1, Jaccard 1/3 of {city, days} and {city, when}, a value, then 2 more.
  close = [call('get', city='Rome', when=3), call('sum', x=1)]
  assert tool_calls.score(close, gold) == pytest.approx(
    6 * (1 + 1 / 3 + 1 + 2) / 6 - 3
  )
  assert tool_calls.score([], gold) == -3.0
  assert tool_calls.score([call('other', city='Rome')], gold) == -3.0
  assert tool_calls.score([], []) == 3.0
  assert tool_calls.score([call('f')], []) == -3.0


def test_optimal_matching_beats_the_greedy_one():
  gold = [call('f', a=1), call('f', a=1, b=2)]
  predicted = [call('f', a=1, b=2), call('f', b=2)]
  # First gold call: 1.5 with the first call, 0 + 0 with the second.
  # Greedy takes 1.5 and leaves 0.5 + 1 for the second gold call.
  # The other way round: 0 and 3, the same; so give the second a real choice.
  predicted[1] = call('f', a=1, c=0)
  # Greedy: 1.5 (tie, the first), then 1/3 + 1; optimal: 1.5, then 3.
  assert tool_calls.score(predicted, gold, 'rlla') == pytest.approx(
    6 * (1 + 1.5 + 1 / 3 + 1) / 6 - 3
  )
  assert tool_calls.score(predicted, gold, 'paper') == pytest.approx(
    6 * (1 + 1.5 + 3) / 6 - 3
  )


def test_repeated_calls_count_as_often_as_they_are_made():
  once, twice = [call('f', x=1)], [call('f', x=1)] * 2
  assert tool_calls.score(twice, twice) == 3.0
  # Names 1/2, then 2 of 2 for one of the two gold calls.
  assert tool_calls.score(once, twice) == pytest.approx(6 * (0.5 + 2) / 5 - 3)
  assert tool_calls.score(twice, once) == pytest.approx(6 * (0.5 + 2) / 3 - 3)


@pytest.mark.parametrize(
  'one, other', [*itertools.permutations([1, 1.0, True, '1'], 2)]
)
def test_values_are_compared_with_their_types(one, other):
  predicted, gold = [call('f', x=[{'y': one}])], [call('f', x=[{'y': other}])]
  assert tool_calls.score(predicted, gold, 'paper') == pytest.approx(
    6 * 2 / 3 - 3
  )
  assert (tool_calls.score(predicted, gold, 'rlla') == 3.0) == (one == other)


def test_rlla_reads_texts_like_the_public_scorer():
  gold = block(call('f', x=1), call('g'))
  assert tool_calls.reward(gold, gold, 'rlla') == 3.0
  assert (
    tool_calls.reward(block(call('g'), call('f', x=1)), gold, 'rlla') == 3.0
  )
  # Names 1/2, Jaccard and value of f, nothing for g: 2.5 of 4.
  assert tool_calls.reward(
    block(call('f', x=1)), gold, 'rlla'
  ) == pytest.approx(0.75)
  one_bad_line = gold.replace('"parameters": {}}', '"parameters": {}')
  assert tool_calls.reward(one_bad_line, gold, 'rlla') == -3.0
  assert tool_calls.reward('no call', gold, 'rlla') == -3.0
  assert tool_calls.reward(block({'name': 'f'}), gold, 'rlla') == -3.0
  assert tool_calls.reward(block({'parameters': {}}), gold, 'rlla') == -3.0
  # Only a call of the same name is looked into.
  assert tool_calls.reward(block({'name': 'h'}), gold, 'rlla') == -3.0
  both = block(call('f', x=1), {'name': 'h'})
  assert tool_calls.reward(both, gold, 'rlla') == pytest.approx(
    6 * (1 / 3 + 2) / 4 - 3
  )
  assert (
    tool_calls.reward(
      gold, '<think> t </think>\n<response> r </response>', 'rlla'
    )
    == 0.0
  )


def test_unknown_presets_are_refused():
  with pytest.raises(ValueError, match="'paper' or 'rlla'"):
    tool_calls.score([], [], 'papers')


TOOL = '<think> t </think>\n<tool_call>\n{"name": "f"}\n</tool_call>'
TALK = '<think> t </think>\n<response> r </response>'
BOTH = TOOL + '\n<response> r </response>'


@pytest.mark.parametrize('gold', [TOOL, TALK, BOTH, '<think> t </think>'])
def test_format_is_the_one_of_the_gold_text(gold):
  assert tool_calls.format_reward(gold, gold) == 1.0
  for other in {TOOL, TALK, BOTH} - {gold}:
    if not other.startswith(gold):
      assert tool_calls.format_reward(gold, other) == 0.0
  assert tool_calls.format_reward('so ' + gold, gold) == 0.0
  assert tool_calls.format_reward(gold + ' done', gold) == 0.0
  assert tool_calls.format_reward(
    gold.replace('</think>\n', '</think> '), gold
  ) == (gold == '<think> t </think>')
  for tag in ('think', 'tool_call', 'response'):
    for mark in (f'<{tag}>', f'</{tag}>'):
      if mark in gold:
        assert (
          tool_calls.format_reward(gold.replace(mark, mark * 2), gold) == 0.0
        )
        assert tool_calls.format_reward(gold.replace(mark, ''), gold) == 0.0


def test_tool_call_lines_stand_alone():
  assert (
    tool_calls.format_reward(TOOL.replace('<tool_call>\n', '<tool_call>'), TOOL)
    == 0
  )


def test_reward_functions_take_message_lists():
  completion = [{'role': 'assistant', 'content': TOOL}]
  assert tool_calls.correct_calls([completion, 'x'], [TOOL, TOOL]) == [
    3.0,
    -3.0,
  ]
  assert tool_calls.correct_format([completion, 'x'], [TOOL, TOOL]) == [
    1.0,
    0.0,
  ]


VALUES = st.one_of(
  st.integers(0, 2), st.booleans(), st.sampled_from(['a', 'b'])
)
CALLS = st.lists(
  st.builds(
    lambda name, parameters: {'name': name, 'parameters': parameters},
    st.sampled_from(['f', 'g']),
    st.dictionaries(st.sampled_from('xyz'), VALUES, max_size=3),
  ),
  max_size=3,
)


@given(CALLS, CALLS)
def test_scores_stay_in_range_and_greedy_is_never_better(predicted, gold):
  paper = tool_calls.score(predicted, gold)
  assert -3 <= paper <= 3
  # as JSON: to Python 0 and False are equal, to a tool they are not
  same = json.dumps(predicted, sort_keys=True) == json.dumps(
    gold, sort_keys=True
  )
  assert paper == pytest.approx(3) or not same
  if gold:
    # With types that agree the two differ in the matching alone.
    tag = json.dumps
    typed = [
      [
        call(c['name'], **{k: tag(v) for k, v in c['parameters'].items()})
        for c in calls
      ]
      for calls in (predicted, gold)
    ]
    rlla = tool_calls.score(*typed, 'rlla')
    assert -3 <= rlla <= tool_calls.score(*typed, 'paper') + 1e-9


def test_gold_texts_of_the_public_data_match_themselves():
  path = SHARED / 'data' / 'rlla_sft.json'
  if not path.exists():
    pytest.skip(f'needs {path} (set GDPO_SHARED)')
  texts = [row['output'] for row in json.loads(path.read_text())]
  with_calls = [text for text in texts if '<tool_call>' in text]
  assert len(with_calls) == 346
  for text in with_calls:
    assert tool_calls.reward(text, text, 'paper') == pytest.approx(3.0)
    # 17 texts mention the tag in their thoughts, where the public scorer looks.
    first = text.partition('<tool_call>')[2].lstrip()
    expected = 3.0 if first.startswith('{') else -3.0
    assert tool_calls.reward(text, text, 'rlla') == pytest.approx(expected)
  formats = [tool_calls.format_reward(text, text) for text in texts]
  assert sum(formats) == 383
