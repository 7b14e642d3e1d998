"""Makes the golden logits: tiny random models run by transformers on torch.

  python tests/policy/golden/make.py

writes one .npz per case beside this file: the config as JSON, the weights as
transformers names them, a left-padded batch and its float32 logits. A few
hundred lines of random numbers, not a trained model; the widths are tiny so
that the files are. Needs torch.
"""

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).parent
SIZES = {
  'vocab_size': 67,
  'hidden_size': 24,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 8,
  'intermediate_size': 40,
  'max_position_embeddings': 256,
  'rms_norm_eps': 1e-5,
  'rope_theta': 1e4,
  'bos_token_id': 1,
  'eos_token_id': 2,
  'pad_token_id': 0,
}
LLAMA3 = {
  'rope_type': 'llama3',
  'factor': 8.0,
  'low_freq_factor': 1.0,
  'high_freq_factor': 4.0,
  'original_max_position_embeddings': 32,
}
# name -> what differs from SIZES; 3 query heads per key head in one of them
CASES = {
  'llama_tied': {
    'model_type': 'llama',
    'tie_word_embeddings': True,
    'num_attention_heads': 3,
    'num_key_value_heads': 1,
  },
  'llama_scaled_untied': {
    'model_type': 'llama',
    'tie_word_embeddings': False,
    'rope_scaling': LLAMA3,
  },
  'qwen2_untied': {'model_type': 'qwen2', 'tie_word_embeddings': False},
  'qwen2_tied': {'model_type': 'qwen2', 'tie_word_embeddings': True},
  'qwen3_tied': {'model_type': 'qwen3', 'tie_word_embeddings': True},
  'qwen3_untied': {'model_type': 'qwen3', 'tie_word_embeddings': False},
}


def run(case: str, seed: int = 0):
  """(config, weights, tokens, mask, logits) of a random model of `case`."""
  import torch
  import transformers

  config = SIZES | CASES[case]
  model_class = {
    'llama': (transformers.LlamaForCausalLM, transformers.LlamaConfig),
    'qwen2': (transformers.Qwen2ForCausalLM, transformers.Qwen2Config),
    'qwen3': (transformers.Qwen3ForCausalLM, transformers.Qwen3Config),
  }[config['model_type']]
  model = model_class[0](model_class[1](**json.loads(json.dumps(config))))
  generator = torch.Generator().manual_seed(seed)
  with torch.no_grad():
    # Larger than at initialization, so that attention is far from uniform and
    # biases and norms matter.
    for name, weight in model.named_parameters():
      noise = torch.randn(weight.shape, generator=generator)
      weight.copy_(1 + 0.2 * noise if 'norm' in name else 0.3 * noise)
  rng = np.random.default_rng(seed)
  tokens = rng.integers(3, config['vocab_size'], (3, 48))
  mask = np.arange(48) >= np.array([[0], [7], [40]])
  tokens = np.where(mask, tokens, config['pad_token_id'])
  with torch.no_grad():
    logits = model.float()(
      torch.tensor(tokens),
      attention_mask=torch.tensor(mask.astype(np.int64)),
      position_ids=torch.tensor(np.maximum(mask.cumsum(1) - 1, 0)),
    ).logits.numpy()
  weights = {
    name: weight.detach().numpy() for name, weight in model.named_parameters()
  }
  return config, weights, tokens, mask, logits


if __name__ == '__main__':
  for case in CASES:
    config, weights, tokens, mask, logits = run(case)
    np.savez_compressed(
      HERE / f'{case}.npz',
      config=json.dumps(config),
      tokens=tokens.astype(np.int32),
      mask=mask,
      logits=logits,
      **{f'weight:{name}': weight for name, weight in weights.items()},
    )
    print(case, logits.shape)
