"""Configs of experiments/chat.py: intent, relevance, conversion, brevity.

python experiments/chat.py --config=experiments/configs/chat.py:VARIANT

Costs and results are expected ones unless said to be measured.

default         SmolLM2-135M-Instruct as the assistant, and frozen as the model
                that reads its replies. Measured: 14 minutes of both cores (42
                by the clock, on a machine with a load of 13), 10 GiB. Sampled,
                first step to last: intent 0.22 -> 0.84, brevity 0.16 -> 0.56,
                relevance 0.50 -> 0.51, conversion 0.00 -> 0.00; held out,
                greedy, 60 visitors: intent 0.42 -> 0.94, brevity 0.32 -> 0.92,
                relevance 0.59 -> 0.66, conversion 0.06 -> 0.18.
:qwen2p5_1p5b   the same with Qwen2.5-1.5B-Instruct in both parts. For
                accelerators; not run here.
"""

import ml_collections
import shapes
from base_config import variant_config


def get_config(variant: str = 'smollm2') -> ml_collections.ConfigDict:
  config = variant_config('chat', VARIANTS, variant)
  with config.unlocked():
    config.task.update(
      reader=config.model,  # reads replies; frozen, with heads of its own
      reader_replies=300,  # labelled replies that it learns from
      conditioned=True,  # the others count only where intent > 0.7
      seed=0,
      num_train=300,
      num_heldout=60,
      worked=2,
    )
    # 0 makes a reward that is only logged
    config.task.weights = ml_collections.ConfigDict(
      {'intent': 1.0, 'relevance': 1.0, 'conversion': 1.0, 'brevity': 1.0}
    )
    config.data.reward = 'conversion'
  return config


def _smollm2(config):
  config.model = 'smollm2-135m'
  config.task.limit_tokens = 20
  config.update(
    num_steps=16,
    prompts_per_step=8,
    group_size=4,
    prompts_per_micro_batch=4,
    max_prompt_tokens=176,
    max_new_tokens=48,
    learning_rate=1e-5,
    warmup_share=0.1,
    save_every=4,
    heldout=60,
    eval_batch_size=30,
  )


def _qwen2p5_1p5b(config):
  shapes.use(config, 'qwen2p5_1p5b')
  config.task.limit_tokens = 20
  config.update(
    num_steps=200,
    prompts_per_step=64,
    group_size=8,
    prompts_per_micro_batch=8,
    max_prompt_tokens=256,
    max_new_tokens=96,
    learning_rate=1e-6,
    kl_coef=1e-3,
    compute_dtype='bfloat16',
    remat='block',
    eval_every=50,
  )


VARIANTS = {'smollm2': _smollm2, 'qwen2p5_1p5b': _qwen2p5_1p5b}
