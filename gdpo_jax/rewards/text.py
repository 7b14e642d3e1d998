"""Rewards on plain text: shape, economy, variety, agreement with a reference.

Reward functions, or factories of them where a setting is needed. The measures
against a reference (speech and caption tasks rewarded from transcripts) come
from jiwer, sacrebleu and rouge-score, the `[judged]` extra.
"""

import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from gdpo_jax.rewards import calls

RewardFn = Callable[..., list[float | None]]


def matches(pattern: str) -> RewardFn:
  """1.0 where the whole completion matches a regular expression, else 0.0.

  `.` matches newlines too. Write patterns that cannot backtrack for ever, or
  run the reward with isolation='process'.
  """
  compiled = re.compile(pattern, re.DOTALL)

  def matches(completions: Sequence[Any], **_: Any) -> list[float]:
    return [
      float(compiled.fullmatch(calls.text_of(text)) is not None)
      for text in completions
    ]

  return matches


def words_between(at_least: int, at_most: int) -> RewardFn:
  """1.0 where the number of words is in [at_least, at_most], else 0.0."""
  if not 0 <= at_least <= at_most:
    raise ValueError(
      'words_between needs 0 <= at_least <= at_most, '
      f'got {at_least}, {at_most}.'
    )

  def words_between(completions: Sequence[Any], **_: Any) -> list[float]:
    return [
      float(at_least <= len(calls.text_of(text).split()) <= at_most)
      for text in completions
    ]

  return words_between


def efficiency(
  completion_ids: Sequence[Sequence[int]], **_: Any
) -> list[float]:
  """1 / (1 + log(1 + tokens)), in (0, 1]; EOS is a token."""
  return [1.0 / (1.0 + math.log1p(len(ids))) for ids in completion_ids]


def coherence(
  completions: Sequence[Any], entropy: Sequence[float | None], **_: Any
) -> list[float | None]:
  """1 - sigmoid(entropy), in (0, 0.5]: the surer the policy, the higher.

  Reads the column `entropy`: mean entropy of the row's tokens in nats, which
  whoever sampled the rows has to provide.
  """
  return [
    None if h is None else 1.0 / (1.0 + math.exp(min(h, 700))) for h in entropy
  ]


def novelty(num_words: int = 3) -> RewardFn:
  """Share of a completion's n-grams that its siblings do not have, in [0, 1].

  Siblings are the other completions of the same prompt in the batch, so the
  value depends on the group (not `pure`). n-grams are of `num_words` words,
  without case; a completion of fewer words has itself as its only one, an
  empty one has none and gets 0.
  """
  if num_words < 1:
    raise ValueError(f'num_words must be at least 1, got {num_words}.')

  def novelty(
    completions: Sequence[Any], prompts: Sequence[Any], **_: Any
  ) -> list[float]:
    grams = [_ngrams(calls.text_of(text), num_words) for text in completions]
    groups = [repr(prompt) for prompt in prompts]
    owners = collections.Counter(
      (group, gram) for group, row in zip(groups, grams) for gram in row
    )
    return [
      sum(owners[group, gram] == 1 for gram in row) / len(row) if row else 0.0
      for group, row in zip(groups, grams)
    ]

  return novelty


def _ngrams(text: str, num_words: int) -> set[tuple[str, ...]]:
  words = text.casefold().split()
  count = max(len(words) - num_words + 1, 1)
  return (
    {tuple(words[i : i + num_words]) for i in range(count)} if words else set()
  )


def word_accuracy(
  completions: Sequence[Any], answer: Sequence[str | None], **_: Any
) -> list[float | None]:
  """max(0, 1 - word error rate) against the column `answer`.

  Case and punctuation do not count. An empty reference is matched by an empty
  completion alone; a row whose reference is None has no opinion.
  """
  import jiwer

  def compare(text, reference):
    if not reference:
      return float(not text)
    return max(0.0, 1.0 - jiwer.wer(reference, text))

  return _compare(compare, completions, answer, _plain)


def chrf(
  completions: Sequence[Any], answer: Sequence[str | None], **_: Any
) -> list[float | None]:
  """chrF (character n-gram F-score, Popovic 2015) / 100, in [0, 1]."""
  import sacrebleu

  metric = sacrebleu.CHRF()
  return _compare(
    lambda text, reference: (
      metric.sentence_score(text, [reference]).score / 100
    ),
    completions,
    answer,
  )


def rouge(kind: str = 'rougeL') -> RewardFn:
  """ROUGE F-measure ('rouge1', 'rouge2', 'rougeL', ...) against `answer`."""
  from rouge_score import rouge_scorer

  scorer = rouge_scorer.RougeScorer([kind], use_stemmer=False)

  def rouge(
    completions: Sequence[Any], answer: Sequence[str | None], **_: Any
  ) -> list[float | None]:
    return _compare(
      lambda text, reference: scorer.score(reference, text)[kind].fmeasure,
      completions,
      answer,
    )

  return rouge


def _plain(text: str) -> str:
  return ' '.join(re.sub(r"[^\w\s']", ' ', text.casefold()).split())


def _compare(measure, completions, references, clean=str) -> list[float | None]:
  return [
    None
    if reference is None
    else float(measure(clean(calls.text_of(text)), clean(reference)))
    for text, reference in zip(completions, references)
  ]
