"""Configs of experiments/chat.py: intent, relevance, conversion, brevity.

python experiments/chat.py --config=experiments/configs/chat.py:VARIANT

Costs and results are expected ones unless said to be measured.

default         SmolLM2-135M-Instruct as the assistant, and frozen as the model
                that reads its replies. Cost: about 20 minutes on two cores, one
                of them for the reader. Expected: brevity and conversion rise.
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
