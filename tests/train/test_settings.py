"""Settings refuse what cannot work, saying what to change."""

import pytest

from gdpo_jax.train.settings import ALGORITHMS, Settings


def test_an_algorithm_fills_in_only_what_was_left_open():
  s = Settings(algorithm='dapo', clip_high=0.3).resolve()
  assert (s.clip_high, s.denominator, s.max_rounds) == (0.3, 'token', 4)
  assert Settings(algorithm='gdpo').resolve().whiten == 'sequence'
  assert Settings(algorithm='dr_grpo').resolve().denominator == 'constant'


@pytest.mark.parametrize('name', sorted(ALGORITHMS))
def test_every_algorithm_resolves(name):
  s = Settings(algorithm=name).resolve()
  assert None not in (s.advantage, s.whiten, s.policy_loss, s.denominator)
  assert s.resolve() == s


@pytest.mark.parametrize(
  ('changes', 'message'),
  [
    ({'algorithm': 'gdpoo'}, 'choose from .*gdpo'),
    ({'advantage': 'gdpoo'}, "advantage is 'gdpoo'; choose from"),
    ({'group_size': 1}, 'group of one has nothing to be compared with'),
    (
      {'prompts_per_step': 8, 'prompts_per_update': 3},
      'a batch of 8 prompts cannot be split into parts of 3',
    ),
    (
      {'prompts_per_step': 8, 'prompts_per_micro_batch': 3},
      r'8 prompts \(32 rows\) cannot be split into micro-batches of 3',
    ),
    ({'temperature': 0.0}, 'temperature above 0'),
    ({'num_steps': 0}, 'num_steps must be at least 1, got 0'),
    ({'learning_rate': -1.0}, 'learning_rate must be positive'),
    ({'warmup_share': 1.0}, r'warmup_share is in \[0, 1\)'),
  ],
)
def test_what_cannot_work_is_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    Settings(**changes).resolve()


def test_a_soft_overlong_penalty_has_a_margin():
  def margin(**changes):
    return Settings(**changes).resolve().overlong_margin

  assert margin(algorithm='dapo', max_new_tokens=20480) == 4096
  # a margin rounded to 0 would be a penalty that no row can get
  assert margin(overlong_share=0.01, max_new_tokens=8) == 1
  assert margin(overlong_share=0.0) == margin() == 0


def test_updates_per_step_counts_epochs_and_splits():
  s = Settings(prompts_per_step=8, prompts_per_update=2, epochs_per_batch=3)
  assert s.resolve().updates_per_step == 12
