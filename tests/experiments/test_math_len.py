"""The door: configs, their checks, and the whole step built abstractly."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))

import launcher  # noqa: E402
import math_len  # noqa: E402
from configs.math_len import VARIANTS, get_config  # noqa: E402

PAPER = ('r1_1p5b', 'r1_7b', 'qwen3_4b')


@pytest.mark.parametrize('variant', sorted(VARIANTS))
def test_every_variant_resolves_and_is_locked(variant):
  config = get_config(variant)
  settings = launcher.settings_of(config)
  assert settings.advantage == 'gdpo'
  assert config.task.limit_tokens <= settings.max_new_tokens
  with pytest.raises(AttributeError, match='Did you mean "algorithm"'):
    config.algoritm = 'grpo'


@pytest.mark.parametrize(
  ('variant', 'millions'),
  # counted by hand from the published shapes: embedding, head, 28 or 36 layers
  [('r1_1p5b', 1777.1), ('r1_7b', 7615.6), ('qwen3_4b', 4022.5)],
)
def test_the_papers_settings_build_abstractly(variant, millions):
  config = get_config(variant)
  config.mesh_data = 1
  config.mesh_fsdp = 4
  settings = launcher.settings_of(config)
  assert (settings.prompts_per_step, settings.group_size) == (512, 16)
  assert (settings.prompts_per_update, settings.updates_per_step) == (64, 8)
  assert (settings.clip_low, settings.clip_high) == (0.2, 0.28)
  assert (settings.kl_estimator, settings.kl_coef) == ('k2', 5e-4)
  sizes = launcher.dry_run(launcher.model_config(config), settings)
  assert sizes['parameters, millions'] == pytest.approx(millions, abs=0.1)
  # float32 masters, two Adam moments of the same size
  assert sizes['optimizer, GiB'] == pytest.approx(
    2 * sizes['parameters, GiB'], rel=1e-3
  )


def test_tasks_of_the_variants_that_need_no_download():
  task = math_len.task_of(get_config('smollm2'))
  assert [r.name for r in task.rewards] == ['correct', 'length']
  assert task.rewards[1].condition == 'correct>=1'
  assert len(task.heldout) >= 200
  tiny = math_len.task_of(get_config('tiny'))
  assert [r.name for r in tiny.rewards] == ['correct', 'length', 'format']
  assert launcher.model_config(get_config('tiny')).num_params < 2e5


def test_a_limit_above_the_maximum_is_refused():
  config = get_config('smollm2')
  config.task.limit_tokens = 49
  with pytest.raises(ValueError, match='limit_tokens 49 is above max_new_tok'):
    math_len.task_of(config)


@pytest.mark.parametrize(
  ('flag', 'message'),
  [
    ('--config.algoritm=grpo', 'Did you mean "algorithm"'),
    ('--config.task.weights.brief=1', 'no such setting: brief'),
    ('--config.group_size=1', 'a group of one has nothing to be compared with'),
  ],
)
def test_mistakes_are_one_sentence(flag, message):
  done = subprocess.run(
    [
      sys.executable,
      'experiments/math_len.py',
      '--config=experiments/configs/math_len.py',
      flag,
    ],
    cwd=ROOT,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 2
  assert message in done.stderr
  assert 'Traceback' not in done.stderr
