import dataclasses
import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import gdpo_jax
from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.order import BySuccess
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings
from gdpo_jax.trainer import GDPOConfig, GDPOTrainer

ROOT = pathlib.Path(__file__).parents[1]
DATA = [{'prompt': f'{i}=', 'answer': str(i)} for i in range(24)]


def correct(completions, answer, **_):
  return [float(a in c) for c, a in zip(completions, answer)]


def short(completions, **_):
  return [1.0 / (1 + len(c)) for c in completions]


@pytest.fixture(scope='module')
def model():
  tokenizer = byte_tokenizer()
  config = PolicyConfig(
    family='llama',
    vocab_size=260,
    width=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=16,
    mlp_width=64,
    tied=True,
    eos_ids=tokenizer.eos_ids,
    pad_id=tokenizer.pad_id,
  )
  params = make_policy(config).init(jax.random.key(0))
  return hf.Pretrained(config, params, tokenizer)


def config(**options):
  options = {
    'num_generations': 2,
    'per_device_train_batch_size': 2,
    'max_steps': 2,
    'max_prompt_length': 8,
    'max_completion_length': 6,
    'per_device_eval_batch_size': 4,
    **options,
  }
  return GDPOConfig(**options)


def test_trains_evaluates_saves_and_goes_on(model, tmp_path):
  made = {
    'model': model,
    'reward_functions': [correct, short],
    'train_dataset': DATA[:20],
    'eval_dataset': DATA[20:],
    'reward_weights': [1.0, 0.5],
    'conditional_thresholds': [None, 'correct>=1'],
    'progress': Progress(quiet=True),
  }
  args = config(output_dir=tmp_path / 'run', learning_rate=1e-3)
  trainer = GDPOTrainer(args=args, **made)
  assert [r.weight for r in trainer.task.rewards] == [1.0, 0.5]
  assert trainer.task.rewards[1].condition == 'correct>=1'
  by_success = BySuccess('correct')
  trainer.task = dataclasses.replace(trainer.task, curriculum=by_success)
  result = trainer.train()
  kept = tmp_path / 'run' / 'checkpoints' / '2' / 'record' / 'metadata'
  rates = json.loads(kept.read_text())['cursor']['rates']
  drawn = 2 * trainer.settings.prompts_per_step
  assert drawn // 2 <= sum(rate >= 0 for rate in rates) <= drawn < len(rates)
  steps = [row for row in result.history if 'rewards/short/mean' in row]
  assert [row['step'] for row in steps] == [1, 2]
  assert steps[0]['rewards/short/weight'] == 0.5
  metrics = trainer.evaluate()
  assert metrics == trainer.evaluate(DATA[20:])
  [last] = [
    r
    for r in result.history
    if r['step'] == 2 and 'eval/rewards/short/mean' in r
  ]
  assert metrics['eval_rewards/short/mean'] == pytest.approx(
    last['eval/rewards/short/mean'], abs=1e-6
  )
  where = trainer.save(dtype='float32')
  _, params = hf.load(where)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), params, trainer.params)
  assert all(jax.tree.leaves(same))
  longer = dataclasses.replace(args, max_steps=3)
  again = GDPOTrainer(args=longer, **made)
  again.task = dataclasses.replace(again.task, curriculum=by_success)
  with pytest.raises(ValueError, match='holds an earlier run'):
    again.train(resume_from_checkpoint=False)
  assert [r['step'] for r in again.train().history][-1] == 3


