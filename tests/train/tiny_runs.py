"""Real runs of the whole loop that take seconds: model, task, settings."""

import jax

from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.policy.tokenizer import byte_tokenizer
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.base import Task
from gdpo_jax.tasks.math_len import math_len
from gdpo_jax.train import loop
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

TOKENIZER = byte_tokenizer()


def byte_model():
  """(policy, params) of a byte-level model of one layer."""
  config = PolicyConfig(
    family='llama',
    vocab_size=260,
    width=32,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=8,
    mlp_width=64,
    tied=True,
    eos_ids=TOKENIZER.eos_ids,
  )
  policy = make_policy(config)
  return policy, policy.init(jax.random.key(0))


def digits(completions, **_):
  """A reward that an untrained model meets now and then."""
  return [float(sum(c.isdigit() for c in text)) for text in completions]


def short(completions, completion_ids, **_):
  return [float(len(ids) < 8) for ids in completion_ids]


def task(*rewards) -> Task:
  problems = math_len('tiny', limit_tokens=11, num_train=64, num_heldout=20)
  return Task(
    name='digits',
    train=problems.train,
    heldout=problems.heldout,
    rewards=rewards or (Reward(digits), Reward(short, weight=0.5)),
  )


def settings(**changes) -> Settings:
  base = {
    'num_steps': 4,
    'prompts_per_step': 8,
    'group_size': 4,
    'max_prompt_tokens': 8,
    'max_new_tokens': 8,
    'learning_rate': 1e-3,
    'mesh_data': 4,
    'save_every': 2,
    'samples_every': 2,
  }
  return Settings(**{**base, **changes})


def train(model, directory, s, *, the_task=None, **kwargs):
  policy, params = model
  return loop.train(
    policy,
    params,
    TOKENIZER,
    the_task or task(),
    s,
    directory,
    progress=Progress(quiet=True),
    **kwargs,
  )
