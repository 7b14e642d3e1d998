import gzip
import json
import os
import pathlib

import pytest

from gdpo_jax.tasks import records

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
CHAT = [{'role': 'user', 'content': 'How many?'}]
VERL = {
  'data_source': 'x',
  'prompt': CHAT,
  'ability': 'math',
  'reward_model': {'style': 'rule', 'ground_truth': '4'},
  'extra_info': {'index': 0},
}


@pytest.mark.parametrize(
  'name', ['a.jsonl', 'a.json', 'a.jsonl.gz', 'a.json.gz']
)
def test_files_of_json(tmp_path, name):
  rows = [{'prompt': 'ä', 'n': 1}, {'prompt': 'b', 'n': 2}]
  text = json.dumps(rows)
  if '.jsonl' in name:
    text = '\n\n'.join(map(json.dumps, rows))
  opener = gzip.open if name.endswith('.gz') else open
  with opener(tmp_path / name, 'wt', encoding='utf-8') as file:
    file.write(text)
  assert records.read(tmp_path / name) == rows


def test_verls_parquet(tmp_path):
  pa = pytest.importorskip('pyarrow')
  parquet = pytest.importorskip('pyarrow.parquet')
  path = tmp_path / 'train.parquet'
  parquet.write_table(pa.Table.from_pylist([VERL, VERL]), path)
  made = records.examples(records.read(path))
  assert made[1] == {
    'data_source': 'x',
    'prompt': CHAT,
    'ability': 'math',
    'answer': '4',
    'extra_info': {'index': 0},
  }


def test_a_data_set_object_of_datasets():
  datasets = pytest.importorskip('datasets')
  data = datasets.Dataset.from_list([{'prompt': CHAT, 'solution': '4'}])
  [made] = records.examples(data, {'answer': 'solution'})
  assert made == {'prompt': CHAT, 'answer': '4'}


def test_toolrl_and_questions():
  [made] = records.examples(
    [{'instruction': 'Use tools.', 'input': 'Hi', 'output': '<response>'}]
  )
  assert [m['role'] for m in made['prompt']] == ['system', 'user']
  assert made['answer'] == '<response>'
  [made] = records.examples([{'question': '1+1?', 'answer': '2'}])
  assert made == {'prompt': '1+1?', 'answer': '2'}


@pytest.mark.parametrize(
  'record, message',
  [
    ([1], 'should be a mapping, got list'),
    ({'text': 'x'}, r"no prompt, only \['text'\]"),
    ({'prompt': [{'role': 'user', 'content': [{'type': 'image'}]}]}, 'images'),
  ],
)
def test_other_records_are_refused(record, message):
  with pytest.raises(ValueError, match=message):
    records.examples([record])


def test_what_is_not_there_is_said(tmp_path):
  (tmp_path / 'a.csv').write_text('x')
  (tmp_path / 'b.json').write_text('{}')
  (tmp_path / 'c.json').write_text('[]')
  for name, message in (
    ('a.csv', 'should end in .jsonl, .json, .parquet'),
    ('b.json', 'a list of records'),
    ('c.json', 'holds no problems'),
    ('none.jsonl', 'there is no file'),
  ):
    with pytest.raises(ValueError, match=message):
      records.read(tmp_path / name)
  with pytest.raises(ValueError, match=r"no column 'b', only \['a'\]"):
    records.examples([{'a': 1}], {'prompt': 'b'})


def test_split_keeps_equal_prompts_together():
  data = [{'prompt': str(i % 10), 'n': i} for i in range(30)]
  train, heldout = records.split_off(data, 0.3, seed=1)
  assert len({e['prompt'] for e in heldout}) == 3 and len(heldout) == 9
  assert not {e['prompt'] for e in train} & {e['prompt'] for e in heldout}
  assert records.split_off(data, 0.3, seed=1) == (train, heldout)


def test_reasoning_gym():
  pytest.importorskip('reasoning_gym')
  made, solved = records.from_reasoning_gym('basic_arithmetic', 3, seed=1)
  answers = [e['answer'] for e in made]
  entries = [e['entry'] for e in made]
  assert solved(answers, entries) == [1.0] * 3
  assert (
    solved([f'So <answer>{a}</answer>' for a in answers], entries) == [1.0] * 3
  )
  assert max(solved(['-12345'] * 3, entries)) < 1.0
