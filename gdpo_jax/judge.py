"""A decoder with a scalar head as a reward, on the training mesh.

  texts or (prompt, completion) --tokenizer--> ids, trailing pads cut off
      --smallest bucket that holds them--> tokens i32[batch_rows, bucket]
      --decoder, last token, score weights--> logits f32[n, labels] --> floats

Every batch has one of a few declared shapes, so a judge compiles once for each
bucket and never again. It is a reward function like any other, to be run with
isolation='main':

  judge = JaxJudge.from_hf('reward-model', mesh=mesh)
  Reward(judge, name='helpful', isolation='main')

Processes that share a mesh have to launch the same programs in the same order,
or each waits for the others for ever. Three things see to it: calls are made on
the thread that made the judge, in the order of the rewards; the processes agree
on the number of batches of each bucket before the first; and a process whose
texts cannot be tokenized takes part with empty rows before it raises.
"""

import dataclasses
import os
import pathlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from gdpo_jax import sharding
from gdpo_jax.policy import hf
from gdpo_jax.policy.config import PolicyConfig
from gdpo_jax.policy.decoder import Decoder, Groups
from gdpo_jax.policy.tokenizer import Tokenizer, read_json

_SCORE = 'score.weight'
_SHORTEST, _LONGEST = 128, 2048  # of the buckets that are chosen for the user

Text = str | Sequence[Mapping[str, Any]]  # a string or a message list


