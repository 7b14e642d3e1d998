import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))

import advise  # noqa: E402
import analysis  # noqa: E402
import compare  # noqa: E402


def test_pareto_by_hand():
  points = [[1, 0], [0, 1], [0.5, 0.5], [0.4, 0.4], [1, 0], [np.nan, 9]]
  wanted = [True, True, True, False, True, False]
  assert analysis.pareto(np.array(points)).tolist() == wanted


def test_intervals_hold_the_truth_as_often_as_they_say():
  rng = np.random.default_rng(0)
  hits = 0
  for i in range(100):
    values = rng.normal(1.0, 2.0, size=(1, 60))
    found = analysis.bootstrap(values, seed=i, resamples=300)
    assert found.low < found.mean < found.high
    hits += found.low <= 1.0 <= found.high
  assert 88 <= hits <= 99


def test_pairing_takes_the_problems_out():
  """Problems differ a lot, the methods by 0.1 on each of them."""
  rng = np.random.default_rng(0)
  base = rng.normal(0, 5, size=(2, 50))
  better = base + 0.1
  found = analysis.paired(better, base)
  assert found.low == pytest.approx(0.1) and found.high == pytest.approx(0.1)
  apart = analysis.bootstrap(better), analysis.bootstrap(base)
  assert apart[0].low < apart[1].high  # unpaired, nothing can be said


def test_missing_values_are_left_out():
  values = np.array([[1.0, np.nan, 3.0]])
  assert analysis.bootstrap(values).mean == 2.0
  assert math.isnan(analysis.bootstrap(np.full((1, 3), np.nan)).mean)
  with pytest.raises(ValueError, match='equal shapes'):
    analysis.paired(np.zeros((1, 2)), np.zeros((2, 2)))


def write_run(directory, correct, short, num_steps=2):
  """What a run of the loop leaves: two evaluations, two steps."""
  (directory / 'heldout').mkdir(parents=True)
  (directory / 'settings.json').write_text(json.dumps({'num_steps': num_steps}))
  rows = [
    {
      'step': step,
      'rewards/correct/mean': correct * step / 2,
      'rewards/short/mean': short,
      'completions/mean_length': 9.0,
    }
    for step in (1, 2)
  ]
  text = '\n'.join(map(json.dumps, rows))
  (directory / 'metrics.jsonl').write_text(text + '\n')
  for step, share in ((0, 0.0), (2, correct)):
    answered = [
      {
        'prompt': str(i),
        'tokens': 9,
        'rewards': {
          'correct': float(i < 20 * share),
          'short': None if i == 0 else short,
        },
      }
      for i in range(20)
    ]
    path = directory / 'heldout' / f'{step}.jsonl'
    path.write_text('\n'.join(map(json.dumps, answered)))


def test_the_page_says_what_the_runs_say(tmp_path):
  variants = compare.parse_variants('grpo,gdpo,mo_grpo')
  for seed in (0, 1):
    write_run(tmp_path / 'grpo' / str(seed), 0.5, 0.2)
    write_run(tmp_path / 'gdpo' / str(seed), 0.75, 0.4)
    write_run(tmp_path / 'mo_grpo' / str(seed), 0.25, 0.9)
  found = compare.write(variants, [0, 1], tmp_path, 'a <title>')
  assert found == json.loads((tmp_path / 'compare.json').read_text()) | {
    'rewards': ('correct', 'short')
  }
  assert found['heldout']['gdpo']['correct']['mean'] == 0.75
  difference = found['differences']['gdpo']['correct']
  assert difference['mean'] == pytest.approx(0.25)
  assert 0 < difference['low'] < 0.25 < difference['high']
  assert found['differences']['gdpo']['short']['low'] == pytest.approx(0.2)
  assert found['pareto_front'] == ['gdpo', 'mo_grpo']
  assert (tmp_path / 'compare.svg').read_text().rstrip().endswith('</svg>')
  page = (tmp_path / 'compare.html').read_text()
  compare.write(variants, [0, 1], tmp_path, 'a <title>')
  assert (tmp_path / 'compare.html').read_text() == page  # byte for byte
  assert 'a &lt;title&gt;' in page and 'gdpo ★' in page and 'grpo ★' in page
  assert '0.750 <small>' in page and 'http' not in page.split('<body>')[1][:500]


