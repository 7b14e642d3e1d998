"""What a user of TRL has: a data set, three reward functions, a trainer.

Run by tests/test_trainer.py after the import and the class names are changed,
and by hand with TRL where it is installed:

  python tests/trl_script.py MODEL_DIRECTORY OUTPUT_DIRECTORY
"""

import sys

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def correct(prompts, completions, answer, **kwargs):
  return [float(c.strip() == a) for c, a in zip(completions, answer)]


def digits(completions, **kwargs):
  return [sum(ch.isdigit() for ch in c) / max(len(c), 1) for c in completions]


def short(completions, log_metric=None, **kwargs):
  if log_metric:
    log_metric('chars', sum(map(len, completions)) / len(completions))
  return [
    1.0 if len(c) <= 4 else None if len(c) == 5 else 0.0 for c in completions
  ]


dataset = Dataset.from_list(
  [
    {'prompt': f'{a}+{b}=', 'answer': str(a + b)}
    for a in range(10)
    for b in range(4)
  ]
)

if __name__ == '__main__':
  model, output_dir = sys.argv[1:3]
  args = GRPOConfig(
    output_dir=output_dir,
    num_generations=4,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_completion_length=8,
    max_steps=3,
    learning_rate=1e-4,
    beta=0.01,
    reward_weights=[1.0, 0.5, 0.5],
    logging_steps=1,
    report_to='none',
    save_strategy='no',
    use_vllm=False,
  )
  trainer = GRPOTrainer(
    model=model,
    reward_funcs=[correct, digits, short],
    args=args,
    train_dataset=dataset,
  )
  trainer.train()
  trainer.save_model(output_dir + '/final')
