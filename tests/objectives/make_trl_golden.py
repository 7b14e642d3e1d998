"""Makes trl_golden.json: advantages as TRL's own trainer computes them.

Runs TRL's GRPOTrainer for one step on a tiny random model, with reward
functions that return the rows of a table, and reads the advantages that it
logged. Needs torch, datasets, tokenizers, transformers and trl (1.16.0 made the
file).

  python tests/objectives/make_trl_golden.py
"""

import json
import pathlib
import tempfile

import numpy as np
import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
  LlamaConfig,
  LlamaForCausalLM,
  PreTrainedTokenizerFast,
)
from trl import GRPOConfig, GRPOTrainer

PROMPTS, GROUP = 3, 4
OUT = pathlib.Path(__file__).with_name('trl_golden.json')


def tables():
  """Name -> rewards [P][G][K], None where missing, and weights."""
  rng = np.random.default_rng(0)
  full = np.round(rng.normal(size=(PROMPTS, GROUP, 2)), 3).tolist()
  three = np.round(rng.random((PROMPTS, GROUP, 3)) * 4 - 1, 3).tolist()
  gaps = [
    [[1.0, 0.25], [None, 0.5], [0.0, None], [0.5, 1.0]],
    [[None, None], [2.0, 1.0], [1.0, None], [None, 0.0]],
    [[None, 1.0], [None, 0.0], [1.0, 0.5], [None, 2.0]],  # one valid value
  ]
  constant = [
    [[0.5, 1.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.25]],
    [[1.0, 0.5], [0.0, 0.5], [0.0, 0.5], [1.0, 0.5]],
    [[0.5, 0.5]] * 4,
  ]
  eval_only = [
    [[1.0, 3.0], [0.0, 1.0], [None, 2.0], [0.5, 0.0]],
    [[0.0, 1.0], [1.0, 2.0], [0.25, 1.0], [1.0, None]],
    [[1.0, 1.0], [0.0, None], [0.75, 0.5], [None, None]],
  ]
  return {
    'full': (full, [1.0, 1.0]),
    'weighted': (three, [1.0, 0.5, -2.0]),
    'missing': (gaps, [1.0, 2.0]),
    'constant': (constant, [1.0, 1.0]),
    'weight_zero': (eval_only, [1.0, 0.0]),
  }


def tiny_model():
  words = {word: i for i, word in enumerate(['<pad>', '<eos>', *'abcdefgh'])}
  core = Tokenizer(models.WordLevel(words, unk_token='<pad>'))
  core.pre_tokenizer = pre_tokenizers.Whitespace()
  tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, pad_token='<pad>', eos_token='<eos>'
  )
  torch.manual_seed(0)
  config = LlamaConfig(
    vocab_size=len(words),
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    pad_token_id=0,
    eos_token_id=1,
  )
  return LlamaForCausalLM(config), tokenizer


def trl_advantages(rewards, weights, **settings):
  """[P][G] from one step of TRL's trainer."""
  rows = [row for group in rewards for row in group]

  def reward(k):
    def score(prompts, completions, **columns):
      assert len(completions) == len(rows)
      return [row[k] for row in rows]

    score.__name__ = f'reward_{k}'
    return score

  model, tokenizer = tiny_model()
  with tempfile.TemporaryDirectory() as out:
    trainer = GRPOTrainer(
      model=model,
      processing_class=tokenizer,
      reward_funcs=[reward(k) for k in range(len(weights))],
      train_dataset=Dataset.from_dict({'prompt': ['a b', 'c d', 'e f']}),
      args=GRPOConfig(
        output_dir=out,
        per_device_train_batch_size=PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=4,
        max_steps=1,
        reward_weights=weights,
        report_to=[],
        save_strategy='no',
        use_cpu=True,
        bf16=False,
        **settings,
      ),
    )
    trainer.train()
  values = list(trainer._logs['advantages'])[: PROMPTS * GROUP]
  return np.array(values).reshape(PROMPTS, GROUP).tolist()


def main():
  cases = []
  for name, (rewards, weights) in tables().items():
    case = {'name': name, 'rewards': rewards, 'weights': weights}
    case['normalize_then_sum'] = trl_advantages(
      rewards, weights, multi_objective_aggregation='normalize_then_sum'
    )
    for scale in ('group', 'batch', 'none'):
      case[f'sum_then_normalize/{scale}'] = trl_advantages(
        rewards,
        weights,
        multi_objective_aggregation='sum_then_normalize',
        scale_rewards=scale,
      )
    cases.append(case)
  versions = {'trl': trl.__version__, 'torch': torch.__version__}
  lines = ',\n  '.join(json.dumps(case) for case in cases)
  OUT.write_text(
    f'{{"made_with": {json.dumps(versions)},\n "cases": [\n  {lines}\n]}}\n',
    encoding='utf-8',
  )


if __name__ == '__main__':
  main()
