"""GSM8K, grade-school word problems (arXiv:2110.14168).

  JSON lines, or the hub --read--> question, solution ending in '#### 18'
        --chat prompt--> 'prompt', 'answer': '18'

The file is the one of github.com/openai/grade-school-math: a record per line
with 'question' and 'answer'.
"""

import os
import re
from typing import Any

from gdpo_jax.tasks import records
from gdpo_jax.tasks.base import Layout, chat_prompt

HUB_ID = 'openai/gsm8k'
INSTRUCTION = (
  'Solve the problem step by step. End with a line "Answer: " and the number.'
)
_GOLD = re.compile(r'####\s*\$?([-+]?[\d,]*\.?\d+)\s*$')

# Our own, in the manner of the data.
_WORKED = (
  (
    'A baker fills 6 trays with 8 rolls each. He sells 30 rolls before noon. '
    'How many rolls are left?',
    '6 * 8 = 48 rolls were baked.\n48 - 30 = 18 rolls are left.\nAnswer: 18',
  ),
  (
    'Nora reads 12 pages a day on 5 days and 20 pages on each of the other 2 '
    'days of the week. How many pages does she read in a week?',
    '12 * 5 = 60\n20 * 2 = 40\n60 + 40 = 100\nAnswer: 100',
  ),
)


def gsm8k(
  train: str | os.PathLike = HUB_ID,
  heldout: str | os.PathLike = HUB_ID,
  num_train: int | None = None,
  num_heldout: int | None = None,
  worked: int = 0,
  layout: Layout = 'single',
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Reads problems for a chat model.

  Args:
    train: a JSONL file, or the id of a hub data set (its split 'train'), for
      which the package `datasets` must be installed.
    heldout: the same; of a hub data set the split 'test'.
    num_train: the first so many; all by default.
    num_heldout: the same.
    worked: examples, 0 to 2, that come before the question.
    layout: the instruction and the examples in one user message, or in turns
      of their own.
  Returns:
    (train, heldout); an example has 'prompt' (chat messages) and 'answer' (the
    number as text, no thousands separators).
  Raises:
    ValueError: no such file or data set, a line that is no such record.
  """
  if not 0 <= worked <= len(_WORKED):
    raise ValueError(f'worked must be 0 to {len(_WORKED)}, got {worked}.')
  examples = []
  for source, split, number in (
    (train, 'train', num_train),
    (heldout, 'test', num_heldout),
  ):
    if number is not None and number < 1:
      raise ValueError(f'{split}: asked for {number} problems; at least 1.')
    examples.append(
      [
        {
          'prompt': chat_prompt(
            question, INSTRUCTION, _WORKED[:worked], layout
          ),
          'answer': gold,
        }
        for question, gold in _read(source, split)[:number]
      ]
    )
  return examples[0], examples[1]


def _read(source: str | os.PathLike, split: str) -> list[tuple[str, str]]:
  advice = (
    f'Download {split}.jsonl from github.com/openai/grade-school-math '
    '(grade_school_math/data) and give its path, or give the id of a hub data '
    f'set such as {HUB_ID!r}.'
  )
  found = records.read(source, split, config='main', advice=advice)
  return [
    _problem(record, f'{source}, record {i}')
    for i, record in enumerate(found, 1)
  ]


def _problem(record: Any, where: str) -> tuple[str, str]:
  if not isinstance(record, dict) or not {'question', 'answer'} <= set(record):
    seen = sorted(record) if isinstance(record, dict) else type(record).__name__
    raise ValueError(
      f"{where} should have the keys 'question' and 'answer', got {seen}."
    )
  gold = _GOLD.search(record['answer'])
  if not gold:
    raise ValueError(
      f'{where}: the answer should end in "#### " and a number, got '
      f'{record["answer"][-60:]!r}.'
    )
  return record['question'], gold.group(1).replace(',', '')
