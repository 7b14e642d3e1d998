"""Tasks, and the way from their examples to batches of prompts.

  Task.train [n] --encode--> token lists, the too long left out
        --order (seed)--> PromptIterator --next()--> Prompts [P]
  Task.heldout --encode, pad--> [(Prompts [P], real bool[P])]

An example is a record with a 'prompt' (a string, or a list of chat messages)
and the columns that the task's rewards ask for.
"""

import dataclasses
import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.order import Curriculum, Shuffled
from gdpo_jax.types import Prompts

Message = dict[str, str]
Example = Mapping[str, Any]
Layout = Literal['turns', 'single']


@dataclasses.dataclass(frozen=True)
class Task:
  """What is asked, and what counts as a good answer.

  Attributes:
    name: for logs and run directories.
    train: examples to learn from.
    heldout: examples to evaluate on; none of their prompts is in `train`.
    rewards: K rewards with names of their own.
    demonstrate: `(seed, n) -> [(prompt, completion)]` for a supervised warm
      start, or None. Completions come without EOS.
    curriculum: in which order examples are drawn (`tasks.order`); None: each
      once per epoch, shuffled.
  Raises:
    ValueError: no training examples or rewards, an example without a prompt,
      two rewards of one name, a held-out prompt that is also trained on.
  """

  name: str
  train: Sequence[Example]
  heldout: Sequence[Example]
  rewards: tuple[Reward, ...]
  demonstrate: Callable[[int, int], list[tuple[Any, str]]] | None = None
  curriculum: Curriculum | None = None

  def __post_init__(self):
    object.__setattr__(self, 'rewards', tuple(self.rewards))
    names = [reward.name for reward in self.rewards]
    if not names or len(set(names)) < len(names):
      raise ValueError(
        f'task {self.name!r} needs rewards with names of their own, got '
        f'{names}.'
      )
    if not self.train:
      raise ValueError(f'task {self.name!r} has no training examples.')
    for part, examples in (('train', self.train), ('heldout', self.heldout)):
      for i, example in enumerate(examples):
        if not example.get('prompt'):
          raise ValueError(
            f'task {self.name!r}: {part}[{i}] has no prompt, only '
            f'{sorted(example)}; rename the column that holds it.'
          )
    trained = {_text(example['prompt']) for example in self.train}
    shared = sum(_text(e['prompt']) in trained for e in self.heldout)
    if shared:
      raise ValueError(
        f'task {self.name!r}: {shared} of {len(self.heldout)} held-out prompts '
        'are also trained on; take them out of one side.'
      )


def chat_prompt(
  question: str,
  instruction: str,
  worked: Sequence[tuple[str, str]] = (),
  layout: Layout = 'turns',
) -> list[Message]:
  """A question after worked examples, as chat messages.

  Args:
    question: what is asked.
    instruction: how to answer.
    worked: (question, answer) pairs that come first.
    layout: 'turns' puts the instruction in the system message and each worked
      example in a turn of its own; 'single' puts all in one user message, for
      models that want no system message.
  """
  if layout == 'turns':
    messages = [{'role': 'system', 'content': instruction}]
    for asked, answered in worked:
      messages += [
        {'role': 'user', 'content': asked},
        {'role': 'assistant', 'content': answered},
      ]
    return [*messages, {'role': 'user', 'content': question}]
  if layout == 'single':
    shown = [f'Problem: {q}\n{a}' for q, a in worked]
    last = f'Problem: {question}' if worked else question
    content = '\n\n'.join([instruction, *shown, last])
    return [{'role': 'user', 'content': content}]
  raise ValueError(f"layout must be 'turns' or 'single', got {layout!r}.")


