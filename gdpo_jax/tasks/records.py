"""Records from files and hubs, and examples in the form that tasks want.

  path | hub id --read--> records --examples--> 'prompt' and further columns

What other libraries train on opens as it is: TRL's data sets ('prompt' and
columns), verl's parquet files ('prompt', 'reward_model'), ToolRL's JSON
('instruction', 'input', 'output') and lists of questions and answers.
"""

import gzip
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_SUFFIXES = ('.jsonl', '.json', '.parquet')


def read(
  source: str | os.PathLike,
  split: str = 'train',
  *,
  config: str | None = None,
  advice: str = '',
) -> list[Any]:
  """Reads a file, or one split of a data set of the Hugging Face hub.

  Args:
    source: a path that ends in .jsonl (a record per line), .json (a list) or
      .parquet, the first two also with .gz behind; or an id, 'owner/name', for
      which the package `datasets` must be installed.
    split: of the hub data set.
    config: of the hub data set, where it has several.
    advice: what to do where there is no such file.
  Raises:
    ValueError: nothing there, or not in that form.
  """
  path = pathlib.Path(source)
  if path.is_file():
    records = _from_file(path)
  elif _hub_id(source):
    records = _from_hub(str(source), split, config)
  else:
    raise ValueError(
      f'there is no file {path}. {advice or "Give the path of a JSONL, JSON or parquet file, or the id of a hub data set (owner/name)."}'
    )
  if not records:
    raise ValueError(f'{source} holds no problems.')
  return records


def _hub_id(source) -> bool:
  plain = re.fullmatch(r'[\w-]+/[\w.-]+', str(source))
  return bool(plain) and not str(source).endswith((*_SUFFIXES, '.gz'))


def _from_file(path: pathlib.Path) -> list[Any]:
  name = path.name.removesuffix('.gz')
  if name.endswith('.parquet'):
    try:
      import pyarrow.parquet as parquet  # optional
    except ImportError as error:
      raise ValueError(
        f'{path} needs pyarrow to be read: pip install gdpo_jax[data].'
      ) from error
    return parquet.read_table(path).to_pylist()
  if not name.endswith(('.json', '.jsonl')):
    raise ValueError(
      f'{path} should end in {", ".join(_SUFFIXES)} (.gz may follow).'
    )
  opener = gzip.open if path.suffix == '.gz' else open
  with opener(path, 'rt', encoding='utf-8') as file:
    if name.endswith('.jsonl'):
      lines = [line for line in file if line.strip()]
      return [_parse(x, f'{path}, line {i}') for i, x in enumerate(lines, 1)]
    value = _parse(file.read(), str(path))
  if not isinstance(value, list):
    raise ValueError(f'{path} should hold a list of records.')
  return value


def _parse(text: str, where: str) -> Any:
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where} is not JSON: {error}.') from error


def _from_hub(name: str, split: str, config: str | None) -> list[Any]:
  advice = (
    f'{name!r} is no file and was taken for a data set of the Hugging Face '
    'hub; give the path of a JSONL file instead, or '
  )
  try:
    import datasets  # optional, and heavy
  except ImportError as error:
    raise ValueError(advice + 'run `pip install datasets`.') from error
  try:
    return list(datasets.load_dataset(name, config, split=split))
  except Exception as error:  # whatever the network or the hub brings
    raise ValueError(
      f'{advice}see why it cannot be loaded: {type(error).__name__}: {error}'
    ) from error


