"""Every config of every experiment: it resolves, and its task can be made."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SHARED = pathlib.Path(os.environ.get('GDPO_SHARED', ROOT.parent / 'shared'))
sys.path.insert(0, str(ROOT / 'experiments'))

import data_choice  # noqa: E402
import launcher  # noqa: E402

EXPERIMENTS = ('math_len', 'gsm8k', 'tool_call', 'code', 'chat')
NEEDS = {  # variant -> file in the shared data
  ('tool_call', 'rlla'): 'rlla_sft.json',
  ('code', 'humaneval'): 'HumanEval.jsonl.gz',
}


def configs(experiment):
  path = ROOT / 'experiments' / 'configs' / f'{experiment}.py'
  spec = importlib.util.spec_from_file_location(f'configs_{experiment}', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


ALL = [(e, v) for e in EXPERIMENTS for v in configs(e).VARIANTS]


@pytest.mark.parametrize(('experiment', 'variant'), ALL)
def test_resolves_is_locked_and_says_what_it_costs(experiment, variant):
  module = configs(experiment)
  config = module.get_config(variant)
  settings = launcher.settings_of(config)
  assert settings.advantage == 'gdpo'
  assert config.experiment == experiment
  json.loads(config.to_json_best_effort())
  with pytest.raises(AttributeError):
    config.task.weights.nothing = 1.0
  if experiment != 'math_len':  # whose costs stand in the README
    text = module.__doc__
    assert variant == 'smollm2' or f':{variant}' in text
    said = ('Expected:', 'Measured:', 'not run here')
    assert sum(map(text.count, said)) >= 2
  with pytest.raises(ValueError, match='unknown variant'):
    module.get_config('none')


@pytest.mark.parametrize('experiment', ['gsm8k', 'tool_call', 'code'])
def test_the_default_needs_no_download(experiment):
  config = configs(experiment).get_config()
  task = launcher.task_function(experiment)(config)
  assert len(task.heldout) >= config.heldout
  assert len(task.train) >= config.prompts_per_step * 8
  assert set(config.task.weights) == {r.name for r in task.rewards}


@pytest.mark.parametrize(('experiment', 'variant'), list(NEEDS))
def test_public_data(experiment, variant):
  path = SHARED / 'data' / NEEDS[experiment, variant]
  if not path.is_file():
    pytest.skip(f'needs {path}; set GDPO_SHARED')
  config = configs(experiment).get_config(variant)
  config.task.train = str(path)
  task = launcher.task_function(experiment)(config)
  assert len(task.heldout) == config.heldout
  assert len(task.train) >= 100


@pytest.mark.slow
@pytest.mark.weights
def test_prompts_fit_and_limits_tell_answers_apart():
  """With the tokenizer of the model that the defaults were made for."""
  from gdpo_jax.policy import weights

  if weights.path('smollm2-135m') is None:
    pytest.skip('no SmolLM2 weights; run make weights')
  tokenizer = weights.load('smollm2-135m').tokenizer
  for experiment in ('gsm8k', 'tool_call', 'code'):
    config = configs(experiment).get_config()
    task = launcher.task_function(experiment)(config)
    lengths = [
      len(tokenizer.chat(e['prompt'])) for e in (*task.train, *task.heldout)
    ]
    assert max(lengths) <= config.max_prompt_tokens <= max(lengths) + 48
    if task.demonstrate:
      right = [len(tokenizer.encode(a)) + 1 for _, a in task.demonstrate(0, 60)]
      assert max(right) <= config.max_new_tokens


@pytest.mark.slow
@pytest.mark.weights
@pytest.mark.parametrize(('experiment', 'variant'), list(NEEDS))
def test_public_prompts_fit(experiment, variant):
  """A held-out prompt that does not would end the run."""
  from gdpo_jax.policy import weights

  path = SHARED / 'data' / NEEDS[experiment, variant]
  if weights.path('smollm2-135m') is None or not path.is_file():
    pytest.skip(f'needs the SmolLM2 weights and {path}')
  tokenizer = weights.load('smollm2-135m').tokenizer
  config = configs(experiment).get_config(variant)
  config.task.train = str(path)
  task = launcher.task_function(experiment)(config)
  lengths = [
    len(tokenizer.chat(e['prompt'])) for e in (*task.train, *task.heldout)
  ]
  assert max(lengths) <= config.max_prompt_tokens


def test_the_recipes_of_the_papers():
  settings = launcher.settings_of(configs('gsm8k').get_config('qwen2p5_1p5b'))
  assert (settings.group_size, settings.learning_rate) == (16, 5e-6)
  assert (settings.schedule, settings.warmup_share) == ('cosine', 0.1)
  assert (settings.max_prompt_tokens, settings.max_new_tokens) == (512, 1024)
  settings = launcher.settings_of(configs('tool_call').get_config('qwen2p5_3b'))
  assert (settings.prompts_per_step, settings.group_size) == (512, 4)
  assert (settings.prompts_per_update, settings.kl_coef) == (128, 1e-3)
  assert settings.learning_rate == 1e-6
  assert settings.num_steps == 15 * 4000 // 512


@pytest.mark.slow
@pytest.mark.parametrize(
  ('experiment', 'variant', 'millions'),
  # counted by hand: tied embedding, 28 or 36 layers
  [
    ('gsm8k', 'qwen2p5_1p5b', 1543.7),
    ('tool_call', 'qwen2p5_3b', 3085.9),
  ],
)
def test_the_recipes_build_abstractly(experiment, variant, millions):
  config = configs(experiment).get_config(variant)
  config.mesh_data, config.mesh_fsdp = 1, 4
  sizes = launcher.dry_run(
    launcher.model_config(config), launcher.settings_of(config)
  )
  assert sizes['parameters, millions'] == pytest.approx(millions, abs=0.1)


def test_filters_and_curricula_by_config(capsys):
  config = configs('gsm8k').get_config()
  task = launcher.task_function('gsm8k')(config)
  data = config.data
  assert data_choice.apply(task, data) == task
  data.column, data.at_most, data.curriculum = 'level', 1.0, 'success'
  easy = data_choice.apply(task, data)
  assert {e['level'] for e in easy.train} == {1}
  assert easy.heldout == task.heldout
  assert easy.curriculum.reward == 'correct'
  assert "left out: {'difficulty'" in capsys.readouterr().err
  for field, value, message in (
    ('curriculum', 'hard', "'hard'; choose from none"),
    ('reward', 'length', "'length', but the rewards are"),
    ('column', '', 'need data.column'),
  ):
    with data.unlocked():
      before = data[field]
      data[field] = value
      with pytest.raises(ValueError, match=message):
        data_choice.apply(task, data)
      data[field] = before


def test_the_standard_librarys_code_is_still_found():
  """`pdb` imports `code`; from this directory that is a launcher."""
  done = subprocess.run(
    [sys.executable, '-c', 'import code, pdb; print(code.InteractiveConsole)'],
    cwd=ROOT / 'experiments',
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
  )
  assert 'InteractiveConsole' in done.stdout, done.stderr


def test_an_unknown_experiment_lists_those_there_are():
  with pytest.raises(
    ValueError, match='chat, code, gsm8k, math_len, tool_call'
  ):
    launcher.task_function('../chat')
