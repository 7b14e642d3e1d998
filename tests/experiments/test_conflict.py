"""The comparison of policies: every method resolves, starts are shared."""

import ast
import dataclasses
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from gdpo_jax.train.settings import Settings

EXPERIMENTS = pathlib.Path(__file__).parents[2] / 'experiments'
sys.path.insert(0, str(EXPERIMENTS))

import compare  # noqa: E402
import conflict  # noqa: E402


def tiny_conflict():
  spec = importlib.util.spec_from_file_location('configs', conflict.CONFIG)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module.get_config('tiny_conflict')


@pytest.mark.parametrize('name', conflict.VARIANTS)
def test_every_method_is_one_that_can_run(name):
  variant = conflict.VARIANTS[name]
  for teacher in variant.teachers:  # each has a run before its student
    assert list(conflict.VARIANTS).index(teacher.name) < list(
      conflict.VARIANTS
    ).index(name)
  if variant.teachers:
    return
  config = tiny_conflict()
  config.algorithm = variant.algorithm
  for text in variant.settings:
    field, value = text.split('=')
    *path, last = field.split('.')
    part = config
    for step in path:
      part = part[step]
    old = part[last]
    part[last] = (
      type(old)(value) if isinstance(old, str) else ast.literal_eval(value)
    )
  weights = config.task.weights
  assert (weights.correct, weights.length) == {
    'correct_alone': (1, 0),
    'short_alone': (0, 1),
  }.get(name, (1, 1))
  fields = [field.name for field in dataclasses.fields(Settings)]
  s = Settings(**{field: config[field] for field in fields}).resolve()
  assert bool(s.subpolicy_rank) == (name in ('gdpo_heads', 'decoupled'))
  assert s.has_value_head == (name == 'ppo')
  assert not config.task.conditioned and not config.task.with_format


def test_runs_of_a_seed_share_the_start_that_one_of_them_made(tmp_path):
  runs = [tmp_path / v.directory / '0' for v in conflict.VARIANTS.values()]
  compare._share_start(runs)  # nothing yet
  made = runs[0] / 'warm_start'
  made.mkdir(parents=True)
  (made / 'model.safetensors').write_bytes(b'weights')
  for _ in range(2):  # again changes nothing
    compare._share_start(runs)
    for run in runs:
      kept = run / 'warm_start' / 'model.safetensors'
      assert kept.read_bytes() == b'weights'
      assert [p.name for p in run.iterdir()] == ['warm_start']


def test_some_of_the_methods():
  assert conflict.variants_of('gdpo,ppo') == [
    conflict.VARIANTS['gdpo'],
    conflict.VARIANTS['ppo'],
  ]
  with pytest.raises(ValueError, match='gdpoo'):
    conflict.variants_of('gdpoo,ppo')


@pytest.mark.slow
def test_a_student_of_two_runs_is_compared_with_them(tmp_path):
  command = [
    sys.executable,
    str(EXPERIMENTS / 'conflict.py'),
    f'--out={tmp_path}',
    '--seeds=0',
    '--algorithms=correct_alone,short_alone,distilled',
    '--config.num_steps=2',
    '--config.warm_start_updates=2',
    '--config.heldout=8',
    '--config.eval_batch_size=8',
  ]
  environment = dict(os.environ, PYTHONPATH=str(EXPERIMENTS.parent))
  subprocess.run(command, env=environment, check=True)
  found = json.loads((tmp_path / 'compare.json').read_text())
  assert list(found['heldout']) == ['correct_alone', 'short_alone', 'distilled']
  rows = (tmp_path / 'distilled' / '0' / 'metrics.jsonl').read_text()
  assert rows.count('distill/gap') == 2 and rows.count('eval/rewards') == 4 * 2
