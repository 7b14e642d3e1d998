"""Every rule on rows made by hand, and on runs that went well."""

import pathlib

import pytest
import run_histories

from gdpo_jax.train import metrics, monitor, rules
from gdpo_jax.train.rule_book import RULES

RESULTS = pathlib.Path(__file__).parents[2] / 'experiments' / 'results'
BY_NAME = {rule.name: rule for rule in RULES}
ABOUT = run_histories.ABOUT


def find(name, history, about=ABOUT):
  rule = BY_NAME[name]
  return rule.find(history, about, rule.threshold)


# rule -> (what is wrong from the first step on, subject, words of the sentence)
FAULTS = {
  'reward_still': (
    {'right/zero_variance': 1.0, 'right/mean': 0.25},
    'right',
    ['never tells', '100%', '0.25'],
  ),
  'weight_small': (
    {'advantage_share/short': 0.01, 'advantage_share/right': 0.99},
    'short',
    ['1.0%', '50%'],
  ),
  'reward_missing': (
    {
      'short/missing': 0.75,
      'short/missing/timeout': 180.0,
      'short/missing/nan': 12.0,
    },
    'short',
    ['75%', "'timeout'", '180'],
  ),
  'reward_muted': ({'short/missing/muted': 256.0}, 'short', ['muted']),
  'not_finite': (
    {'skipped_updates': 1.0, 'right/missing/nan': 4.0, 'loss': None},
    'update',
    ['100%', 'right returned NaN'],
  ),
  'kl_high': ({'kl/nats_per_sequence': 13.0}, 'kl', ['13.0', '2.2 times']),
  'condition_silent': (
    {'condition/short/held': 0.005},
    'short',
    ['right>=1', '0.5%'],
  ),
}


@pytest.mark.parametrize('name', FAULTS)
def test_a_fault_is_found_and_named(name):
  changes, subject, words = FAULTS[name]
  found = find(name, run_histories.run(20, **changes))
  assert [f.subject for f in found] == [subject]
  for word in words:
    assert word in found[0].sentence, found[0].sentence


@pytest.mark.parametrize('name', FAULTS)
def test_every_other_rule_is_silent_about_it(name):
  changes, _, _ = FAULTS[name]
  history = run_histories.run(20, **changes)
  loud = {
    r.name for r in RULES if not r.once and r.find(history, ABOUT, r.threshold)
  }
  assert loud == {name}


@pytest.mark.parametrize('name', sorted(BY_NAME))
def test_a_rule_without_its_metrics_says_nothing(name):
  history = [{'step': step} for step in range(1, 61)]
  if not BY_NAME[name].once:
    assert find(name, history) == []


def test_a_function_whose_fallback_answers_fails_all_the_same():
  history = run_histories.run(4, **{'short/missing/exception': 256.0})
  (found,) = find('reward_missing', history)
  assert "'exception' (256 rows" in found.sentence
  assert 'right stands in' in found.sentence


def test_no_opinion_on_some_rows_is_no_failure():
  changes = {'short/missing': 0.75, 'short/missing/none': 192.0}
  assert find('reward_missing', run_histories.run(4, **changes)) == []
  changes = {'short/missing': 1.0, 'short/missing/none': 256.0}
  assert find('reward_missing', run_histories.run(4, **changes))
  # three rounds of sampling count three times as many rows
  changes = {'short/missing/timeout': 256.0, 'groups/rounds': 3.0}
  assert find('reward_missing', run_histories.run(4, **changes)) == []


def test_a_reward_kept_small_by_its_condition_is_not_told_to_weigh_more():
  history = run_histories.run(
    20, **{'advantage_share/short': 0.0, 'condition/short/held': 0.01}
  )
  assert find('weight_small', history) == []
  assert [f.subject for f in find('condition_silent', history)] == ['short']


def test_a_reward_that_reached_its_best_is_not_still():
  def best(step):
    return 1.0 if step > 10 else 0.5

  def silent(step):
    return 1.0 if step > 10 else 0.2

  changes = {'right/mean': best, 'right/zero_variance': silent}
  assert find('reward_still', run_histories.run(30, **changes)) == []
  # without a declared range: it rose until all agreed
  changes = {'short/mean': best, 'short/zero_variance': silent}
  assert find('reward_still', run_histories.run(30, **changes)) == []
  # it fell until all agreed
  changes['short/mean'] = lambda step: 0.0 if step > 10 else 0.5
  found = find('reward_still', run_histories.run(30, **changes))
  assert 'no longer tells' in found[0].sentence


def test_entropy_needs_copies_to_have_collapsed():
  def falls(step):
    return 1.0 if step <= 5 else 0.2

  brief = run_histories.run(20, **{'entropy/sampled': falls})
  assert find('entropy_collapse', brief) == []
  copies = run_histories.run(
    20, **{'entropy/sampled': falls, 'completions/distinct': 0.3}
  )
  (found,) = find('entropy_collapse', copies)
  assert '0.20 times' in found.sentence and '30%' in found.sentence
  # in the first steps there is nothing to compare with
  assert find('entropy_collapse', copies[:8]) == []


def test_entropy_that_rises():
  rising = run_histories.run(
    9, **{'entropy/sampled': lambda s: 1.0 if s <= 5 else 4.0}
  )
  (found,) = find('entropy_rise', rising)
  assert '4.0 times' in found.sentence
  assert find('entropy_rise', rising[:6]) == []


