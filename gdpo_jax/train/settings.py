"""Every setting of a run: name, unit, default. The only place they are written.

An algorithm is a row of choices (`ALGORITHMS`), not a class. A field that is
None means "as the algorithm says"; `resolve` fills it in, and whatever was set
by hand stays. `resolve` also refuses combinations that cannot work, before any
model is loaded.
"""

import dataclasses
import inspect

from gdpo_jax.objectives import advantages, kl, losses

# What the published algorithms choose. Denominators: 'row' is the mean of row
# means (GRPO), 'token' one mean over all tokens (DAPO), 'constant' the length
# limit (Dr.GRPO).
_GRPO_LOSS = {
  'policy_loss': 'clipped',
  'denominator': 'row',
  'clip_low': 0.2,
  'clip_high': 0.2,
}
ALGORITHMS = {
  'grpo': {**_GRPO_LOSS, 'advantage': 'grpo', 'whiten': 'none'},
  # The control that the GDPO paper leaves out: sum, normalize, batch step.
  'grpo_batch': {**_GRPO_LOSS, 'advantage': 'grpo', 'whiten': 'sequence'},
  'dr_grpo': {
    **_GRPO_LOSS,
    'advantage': 'dr_grpo',
    'whiten': 'none',
    'denominator': 'constant',
  },
  'mo_grpo': {**_GRPO_LOSS, 'advantage': 'mo_grpo', 'whiten': 'none'},
  'gdpo': {**_GRPO_LOSS, 'advantage': 'gdpo', 'whiten': 'sequence'},
  # arXiv 2503.14476: clip-higher, token-level loss, dynamic sampling.
  'dapo': {
    'policy_loss': 'clipped',
    'denominator': 'token',
    'clip_low': 0.2,
    'clip_high': 0.28,
    'advantage': 'grpo',
    'whiten': 'none',
    'max_rounds': 4,
  },
}
# Every other published way to combine rewards, in GRPO's loss, with the batch
# step that its paper has.
for _name, _function in advantages.ADVANTAGES.items():
  if _name not in ALGORITHMS:
    _whiten = inspect.signature(_function).parameters['whiten'].default
    ALGORITHMS[_name] = {**_GRPO_LOSS, 'advantage': _name, 'whiten': _whiten}