class JaxJudge:
  """Scores texts by the last token's state, as sequence classifiers do.

  The call is a reward function and a scorer: `judge(texts)` scores texts alone,
  `judge(prompts=..., completions=...)`, which is what a `Pipeline` does, each
  completion after its prompt. With one label the value is its logit, unbounded;
  with several it is the probability of the chosen one.

  Strings are joined as they are, and get a BOS where the tokenizer adds one;
  message lists are rendered with the tokenizer's chat template. A text without
  tokens, or longer than the last bucket, is NaN: missing, never cut.

  Attributes:
    num_labels: rows of the score weights.
    buckets: lengths, in tokens, that batches are padded to.
  """

  def __init__(
    self,
    config: PolicyConfig,
    params: Any,
    score: Any,
    tokenizer: Tokenizer,
    *,
    label: int | None = None,
    pad_id: int | None = None,
    buckets: Sequence[int] | None = None,
    batch_rows: int = 32,
    mesh: jax.sharding.Mesh | None = None,
    dtype: Any = None,
  ):
    """Places the weights; compiles nothing yet, see `warm_up`.

    Args:
      config: of the decoder.
      params: its parameters; a language model's head is not used.
      score: f32[num_labels, D].
      tokenizer: of the model.
      label: which of several labels; needed unless there is one alone.
      pad_id: ids of this value at the end of a text are not scored, the last
        one before them is. That is what transformers does, which matters where
        the pad is also an EOS that ends every text.
      buckets: rising lengths; powers of two from 128 to 2048 by default, as far
        as the model's positions reach.
      batch_rows: rows of one batch, over all devices and processes. Unused ones
        are computed too, so not many more than there are texts per call.
      mesh: rows are split over its data and fsdp axes, weights by the table of
        `gdpo_jax.sharding`. None: one device.
      dtype: of the layers' matrices, as they are stored and multiplied, for
        instance bfloat16; None leaves them.
    Raises:
      ValueError: sizes that do not fit each other, the model or the mesh.
    """
    if score.ndim != 2 or score.shape[1] != config.width:
      raise ValueError(
        f'score weights have shape {list(score.shape)}, expected '
        f'[labels, {config.width}].'
      )
    self.num_labels = score.shape[0]
    if label is None and self.num_labels == 1:
      label = 0
    if label is None or not 0 <= label < self.num_labels:
      raise ValueError(
        f'the judge has {self.num_labels} labels; choose one by '
        f'0 <= label < {self.num_labels}, got {label}.'
      )
    self.buckets = _check_buckets(buckets, config.max_positions)
    self._local_rows = _local_rows(batch_rows, mesh)
    self._tokenizer, self._label, self._pad_id = tokenizer, label, pad_id
    self._vocab_size = config.vocab_size
    self._mesh, self._thread = mesh, threading.get_ident()

    params = {name: leaf for name, leaf in params.items() if name != 'head'}
    if dtype is not None:
      params = jax.tree_util.tree_map_with_path(
        lambda path, x: x.astype(dtype) if path[-1].key == 'kernel' else x,
        params,
      )
    placed = None
    if mesh is not None:
      placed = sharding.shardings(mesh, params), sharding.replicated(mesh)
    self._weights = jax.device_put((params, score), placed)
    # tied: the decoder then asks for no head of its own
    decoder = Decoder(dataclasses.replace(config, tied=True))

    def forward(weights, tokens, lengths):
      params, score = weights
      steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
      hidden, _ = decoder.apply(
        {'params': params},
        tokens,
        jnp.broadcast_to(steps, tokens.shape),
        Groups(steps < lengths[:, None]),
      )
      last = jnp.take_along_axis(hidden, lengths[:, None, None] - 1, axis=1)
      return jnp.dot(
        last[:, 0].astype(jnp.float32),
        score.astype(jnp.float32).T,
        precision=jax.lax.Precision.HIGHEST,
      )

    self._forward = jax.jit(
      forward, out_shardings=None if mesh is None else sharding.rows(mesh)
    )

  @classmethod
  def from_hf(
    cls,
    directory: str | os.PathLike,
    *,
    label: str | int | None = None,
    mesh: jax.sharding.Mesh | None = None,
    **options: Any,
  ) -> 'JaxJudge':
    """Reads a sequence classifier of a policy family, with its tokenizer.

    Args:
      directory: in hub layout; safetensors as `hf.load` reads them, with
        `score.weight` [labels, D] in place of a language model's head.
      label: by number, or as `id2label` of config.json spells it.
      mesh: each process reads the slices of its own devices.
      **options: as for the constructor; `pad_id` is read from config.json.
    Raises:
      ValueError: what is missing, surplus or misshapen, by name.
    """
    directory = pathlib.Path(directory)
    config = dataclasses.replace(hf.load_config(directory), tied=True)
    raw = read_json(directory / 'config.json')
    with hf.open_tensors(directory) as tensors:
      score = tensors.pop(_SCORE, None)
      if score is None:
        raise ValueError(
          f'{directory} has no {_SCORE!r}: not a sequence classifier. Give a '
          'model saved by a ForSequenceClassification class of transformers.'
        )
      params = hf.assemble(
        config,
        tensors,
        directory,
        shardings=mesh and (lambda tree: sharding.shardings(mesh, tree)),
      )
      score = score.read((slice(None),) * len(score.shape))
    if isinstance(label, str):
      named = {name: int(at) for at, name in raw.get('id2label', {}).items()}
      if label not in named:
        raise ValueError(
          f'label {label!r} is none of those of {directory}: {sorted(named)}.'
        )
      label = named[label]
    options.setdefault('pad_id', raw.get('pad_token_id'))
    tokenizer = Tokenizer.from_hf(directory)
    return cls(
      config, params, score, tokenizer, label=label, mesh=mesh, **options
    )

  def __call__(
    self, completions: Sequence[Text], prompts: Sequence[Text] | None = None
  ) -> list[float]:
    """A float per completion; NaN where it has no tokens or too many."""
    logits = self.logits(completions, prompts)
    if self.num_labels == 1:
      return logits[:, 0].tolist()
    exp = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (exp[:, self._label] / exp.sum(axis=1)).tolist()

  def __reduce__(self):
    # a copy would start a second JAX beside this one, on the same devices
    raise TypeError(
      "a judge stays in the process that made it; use isolation='main'."
    )

  def logits(
    self, completions: Sequence[Text], prompts: Sequence[Text] | None = None
  ) -> np.ndarray:
    """f32[n, num_labels] of this process's n texts; rows of NaN as above.

    With several processes, all of them call this together.

    Raises:
      ValueError: a text that the tokenizer or its chat template refuses, or
        whose ids the model does not know.
      RuntimeError: a call from a thread other than the one that made the
        judge, where several devices work together.
    """
    if (
      self._mesh is not None
      and self._mesh.size > 1
      and threading.get_ident() != self._thread
    ):
      raise RuntimeError(
        'a judge on several devices is called from the thread that made it, '
        "or programs launched at the same time can deadlock; use isolation='main'."
      )
    refused = None
    try:
      if prompts is None:
        prompts = [None] * len(completions)
      pairs = zip(prompts, completions, strict=True)
      ids = [self._encode(prompt, text) for prompt, text in pairs]
    except Exception as error:
      ids, refused = [], error
    logits = self._run(ids)
    if refused is not None:
      raise refused
    return logits

  def warm_up(self) -> None:
    """Compiles every bucket now rather than when the first text needs it."""
    for length in self.buckets:
      self._batch(length, [])

  def _encode(self, prompt: Text | None, completion: Text) -> list[int]:
    if isinstance(completion, str) and (
      prompt is None or isinstance(prompt, str)
    ):
      ids = self._tokenizer.encode((prompt or '') + completion, add_bos=True)
    else:
      messages = [
        *_messages(prompt or [], 'user'),
        *_messages(completion, 'assistant'),
      ]
      ids = self._tokenizer.chat(messages, add_generation_prompt=False)
    while len(ids) > 1 and ids[-1] == self._pad_id:
      ids.pop()  # later tokens have no influence on the one that is scored
    if ids and max(ids) >= self._vocab_size:
      raise ValueError(
        f'token {max(ids)} is outside the {self._vocab_size} of the model; '
        'the tokenizer belongs to another one.'
      )
    return ids

  def _run(self, ids: list[list[int]]) -> np.ndarray:
    out = np.full((len(ids), self.num_labels), np.nan, np.float32)
    held: dict[int, list[int]] = {length: [] for length in self.buckets}
    for row, tokens in enumerate(ids):
      if 0 < len(tokens) <= self.buckets[-1]:
        held[next(b for b in self.buckets if len(tokens) <= b)].append(row)
    size = self._local_rows
    counts = np.asarray([-(-len(rows) // size) for rows in held.values()])
    if _num_processes(self._mesh) > 1:
      counts = multihost_utils.process_allgather(counts).max(axis=0)
    for (length, rows), count in zip(held.items(), counts):
      for start in range(0, int(count) * size, size):
        picked = rows[start : start + size]
        out[picked] = self._batch(length, [ids[row] for row in picked])
    return out

  def _batch(self, length: int, ids: list[list[int]]) -> np.ndarray:
    """f32[len(ids), labels]; unused rows hold one token of no meaning."""
    tokens = np.zeros((self._local_rows, length), np.int32)
    lengths = np.ones(self._local_rows, np.int32)
    for row, each in enumerate(ids):
      tokens[row, : len(each)], lengths[row] = each, len(each)
    if self._mesh is not None:
      tokens, lengths = (
        jax.make_array_from_process_local_data(sharding.rows(self._mesh), x)
        for x in (tokens, lengths)
      )
    result = self._forward(self._weights, tokens, lengths)
    parts = {  # rows of this process, each once, in their order
      shard.index[0].start or 0: shard for shard in result.addressable_shards
    }
    local = [np.asarray(parts[start].data) for start in sorted(parts)]
    return np.concatenate(local)[: len(ids)]


def _messages(text: Text, role: str) -> list[Mapping[str, Any]]:
  return [{'role': role, 'content': text}] if isinstance(text, str) else text


def _num_processes(mesh) -> int:
  if mesh is None:
    return 1
  return len({device.process_index for device in mesh.devices.flat})


def _local_rows(batch_rows: int, mesh) -> int:
  """Rows of a batch that this process supplies."""
  shards = 1 if mesh is None else sharding.num_row_shards(mesh)
  processes = _num_processes(mesh)
  if shards % processes:
    raise ValueError(
      f'{processes} processes cannot share {shards} shards of rows; make '
      'data * fsdp of the mesh a multiple of the number of processes.'
    )
  if batch_rows < 1 or batch_rows % shards:
    raise ValueError(
      f'batch_rows {batch_rows} must be a positive multiple of the {shards} '
      'devices that share the rows (data * fsdp).'
    )
  return batch_rows // processes


def _check_buckets(buckets, max_positions) -> tuple[int, ...]:
  if buckets is None:
    longest = min(_LONGEST, max_positions)
    powers = (2**i for i in range(longest.bit_length()))
    return (*(p for p in powers if _SHORTEST <= p < longest), longest)
  buckets = tuple(int(length) for length in buckets)
  rising = all(a < b for a, b in zip(buckets, buckets[1:]))
  if not buckets or buckets[0] < 1 or not rising:
    raise ValueError(f'buckets must be rising lengths, got {buckets}.')
  if buckets[-1] > max_positions:
    raise ValueError(
      f'buckets {buckets} go beyond the {max_positions} positions that the '
      'model was made for.'
    )
  return buckets