def load(
  sources: Mapping[str, Callable], source: str, settings: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """(train, heldout) of the source of that name.

  Raises:
    ValueError: no such source, or a setting that it does not have.
  """
  if source not in sources:
    raise ValueError(
      f'source must be one of {sorted(sources)}, got {source!r}.'
    )
  known = set(inspect.signature(sources[source]).parameters)
  if set(settings) - known:
    raise ValueError(
      f'source {source!r} has no setting {sorted(set(settings) - known)}; it '
      f'has {sorted(known)}.'
    )
  return sources[source](**settings)


def weighted(
  rewards: Sequence[Reward], weights: Mapping[str, float] | None
) -> tuple[Reward, ...]:
  """The rewards with weights by name; those not named keep their own.

  Raises:
    ValueError: a name that no reward has.
  """
  names = [reward.name for reward in rewards]
  weights = dict(weights or {})
  if set(weights) - set(names):
    raise ValueError(
      f'weights are for {sorted(set(weights) - set(names))}, but the rewards '
      f'are {names}.'
    )
  return tuple(
    dataclasses.replace(r, weight=weights.get(r.name, r.weight))
    for r in rewards
  )


def demonstrations(
  examples: Sequence[Example], answer: Callable[[Example], str]
) -> Callable[[int, int], list[tuple[Any, str]]]:
  """`Task.demonstrate` out of examples that hold a right answer."""

  def demonstrate(seed: int, n: int) -> list[tuple[Any, str]]:
    chosen = random.Random(seed).choices(examples, k=n)
    return [(example['prompt'], answer(example)) for example in chosen]

  return demonstrate


class PromptTokenizer(Protocol):
  """What this module needs of policy.tokenizer.Tokenizer."""

  pad_id: int

  def encode(self, text: str, add_bos: bool = False) -> list[int]: ...

  def chat(
    self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool
  ) -> list[int]: ...


def encode_prompt(prompt: Any, tokenizer: PromptTokenizer) -> list[int]:
  """Strings get the model's BOS, if it has one; a template writes its own."""
  if isinstance(prompt, str):
    return tokenizer.encode(prompt, add_bos=True)
  return tokenizer.chat(prompt, add_generation_prompt=True)


def _pad(ids, examples, pad_id, width) -> Prompts:
  tokens = np.full((len(ids), width), pad_id, np.int32)
  mask = np.zeros((len(ids), width), bool)
  for row, row_ids in enumerate(ids):
    if row_ids:  # [-0:] would be the whole row
      tokens[row, -len(row_ids) :] = row_ids
      mask[row, -len(row_ids) :] = True
  return Prompts(tokens, mask, list(examples))


def encode_prompts(
  examples: Sequence[Example],
  tokenizer: PromptTokenizer,
  max_prompt_tokens: int,
) -> Prompts:
  """Examples as they stand, left-padded to i32[P, max_prompt_tokens].

  Raises:
    ValueError: a prompt is longer; nothing is cut or left out here.
  """
  ids = [encode_prompt(example['prompt'], tokenizer) for example in examples]
  lengths = [len(row) for row in ids]
  too_long = sum(length > max_prompt_tokens for length in lengths)
  if too_long:
    raise ValueError(
      f'{too_long} of {len(ids)} prompts are longer than max_prompt_tokens '
      f'{max_prompt_tokens}, the longest has {max(lengths)}; raise '
      'max_prompt_tokens or leave those examples out.'
    )
  return _pad(ids, examples, tokenizer.pad_id, max_prompt_tokens)


def evaluation_batches(
  examples: Sequence[Example],
  tokenizer: PromptTokenizer,
  prompts_per_batch: int,
  max_prompt_tokens: int,
) -> list[tuple[Prompts, np.ndarray]]:
  """All examples in order, in batches of one shape.

  Returns:
    `(Prompts [P], real bool[P])` per batch. The last one is filled up with
    copies of its last example; they are False in `real` and must count for
    nothing.
  Raises:
    ValueError: a prompt is too long (see encode_prompts).
  """
  batches = []
  for start in range(0, len(examples), prompts_per_batch):
    rows = list(examples[start : start + prompts_per_batch])
    missing = prompts_per_batch - len(rows)
    real = np.arange(prompts_per_batch) < len(rows)
    rows += rows[-1:] * missing
    batches.append((encode_prompts(rows, tokenizer, max_prompt_tokens), real))
  return batches


# Examples of which it is remembered how long their answers were.
REMEMBERED = 100_000


class PromptIterator:
  """Batches of shuffled prompts, for ever; can be stopped and resumed anywhere.

  Without a curriculum every epoch is a permutation of its own, drawn from
  (seed, epoch), in which each example comes up once. Where P does not divide
  the number of examples, a batch takes the end of one epoch and the beginning
  of the next.

  Attributes:
    num_examples: examples in an epoch.
    num_too_long: examples left out, longer than `max_prompt_tokens`.
    num_duplicates: examples kept whose prompt had come before.
  """

  def __init__(
    self,
    examples: Sequence[Example],
    tokenizer: PromptTokenizer,
    prompts_per_step: int,
    max_prompt_tokens: int,
    seed: int = 0,
    curriculum: Curriculum | None = None,
  ):
    """Tokenizes all examples.

    Args:
      examples: records with a 'prompt'.
      tokenizer: of the policy.
      prompts_per_step: P.
      max_prompt_tokens: Tp of every batch; shorter prompts are left-padded.
      seed: of the order.
      curriculum: how examples are drawn; shuffled by default.
    Raises:
      ValueError: no example is left, a number is out of range, or the
        curriculum does not suit the examples.
    """
    if prompts_per_step < 1 or seed < 0:
      raise ValueError(
        f'prompts_per_step must be at least 1 and seed at least 0, got '
        f'{prompts_per_step} and {seed}.'
      )
    ids = [encode_prompt(example['prompt'], tokenizer) for example in examples]
    kept = [i for i, row in enumerate(ids) if len(row) <= max_prompt_tokens]
    if not kept:
      raise ValueError(
        f'none of {len(ids)} prompts has at most max_prompt_tokens '
        f'{max_prompt_tokens} tokens (the shortest has '
        f'{min(map(len, ids), default=0)}); raise max_prompt_tokens.'
      )
    self._ids = [ids[i] for i in kept]
    self._examples = [examples[i] for i in kept]
    self._pad_id = tokenizer.pad_id
    self._width = max_prompt_tokens
    self._prompts_per_step = prompts_per_step
    self._seed = seed
    if curriculum is None:
      self._order = Shuffled(len(kept), (seed,))
    else:
      self._order = curriculum.order(self._examples, seed)
    self._index = {id(e): i for i, e in enumerate(self._examples)}
    self._answer_tokens: dict[int, int] = {}  # by example, as last time
    self._fingerprint = _fingerprint(self._ids, self._examples)
    self.num_examples = len(kept)
    self.num_too_long = len(ids) - len(kept)
    self.num_duplicates = len(kept) - len(set(map(tuple, self._ids)))

  def next(self) -> Prompts:
    """The next P prompts: tokens i32[P, Tp], mask bool[P, Tp], examples."""
    chosen = self._order.take(self._prompts_per_step)
    return _pad(
      [self._ids[i] for i in chosen],
      [self._examples[i] for i in chosen],
      self._pad_id,
      self._width,
    )

  __next__ = next

  def observe(
    self, examples: Sequence[Example], values: Mapping[str, np.ndarray]
  ) -> None:
    """Tells the curriculum what became of examples that `next` gave.

    Args:
      examples: P of them, the very objects.
      values: f32[P, G] raw rewards by name, NaN where missing.
    """
    self._order.observe([self._index[id(e)] for e in examples], values)

  def expected_tokens(self, examples: Sequence[Example]) -> np.ndarray:
    """f64[P], tokens of an answer: as last time, else the mean of all so far."""
    known = self._answer_tokens
    usual = sum(known.values()) / len(known) if known else 0
    index = [self._index[id(e)] for e in examples]
    return np.array([known.get(i, usual) for i in index], float)

  def observe_tokens(
    self, examples: Sequence[Example], tokens: np.ndarray
  ) -> None:
    """Keeps, for each of P examples, how long its answers were, f[P]."""
    for example, mean in zip(examples, tokens, strict=True):
      index = self._index[id(example)]
      self._answer_tokens.pop(index, None)  # the newest come last
      self._answer_tokens[index] = round(float(mean))
    while len(self._answer_tokens) > REMEMBERED:
      del self._answer_tokens[next(iter(self._answer_tokens))]

  def __iter__(self) -> Iterator[Prompts]:
    return self

  @property
  def cursor(self) -> dict[str, Any]:
    """Where the next batch begins; plain JSON, for a checkpoint."""
    cursor = {
      **self._order.cursor,
      'seed': self._seed,
      'fingerprint': self._fingerprint,
    }
    if self._answer_tokens:
      pairs = [[i, n] for i, n in self._answer_tokens.items()]
      cursor['answer_tokens'] = pairs
    return cursor

  def restore(self, cursor: Mapping[str, Any]) -> None:
    """Goes to where a cursor was taken; the next batches are the same again.

    P may differ from then: positions count examples.

    Raises:
      ValueError: the cursor belongs to other data or another seed.
    """
    cursor = dict(cursor)
    tokens = cursor.pop('answer_tokens', [])
    self._answer_tokens = {}
    for key, what in (
      ('fingerprint', 'examples, tokenizer or max_prompt_tokens'),
      ('seed', 'seed'),
    ):
      if cursor[key] != self.cursor[key]:
        raise ValueError(
          f'this cursor was taken with other {what}: {key} {cursor[key]!r}, '
          f'here {self.cursor[key]!r}; resume with the settings of that run, '
          'or start a new one.'
        )
    if cursor.keys() != self.cursor.keys():
      raise ValueError(
        'this cursor was taken with another curriculum: it has '
        f'{sorted(cursor)}, here {sorted(self.cursor)}; resume with the '
        'curriculum of that run, or start a new one.'
      )
    self._answer_tokens = dict(tokens)
    self._order.restore(cursor)


def _text(prompt) -> str:
  return prompt if isinstance(prompt, str) else json.dumps(prompt)


def _fingerprint(ids, examples) -> str:
  """Of tokens and columns: rewards read the columns, so they count as well."""
  digest = hashlib.blake2b(digest_size=8)
  for row, example in zip(ids, examples):
    record = json.dumps([row, example], sort_keys=True, default=_plain)
    digest.update(record.encode())
  return digest.hexdigest()


def _plain(value):
  """Stands for what JSON cannot hold; never an address, which changes."""
  return value.tolist() if hasattr(value, 'tolist') else type(value).__name__
