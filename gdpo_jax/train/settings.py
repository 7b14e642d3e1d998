"""Every setting of a run: name, unit, default. The only place they are written.

An algorithm is a row of choices (`ALGORITHMS`), not a class. A field that is
None means "as the algorithm says"; `resolve` fills it in, and whatever was set
by hand stays. `resolve` also refuses combinations that cannot work, before any
model is loaded.
"""

import dataclasses
import inspect

from gdpo_jax.objectives import advantages, kl, losses
from gdpo_jax.policy.lora import Lora
from gdpo_jax.train import monitor, policy_settings, trackers

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
    'overlong_share': 0.2,  # 4,096 of 20,480 tokens
  },
  # arXiv 2507.18071 and 2506.13585: another ratio, the advantages of GRPO.
  'gspo': {
    'policy_loss': 'gspo',
    'denominator': 'row',
    'clip_low': 3e-4,
    'clip_high': 4e-4,
    'advantage': 'grpo',
    'whiten': 'none',
  },
  'cispo': {
    'policy_loss': 'cispo',
    'denominator': 'token',
    'clip_low': 1.0,  # no lower bound
    'clip_high': 0.28,
    'advantage': 'grpo',
    'whiten': 'none',
  },
  # arXiv 1707.06347 with a value head: the weighted sum of the rewards on the
  # last token, advantages by GAE, whitened over the tokens.
  'ppo': {
    **_GRPO_LOSS,
    'denominator': 'token',
    'advantage': 'gae',
    'whiten': 'token',
  },
}
# Every other published way to combine rewards, in GRPO's loss, with the batch
# step that its paper has.
for _name, _function in advantages.ADVANTAGES.items():
  if _name not in ALGORITHMS:
    _whiten = inspect.signature(_function).parameters['whiten'].default
    ALGORITHMS[_name] = {**_GRPO_LOSS, 'advantage': _name, 'whiten': _whiten}
# ... and the setting that each schedule of the weights needs.
WEIGHT_SCHEDULES = {
  'constant': None,
  'piecewise': 'weight_milestones',
  'linear': 'weight_milestones',
  'cosine': 'weight_milestones',
  'gap_driven': 'weight_targets',
  'lagrangian': 'weight_constraints',
  'sampled': None,
}
_UNSET = {'max_rounds': 1, 'overlong_share': 0.0}


