"""Configs of experiments/math_len.py: correct, and short.

  ...math_len.py              SmolLM2-135M-Instruct on arithmetic, two worked
                              examples in the prompt: correct + length.
  ...math_len.py:gsm8k        the same model on GSM8K (two files in `data/`).
  ...math_len.py:tiny         a byte-level model of 10^5 parameters on two-digit
                              additions, after a supervised start.
  ...math_len.py:tiny_collapse  tiny with a plain length reward and a high rate:
                              GDPO collapses to answers that are short and wrong.
  ...math_len.py:tiny_conflict  tiny with correct and plain length alone, for
                              conflict.py.
  ...math_len.py:r1_1p5b, :r1_7b, :qwen3_4b  the settings of the GDPO paper
                              (arXiv 2601.05242, math) for accelerators.

Cost and expected result of each stand in the README.
"""

import ml_collections
import shapes
from base_config import variant_config


def get_config(variant: str = 'smollm2') -> ml_collections.ConfigDict:
  config = variant_config('math_len', VARIANTS, variant)
  with config.unlocked():
    # 0 makes a reward that is only logged; 'format' counts with with_format
    config.task.weights = ml_collections.ConfigDict(
      {'correct': 1.0, 'length': 1.0, 'format': 1.0}
    )
  return config


def _smollm2(config):
  config.model = 'smollm2-135m'
  config.task.update(
    source='arithmetic',
    level=(1, 2),
    style='expression',
    limit_tokens=18,  # a brief answer takes at most 18, a long one 19 or more
    conditioned=True,
    with_format=False,
    seed=0,
    num_train=400,
    num_heldout=200,
  )
  config.update(
    num_steps=16,
    prompts_per_step=8,
    group_size=4,
    prompts_per_micro_batch=4,
    max_prompt_tokens=120,  # the longest has 116
    max_new_tokens=48,
    learning_rate=1e-5,
    warmup_share=0.1,
    save_every=4,
    heldout=200,
  )


def _gsm8k(config):
  config.model = 'smollm2-135m'
  config.task.update(
    source='gsm8k',
    train='data/gsm8k_train.jsonl',
    heldout='data/gsm8k_test.jsonl',
    limit_tokens=128,
    conditioned=True,
    with_format=True,
  )
  config.update(
    num_steps=100,
    prompts_per_step=8,
    group_size=8,
    prompts_per_micro_batch=2,
    max_prompt_tokens=384,
    max_new_tokens=192,
    learning_rate=5e-6,
    warmup_share=0.1,
    eval_batch_size=32,
  )


def _tiny(config):
  config.model = 'bytes'
  config.shape = ml_collections.ConfigDict(shapes.TINY)
  config.task.update(
    source='tiny',
    limit_tokens=11,
    conditioned=True,
    with_format=True,
    seed=0,
    num_train=4096,
    num_heldout=512,
  )
  config.update(
    num_steps=150,
    prompts_per_step=16,
    group_size=8,
    max_prompt_tokens=8,
    max_new_tokens=26,
    learning_rate=1e-4,
    save_every=50,
    heldout=512,
    eval_batch_size=512,
    warm_start_updates=500,
    warm_start_rate=5e-3,
  )


def _tiny_collapse(config):
  _tiny(config)
  config.task.conditioned = False
  config.learning_rate = 1e-3
  config.num_steps = 60


def _tiny_conflict(config):
  """Two rewards against each other: right answers are longer than the limit."""
  _tiny(config)
  config.task.update(conditioned=False, with_format=False)
  config.num_steps = 100


def _paper(config):
  """512 prompts x 16, mini-batch of 64 prompts, limit 4000 of 8000 tokens.

  The paper trains on DeepScaleR-Preview; here GSM8K from the hub stands in,
  until `config.task` names other data.
  """
  config.task.update(
    source='gsm8k',
    train='openai/gsm8k',
    heldout='openai/gsm8k',
    limit_tokens=4000,
    conditioned=True,
    with_format=False,
  )
  config.update(
    num_steps=500,
    prompts_per_step=512,
    group_size=16,
    prompts_per_rollout=32,
    prompts_per_update=64,
    prompts_per_micro_batch=4,
    max_prompt_tokens=1024,
    max_new_tokens=8000,
    learning_rate=1e-6,
    clip_low=0.2,
    clip_high=0.28,
    kl_coef=5e-4,
    kl_estimator='k2',
    compute_dtype='bfloat16',
    remat='block',
    eval_every=50,
  )


def _r1_1p5b(config):
  _paper(config)
  shapes.use(config, 'r1_1p5b')


def _r1_7b(config):
  _paper(config)
  shapes.use(config, 'r1_7b')


def _qwen3_4b(config):
  _paper(config)
  shapes.use(config, 'qwen3_4b')


VARIANTS = {
  'smollm2': _smollm2,
  'gsm8k': _gsm8k,
  'tiny': _tiny,
  'tiny_collapse': _tiny_collapse,
  'tiny_conflict': _tiny_conflict,
  'r1_1p5b': _r1_1p5b,
  'r1_7b': _r1_7b,
  'qwen3_4b': _qwen3_4b,
}
