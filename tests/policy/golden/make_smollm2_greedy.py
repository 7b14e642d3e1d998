"""Greedy continuations of five chats by SmolLM2, from transformers on torch.

  python tests/policy/golden/make_smollm2_greedy.py

The weights come from transformers' own reading of the GGUF file, so nothing
here depends on gdpo_jax but the path of that file. As transformers keeps such
a model in its quantized form, its dequantized state dict is loaded into a
plain LlamaForCausalLM in float32.
"""

import json
import pathlib

import torch
import transformers

from gdpo_jax.policy import weights

CHATS = [
  [{'role': 'user', 'content': 'What is the capital of France?'}],  # ends early
  [{'role': 'user', 'content': 'Tom has 12 apples and buys 7. How many now?'}],
  [
    {'role': 'system', 'content': 'You are a patient teacher.'},
    {'role': 'user', 'content': 'Why does the moon change its shape?'},
  ],
  [
    {'role': 'user', 'content': 'Name a fruit.'},
    {'role': 'assistant', 'content': 'An apple.'},
    {'role': 'user', 'content': 'Describe it in detail, please.'},
  ],
  [
    {
      'role': 'user',
      'content': 'Write a Python function that adds two numbers.',
    }
  ],
  [
    {
      'role': 'user',
      'content': 'Tell me a story about a caf\u00e9 in K\u00f6ln.',
    }
  ],
]
NEW_TOKENS = 32
STRIDE = 256  # of the logits that are kept


def reference_model(file):
  read = transformers.AutoModelForCausalLM.from_pretrained(
    file.parent, gguf_file=file.name, dtype=torch.float32
  )
  config = read.config.to_dict()
  config.pop('quantization_config', None)
  model = transformers.LlamaForCausalLM(
    transformers.LlamaConfig.from_dict(config)
  )
  model.load_state_dict(read.state_dict())
  return model.float().eval()


def main():
  file = weights.fetch('smollm2-135m')
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    file.parent, gguf_file=file.name
  )
  model = reference_model(file)
  records = []
  for messages in CHATS:
    text = tokenizer.apply_chat_template(
      messages, tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False)['input_ids']
    ids, margins, step, cache = list(prompt), [], prompt, None
    with torch.no_grad():
      for _ in range(NEW_TOKENS):
        output = model(torch.tensor([step]), past_key_values=cache)
        logits, cache = output.logits[0, -1], output.past_key_values
        if len(ids) == len(prompt):
          first = logits
        top = logits.topk(2).values
        margins.append(float(top[0] - top[1]))
        step = [int(logits.argmax())]
        ids += step
        if step == [model.config.eos_token_id]:
          break
    records.append(
      {
        'messages': messages,
        'text': text,
        'prompt': prompt,
        'tokens': ids[len(prompt) :],
        'smallest_margin': round(min(margins), 4),
        'first_logits': [round(float(x), 5) for x in first[::STRIDE]],
      }
    )
    print(records[-1]['smallest_margin'], repr(tokenizer.decode(ids)))
  out = pathlib.Path(__file__).with_name('smollm2_greedy.json')
  versions = {
    'torch': torch.__version__,
    'transformers': transformers.__version__,
  }
  out.write_text(
    json.dumps(
      {'versions': versions, 'stride': STRIDE, 'chats': records}, indent=1
    )
    + '\n'
  )


if __name__ == '__main__':
  main()
