"""Every metric by name: what it is, and its unit. TRL's names where TRL has one.

In a name, NAME, A and B stand for rewards, REASON for the kind of a fault, and
the other words in capitals for what their definition says. A row of
metrics.jsonl has those that apply to its run. `describe` finds the entry of a
name; experiments/METRICS.md is made from this file.
"""

import re
from typing import NamedTuple


class Metric(NamedTuple):
  """One entry; a name that ends in a placeholder stands for many."""

  name: str
  unit: str
  definition: str
  trl: bool = False  # TRL's name, for the same thing


class Section(NamedTuple):
  title: str
  metrics: tuple[Metric, ...]


_M = Metric

SECTIONS = (
  Section(
    'Every reward',
    (
      _M(
        'rewards/NAME/mean',
        'reward',
        'mean of the raw values of the batch, missing ones left out',
        trl=True,
      ),
      _M(
        'rewards/NAME/std',
        'reward',
        'their deviation over the batch (ddof 1)',
        trl=True,
      ),
      _M(
        'rewards/NAME/stderr',
        'reward',
        'standard error of the mean, each group counted as one draw: deviation '
        'of the group means over the root of their number',
      ),
      _M(
        'rewards/NAME/group_std',
        'reward',
        'mean over groups of the deviation within the group (ddof 1): what the '
        'advantage is made of',
      ),
      _M(
        'rewards/NAME/zero_variance',
        'share of groups',
        'groups in which all rows have the same value: the reward says nothing',
      ),
      _M(
        'rewards/NAME/missing',
        'share of rows',
        'rows without a value; missing is not zero',
      ),
      _M(
        'rewards/NAME/missing/REASON',
        'rows',
        'rows without a value by reason: exception, timeout, died, none, nan, '
        'inf, length, type, muted',
      ),
      _M(
        'rewards/NAME/fallback',
        'share of rows',
        'rows that the fallback of the reward answered',
      ),
      _M(
        'rewards/NAME/weight',
        '1',
        'weight in use: as declared or scheduled, 0 where muted',
      ),
      _M(
        'advantage_share/NAME',
        'share',
        'its mean absolute part in the sum that becomes the advantage; the '
        'shares add up to 1',
      ),
      _M(
        'condition/NAME/held',
        'share of rows',
        'rows on which the condition of the reward could be judged and held',
      ),
      _M(
        'conflict/A/B',
        'correlation',
        'of the weighted per-reward advantages of A and B over the batch; '
        'below 0 they pull rows in opposite directions',
      ),
      _M(
        'gradient_cosine/A/B',
        'cosine',
        'between the policy gradients of A alone and of B alone',
      ),
      _M('logged/KEY', 'own', 'mean of what a reward gave to log_metric(KEY)'),
    ),
  ),
  Section(
    'The sum and the advantage',
    (
      _M(
        'reward',
        'reward',
        'mean over rows of the weighted sum of the rewards after conditions',
        trl=True,
      ),
      _M(
        'reward_std',
        'reward',
        'mean over groups of its deviation within the group',
        trl=True,
      ),
      _M(
        'frac_reward_zero_std',
        'share of groups',
        'groups in which that sum is the same for all rows',
        trl=True,
      ),
      _M(
        'advantages/abs_mean',
        '1',
        'mean absolute advantage of a row',
      ),
      _M(
        'groups/informative',
        'share of groups',
        'groups whose rows the chosen method tells apart',
      ),
      _M('groups/rounds', 'rounds', 'of sampling (dynamic sampling)'),
      _M(
        'rows/excluded',
        'rows',
        'left out of the loss: no reward scored them, filled up, or cut off '
        '(mask_truncated)',
      ),
      _M(
        'collapse/distinct_rewards',
        'per group',
        'distinct tuples of rewards in a group, mean over groups',
      ),
      _M(
        'collapse/distinct_advantages/METHOD',
        'per group',
        'distinct advantages that METHOD would give the same group; far below '
        'the line above, it cannot tell rows apart',
      ),
      _M(
        'counterfactual/cosine/METHOD/METHOD',
        'cosine',
        'between the advantages that two methods would give this batch',
      ),
      _M(
        'counterfactual/sign_flips/METHOD/METHOD',
        'share of rows',
        'rows that the two methods would push in opposite directions',
      ),
    ),
  ),
  Section(
    'Completions',
    (
      _M('completions/mean_length', 'tokens', 'EOS counted', trl=True),
      _M('completions/min_length', 'tokens', 'the shortest', trl=True),
      _M('completions/max_length', 'tokens', 'the longest', trl=True),
      _M(
        'completions/mean_terminated_length',
        'tokens',
        'mean over those that ended by themselves',
        trl=True,
      ),
      _M(
        'completions/clipped_ratio',
        'share of rows',
        'ran into max_new_tokens',
        trl=True,
      ),
      _M(
        'packing/lines_per_row',
        'ratio',
        'lines of a group in the update over its rows; only with `pack_tokens`, '
        'where packing gained something',
      ),
      _M(
        'completions/distinct',
        'share',
        'distinct texts of a group over its size, mean over groups',
      ),
      _M(
        'completions/up/mean_length',
        'tokens',
        'rows with an advantage above 0',
      ),
      _M(
        'completions/up/clipped_ratio',
        'share of rows',
        'of those, ran into the limit',
      ),
      _M(
        'completions/down/mean_length',
        'tokens',
        'rows with an advantage below 0',
      ),
      _M(
        'completions/down/clipped_ratio',
        'share of rows',
        'of those, ran into the limit',
      ),
      _M('num_tokens', 'tokens', 'completion tokens of the step'),
    ),
  ),
  Section(
    'The update',
    (
      _M('loss', 'nats', 'what is minimized, mean over the updates', trl=True),
      _M(
        'grad_norm',
        '1',
        'global norm of the gradient before clipping',
        trl=True,
      ),
      _M(
        'learning_rate',
        'per update',
        'of the last update, adjustments included',
        trl=True,
      ),
      _M(
        'skipped_updates',
        'share of updates',
        'left out because loss or gradient were not finite',
      ),
      _M(
        'groups_in_loss',
        'share of groups',
        'that went through forward and backward pass; groups without signal '
        'are skipped where that changes nothing',
      ),
      _M('entropy', 'nats per token', 'of the policy', trl=True),
      _M(
        'entropy/sampled',
        'nats per token',
        'the same of the sampler, estimated by minus the mean log-probability '
        'of what was sampled; over all rows, also those of groups without '
        'signal, which the update leaves out',
      ),
      _M(
        'entropy/ratio',
        'of the start',
        'entropy/sampled over the mean of the first 5 steps: 0.8 to 1.2 is '
        'calm, the alarms are at 0.3 and 3',
      ),
      _M('entropy_coef', '1', 'coefficient of the entropy bonus in use'),
      _M(
        'kl',
        'nats per token',
        'to the reference policy, estimator k3',
        trl=True,
      ),
      _M(
        'kl/nats_per_sequence',
        'nats per sequence',
        'mean over rows of the KL summed over the tokens',
      ),
      _M('kl/coef', '1', 'coefficient of the KL term in use'),
      _M(
        'clip_ratio/low_mean',
        'share of tokens',
        'importance ratio below 1 - clip_low, advantage below 0',
        trl=True,
      ),
      _M(
        'clip_ratio/high_mean',
        'share of tokens',
        'importance ratio above 1 + clip_high, advantage above 0',
        trl=True,
      ),
      _M('clip_ratio/region_mean', 'share of tokens', 'either', trl=True),
      _M(
        'sampler_mismatch',
        'nats per token',
        'mean absolute difference of the log-probabilities of trainer and '
        'sampler; 1e-4 and less in float32 at the first update',
      ),
      _M(
        'importance/weight_mean',
        'ratio',
        'mean over tokens of min(trainer / sampler, importance_cap), which '
        'multiplies the advantage; only with importance_cap',
      ),
      _M(
        'importance/capped',
        'share of tokens',
        'that ratio at its cap',
      ),
      _M(
        'kl/to_sampler',
        'nats per token',
        'to the policy that sampled, estimator k3',
      ),
      _M(
        'value/mean',
        'reward',
        'mean over tokens of the value head (PPO)',
      ),
      _M(
        'value/squared_error',
        'reward squared',
        'mean squared distance to the returns',
      ),
      _M(
        'value/bias',
        'deviations',
        '(mean return - mean value) / deviation of the values; healthy within '
        '-0.5 and 0.5',
      ),
      _M('value/ratio', '1', 'mean return over mean value'),
      _M(
        'heads/NAME/grad_norm',
        '1',
        'gradient norm of the head of a reward (decoupled policy)',
      ),
      _M(
        'heads/NAME/grad_share',
        'share',
        "of that norm in the sum over the heads; both in the heads' turn only",
      ),
      _M(
        'heads/NAME/kl',
        'nats per token',
        'of the mixture to the sub-policy of a reward, estimator k3',
      ),
      _M(
        'fusion/NAME/weight',
        'share',
        'mean mixing weight of the head of a reward (decoupled policy)',
      ),
      _M(
        'fusion/NAME/leads',
        'share',
        'tokens on which that weight is the largest',
      ),
      _M(
        'fusion/entropy',
        'nats',
        'of the mixing weights, mean over tokens; log K where all are equal',
      ),
      _M('fusion/entropy_coef', '1', 'of the bonus on that entropy'),
      _M(
        'online/files', 'files', 'that appeared for the head that learns online'
      ),
      _M('online/rows', 'rows', 'scored completions in them that were used'),
      _M('online/refused', 'lines', 'in them that could not be used'),
      _M(
        'snapshots/age',
        'steps',
        'since the policy was kept that this step sampled from; 0: the current '
        'one, or kept just now',
      ),
      _M(
        'snapshots/relative_error',
        'share',
        'norm of what 8 bits lose of the kept policy, in that of its parameters',
      ),
    ),
  ),
  Section(
    'Time',
    (
      _M('epoch', 'passes', 'over the training problems'),
      _M('time/step', 's', 'the whole step'),
      _M('time/generate', 's', 'sampling'),
      _M(
        'time/generate/prefill',
        's',
        'of it: weights of the rollout, prompts, first tokens',
      ),
      _M('time/generate/decode', 's', 'of it: all other tokens'),
      _M('time/generate/transfer', 's', 'of it: from device to host'),
      _M(
        'time/advantages/log_probs',
        's',
        'of `time/advantages`: log-probabilities of the reference',
      ),
      _M('time/rewards', 's', 'waiting for rewards after sampling is done'),
      _M(
        'time/rewards/NAME',
        's',
        'duration of the calls of a reward; they run side by side',
      ),
      _M(
        'time/advantages',
        's',
        'aggregation, log-probabilities of the reference',
      ),
      _M(
        'time/diagnosis',
        's',
        'comparison with other methods, and gradient cosines where asked for',
      ),
      _M('time/update', 's', 'forward, backward, optimizer'),
      _M(
        'time/wait',
        's',
        'for a batch that is gathered beside the update (`off_policy_steps`); '
        'its own parts are counted as far as they go, and may exceed the step',
      ),
      _M(
        'time/metrics',
        's',
        'making this row; and, of the step before, writing, rules and report',
      ),
      _M('time/PART', 's', 'other parts of the step'),
      _M(
        'throughput/tokens_per_second',
        'tokens/s',
        'completion tokens over the time of sampling',
      ),
      _M(
        'throughput/tflops',
        'TFLOP/s',
        'model FLOPs of the step, counted from shapes on real tokens (twice '
        'the multiplications; the prompt of a group once; backward twice '
        'forward), over its time',
      ),
      _M(
        'throughput/mfu',
        'share',
        'time that those FLOPs take at the matrix peak, over that of the step; '
        "the peak is measured once at start, on a product of the model's own "
        'shape, for the dtype of each part',
      ),
      _M('throughput/mfu_rollout', 'share', 'the same of `time/generate`'),
      _M('throughput/mfu_update', 'share', 'the same of `time/update`'),
      _M('flops/rollout', 'FLOP', 'of sampling, see `throughput/tflops`'),
      _M('flops/update', 'FLOP', 'of forward and backward passes'),
      _M('memory/host_peak', 'GiB', 'largest resident size of the process'),
      _M(
        'memory/device_peak',
        'GiB',
        'most in use on the fullest local device, where the device says so',
      ),
    ),
  ),
  Section(
    'Held-out evaluation',
    (
      _M('eval/rewards/NAME/mean', 'reward', 'greedy answers'),
      _M('eval/rewards/NAME/stderr', 'reward', 'standard error over problems'),
      _M('eval/completions/mean_length', 'tokens', 'EOS counted'),
      _M(
        'eval/hypervolume',
        'rewards multiplied',
        'volume between the Pareto front of all evaluations so far and the '
        'first one',
      ),
      _M('eval/completions/clipped_ratio', 'share', 'ran into the limit'),
    ),
  ),
)

METRICS = tuple(m for section in SECTIONS for m in section.metrics)
_PLACEHOLDER = re.compile(r'\b(NAME|A|B|REASON|METHOD|KEY|PART)\b')


def _pattern(name: str) -> re.Pattern:
  parts = _PLACEHOLDER.split(name)
  # odd parts are the placeholders; names of rewards may hold slashes
  return re.compile(
    ''.join('.+' if i % 2 else re.escape(p) for i, p in enumerate(parts))
  )


_PATTERNS = sorted(
  ((_pattern(m.name), m) for m in METRICS),
  # the most literal entry first
  key=lambda pair: -len(_PLACEHOLDER.sub('', pair[1].name)),
)


def describe(name: str) -> Metric | None:
  """The entry of a metric's name; None where it has none."""
  for pattern, metric in _PATTERNS:
    if pattern.fullmatch(name):
      return metric
  return None