_UNSET = {'max_rounds': 1}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Plain values; see the comment of each field for its unit."""

  # What is optimized.
  algorithm: str = 'gdpo'  # a row of ALGORITHMS
  advantage: str | None = None  # a name in objectives.advantages.ADVANTAGES
  whiten: str | None = None  # batch step: 'none', 'sequence' or 'token'
  advantage_eps: float = 1e-4  # added to standard deviations
  advantage_ddof: int = 1  # 1: sample, 0: population standard deviation
  condition_mode: str = 'zero'  # unmet condition: 'zero' or 'missing'
  policy_loss: str | None = None  # a name in objectives.losses.LOSSES
  denominator: str | None = None  # 'row', 'token' or 'constant'
  clip_low: float | None = (
    None  # importance ratio is clipped below 1 - clip_low
  )
  clip_high: float | None = None  # ... and above 1 + clip_high
  dual_clip: float | None = None  # bound c > 1 for negative advantages
  kl_coef: float = 0.0  # 0: no reference policy is kept
  kl_estimator: str = 'k3'  # 'k1', 'k2' or 'k3'
  entropy_coef: float = 0.0  # bonus per nat of token entropy

  # How much, how often.
  num_steps: int = 100  # rollout batches
  prompts_per_step: int = 8  # P
  group_size: int = 4  # G, samples per prompt
  prompts_per_rollout: int | None = None  # sampled at once; None: all of P
  prompts_per_update: int | None = None  # per optimizer step; None: all of P
  epochs_per_batch: int = 1  # passes over one rollout batch
  prompts_per_micro_batch: int | None = None  # None: no accumulation
  max_prompt_tokens: int = 128  # Tp, left-padded; longer prompts are dropped
  max_new_tokens: int = 128  # Tc, EOS included
  temperature: float = 1.0  # of the sampler, and of the trainer with it
  max_rounds: int | None = None  # dynamic sampling: rollouts per step at most
  when_dry: str = 'train'  # too few informative groups: 'train' or 'skip'
  mask_truncated: bool = False  # overlong filtering: cut rows do not count

  # Optimizer (AdamW; rates per optimizer step).
  learning_rate: float = 1e-6
  schedule: str = 'constant'  # 'constant', 'cosine' or 'linear' to 0
  warmup_share: float = 0.0  # share of all updates with a rising rate
  weight_decay: float = 0.0
  adam_b1: float = 0.9
  adam_b2: float = 0.999
  clip_norm: float = 1.0  # global gradient norm

  # Numbers and devices.
  seed: int = 0
  compute_dtype: str = 'float32'  # inputs of matrix products when training
  remat: str = 'none'  # what the backward pass recomputes: 'none', 'block'
  mesh_data: int = -1  # devices that hold whole copies; -1: what is left
  mesh_fsdp: int = 1  # devices that split parameters and optimizer
  mesh_tensor: int = 1  # devices that split heads, mlp and vocabulary

  # What is written, in steps.
  eval_every: int = 0  # held-out evaluation; 0: only at start and end
  save_every: int = 20  # checkpoints; 0: only at the end
  keep_checkpoints: int = 2
  samples_every: int = 10  # completions written to samples.jsonl; 0: never

  def resolve(self) -> 'Settings':
    """Fills in what the algorithm chooses, then checks the whole.

    Raises:
      ValueError: says what was seen and what to change.
    """
    row = ALGORITHMS.get(self.algorithm)
    if row is None:
      raise ValueError(
        f'unknown algorithm {self.algorithm!r}; choose from '
        f'{", ".join(sorted(ALGORITHMS))}.'
      )
    filled = {
      name: value
      for name, value in {**_UNSET, **row}.items()
      if getattr(self, name) is None
    }
    for name in ('prompts_per_rollout', 'prompts_per_update'):
      if getattr(self, name) is None:
        filled[name] = self.prompts_per_step
    settings = dataclasses.replace(self, **filled)
    if settings.prompts_per_micro_batch is None:
      settings = dataclasses.replace(
        settings, prompts_per_micro_batch=settings.prompts_per_update
      )
    settings._check()
    return settings

  def _check(self):
    _choice('advantage', self.advantage, advantages.ADVANTAGES)
    _choice('whiten', self.whiten, ('none', 'sequence', 'token'))
    _choice('policy_loss', self.policy_loss, losses.LOSSES)
    _choice('denominator', self.denominator, ('row', 'token', 'constant'))
    _choice('kl_estimator', self.kl_estimator, kl.ESTIMATORS)
    _choice('schedule', self.schedule, ('constant', 'cosine', 'linear'))
    _choice('compute_dtype', self.compute_dtype, ('float32', 'bfloat16'))
    _choice('condition_mode', self.condition_mode, ('zero', 'missing'))
    _choice('when_dry', self.when_dry, ('train', 'skip'))
    for name in (
      'num_steps',
      'prompts_per_step',
      'prompts_per_rollout',
      'prompts_per_update',
      'prompts_per_micro_batch',
      'epochs_per_batch',
      'max_prompt_tokens',
      'max_new_tokens',
      'max_rounds',
      'keep_checkpoints',
    ):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, got {getattr(self, name)}.'
        )
    if self.group_size < 2:
      raise ValueError(
        f'group_size is {self.group_size}: a group of one has nothing to be '
        'compared with, every advantage would be 0; set group_size to 2 or more.'
      )
    for name in ('prompts_per_rollout', 'prompts_per_update'):
      if self.prompts_per_step % getattr(self, name):
        raise ValueError(
          f'a batch of {self.prompts_per_step} prompts cannot be split into '
          f'parts of {getattr(self, name)}; make prompts_per_step a multiple '
          f'of {name}.'
        )
    if self.prompts_per_update % self.prompts_per_micro_batch:
      raise ValueError(
        f'an update of {self.prompts_per_update} prompts '
        f'({self.prompts_per_update * self.group_size} rows) cannot be split '
        f'into micro-batches of {self.prompts_per_micro_batch} prompts; make '
        'prompts_per_update a multiple of prompts_per_micro_batch.'
      )
    if self.temperature <= 0:
      raise ValueError(
        f'temperature is {self.temperature}: training samples need a '
        'temperature above 0 (evaluation is greedy by itself).'
      )
    for name in ('learning_rate', 'clip_norm', 'clip_low', 'clip_high'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name} must be positive, got {getattr(self, name)}.')
    if not 0 <= self.warmup_share < 1:
      raise ValueError(f'warmup_share is in [0, 1), got {self.warmup_share}.')
    if self.kl_coef < 0:
      raise ValueError(f'kl_coef must not be negative, got {self.kl_coef}.')

  @property
  def updates_per_step(self) -> int:
    return self.epochs_per_batch * (
      self.prompts_per_step // self.prompts_per_update
    )


def _choice(name, value, known):
  if value not in known and not callable(value):
    raise ValueError(
      f'{name} is {value!r}; choose from {", ".join(sorted(known))}.'
    )


def asked_for(function, **offered):
  """Those of `offered` that the function names in its signature."""
  names = inspect.signature(function).parameters
  return {k: v for k, v in offered.items() if k in names}