def examples(
  records: Iterable[Any], columns: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
  """Records of another library as examples: 'prompt' and columns for rewards.

  Args:
    records: of one form. With 'prompt' it stays (TRL; messages or a string).
      verl's 'reward_model' becomes 'answer', its ground truth. ToolRL's
      'instruction' is the system message, 'input' the user's, 'output' the
      'answer'. 'question' becomes 'prompt'.
    columns: further renaming, new name -> name in the records; done first.
  Raises:
    ValueError: a record that is none of these.
  """
  out = []
  for i, record in enumerate(records):
    if not isinstance(record, Mapping):
      raise ValueError(
        f'record {i} should be a mapping, got {type(record).__name__}.'
      )
    record = dict(record)
    for new, old in (columns or {}).items():
      if old not in record:
        raise ValueError(
          f'record {i} has no column {old!r}, only {sorted(record)}.'
        )
      record[new] = record.pop(old)
    out.append(_example(record, i))
  return out


def _example(record: dict[str, Any], i: int) -> dict[str, Any]:
  if {'instruction', 'input', 'output'} <= record.keys():
    record['prompt'] = [
      {'role': 'system', 'content': record.pop('instruction')},
      {'role': 'user', 'content': record.pop('input')},
    ]
    record['answer'] = record.pop('output')
  if 'prompt' not in record and 'question' in record:
    record['prompt'] = record.pop('question')
  graded = record.get('reward_model')
  if isinstance(graded, Mapping) and 'ground_truth' in graded:
    record['answer'] = record.pop('reward_model')['ground_truth']
  if 'prompt' not in record:
    raise ValueError(
      f'record {i} has no prompt, only {sorted(record)}; say which column it '
      "is: columns={'prompt': NAME}."
    )
  record['prompt'] = _prompt(record['prompt'], i)
  return record


def _prompt(prompt: Any, i: int) -> str | list[dict[str, str]]:
  if isinstance(prompt, str):
    return prompt
  messages = [dict(message) for message in prompt]
  for message in messages:
    if not isinstance(message.get('content'), str) or 'role' not in message:
      raise ValueError(
        f"record {i}: a message needs 'role' and a string 'content', got "
        f'{message!r:.200}; images and tool calls in prompts are not supported.'
      )
  return messages


def at_most_chars(
  items: Sequence[dict[str, Any]], limit: int | None
) -> list[dict[str, Any]]:
  """Those whose prompt has at most so many characters; None: all.

  Held-out prompts that are too long are an error later on, when a tokenizer is
  there to measure them; code has about three characters to a token, text four.

  Raises:
    ValueError: nothing is left.
  """

  def size(prompt) -> int:
    if isinstance(prompt, str):
      return len(prompt)
    return sum(len(message['content']) for message in prompt)

  kept = [
    item for item in items if limit is None or size(item['prompt']) <= limit
  ]
  if not kept:
    raise ValueError(
      f'no prompt has at most max_prompt_chars {limit} characters; raise it.'
    )
  return kept


def split_off(
  items: Sequence[dict[str, Any]], share: float, seed: int = 0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """(train, heldout): prompts are held out, so equal prompts stay together.

  Args:
    share: of the distinct prompts, rounded; in (0, 1).
  """
  if not 0 < share < 1:
    raise ValueError(f'share must be in (0, 1), got {share}.')
  import random

  keys = [json.dumps(item['prompt']) for item in items]
  distinct = sorted(set(keys))
  random.Random(seed).shuffle(distinct)
  chosen = set(distinct[: round(share * len(distinct))])
  train = [item for item, key in zip(items, keys) if key not in chosen]
  heldout = [item for item, key in zip(items, keys) if key in chosen]
  return train, heldout


def from_reasoning_gym(
  name: str, size: int, seed: int = 0, **settings: Any
) -> tuple[list[dict[str, Any]], Any]:
  """Problems of a `reasoning-gym` generator, and the reward that scores them.

  Args:
    name: of the generator, for instance 'leg_counting'.
    size: number of problems.
    **settings: of that generator.
  Returns:
    (examples, reward function); an example has 'prompt', 'answer' and 'entry'
    (all of the problem, which the reward reads). The reward takes what stands
    in <answer> tags, or else the whole completion, and is in [0, 1].
  """
  try:
    import reasoning_gym  # optional
  except ImportError as error:
    raise ValueError(
      'reasoning-gym is not installed: pip install gdpo_jax[data].'
    ) from error
  data = reasoning_gym.create_dataset(name, size=size, seed=seed, **settings)
  made = [
    {
      'prompt': [{'role': 'user', 'content': entry['question']}],
      'answer': entry['answer'],
      'entry': entry,
    }
    for entry in data
  ]

  def solved(completions, entry, **_) -> list[float]:
    values = []
    for completion, each in zip(completions, entry):
      text = completion
      if not isinstance(text, str):
        text = completion[-1]['content']
      tagged = re.findall(r'<answer>(.*?)</answer>', text, re.DOTALL)
      answer = (tagged[-1] if tagged else text).strip()
      values.append(float(data.score_answer(answer, each)))
    return values

  return made, solved