@pytest.mark.slow
def test_a_trl_script_runs_after_changing_the_names(model, tmp_path):
  pytest.importorskip('datasets')
  hf.save(tmp_path / 'model', *model, dtype='float32')
  source = (ROOT / 'tests' / 'trl_script.py').read_text()
  changed = (
    source.replace('from trl import', 'from gdpo_jax import')
    .replace('GRPOConfig', 'GDPOConfig')
    .replace('GRPOTrainer', 'GDPOTrainer')
  )
  assert (
    sum(a != b for a, b in zip(source.split('\n'), changed.split('\n'))) == 3
  )
  script = tmp_path / 'script.py'
  script.write_text(changed)
  done = subprocess.run(
    [sys.executable, script, tmp_path / 'model', tmp_path / 'out'],
    env={**os.environ, 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  lines = (tmp_path / 'out' / 'metrics.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  rows = [row for row in rows if 'reward' in row]
  assert [row['step'] for row in rows] == [1, 2, 3]
  assert rows[0]['rewards/digits/weight'] == 0.5
  assert rows[0]['logged/chars'] > 0
  assert (
    'kl' in rows[-1]
    or 'kl/mean' in rows[-1]
    or any(key.startswith('kl') for key in rows[-1])
  )
  hf.load(tmp_path / 'out' / 'final')


def test_rows_become_prompts_as_in_trl():
  made = GDPOConfig(
    num_generations=8,
    per_device_train_batch_size=16,
    gradient_accumulation_steps=4,
    steps_per_generation=8,
    num_train_epochs=2,
    warmup_steps=10,
    eval_strategy='steps',
    eval_steps=20,
    epsilon_high=0.28,
    beta=0.04,
    bf16=True,
  ).to_settings(num_prompts=160, num_devices=2)
  # rollouts of 16 * 8 * 2 rows, steps of 16 * 4 * 2, 16 * 2 at once
  assert (made.prompts_per_step, made.prompts_per_update) == (32, 16)
  assert made.prompts_per_micro_batch == 4
  assert made.num_steps == 2 * 160 // 32
  assert made.updates_per_step == 2
  assert made.warmup_share == 10 / (10 * 2)
  assert made.eval_every == 10
  assert (made.clip_low, made.clip_high, made.kl_coef) == (0.2, 0.28, 0.04)
  assert (made.denominator, made.advantage) == ('token', 'gdpo')
  assert made.compute_dtype == 'bfloat16'


@pytest.mark.parametrize(
  ('options', 'wanted'),
  [
    (
      {'multi_objective_aggregation': 'normalize_then_sum'},
      ('gdpo', 'sequence'),
    ),
    ({'multi_objective_aggregation': 'sum_then_normalize'}, ('grpo', 'none')),
    (
      {
        'multi_objective_aggregation': 'sum_then_normalize',
        'scale_rewards': 'none',
      },
      ('dr_grpo', 'none'),
    ),
    ({'algorithm': 'dvao'}, ('dvao', 'none')),
    ({'settings': {'whiten': 'none'}}, ('gdpo', 'none')),
  ],
)
def test_aggregation(options, wanted):
  made = config(**options).to_settings(10)
  assert (made.advantage, made.whiten) == wanted


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'per_device_train_batch_size': 3}, 'whole groups of num_generations 2'),
    ({'loss_type': 'sapo'}, "'sapo'; give one of"),
    ({'lr_scheduler_type': 'polynomial'}, "'polynomial'; give one of"),
    ({'scale_rewards': 'batch'}, "'batch'; give None"),
    ({'settings': {'lr': 1}}, r"settings has \['lr'\]"),
    ({'importance_sampling_level': 'word'}, "'token' or 'sequence'"),
  ],
)
def test_options_without_a_counterpart_are_refused(options, message):
  with pytest.raises(ValueError, match=message):
    config(**options).to_settings(10)


def test_vllm_is_not_there():
  with pytest.raises(ValueError, match='use_vllm=True is not supported'):
    GDPOConfig(use_vllm=True)


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ({'reward_functions': []}, 'at least one reward function'),
    ({'reward_functions': 'some/model'}, 'by name .*JaxJudge'),
    ({'reward_weights': [1, 2]}, '2 weights were given for 1 rewards'),
    ({'conditional_thresholds': [None, None]}, '2 conditional_thresholds'),
    ({'conditional_thresholds': {'a': 'b>1'}}, r"name \['a'\], but .*'short'"),
    ({'train_dataset': None}, 'train_dataset is missing'),
    ({'train_dataset': [{'text': 'x'}]}, r"no prompt, only \['text'\]"),
    ({'args': object()}, 'give a gdpo_jax.GDPOConfig'),
    ({'args': Settings()}, 'output_dir'),
  ],
)
def test_mistakes_are_said_before_a_model_is_loaded(arguments, message):
  made = {
    'model': 'no/such/model',
    'reward_functions': [Reward(short)],
    'train_dataset': DATA,
    'args': config(),
    **arguments,
  }
  with pytest.raises(ValueError, match=message):
    GDPOTrainer(**made)


def test_public_names():
  assert gdpo_jax.GDPOTrainer is GDPOTrainer
  assert gdpo_jax.GDPOConfig is GDPOConfig


def test_a_length_beyond_the_model_is_said_in_the_names_of_trl(model):
  args = config(output_dir='runs', max_prompt_length=2**20)
  with pytest.raises(
    ValueError, match='max_prompt_length 1048576 .* positions'
  ):
    GDPOTrainer(model, [short], args, DATA)
