"""A shop assistant with four objectives, scored by a model and a customer.

  python experiments/chat.py --config=experiments/configs/chat.py

Single-turn. Before the run, two heads are fitted to a frozen model that reads
replies, and how far its scores agree with labels by hand is printed. A run that
was stopped goes on when the same command is given again.
"""

import sys

import launcher

from gdpo_jax.policy import weights
from gdpo_jax.tasks import chat, chat_reader
from gdpo_jax.tasks.chat_labels import LABELLED


def task_of(config):
  """The task of a config; fits the reader, about a minute on two cores."""
  task = config.task.to_dict()
  model, num_replies = task.pop('reader'), task.pop('reader_replies')
  reader = chat_reader.fit(weights.load(model), num_replies)
  accuracy, count = chat.agreement(reader, LABELLED)
  for name, share in accuracy.items():
    print(
      f'{name}: agrees with {share:.0%} of {count[name]} labels by hand',
      file=sys.stderr,
    )
  return chat.chat(reader, **task)


if __name__ == '__main__':
  launcher.experiment(task_of)