def test_early_oscillation():
  # the standard error of a step is 0.5 / 8 = 0.0625
  jumps = run_histories.run(
    12, **{'right/mean': lambda s: 0.5 + 0.15 * (-1) ** s}
  )
  (found,) = find('early_oscillation', jumps)
  assert found.subject == 'right' and '8 of the last 8' in found.sentence
  chance = run_histories.run(
    12, **{'right/mean': lambda s: 0.5 + 0.06 * (-1) ** s}
  )
  assert find('early_oscillation', chance) == []
  rising = run_histories.run(12, **{'right/mean': lambda s: 0.3 * s})
  assert find('early_oscillation', rising) == []
  late = run_histories.run(60, **{'right/mean': lambda s: 0.3 * (-1) ** s})
  assert find('early_oscillation', late) == []


def test_late_drop_says_where_the_best_was():
  def falls(step):
    return 0.8 if 10 <= step < 30 else 0.2

  dropped = run_histories.run(40, **{'right/mean': falls})
  (found,) = find('late_drop', dropped)
  assert found.subject == 'right'
  assert '0.8 (around step 10) to 0.2' in found.sentence
  assert find('late_drop', dropped[:30]) == []


def test_a_negative_weight_turns_better_round():
  def late(step):
    return 0.8 if step >= 30 else 0.2

  # a cost that rises is a drop; the weight is that of the row
  costs = run_histories.run(40, **{'right/mean': late, 'right/weight': -1.0})
  (found,) = find('late_drop', costs)
  assert 'fell from 0.2' in found.sentence and 'to 0.8' in found.sentence


def test_values_that_are_off_get_time_to_learn():
  history = run_histories.run(40, **{'value/bias': 0.8})
  assert find('value_bias', history[:29]) == []
  (found,) = find('value_bias', history[:30])
  assert 'below the returns by 0.8' in found.sentence
  healthy = run_histories.run(40, **{'value/bias': -0.4})
  assert find('value_bias', healthy) == []


def test_rewards_made_by_settings_are_not_accused():
  history = run_histories.run(20)
  for r in history:
    r |= {'advantage_share/kl': 1e-4, 'rewards/kl/zero_variance': 0.0}
    r['rewards/kl/weight'] = 1e-3
  about = ABOUT._replace(
    rewards=(*ABOUT.rewards, rules.RewardInfo('kl', declared=False))
  )
  assert find('weight_small', history, about) == []


def test_a_dead_head():
  history = run_histories.run(12)
  for r in history:
    r.update({f'heads/{n}/grad_norm': 1.0 for n in 'abc'})
    r['heads/b/grad_norm'] = 1e-5
  (found,) = find('head_dead', history)
  assert found.subject == 'b'


def test_a_dead_head_is_seen_although_heads_have_turns():
  history = run_histories.run(31)
  for r in history[1::3]:
    r.update({f'heads/{n}/grad_norm': 1.0 for n in 'ab'})
    r['heads/b/grad_norm'] = 1e-5
  (found,) = find('head_dead', history)
  assert found.subject == 'b'
  assert find('head_dead', history[:20]) == []  # too few turns to say


def fused(weights, **more):
  history = run_histories.run(len(weights))
  for r, w in zip(history, weights, strict=True):
    r |= {'fusion/a/weight': w, 'fusion/b/weight': 1 - w, **more}
  return history


def test_fusion_that_oscillates_and_fusion_that_collapses():
  assert find('fusion_oscillates', fused([0.5, 0.52] * 8)) == []
  (found,) = find('fusion_oscillates', fused([0.3, 0.7] * 8))
  assert 'jumps by 0.4 a step' in found.sentence
  even = {'fusion/entropy': 0.69}
  assert find('fusion_collapse', fused([0.5] * 12, **even)) == []
  (found,) = find(
    'fusion_collapse', fused([1.0] * 12, **{'fusion/entropy': 0.01})
  )
  assert '0.01 nats, of 0.69 for 2 heads' in found.sentence


def test_batch_size_is_judged_per_reward_and_in_all():
  history = run_histories.run(1)
  assert find('batch_small', history) == []
  (found,) = find('batch_small', history, ABOUT._replace(prompts_per_step=8))
  assert '32 rows' in found.sentence and 'fewer than' not in found.sentence
  history = run_histories.run(1, **{'short/missing': 0.95})
  (found,) = find('batch_small', history)
  assert 'short 13' in found.sentence


def demo(seed):
  path = RESULTS / 'demo' / f'metrics_seed{seed}.jsonl'
  return metrics.split_history(metrics.read_jsonl(path))[0]


@pytest.mark.parametrize('seed', range(3))
def test_no_false_alarm_on_a_real_run_that_went_well(seed):
  """SmolLM2 on arithmetic: entropy falls to a quarter, length reaches 1."""
  about = rules.About(
    (
      rules.RewardInfo('correct', 1.0, (0.0, 1.0)),
      rules.RewardInfo('length', 1.0, (0.0, 1.0), 'correct>=1'),
    ),
    prompts_per_step=8,
    group_size=4,
  )
  watching = monitor.Monitor(about)
  events = [e for row in demo(seed) for e in watching.check(row['step'], row)]
  assert [(e.rule, e.kind) for e in events] == [('batch_small', 'advice')]


def test_no_false_alarm_on_rows_that_stay_healthy():
  watching = monitor.Monitor(ABOUT)
  rows = run_histories.run(60)
  assert [e for row in rows for e in watching.check(row['step'], row)] == []