def test_only_seeds_that_all_have_are_compared(tmp_path):
  variants = compare.parse_variants('grpo gdpo:clip_high=0.28')
  assert variants[1].directory == 'gdpo_clip_high=0.28'
  assert variants[1].arguments == [
    '--config.algorithm=gdpo',
    '--config.clip_high=0.28',
  ]
  write_run(tmp_path / 'grpo' / '0', 0.5, 0.2)
  write_run(tmp_path / 'grpo' / '1', 0.5, 0.2)
  with pytest.raises(ValueError, match='no seed has a finished run of every'):
    compare.collect(variants, [0, 1], tmp_path)
  write_run(tmp_path / variants[1].directory / '1', 0.5, 0.2)
  runs = compare.collect(variants, [0, 1], tmp_path)
  assert [len(r) for r in runs.values()] == [1, 1]
  assert runs['grpo'][0].directory.name == '1'


def test_what_has_ended_is_not_run_again(tmp_path):
  write_run(tmp_path / 'gdpo' / '0', 0.5, 0.2)
  variants = compare.parse_variants('gdpo')
  assert compare.run_all('none', [], variants, [0], tmp_path, 2) == []
  # with more steps it has not ended; there is no launcher `none`
  failed = compare.run_all('none', [], variants, [0], tmp_path, 3)
  assert failed == [tmp_path / 'gdpo' / '0']
  assert 'none.py' in (failed[0] / 'log.txt').read_text()


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('grpo,gdqo', "unknown algorithm 'gdqo'"),
    ('gdpo,gdpo', 'each once'),
    ('', "unknown algorithm ''"),
    ('gdpo:clip', 'FIELD=VALUE'),
  ],
)
def test_lists_that_cannot_be(text, message):
  with pytest.raises(ValueError, match=message):
    compare.parse_variants(text)


@pytest.mark.slow
def test_two_algorithms_end_to_end_and_again(tmp_path):
  command = [
    sys.executable,
    'experiments/compare.py',
    '--config=experiments/configs/gsm8k.py:tiny',
    '--algorithms=grpo,gdpo',
    '--seeds=0,1',
    f'--out={tmp_path}',
    '--config.num_steps=3',
    '--config.warm_start_updates=30',
    '--config.heldout=32',
    '--config.eval_batch_size=32',
  ]
  options = {
    'cwd': ROOT,
    'env': {**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    'capture_output': True,
    'text': True,
  }
  done = subprocess.run(command, **options)
  assert done.returncode == 0, done.stderr
  first = (tmp_path / 'compare.html').read_text()
  again = subprocess.run(command, **options)
  assert again.returncode == 0 and 'log.txt' not in again.stdout
  assert (tmp_path / 'compare.html').read_text()[:3000] == first[:3000]


def value(advice, setting):
  return next((a.value for a in advice if a.setting == setting), None)


def test_advice_for_the_public_recipe():
  situation = advise.Situation(
    examples=7473, rewards=3, model_params=1.5e9, devices=8, memory_gib=80,
    tflops=400, prompt_tokens=512, completion_tokens=1024, units_differ=True,
  )  # fmt: skip
  advice = advise.advise(situation)
  assert value(advice, 'algorithm') == 'gdpo'
  assert value(advice, 'group_size') == 16
  assert value(advice, 'learning_rate') == 1e-6
  assert value(advice, 'mesh_fsdp') is None  # 22 GiB fit into 80
  assert all(a.reason for a in advice)


def test_advice_changes_with_the_situation():
  base = advise.Situation(examples=10_000, rewards=2)
  assert value(advise.advise(base._replace(rewards=1)), 'algorithm') == 'grpo'
  big = base._replace(model_params=7e9, devices=8, memory_gib=80, tflops=400)
  assert value(advise.advise(big), 'mesh_fsdp') == 4  # 104 GiB, 48 usable
  assert value(advise.advise(big._replace(memory_gib=640)), 'mesh_fsdp') is None
  short = advise.advise(base._replace(hours=2))
  assert value(short, 'prompts_per_step') < value(
    advise.advise(base), 'prompts_per_step'
  )
  hints = {a.value for a in advise.advise(base._replace(success=0.01))}
  assert any('warm start' in str(h) for h in hints)
  assert value(advise.advise(base._replace(success=0.95)), 'max_rounds') == 4
  assert value(advise.advise(base._replace(examples=400)), 'kl_coef') == 1e-3
  with pytest.raises(ValueError, match='rewards must be positive'):
    advise.advise(base._replace(rewards=0))


def test_advice_is_a_command_that_the_config_takes():
  import launcher
  from base_config import base_config

  advice = advise.advise(advise.Situation(examples=500, rewards=2, hours=1))
  config = base_config()
  for flag in advise.command_line(advice).split():
    name, _, text = flag.removeprefix('--config.').partition('=')
    kind = type(config[name]) if config[name] is not None else int
    config[name] = kind(text)
  assert launcher.settings_of(config).kl_coef == 1e-3
