"""Rewards by model: anything from a list of texts to a list of numbers.

  prompts, completions --text--> list[str] --scorer--> list[float]

A scorer may be a function of yours, or a transformer from a local Hugging Face
directory: a sequence classifier, or an embedding model for similarity and
diversity. These run in torch (the `[judged]` extra) in the host process or,
with isolation='process', beside it; they are loaded when first called. A judge
that runs in JAX on the training mesh is `gdpo_jax.judge`.
"""

import collections
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gdpo_jax.rewards import calls

Scorer = Callable[[list[str]], Sequence[float | None]]


def judge(
  scorer: Scorer, *, with_prompt: bool = False, name: str | None = None
) -> Callable[..., Sequence[float | None]]:
  """A reward function out of a scorer of texts.

  Args:
    scorer: list[str] -> as many numbers.
    with_prompt: the scorer sees the prompt, a blank line, and the completion;
      otherwise the completion alone.
    name: of the function, and so of the reward.
  """

  def judge(prompts, completions, **_: Any) -> Sequence[float | None]:
    texts = [calls.text_of(text) for text in completions]
    if with_prompt:
      heads = [calls.text_of(prompt) for prompt in prompts]
      texts = [f'{head}\n\n{text}' for head, text in zip(heads, texts)]
    return scorer(texts)  # the pipeline checks what that is

  judge.__name__ = name or getattr(scorer, '__name__', 'judge')
  return judge


class _Model:
  """A transformer that is loaded on first use and travels without weights."""

  def __init__(
    self, directory: str, *, batch_rows: int = 32, max_tokens: int = 512
  ):
    if not (pathlib.Path(directory) / 'config.json').is_file():
      raise ValueError(
        f'{directory} is no Hugging Face model directory: it has no config.json'
      )
    self.directory, self.batch_rows = str(directory), batch_rows
    self.max_tokens = max_tokens
    self._loaded = None

  def __getstate__(self):
    return {**self.__dict__, '_loaded': None}

  def _load(self, kind: str):
    """Tokenizer and model; `kind` is the name of an Auto class."""
    if self._loaded is None:
      import transformers

      tokenizer = transformers.AutoTokenizer.from_pretrained(self.directory)
      model = getattr(transformers, kind).from_pretrained(self.directory)
      self._loaded = tokenizer, model.eval()
    return self._loaded

  def _batches(self, kind: str, texts: list[str], read: Callable) -> np.ndarray:
    """`read(model output, mask)` of all texts, batched by length."""
    import torch

    tokenizer, model = self._load(kind)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    rows: list[Any] = [None] * len(texts)
    for start in range(0, len(order), self.batch_rows):
      picked = order[start : start + self.batch_rows]
      inputs = tokenizer(
        [texts[row] for row in picked],
        padding=True,
        truncation=True,
        max_length=self.max_tokens,
        return_tensors='pt',
      )
      with torch.inference_mode():
        values = read(model(**inputs), inputs['attention_mask'])
      for row, value in zip(picked, values.float().numpy()):
        rows[row] = value
    return np.stack(rows)


class Classifier(_Model):
  """A sequence classifier as a scorer: probability of a label, or its score.

  With one output (a reward model) that number itself, unbounded.
  """

  def __init__(self, directory: str, label: str | None = None, **options: Any):
    """`label`: which output of several; as the config spells it."""
    super().__init__(directory, **options)
    self.__name__ = label or 'classifier'
    config = json.loads((pathlib.Path(directory) / 'config.json').read_text())
    labels = {
      name: int(at) for at, name in (config.get('id2label') or {}).items()
    }
    single = len(labels) == 1 or config.get('num_labels') == 1
    if label is None and not single:
      raise ValueError(f'choose one of the labels {sorted(labels)}.')
    if label is not None and label not in labels:
      raise ValueError(f'label {label!r} is none of {sorted(labels)}.')
    self._label = None if label is None else labels[label]

  def __call__(self, texts: list[str]) -> list[float]:
    if not texts:
      return []

    def read(output, mask):
      if output.logits.shape[-1] == 1:
        return output.logits[:, 0]
      return output.logits.softmax(-1)[:, self._label]

    kind = 'AutoModelForSequenceClassification'
    return self._batches(kind, list(texts), read).tolist()


class Embedder(_Model):
  """A sentence embedding model; rows of unit length.

  Pools as the directory's `1_Pooling/config.json` says (mean or first token;
  mean where there is none).
  """

  def __init__(self, directory: str, **options: Any):
    super().__init__(directory, **options)
    path = pathlib.Path(directory) / '1_Pooling' / 'config.json'
    pooling = json.loads(path.read_text()) if path.is_file() else {}
    self._first = bool(pooling.get('pooling_mode_cls_token'))
    if not self._first and not pooling.get('pooling_mode_mean_tokens', True):
      raise ValueError(f'{path}: pooling by mean or first token is supported.')

  def __call__(self, texts: list[str]) -> np.ndarray:
    """f32[n, D] of n texts."""

    def read(output, mask):
      states = output.last_hidden_state
      if self._first:
        pooled = states[:, 0]
      else:
        mask = mask[..., None].to(states.dtype)
        pooled = (states * mask).sum(1) / mask.sum(1)
      return pooled / pooled.norm(dim=-1, keepdim=True).clamp(min=1e-12)

    return self._batches('AutoModel', list(texts), read)


def similarity(embed: Callable[[list[str]], np.ndarray]) -> Callable[..., list]:
  """Cosine between a completion and the column `answer`, in [-1, 1].

  Rows whose reference is None have no opinion.
  """

  def similarity(completions, answer, **_: Any) -> list[float | None]:
    rows = [row for row, text in enumerate(answer) if text is not None]
    values: list[float | None] = [None] * len(answer)
    if rows:
      texts = [calls.text_of(completions[row]) for row in rows]
      vectors = embed(texts + [str(answer[row]) for row in rows])
      half = len(rows)
      for row, one, other in zip(rows, vectors[:half], vectors[half:]):
        values[row] = float(one @ other)
    return values

  return similarity


class Diversity:
  """coef * (1 - cos) against the mean of the last responses.

  `cos` is the mean cosine between a response and the `window` responses before
  it, in the order of the rows and across calls; nothing before it counts as 0.
  Stateful: neither `pure` nor for several workers.
  """

  def __init__(
    self,
    embed: Callable[[list[str]], np.ndarray],
    *,
    window: int = 5,
    coef: float = 0.03,
  ):
    self.__name__ = 'diversity'
    self._embed, self._coef = embed, coef
    self._last: collections.deque = collections.deque(maxlen=window)

  def __call__(self, completions, **_: Any) -> list[float]:
    values = []
    for vector in self._embed([calls.text_of(text) for text in completions]):
      cosine = np.mean([vector @ other for other in self._last] or [0.0])
      values.append(self._coef * float(1.0 - cosine))
      self._last.append(vector)
    return values
