"""Configs of experiments/gsm8k.py: correct, integer, format.

python experiments/gsm8k.py --config=experiments/configs/gsm8k.py:VARIANT

Costs and results are expected ones unless said to be measured.

default         SmolLM2-135M-Instruct on word problems and bare sums made here.
                Measured: 6:17 on two cores, a quarter of them busy with other
                work. Sampled, first step to last: correct 0.34 -> 0.44, integer
                0.88 -> 0.97, format 0.47 -> 0.94; held out, greedy: correct
                0.51 -> 0.64, integer 1.00 -> 1.00, format 0.92 -> 1.00.
:tiny           a byte-level model of 10^5 parameters on two-digit additions,
                after a supervised start. Cost: two minutes on two cores.
                Expected: correct 0.4 -> 0.6 (sampled), format 1.
:gsm8k          SmolLM2 on GSM8K (two files in `data/`). Cost: hours on two
                cores. Expected: a model of this size gets almost none right;
                format and integer rise.
:qwen2p5_1p5b   the public GDPO recipe for GSM8K: 16 answers to a prompt, rate
                5e-6 along a cosine after a tenth of warm-up, prompts of 512
                and completions of 1024 tokens. For accelerators; not run here.
"""

import ml_collections
import shapes
from base_config import variant_config


def get_config(variant: str = 'smollm2') -> ml_collections.ConfigDict:
  config = variant_config('gsm8k', VARIANTS, variant)
  with config.unlocked():
    # 0 makes a reward that is only logged
    config.task.weights = ml_collections.ConfigDict(
      {'correct': 1.0, 'integer': 1.0, 'format': 1.0}
    )
  return config


def _smollm2(config):
  config.model = 'smollm2-135m'
  config.task.update(
    source='arithmetic',
    level=(1, 2),
    style='mixed',
    worked=('brief', 'brief'),
    seed=0,
    num_train=400,
    num_heldout=200,
  )
  config.update(
    num_steps=16,
    prompts_per_step=8,
    group_size=4,
    prompts_per_micro_batch=4,
    max_prompt_tokens=152,
    max_new_tokens=48,
    learning_rate=1e-5,
    warmup_share=0.1,
    save_every=4,
    heldout=200,
  )


def _tiny(config):
  config.model = 'bytes'
  config.shape = ml_collections.ConfigDict(shapes.TINY)
  config.task.update(source='tiny', seed=0, num_train=4096, num_heldout=512)
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


def _recipe(config):
  config.update(
    group_size=16,
    learning_rate=5e-6,
    schedule='cosine',
    warmup_share=0.1,
    max_prompt_tokens=512,
    max_new_tokens=1024,
  )


def _gsm8k(config):
  _recipe(config)
  config.model = 'smollm2-135m'
  config.task.update(
    source='gsm8k',
    train='data/gsm8k_train.jsonl',
    heldout='data/gsm8k_test.jsonl',
    worked=2,
  )
  config.update(
    num_steps=100,
    prompts_per_step=4,
    group_size=8,
    prompts_per_micro_batch=1,
    max_new_tokens=192,
    eval_batch_size=32,
  )


def _qwen2p5_1p5b(config):
  """One epoch of GSM8K: 7473 prompts, 64 a step."""
  _recipe(config)
  shapes.use(config, 'qwen2p5_1p5b')
  config.task.update(
    source='gsm8k', train='openai/gsm8k', heldout='openai/gsm8k'
  )
  config.update(
    num_steps=117,
    prompts_per_step=64,
    prompts_per_rollout=32,
    prompts_per_micro_batch=4,
    compute_dtype='bfloat16',
    remat='block',
    eval_every=50,
  )


VARIANTS = {
  'smollm2': _smollm2,
  'tiny': _tiny,
  'gsm8k': _gsm8k,
  'qwen2p5_1p5b': _qwen2p5_1p5b,
}
