"""Which examples are worth training on: filters, before a run starts.

examples --keep--> Kept(examples, dropped = how many, and why)
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.tasks.base import PromptTokenizer, encode_prompt


class Kept(NamedTuple):
  """What is left, in the order it came, and what went, by reason."""

  examples: list[dict[str, Any]]
  dropped: dict[str, int]


def keep(
  examples: Sequence[Mapping[str, Any]],
  *,
  unique: bool = False,
  column: str | None = None,
  at_least: float | None = None,
  at_most: float | None = None,
  tokenizer: PromptTokenizer | None = None,
  max_prompt_tokens: int | None = None,
) -> Kept:
  """Leaves out duplicates, the too easy and too hard, and the too long.

  Each example goes for the first reason that applies, in this order:

  Args:
    unique: 'duplicate': the prompt came before.
    column: 'difficulty': a number, a level or a success rate, outside
      [at_least, at_most]; or 'unknown difficulty': None, or no such column.
    at_least, at_most: bounds, included; None for none.
    tokenizer, max_prompt_tokens: 'too long': more tokens than that.
  Raises:
    ValueError: nothing is left, or half of a pair of arguments.
  """
  if (column is None) != (at_least is None and at_most is None):
    raise ValueError('a difficulty needs a column and at_least or at_most.')
  if (tokenizer is None) != (max_prompt_tokens is None):
    raise ValueError('lengths need a tokenizer and max_prompt_tokens.')
  low = float('-inf') if at_least is None else at_least
  high = float('inf') if at_most is None else at_most
  seen: set[str] = set()

  def reason(example) -> str | None:
    key = json.dumps(example['prompt'])
    if unique and key in seen:
      return 'duplicate'
    seen.add(key)
    if column is not None:
      value = example.get(column)
      if value is None:
        return 'unknown difficulty'
      if not low <= float(value) <= high:
        return 'difficulty'
    if tokenizer is not None:
      ids = encode_prompt(example['prompt'], tokenizer)
      if len(ids) > max_prompt_tokens:
        return 'too long'
    return None

  kept, dropped = [], {}
  for example in examples:
    why = reason(example)
    if why is None:
      kept.append(dict(example))
    else:
      dropped[why] = dropped.get(why, 0) + 1
  if not kept:
    raise ValueError(
      f'none of {len(examples)} examples is left after the filters: {dropped}.'
    )
  return Kept(kept, dropped)


def with_success_rates(
  examples: Sequence[Mapping[str, Any]],
  answered: Sequence[Mapping[str, Any]],
  reward: str,
  solved: float = 1.0,
) -> list[dict[str, Any]]:
  """Examples with a column 'success_rate', measured on answers to them.

  Args:
    answered: records with 'prompt' and 'rewards' by name, as runs write them
      to `samples.jsonl` and `heldout/STEP.jsonl`.
    reward: which of the rewards tells success.
    solved: its value from which an answer counts as right.
  Returns:
    copies; the rate is None where no answer was scored.
  """
  scored: dict[str, list[bool]] = {}
  for record in answered:
    value = record['rewards'].get(reward)
    if value is not None:
      key = json.dumps(record['prompt'])
      scored.setdefault(key, []).append(value >= solved)
  out = []
  for example in examples:
    hits = scored.get(json.dumps(example['prompt']))
    rate = sum(hits) / len(hits) if hits else None
    out.append({**example, 'success_rate': rate})
  return out
