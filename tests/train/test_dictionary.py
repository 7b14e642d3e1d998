"""Every name that a run writes has an entry, and the page says what the code says."""

import pathlib

import pytest

from experiments import metrics_table
from gdpo_jax.train import dictionary, metrics

RESULTS = pathlib.Path(__file__).parents[2] / 'experiments' / 'results'


def test_the_documented_page_is_current():
  assert metrics_table.OUT.read_text(encoding='utf-8') == (
    metrics_table.document()
  )


def test_every_name_of_a_real_run_is_described():
  rows = metrics.read_jsonl(RESULTS / 'demo' / 'metrics_seed0.jsonl')
  names = {name for row in rows for name in row} - {'step'}
  assert len(names) > 40
  assert [n for n in sorted(names) if dictionary.describe(n) is None] == []


@pytest.mark.parametrize(
  ('name', 'entry'),
  [
    ('rewards/a/mean', 'rewards/NAME/mean'),
    ('rewards/a/missing', 'rewards/NAME/missing'),
    ('rewards/a/missing/timeout', 'rewards/NAME/missing/REASON'),
    ('rewards/tools/names/std', 'rewards/NAME/std'),
    ('conflict/a/b', 'conflict/A/B'),
    ('counterfactual/cosine/grpo/gdpo', 'counterfactual/cosine/METHOD/METHOD'),
    ('time/generate', 'time/generate'),
    ('time/checkpoint', 'time/PART'),
    ('eval/rewards/a/stderr', 'eval/rewards/NAME/stderr'),
  ],
)
def test_placeholders(name, entry):
  assert dictionary.describe(name).name == entry


def test_unknown_names_have_none():
  assert dictionary.describe('rewards/a/median') is None
  assert dictionary.describe('losses') is None


def test_names_are_there_once():
  names = [m.name for m in dictionary.METRICS]
  assert len(names) == len(set(names))
