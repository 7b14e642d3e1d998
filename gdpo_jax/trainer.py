"""GDPOTrainer, for people who come from TRL: their options, our loop.

  GDPOConfig (TRL's names) --settings--> train.settings.Settings
  data set, reward functions --> tasks.base.Task
  GDPOTrainer.train() --> train.loop.train, and nothing else

Rows are counted as in TRL: `per_device_train_batch_size` completions on each
device, `gradient_accumulation_steps` of those in an optimizer step,
`steps_per_generation` of those in a rollout. Groups stay whole, so each of the
sums must be a multiple of `num_generations`. What is different stands in
`experiments/COMING_FROM.md`.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from gdpo_jax import sharding
from gdpo_jax.policy import hf, weights
from gdpo_jax.policy.hf import Pretrained
from gdpo_jax.policy.policy import make_policy
from gdpo_jax.rewards.pipeline import Pipeline, Reward, reward_weights
from gdpo_jax.sampling import Sampling
from gdpo_jax.tasks import records
from gdpo_jax.tasks.base import Task
from gdpo_jax.train import loop
from gdpo_jax.train.evaluate import evaluate
from gdpo_jax.train.progress import Progress
from gdpo_jax.train.settings import Settings

# TRL's name of a loss -> our policy loss and denominator
_LOSSES = {
  'grpo': ('clipped', 'row'),
  'dapo': ('clipped', 'token'),
  'bnpo': ('clipped', 'token'),
  'dr_grpo': ('clipped', 'constant'),
  'cispo': ('cispo', 'token'),
}
_SCHEDULES = {
  'constant': 'constant',
  'constant_with_warmup': 'constant',
  'linear': 'linear',
  'cosine': 'cosine',
}


@dataclasses.dataclass
class GDPOConfig:
  """Options of a run under the names of TRL's GRPOConfig.

  An option that is not here is refused by Python. Those of the last group are
  taken, so that scripts run unchanged, and do nothing.
  """

  output_dir: str | os.PathLike = 'gdpo-output'

  # How much: rows are completions, steps are optimizer steps.
  num_generations: int = 8  # G
  per_device_train_batch_size: int = 8
  gradient_accumulation_steps: int = 1
  steps_per_generation: int | None = None  # None: gradient_accumulation_steps
  generation_batch_size: int | None = None  # rows over all devices, instead
  num_iterations: int = 1  # passes over a rollout
  num_train_epochs: float = 3.0
  max_steps: int = -1  # wins over num_train_epochs where positive
  max_prompt_length: int = 512  # tokens; longer prompts are left out
  max_completion_length: int = 256  # tokens, EOS included
  temperature: float = 1.0
  seed: int = 42

  # What is optimized.
  algorithm: str = 'gdpo'  # a row of train.settings.ALGORITHMS
  # TRL's way to say it: 'normalize_then_sum' is gdpo, 'sum_then_normalize' grpo
  multi_objective_aggregation: str | None = None
  scale_rewards: str | bool | None = None  # 'none' with sum_then_normalize
  reward_weights: Sequence[float] | None = None
  loss_type: str = 'dapo'
  importance_sampling_level: str = 'token'  # 'sequence': GSPO's ratio
  epsilon: float = 0.2
  epsilon_high: float | None = None  # None: epsilon
  delta: float | None = None  # upper bound of the ratio, dual clip
  beta: float = 0.0  # of the KL term; 0: no reference model
  entropy_coef: float = 0.0
  mask_truncated_completions: bool = False

  # Optimizer.
  learning_rate: float = 1e-6
  lr_scheduler_type: str = 'linear'
  warmup_ratio: float = 0.0
  warmup_steps: float = 0  # below 1: a share, as in transformers 5
  weight_decay: float = 0.0
  adam_beta1: float = 0.9
  adam_beta2: float = 0.999
  max_grad_norm: float = 1.0

  # Numbers, and what is written.
  bf16: bool = False  # inputs of the matrix products of training
  gradient_checkpointing: bool = False
  eval_strategy: str = 'no'  # 'no': before and after; 'steps': every eval_steps
  eval_steps: int = 500
  save_strategy: str = 'steps'  # 'no': only at the end
  save_steps: int = 500
  save_total_limit: int = 2
  per_device_eval_batch_size: int = 64
  # anything else, by our own names: {'max_rounds': 4}
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  # Without effect: the loop writes every step, and shows what it does.
  logging_steps: float = 1
  logging_strategy: str = 'steps'
  log_completions: bool = True
  report_to: Any = None
  run_name: str | None = None
  disable_tqdm: bool | None = None
  use_vllm: bool = False
  remove_unused_columns: bool = False
  shuffle_dataset: bool = True

  def __post_init__(self):
    for name, right in (
      ('use_vllm', False),
      ('remove_unused_columns', False),
      ('shuffle_dataset', True),
    ):
      if getattr(self, name) != right:
        raise ValueError(
          f'{name}={getattr(self, name)} is not supported; leave it at {right}.'
        )

  def to_settings(self, num_prompts: int, num_devices: int = 1) -> Settings:
    """Our settings for a data set of so many prompts.

    Raises:
      ValueError: numbers of rows that hold no whole groups, or an option whose
        value has no counterpart.
    """
    per_step = self._prompts(
      self.generation_batch_size
      or self.per_device_train_batch_size
      * (self.steps_per_generation or self.gradient_accumulation_steps)
      * num_devices,
      'a rollout',
    )
    per_update = self._prompts(
      self.per_device_train_batch_size
      * self.gradient_accumulation_steps
      * num_devices,
      'an optimizer step',
    )
    per_update = min(per_update, per_step)
    at_once = self.per_device_train_batch_size * num_devices
    # the largest part of an update that fits the device, in whole groups
    micro = max(
      n
      for n in range(1, per_update + 1)
      if per_update % n == 0 and (n == 1 or n * self.num_generations <= at_once)
    )
    updates = self.num_iterations * max(1, per_step // per_update)
    if self.max_steps > 0:
      num_steps = math.ceil(self.max_steps / updates)
    else:
      num_steps = math.ceil(self.num_train_epochs * num_prompts / per_step)
    warmup = self.warmup_steps
    if warmup >= 1:
      warmup = min(warmup / (num_steps * updates), 0.99)
    loss, denominator = self._choice('loss_type', _LOSSES)
    if self.importance_sampling_level == 'sequence':
      loss = 'gspo'
    elif self.importance_sampling_level != 'token':
      self._refuse('importance_sampling_level', "'token' or 'sequence'")

    def every(strategy: str, steps: int) -> int:
      return max(1, round(steps / updates)) if strategy == 'steps' else 0

    chosen = {
      'algorithm': self._algorithm(),
      'policy_loss': loss,
      'denominator': denominator,
      'clip_low': self.epsilon,
      'clip_high': self.epsilon_high or self.epsilon,
      'dual_clip': self.delta,
      'kl_coef': self.beta,
      'entropy_coef': self.entropy_coef,
      'num_steps': num_steps,
      'prompts_per_step': per_step,
      'group_size': self.num_generations,
      'prompts_per_update': per_update,
      'epochs_per_batch': self.num_iterations,
      'prompts_per_micro_batch': micro,
      'max_prompt_tokens': self.max_prompt_length,
      'max_new_tokens': self.max_completion_length,
      'temperature': self.temperature,
      'mask_truncated': self.mask_truncated_completions,
      'learning_rate': self.learning_rate,
      'schedule': self._choice('lr_scheduler_type', _SCHEDULES),
      'warmup_share': warmup or self.warmup_ratio,
      'weight_decay': self.weight_decay,
      'adam_b1': self.adam_beta1,
      'adam_b2': self.adam_beta2,
      'clip_norm': self.max_grad_norm,
      'seed': self.seed,
      'compute_dtype': 'bfloat16' if self.bf16 else 'float32',
      'remat': 'block' if self.gradient_checkpointing else 'none',
      'eval_every': every(self.eval_strategy, self.eval_steps),
      'save_every': every(self.save_strategy, self.save_steps),
      'keep_checkpoints': self.save_total_limit,
    }
    unknown = set(self.settings) - {
      f.name for f in dataclasses.fields(Settings)
    }
    if unknown:
      raise ValueError(
        f'settings has {sorted(unknown)}, which gdpo_jax.train.settings does '
        'not.'
      )
    return Settings(**{**chosen, **self.settings}).resolve()

  def _prompts(self, rows: int, what: str) -> int:
    if rows % self.num_generations or not rows:
      raise ValueError(
        f'{what} of {rows} rows does not hold whole groups of num_generations '
        f'{self.num_generations}; make per_device_train_batch_size * '
        'gradient_accumulation_steps (* devices) a multiple of it.'
      )
    return rows // self.num_generations

  def _algorithm(self) -> str:
    if self.multi_objective_aggregation is None:
      if self.scale_rewards is not None:
        self._refuse(
          'scale_rewards', "None without multi_objective_aggregation='sum_...'"
        )
      return self.algorithm
    if self.multi_objective_aggregation == 'normalize_then_sum':
      return 'gdpo'
    if self.multi_objective_aggregation != 'sum_then_normalize':
      self._refuse(
        'multi_objective_aggregation',
        "'normalize_then_sum' or 'sum_then_normalize'",
      )
    if self.scale_rewards in (None, True, 'group'):
      return 'grpo'
    if self.scale_rewards in (False, 'none'):
      return 'dr_grpo'
    return self._refuse('scale_rewards', "'group' or 'none'")

  def _choice(self, name: str, known: Mapping[str, Any]) -> Any:
    if getattr(self, name) not in known:
      self._refuse(name, f'one of {sorted(known)}')
    return known[getattr(self, name)]

  def _refuse(self, name: str, expected: str):
    raise ValueError(f'{name} is {getattr(self, name)!r}; give {expected}.')


RewardFunction = Callable[..., Any] | Reward


class GDPOTrainer:
  """Trains a model on a data set with several reward functions.

  A thin shell: whatever it does can be done with `train.loop.train`, a `Task`
  and `Settings`, where more can be said.
  """

  def __init__(
    self,
    model: str | os.PathLike | Pretrained,
    reward_functions: RewardFunction | Sequence[RewardFunction] = (),
    args: GDPOConfig | Settings | None = None,
    train_dataset: Any = None,
    eval_dataset: Any = None,
    *,
    reward_weights: Sequence[float] | None = None,
    conditional_thresholds: Sequence[Any] | Mapping[str, Any] | None = None,
    reward_funcs: RewardFunction | Sequence[RewardFunction] = (),
    output_dir: str | os.PathLike | None = None,
    progress: Progress | None = None,
  ):
    """Checks everything that can be checked, then loads the model.

    Args:
      model: a directory in Hugging Face's layout, a GGUF file, an id on the hub,
        a known name (`policy.weights`), or what was loaded.
      reward_functions: in TRL's calling convention, or `Reward`s, which say
        more (time-outs, isolation, ranges).
      args: a GDPOConfig, or plain Settings.
      train_dataset: a list of records, a data set of `datasets`, or what
        `tasks.records.read` opens. Every record has 'prompt' (a string or
        messages); the other columns go to the reward functions that ask.
      eval_dataset: the same; answered greedily before and after training.
      reward_weights: one per function; `args.reward_weights` by default, else 1.
      conditional_thresholds: when each reward counts, one entry per function or
        by name of the reward: None, text ('correct>=1') or ('correct', 1.0).
      reward_funcs: TRL's name of `reward_functions`.
      output_dir: where the run is written; `args.output_dir` by default.
    Raises:
      ValueError: what is missing, or does not fit.
    """
    args = args or GDPOConfig()
    if isinstance(args, GDPOConfig):
      output_dir = output_dir or args.output_dir
      reward_weights = reward_weights or args.reward_weights
    elif not isinstance(args, Settings):
      raise ValueError(
        f'args is a {type(args).__name__}; give a gdpo_jax.GDPOConfig, whose '
        "options have TRL's names, or gdpo_jax.train.settings.Settings."
      )
    if output_dir is None:
      raise ValueError('say where the run is written: output_dir.')
    if train_dataset is None:
      raise ValueError('train_dataset is missing.')
    functions = _as_list(reward_functions) or _as_list(reward_funcs)
    self.task = Task(
      name='gdpo_trainer',
      train=_examples(train_dataset, 'train'),
      heldout=[] if eval_dataset is None else _examples(eval_dataset, 'test'),
      rewards=_rewards(functions, reward_weights, conditional_thresholds),
    )
    devices = jax.device_count()
    if isinstance(args, GDPOConfig):
      settings = args.to_settings(len(self.task.train), devices)
      self._eval_batch = args.per_device_eval_batch_size
    else:
      settings, self._eval_batch = args.resolve(), 64
    self.settings = settings
    self.output_dir = pathlib.Path(output_dir)
    if not isinstance(model, Pretrained):
      model = weights.load(model)
    length = settings.max_prompt_tokens + settings.max_new_tokens
    if length > model.config.max_positions:
      raise ValueError(
        f'max_prompt_length {settings.max_prompt_tokens} + max_completion_length '
        f'{settings.max_new_tokens} exceed the {model.config.max_positions} '
        'positions of the model; lower either.'
      )
    self.tokenizer, self.config = model.tokenizer, model.config
    self.params = self._start = model.params
    self.policy = make_policy(
      model.config, compute_dtype=settings.compute_dtype, remat=settings.remat
    )
    self._progress = progress

  def train(self, resume_from_checkpoint: bool | None = None) -> loop.Result:
    """Trains to the end; goes on where a run in `output_dir` stopped.

    Args:
      resume_from_checkpoint: False refuses to go on with an earlier run.
    Returns:
      the loop's result; `history` holds a row of metrics per step, under TRL's
      names.
    """
    kept = self.output_dir / 'checkpoints'
    if (
      resume_from_checkpoint is False and kept.is_dir() and any(kept.iterdir())
    ):
      raise ValueError(
        f'{kept} holds an earlier run; choose another output_dir, or leave '
        'resume_from_checkpoint out to go on with it.'
      )
    result = loop.train(
      self.policy,
      self._start,
      self.tokenizer,
      self.task,
      self.settings,
      self.output_dir,
      eval_batch_size=self._eval_batch,
      progress=self._progress,
    )
    self.policy, self.params = result.policy, result.params
    return result

  def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
    """Greedy answers: mean and standard error of every reward, lengths.

    Args:
      eval_dataset: as for the constructor; the one given there by default.
    """
    examples = list(self.task.heldout)
    if eval_dataset is not None:
      examples = _examples(eval_dataset, 'test')
    if not examples:
      raise ValueError('there is no eval_dataset, here or in the constructor.')
    settings = self.settings
    sampling = Sampling(
      group_size=1,
      max_new_tokens=settings.max_new_tokens,
      temperature=0.0,
      eos_ids=tuple(self.tokenizer.eos_ids),
      pad_id=self.tokenizer.pad_id,
    )
    with Pipeline(self.task.rewards) as pipeline:
      pipeline.check_columns(set(examples[0]) - {'prompt'})
      mesh = sharding.make_mesh(
        settings.mesh_data, settings.mesh_fsdp, settings.mesh_tensor
      )
      result = evaluate(
        self.policy,
        sharding.place(mesh, self.params),
        self.tokenizer,
        pipeline,
        examples,
        sampling,
        settings.max_prompt_tokens,
        min(self._eval_batch, len(examples)),
        mesh,
      )
    return {f'eval_{k}': v for k, v in result.summary().items()}

  def save(
    self, directory: str | os.PathLike | None = None, dtype: str = 'bfloat16'
  ) -> pathlib.Path:
    """Writes weights and tokenizer for transformers; returns the directory."""
    directory = pathlib.Path(directory or self.output_dir / 'model')
    hf.save(directory, self.config, self.params, self.tokenizer, dtype=dtype)
    return directory

  save_model = save  # TRL's name


def _as_list(functions) -> list[RewardFunction]:
  if isinstance(functions, (str, Reward)) or callable(functions):
    return [functions]
  return list(functions or ())


def _examples(data: Any, split: str) -> list[dict[str, Any]]:
  if isinstance(data, (str, os.PathLike)):
    data = records.read(data, split)
  return records.examples(data)


def _rewards(functions, given_weights, conditions) -> list[Reward]:
  if not functions:
    raise ValueError('at least one reward function is needed.')
  for fn in functions:
    if isinstance(fn, str):
      raise ValueError(
        f'a reward model by name ({fn!r}) is not loaded here; wrap it: '
        'gdpo_jax.JaxJudge, or gdpo_jax.rewards.judged.'
      )
  rewards = [fn if isinstance(fn, Reward) else Reward(fn) for fn in functions]
  if given_weights is not None:
    values = reward_weights(rewards, given_weights)
    rewards = [
      dataclasses.replace(r, weight=float(w)) for r, w in zip(rewards, values)
    ]
  if conditions is None:
    return rewards
  names = [reward.name for reward in rewards]
  if isinstance(conditions, Mapping):
    unknown = set(conditions) - set(names)
    if unknown:
      raise ValueError(
        f'conditional_thresholds name {sorted(unknown)}, but the rewards are '
        f'{names}.'
      )
    conditions = [conditions.get(name) for name in names]
  if len(conditions) != len(names):
    raise ValueError(
      f'{len(conditions)} conditional_thresholds were given for {len(names)} '
      f'rewards {names}; give each one, or None.'
    )
  return [
    dataclasses.replace(r, condition=r.condition if c is None else c)
    for r, c in zip(rewards, conditions)
  ]
