"""Configs of experiments/tool_call.py: format in [0, 1], correct in [-3, 3].

  python experiments/tool_call.py \\
    --config=experiments/configs/tool_call.py:VARIANT

Costs and results are expected ones unless said to be measured.

  default         SmolLM2-135M-Instruct on requests to five tools, made here, two
                  worked examples in the prompt. Measured: 10:43 on two cores
                  shared with other work. Sampled, first step to last: format
                  0.16 -> 0.91, correct -2.73 -> -2.44; held out, greedy: format
                  0.70 -> 1.00, correct -1.66 -> -1.43.
  :rlla           SmolLM2 on ToolRL's public file (`data/rlla_sft.json`), prompts
                  of up to 1024 tokens. Cost: some minutes a step on two cores.
                  Expected: correct stays near -3, the model is too small.
  :qwen2p5_1p5b, :qwen2p5_3b
                  the public recipe of GDPO on ToolRL's data: 512 prompts x 4,
                  mini-batches of 128 prompts, rate 1e-6, KL 1e-3, 15 epochs of
                  4,000 prompts (117 steps). For accelerators; not run here.
"""

import ml_collections
import shapes
from base_config import variant_config


def get_config(variant: str = 'smollm2') -> ml_collections.ConfigDict:
  config = variant_config('tool_call', VARIANTS, variant)
  with config.unlocked():
    config.task.preset = 'paper'  # 'rlla': as the public scorer
    # 0 makes a reward that is only logged
    config.task.weights = ml_collections.ConfigDict(
      {'format': 1.0, 'correct': 1.0}
    )
  return config


def _smollm2(config):
  config.model = 'smollm2-135m'
  config.task.update(
    source='generated',
    seed=0,
    num_train=300,
    num_heldout=100,
    worked=2,
    num_tools=5,
  )
  config.update(
    num_steps=16,
    prompts_per_step=8,
    group_size=4,
    prompts_per_micro_batch=2,
    max_prompt_tokens=264,
    max_new_tokens=64,
    learning_rate=1e-5,
    warmup_share=0.1,
    save_every=4,
    heldout=100,
    eval_batch_size=32,
  )


def _rlla(config):
  config.model = 'smollm2-135m'
  config.task.update(
    source='public',
    train='data/rlla_sft.json',
    max_prompt_chars=3200,
    num_heldout=16,
  )
  config.update(
    num_steps=20,
    prompts_per_step=4,
    group_size=4,
    prompts_per_micro_batch=1,
    max_prompt_tokens=1024,
    max_new_tokens=192,
    learning_rate=1e-5,
    save_every=4,
    heldout=16,
    eval_batch_size=16,
  )


def _recipe(config):
  config.task.update(
    source='public',
    train='data/rlla_4k/train.parquet',
    heldout='data/rlla_4k/test.parquet',
  )
  config.update(
    num_steps=117,
    prompts_per_step=512,
    group_size=4,
    prompts_per_rollout=128,
    prompts_per_update=128,
    prompts_per_micro_batch=8,
    max_prompt_tokens=2048,
    max_new_tokens=1024,
    learning_rate=1e-6,
    kl_coef=1e-3,
    compute_dtype='bfloat16',
    remat='block',
    eval_every=25,
  )


def _qwen2p5_1p5b(config):
  _recipe(config)
  shapes.use(config, 'qwen2p5_1p5b')


def _qwen2p5_3b(config):
  _recipe(config)
  shapes.use(config, 'qwen2p5_3b')


VARIANTS = {
  'smollm2': _smollm2,
  'rlla': _rlla,
  'qwen2p5_1p5b': _qwen2p5_1p5b,
  'qwen2p5_3b': _qwen2p5_3b,
}