@dataclasses.dataclass(frozen=True)
class Settings:
  """Plain values; see the comment of each field for its unit."""

  # What is optimized.
  algorithm: str = 'gdpo'  # a row of ALGORITHMS
  # a name in objectives.advantages.ADVANTAGES or PRESETS, or 'gae'
  advantage: str | None = None
  whiten: str | None = None  # batch step: 'none', 'sequence' or 'token'
  # added to standard deviations; None: 1e-4, or that of the preset
  advantage_eps: float | None = None
  # 1: sample, 0: population standard deviation; None: 1, or as the preset
  advantage_ddof: int | None = None
  condition_mode: str = 'zero'  # unmet condition: 'zero' or 'missing'
  policy_loss: str | None = None  # a name in objectives.losses.LOSSES
  denominator: str | None = None  # 'row', 'token' or 'constant'
  clip_low: float | None = (
    None  # importance ratio is clipped below 1 - clip_low
  )
  clip_high: float | None = None  # ... and above 1 + clip_high
  dual_clip: float | None = None  # bound c > 1 for negative advantages
  clip_target_kl: float | None = None  # adaptive clip: nats per token
  kl_coef: float = 0.0  # 0: no reference policy is kept
  kl_estimator: str = 'k3'  # in the loss: 'k1', 'k2' or 'k3'
  # 'loss', or 'reward': as one more reward with weight kl_coef. A method that
  # sums first thereby subtracts it from the total, one that normalizes first
  # normalizes it like the others, and PPO takes it off each token's reward.
  kl_place: str = 'loss'
  kl_controller: str = 'constant'  # 'constant', 'adaptive' or 'moving_target'
  kl_target: float = 6.0  # of the controller, nats per sequence
  kl_gain: float = 0.1  # of the controller
  reference_every: int = 0  # steps between refreshes of the reference; 0: never
  reference_decay: float = 0.0  # EMA of the parameters as reference; 0: none
  entropy_coef: float = 0.0  # bonus per nat of token entropy
  # the clipped term is multiplied by 1 + 0.1 entropy_coef
  entropy_scaled_clip: bool = False

  # What the rewards count.
  weight_schedule: str = 'constant'  # or a name in WEIGHT_SCHEDULES
  # 'piecewise', 'linear', 'cosine': ((step, (w_1, ..., w_K)), ...) from step 0
  weight_milestones: tuple = ()
  weight_targets: tuple = ()  # 'gap_driven': K batch means of raw rewards
  # 'lagrangian': ((reward, '<=' or '>=', limit of the batch mean), ...)
  weight_constraints: tuple = ()
  weight_rate: float = 0.1  # 'lagrangian': of a multiplier, per step
  weight_max: float = 10.0  # 'lagrangian': largest multiplier
  # 'none', 'sigmoid' or 'running' for all rewards, or K kinds: 'none,running'
  normalizers: str = 'none'
  # soft overlong penalty (DAPO) as one more reward of weight 1: grows from 0 to
  # -1 over this last share of max_new_tokens; 0: none
  overlong_share: float | None = None

  # The value head (advantage 'gae').
  gae_gamma: float = 1.0
  gae_lambda: float = 0.95
  gae_dynamic: bool = False  # lambda by token entropy, segmented gamma
  value_coef: float = 0.5
  value_clip: float = 0.2

  # LoRA: a small tree is trained, what was given stays as it is and is the
  # reference policy (see policy/lora.py).
  lora_rank: int = 0  # 0: everything is trained
  lora_alpha: float = 16.0  # the product counts alpha / rank times
  lora_targets: str = '.*'  # regular expression on 'attn/q', 'mlp/down', ...
  lora_rank_stabilized: bool = False  # alpha / sqrt(rank) instead

  # Sub-policies: one per declared reward, on a shared trunk, mixed token by
  # token (see policy/decoupled.py and train/subpolicies.py).
  subpolicy_rank: int = 0  # of each block; 0: none
  subpolicy_isolation: float = 0.25  # share of its gradient in the trunk
  subpolicy_every: int = 3  # updates of the trunk per update of the heads
  subpolicy_cold_start: int = 0  # first updates, in which the heads alone learn
  subpolicy_rates: str = ''  # '1,0.5': factors of the learning rate, one each
  subpolicy_frozen: str = ''  # 'short,trunk': rewards, 'trunk', 'fusion'
  fusion_width: int = 16  # of queries and keys
  fusion_entropy_coef: float = 0.0  # bonus per nat of the mixing weights

  # ... one of which may learn from scored completions that others write into a
  # directory while the run goes on (see train/online.py).
  online_head: str = ''  # its reward; '': none
  online_dir: str = ''  # where new *.jsonl appear
  online_every: int = 1  # steps between two looks
  online_rows: int = 32  # per update
  online_rate: float = 1e-4  # learning rate of these updates

  # Past policies in 8 bits (see train/snapshots.py).
  snapshot_every: int = 0  # steps between two; 0: none are kept
  snapshot_keep: int = 4  # the newest so many
  snapshot_format: str = 'int8'  # or 'fp8'; errors in policy/eight_bit.py
  snapshot_use: str = 'sampling'  # or 'reference', of the KL term
  snapshot_share: float = 0.25  # of the steps that a past policy samples

  # How much, how often.
  num_steps: int = 100  # rollout batches
  prompts_per_step: int = 8  # P
  group_size: int = 4  # G, samples per prompt
  # sampled at once, the others wait for their slots; None: all of P
  prompts_per_rollout: int | None = None
  prompts_per_update: int | None = None  # per optimizer step; None: all of P
  epochs_per_batch: int = 1  # passes over one rollout batch
  prompts_per_micro_batch: int | None = None  # None: no accumulation
  # The completions of a group go through the update in lines of at least so
  # many tokens, packed one behind the other; 0: each has a line of its own.
  pack_tokens: int = 0
  max_prompt_tokens: int = 128  # Tp, left-padded; longer prompts are dropped
  max_new_tokens: int = 128  # Tc, EOS included
  # 1: the next batch is gathered while this one is trained on (train/ahead.py)
  off_policy_steps: int = 0
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
  # weights of rollouts and evaluation, and what they are multiplied with
  rollout_dtype: str = 'float32'
  # The ratio of the loss is to the trainer's own log-probs, and that of trainer
  # to sampler, up to this, multiplies the advantage; None: one ratio for both.
  importance_cap: float | None = None
  remat: str = 'none'  # what the backward pass recomputes: 'none', 'block'
  mesh_data: int = -1  # devices that hold whole copies; -1: what is left
  mesh_fsdp: int = 1  # devices that split parameters and optimizer
  mesh_tensor: int = 1  # devices that split heads, mlp and vocabulary

  # What is written, in steps.
  eval_every: int = 0  # held-out evaluation; 0: only at start and end
  save_every: int = 20  # checkpoints; 0: only at the end
  keep_checkpoints: int = 2  # the newest n ...
  keep_every: int = 0  # ... and those of every so many steps; 0: none
  keep_best: str | None = None  # ... and the highest of this metric
  keep_pareto: bool = False  # ... and the Pareto front of the mean rewards
  samples_every: int = 10  # completions written to samples.jsonl; 0: never
  gradient_cosine_every: int = 0  # costs K backward passes of a micro-batch
  # what the rules of train/rule_book.py do: 'RULE=ACTION,...', ACTION one of off,
  # warn, adjust, stop; 'all=ACTION' first changes the others; they warn
  monitor_actions: str = ''
  profile: int = 0  # this step is traced to RUN/trace (1: the first); 0: none
  trackers: str = ''  # beside metrics.jsonl: 'tensorboard', 'wandb' or both

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
    if self.policy_loss not in (None, row['policy_loss']):
      # Another loss has another band: 0.2 would never clip a GSPO ratio.
      default = inspect.signature(
        losses.LOSSES.get(self.policy_loss, losses.clipped)
      ).parameters
      for name in ('clip_low', 'clip_high'):
        if getattr(self, name) is None and name in default:
          # CISPO has no lower bound: ratios are above 0 anyway.
          filled[name] = default[name].default or 1.0
    preset = advantages.PRESETS.get(filled.get('advantage', self.advantage))
    own = inspect.signature(preset).parameters if preset else {}
    for name, field, usual in (
      ('eps', 'advantage_eps', 1e-4),
      ('ddof', 'advantage_ddof', 1),
      ('whiten', 'whiten', filled.get('whiten')),
    ):
      if getattr(self, field) is None:
        filled[field] = own[name].default if preset else usual
    settings = dataclasses.replace(self, **filled)
    if settings.prompts_per_micro_batch is None:
      settings = dataclasses.replace(
        settings, prompts_per_micro_batch=settings.prompts_per_update
      )
    settings._check()
    return settings

  def _check(self):
    _choice(
      'advantage',
      self.advantage,
      {*advantages.ADVANTAGES, *advantages.PRESETS, 'gae'},
    )
    _choice('whiten', self.whiten, ('none', 'sequence', 'token'))
    _choice('policy_loss', self.policy_loss, losses.LOSSES)
    _choice('denominator', self.denominator, ('row', 'token', 'constant'))
    _choice('kl_estimator', self.kl_estimator, kl.ESTIMATORS)
    _choice('schedule', self.schedule, ('constant', 'cosine', 'linear'))
    _choice('compute_dtype', self.compute_dtype, ('float32', 'bfloat16'))
    _choice(
      'rollout_dtype', self.rollout_dtype, ('float32', 'bfloat16', 'int8')
    )
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
    if self.group_size < 1 or (
      self.group_size == 1 and self.advantage != 'gae'
    ):
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
    if self.importance_cap is not None and self.importance_cap < 1:
      raise ValueError(
        f'importance_cap is {self.importance_cap}: it bounds ratios around 1 '
        'from above; set 2, or None for no correction.'
      )
    for name in ('kl_coef', 'entropy_coef', 'value_coef'):
      if getattr(self, name) < 0:
        raise ValueError(
          f'{name} must not be negative, got {getattr(self, name)}.'
        )
    if self.pack_tokens < 0 or self.pack_tokens and self.subpolicy_rank:
      raise ValueError(
        f'pack_tokens is {self.pack_tokens}: it is at least 0, and 0 with '
        'sub-policies, which are not computed in packed lines.'
      )
    if self.rollout_dtype == 'int8' and self.subpolicy_rank:
      raise ValueError(
        'rollout_dtype int8 does not hold the blocks of sub-policies; choose '
        'bfloat16 or float32.'
      )
    self._check_ahead()
    policy_settings.check(self)
    self._check_controllers()
    self._check_watch()

  def _check_ahead(self):
    if self.off_policy_steps not in (0, 1):
      raise ValueError(
        f'off_policy_steps is {self.off_policy_steps}: a batch may be one step '
        'behind the policy (1) or not at all (0).'
      )
    past = self.snapshot_every and self.snapshot_use == 'sampling'
    if self.off_policy_steps and past:
      raise ValueError(
        'off_policy_steps and snapshot_use sampling exclude each other: a step '
        'is sampled from the policy before or from a past one; set off_policy_steps '
        'or snapshot_every to 0.'
      )

  def _check_watch(self):
    actions = monitor.parse_actions(self.monitor_actions)
    trackers.parse(self.trackers)
    if actions['entropy_collapse'] == 'adjust' and not self.entropy_coef:
      raise ValueError(
        'entropy_collapse=adjust multiplies entropy_coef, which is 0; set '
        'entropy_coef above 0, such as 1e-3.'
      )

  def _check_controllers(self):
    _choice('kl_place', self.kl_place, ('loss', 'reward'))
    _choice(
      'kl_controller',
      self.kl_controller,
      ('constant', 'adaptive', 'moving_target'),
    )
    _choice('weight_schedule', self.weight_schedule, WEIGHT_SCHEDULES)
    needed = WEIGHT_SCHEDULES[self.weight_schedule]
    for name in ('weight_milestones', 'weight_targets', 'weight_constraints'):
      if name == needed and not getattr(self, name):
        raise ValueError(
          f'weight_schedule {self.weight_schedule!r} needs {name}.'
        )
      if name != needed and getattr(self, name):
        raise ValueError(
          f'{name} is set, but weight_schedule {self.weight_schedule!r} does '
          f'not look at it; set weight_schedule, or leave {name} out.'
        )
    moving = self.reference_every or self.reference_decay
    if not self.kl_coef and (self.kl_controller != 'constant' or moving):
      raise ValueError(
        'a KL controller or a moving reference needs a KL term; set kl_coef '
        'above 0.'
      )
    if self.reference_every and self.reference_decay:
      raise ValueError(
        'reference_every and reference_decay exclude each other; set one to 0.'
      )
    if self.reference_every < 0 or not 0 <= self.reference_decay < 1:
      raise ValueError(
        f'reference_every is at least 0 and reference_decay in [0, 1), got '
        f'{self.reference_every} and {self.reference_decay}.'
      )
    if not 0 <= self.overlong_share <= 1:
      raise ValueError(
        f'overlong_share is a share of max_new_tokens, in [0, 1], got '
        f'{self.overlong_share}.'
      )
    if self.clip_target_kl is not None and self.policy_loss != 'clipped':
      raise ValueError(
        f'clip_target_kl adapts the clip of policy_loss clipped, not of '
        f'{self.policy_loss!r}.'
      )

  @property
  def lora(self) -> Lora | None:
    """The adapters that are trained; None where everything is."""
    if not self.lora_rank:
      return None
    return Lora(
      self.lora_rank,
      self.lora_alpha,
      self.lora_targets,
      self.lora_rank_stabilized,
    )

  @property
  def has_value_head(self) -> bool:
    return self.advantage == 'gae'

  @property
  def kl_in_loss(self) -> bool:
    return bool(self.kl_coef) and self.kl_place == 'loss'

  @property
  def overlong_margin(self) -> int:
    """Tokens before the limit in which the overlong penalty grows; 0: none."""
    margin = round(self.overlong_share * self.max_new_tokens)
    return max(margin, 1) if self.overlong_share else 0

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
