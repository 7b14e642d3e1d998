import json
import os
import pathlib
import re

import pytest

from gdpo_jax.rewards import answers
from gdpo_jax.tasks import gsm8k as module
from gdpo_jax.tasks.gsm8k import gsm8k

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
PUBLIC = SHARED / 'data'

RECORDS = [
  {'question': 'Two and two?', 'answer': 'It is 2+2=<<2+2=4>>4.\n#### 4'},
  {'question': 'A lot?', 'answer': 'Much.\n#### 1,234,000'},
  {'question': 'Below?', 'answer': 'Cold.\n#### -3\n'},
]


def write(path, records):
  path.write_text('\n'.join(json.dumps(r) for r in records) + '\n\n')
  return path


def test_reads_questions_and_gold_answers(tmp_path):
  path = write(tmp_path / 'a.jsonl', RECORDS)
  train, heldout = gsm8k(path, str(path), num_heldout=1)
  assert [e['answer'] for e in train] == ['4', '1234000', '-3']
  assert [e['answer'] for e in heldout] == ['4']
  assert train[0]['prompt'] == [
    {'role': 'user', 'content': f'{module.INSTRUCTION}\n\nTwo and two?'}
  ]


def test_worked_examples_are_right(tmp_path):
  path = write(tmp_path / 'a.jsonl', RECORDS)
  train, _ = gsm8k(path, path, worked=2, layout='turns')
  roles = [m['role'] for m in train[0]['prompt']]
  assert roles == ['system', 'user', 'assistant', 'user', 'assistant', 'user']
  for _, answered in module._WORKED:
    sums = re.findall(r'^([\d *+-]+) = (\d+)', answered, re.MULTILINE)
    assert len(sums) >= 2
    assert all(eval(left) == int(right) for left, right in sums)
    assert answers.extract(answered) == sums[-1][1]
  with pytest.raises(ValueError, match='worked must be 0 to 2, got 3'):
    gsm8k(path, path, worked=3)


@pytest.mark.parametrize(
  'text, message',
  [
    ('', 'holds no problems'),
    ('{"question": "x"', 'line 1 is not JSON'),
    ('[1]', "'question' and 'answer', got list"),
    ('{"question": "x", "solution": "1"}', r"got \['question', 'solution'\]"),
    ('{"question": "x", "answer": "It is 4."}', "end in .* got 'It is 4.'"),
  ],
)
def test_files_of_another_form_are_refused(tmp_path, text, message):
  path = tmp_path / 'a.jsonl'
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    gsm8k(path, path)


def test_missing_data_says_what_to_do(tmp_path, monkeypatch):
  with pytest.raises(ValueError, match='Download train.jsonl from'):
    gsm8k(tmp_path / 'none.jsonl')
  with pytest.raises(ValueError, match='asked for 0 problems'):
    gsm8k(tmp_path / 'none.jsonl', num_train=0)
  monkeypatch.setitem(__import__('sys').modules, 'datasets', None)
  with pytest.raises(ValueError, match='run `pip install datasets`'):
    gsm8k('openai/gsm8k')


def test_reads_a_data_set_in_hub_form(tmp_path, monkeypatch):
  """A local directory stands for the hub: the same code of `datasets`."""
  datasets = pytest.importorskip('datasets')
  directory = tmp_path / 'owner' / 'main'
  directory.mkdir(parents=True)
  for split in ('train', 'test'):
    write(directory / f'{split}.jsonl', RECORDS)
  (tmp_path / 'owner' / 'README.md').write_text(
    '---\nconfigs:\n- config_name: main\n  data_files:\n'
    '  - split: train\n    path: main/train.jsonl\n'
    '  - split: test\n    path: main/test.jsonl\n---\n'
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  (tmp_path / 'some').mkdir()
  (tmp_path / 'owner').rename(tmp_path / 'some' / 'name')
  train, heldout = gsm8k('some/name', 'some/name', num_train=2)
  assert [e['answer'] for e in train] == ['4', '1234000']
  assert len(heldout) == 3


@pytest.mark.skipif(
  not (PUBLIC / 'gsm8k_test.jsonl').is_file(),
  reason=f'no GSM8K files in {PUBLIC}; set GDPO_SHARED',
)
def test_public_files():
  train, heldout = gsm8k(
    PUBLIC / 'gsm8k_train.jsonl', PUBLIC / 'gsm8k_test.jsonl'
  )
  assert (len(train), len(heldout)) == (7473, 1319)
  assert heldout[0]['answer'] == '18'
  for example in train + heldout:
    assert re.fullmatch(r'-?\d+(\.\d+)?', example['answer'])
