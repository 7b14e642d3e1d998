"""What the report shows, in order: sections of cards."""

from collections.abc import Callable
from typing import NamedTuple

from gdpo_jax.train.page import reward_charts as rewards
from gdpo_jax.train.page import run_charts as run_
from gdpo_jax.train.page.figures import Figure
from gdpo_jax.train.page.reward_graph import reward_graph
from gdpo_jax.train.run_files import Run


class Card(NamedTuple):
  title: str
  caption: str  # how to read it
  make: Callable[[Run], Figure | None]


class Section(NamedTuple):
  anchor: str
  title: str
  cards: Callable[[Run], list[Card]]


def _reward_cards(run: Run) -> list[Card]:
  return [
    Card(
      name,
      'Raw values of the sampled answers; the band is the 95% interval over '
      'groups, diamonds are greedy answers to held-out problems.',
      lambda run, i=i: rewards.reward_curve(run, i),
    )
    for i, name in enumerate(run.names)
  ]


def _histogram_cards(run: Run) -> list[Card]:
  titles = {
    'advantages': ('Advantages', 'Share of the rows by size of the advantage.'),
    'completions/length': ('Lengths', 'Share of the rows by tokens.'),
  }
  names = {
    name for record in run.histograms for name in record if name != 'step'
  }
  cards = []
  for name in sorted(names):
    title, caption = titles.get(
      name,
      (name.removeprefix('rewards/'), 'Share of the rows by raw value.'),
    )
    cards.append(
      Card(
        f'{title}, distribution',
        f'{caption} Bins grow by a constant factor.',
        lambda run, name=name: run_.histogram(run, name),
      )
    )
  return cards


SECTIONS = (
  Section('rewards', 'Rewards', _reward_cards),
  Section(
    'advantage',
    'Who drives the update',
    lambda run: [
      Card(
        'The reward graph',
        'Functions and their weights. Grey arrows: a reward counts only where '
        'the other fulfils its condition. Yellow: stands in where a value is '
        'missing.',
        reward_graph,
      ),
      Card(
        'Shares of the advantage',
        'Mean absolute part of each reward in the sum. A thin stripe is not '
        'heard.',
        rewards.shares,
      ),
      Card(
        'Spread within a group',
        'What an advantage is made of. 0: all answers to a prompt are worth '
        'the same to this reward.',
        rewards.spread,
      ),
      Card(
        'Groups without a difference',
        'Share of the groups in which all rows have the same value.',
        rewards.silent,
      ),
      Card(
        'Conflict matrix',
        'Correlation of the per-reward advantages, last 10 steps. Below 0 two '
        'rewards pull rows in opposite directions.',
        rewards.conflict,
      ),
      Card(
        'Conflict of gradients',
        'Cosine between the gradients of each reward alone, last 10 steps.',
        rewards.gradient_conflict,
      ),
      Card(
        'Conflict over time',
        'The same, step by step.',
        rewards.conflict_lines,
      ),
      Card(
        'Collapse meter',
        'Distinct advantages per group against distinct tuples of rewards: a '
        'method far below the rewards cannot tell rows apart.',
        rewards.collapse,
      ),
      Card(
        'What other methods would have done',
        'On the same batches: cosine between the advantages of two methods, '
        'and share of rows pushed in opposite directions.',
        rewards.counterfactual,
      ),
      Card(
        'Weights in use',
        'As declared or scheduled; 0 where a function is muted.',
        rewards.weights,
      ),
      Card(
        'Conditions',
        'Share of the rows on which the condition of a reward held.',
        rewards.conditions,
      ),
      Card(
        'Missing values',
        'Share of the rows on which a function gave no value, by step; its '
        'fallback may have given one.',
        rewards.missing,
      ),
      Card(
        'Contribution on held-out problems',
        'Advantages computed again without one reward.',
        run_.contributions,
      ),
    ],
  ),
  Section(
    'answers',
    'Completions',
    lambda run: [
      Card(
        'Length by outcome',
        'Tokens of all rows, and of those that the update pushes up or down. '
        'If the longer ones are pushed up, answers will grow.',
        run_.lengths,
      ),
      Card(
        'Truncation by outcome',
        'Share that ran into the limit.',
        run_.truncation,
      ),
      *_histogram_cards(run),
    ],
  ),
  Section(
    'update',
    'The update',
    lambda run: [
      Card(
        'Entropy',
        'Relative to the first steps: the band 0.8 to 1.2 is calm; below the '
        'dotted line 0.3, with copies in the groups, it has collapsed.',
        run_.entropy,
      ),
      Card(
        'KL to the reference',
        'Dotted: the target and twice the target, where the alarm is.',
        run_.kl,
      ),
      Card('Coefficients', 'Of the KL and entropy terms in use.', run_.kl_coef),
      Card(
        'Clipped tokens',
        'Share of the tokens whose importance ratio left the trust region.',
        run_.clipping,
      ),
      Card(
        'Gradient norm and loss',
        'Before clipping. The loss of a policy gradient need not fall.',
        run_.optimizer,
      ),
      Card('Learning rate', 'Adjustments included.', run_.learning_rate),
      Card(
        'Sampler against trainer',
        'Mean absolute difference of log-probabilities, logarithmic.',
        run_.mismatch,
      ),
      Card('Value head', 'PPO only.', run_.value_head),
      Card('Gradient norm of the heads', 'Decoupled policy.', run_.heads),
      Card('Fusion weights', 'Decoupled policy.', run_.fusion),
    ],
  ),
  Section(
    'time',
    'Time',
    lambda run: [
      Card('Seconds by part', 'The first step compiles.', run_.timing),
      Card(
        'Timing tree',
        'A mean step, the first left out.',
        run_.time_tree,
      ),
      Card(
        'Throughput',
        'Completion tokens per second of sampling.',
        run_.throughput,
      ),
      Card(
        'Arithmetic',
        'Model FLOPs per second of the whole step.',
        run_.arithmetic,
      ),
      Card(
        'Utilisation',
        'Model FLOPs over the peak of the devices.',
        run_.utilisation,
      ),
    ],
  ),
  Section(
    'front',
    'Trade-offs',
    lambda run: [
      Card(
        'Pareto front',
        'Evaluations on held-out problems; large dots are beaten by no other '
        'on every reward.',
        run_.pareto_front,
      ),
      Card(
        'Hypervolume',
        'Volume between the front and the first evaluation.',
        run_.hypervolume,
      ),
    ],
  ),
)
