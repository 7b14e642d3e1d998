"""Text to token ids and back, and chats to prompts.

  messages --chat template (jinja2, sandboxed)--> text --backend--> ids

A template writes its own BOS, so a rendered chat is tokenized as it stands; a
raw string gets a BOS where the model was trained with one. Either way a prompt
has exactly one. What generation stops at is `eos_ids`: the tokenizer's own EOS
first, then those that only `generation_config.json` names.
"""

import itertools
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

_SPECIAL = ('bos_token', 'eos_token', 'pad_token')
_TEMPLATE_FILE = 'chat_template.jinja'


class Tokenizer:
  """A `tokenizers.Tokenizer` with what a policy must know about it.

  Attributes:
    backend: the `tokenizers.Tokenizer`; `backend.encode_batch` and the like.
    vocab_size: ids that the tokenizer knows, added tokens included; a model's
      embedding may be larger.
    eos_ids: every id that ends a completion; may be empty.
    eos_id: the first of them, or None.
    bos_id: None where there is none.
    pad_id: may equal an EOS id (it does in SmolLM2), so padding is told by
      masks and never by value.
    adds_bos: whether prompts that are plain strings begin with BOS.
    chat_template: jinja2 source, or None.
  """

  def __init__(
    self,
    backend: tokenizers.Tokenizer,
    *,
    eos_ids: Sequence[int] = (),
    bos_id: int | None = None,
    pad_id: int | None = None,
    adds_bos: bool = False,
    chat_template: str | None = None,
  ):
    # files carry the padding and truncation of whoever saved them
    backend.no_padding()
    backend.no_truncation()
    self.backend = backend
    self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
    self.eos_ids = tuple(dict.fromkeys(int(i) for i in eos_ids))
    self.eos_id = self.eos_ids[0] if self.eos_ids else None
    self.bos_id = bos_id
    self.pad_id = (self.eos_id or 0) if pad_id is None else pad_id
    self.adds_bos = adds_bos and bos_id is not None
    self.chat_template = chat_template

  @classmethod
  def from_hf(cls, directory: str | os.PathLike) -> 'Tokenizer':
    """Reads the tokenizer of a model directory in hub layout.

    Needs `tokenizer.json`; takes special tokens and chat template from
    `tokenizer_config.json`, `special_tokens_map.json` and
    `chat_template.jinja`, further EOS ids from `generation_config.json` (or
    `config.json`). Runs no code from the directory.
    """
    directory = pathlib.Path(directory)
    path = directory / 'tokenizer.json'
    if not path.is_file():
      raise ValueError(
        f'{directory} has no tokenizer.json. Convert its tokenizer once with '
        'transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...).'
      )
    try:
      backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
      raise ValueError(f'{path} is not a usable tokenizer: {error}') from error

    config = read_json(directory / 'tokenizer_config.json')
    named = read_json(directory / 'special_tokens_map.json') | config
    special = {key: _content(named.get(key)) for key in _SPECIAL}
    ids = {k: v and backend.token_to_id(v) for k, v in special.items()}
    generation = read_json(directory / 'generation_config.json')
    if 'eos_token_id' not in generation:
      generation |= read_json(directory / 'config.json')
    eos = generation.get('eos_token_id')
    eos = eos if isinstance(eos, list) else [eos]
    if ids['pad_token'] is None:
      ids['pad_token'] = generation.get('pad_token_id')

    adds_bos = config.get('add_bos_token')
    if adds_bos is None:
      # newer files say it in the post-processor alone
      adds_bos = backend.encode('').ids[:1] == [ids['bos_token']]
    return cls(
      backend,
      eos_ids=[i for i in (ids['eos_token'], *eos) if i is not None],
      bos_id=ids['bos_token'],
      pad_id=ids['pad_token'],
      adds_bos=bool(adds_bos),
      chat_template=_read_template(directory, config),
    )

  def save(self, directory: str | os.PathLike) -> None:
    """Writes the files that `from_hf` and transformers' AutoTokenizer read."""
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    config = {
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'add_bos_token': self.adds_bos,
      'clean_up_tokenization_spaces': False,
      **self._special_tokens(),
    }
    several = list(self.eos_ids)
    generation = {
      'bos_token_id': self.bos_id,
      'eos_token_id': several if len(several) > 1 else self.eos_id,
      'pad_token_id': self.pad_id,
    }
    files = {
      'tokenizer.json': self.backend.to_str(pretty=True),
      'tokenizer_config.json': json.dumps(config, indent=2),
      'generation_config.json': json.dumps(generation, indent=2),
    }
    if self.chat_template is not None:
      files[_TEMPLATE_FILE] = self.chat_template
    for name, text in files.items():
      partial = directory / f'.{name}.partial'
      partial.write_text(text, encoding='utf-8')
      os.replace(partial, directory / name)

  def encode(self, text: str, add_bos: bool = False) -> list[int]:
    """Token ids of a raw string.

    With `add_bos` they begin with exactly one BOS if the model was trained so
    (`adds_bos`), also where the text already spells it out; with a model that
    was not, nothing is added.

    Raises:
      ValueError: a character outside the alphabet of a character tokenizer.
    """
    try:
      ids = self.backend.encode(text, add_special_tokens=False).ids
    except Exception as error:  # the Rust side raises bare Exception
      unknown = {
        char for char in text if self.backend.token_to_id(char) is None
      }
      raise ValueError(
        f'cannot tokenize {text[:80]!r} ({error}); characters without a token '
        f'of their own: {sorted(unknown)}.'
      ) from error
    if add_bos and self.adds_bos and ids[:1] != [self.bos_id]:
      ids = [self.bos_id, *ids]
    return ids

  def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
    """Text of the ids; control tokens are left out unless asked for."""
    ids = [int(i) for i in ids]
    return self.backend.decode(ids, skip_special_tokens=skip_special)

  def chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **template_kwargs,
  ) -> list[int]:
    """Token ids of a conversation; see `render`. Adds no BOS of its own."""
    return self.encode(
      self.render(messages, add_generation_prompt, **template_kwargs)
    )

  def render(
    self,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **template_kwargs,
  ) -> str:
    """The conversation as text, by transformers' own sandboxed renderer.

    Args:
      messages: records with 'role' and 'content'.
      add_generation_prompt: end with the header of the assistant's turn.
      **template_kwargs: further variables of the template, for instance
        `enable_thinking` of Qwen3.
    """
    if self.chat_template is None:
      raise ValueError(
        'this tokenizer has no chat template; give the prompt as a string, or '
        'set tokenizer.chat_template.'
      )
    # half a second of import that string prompts need not pay
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(
      conversations=[list(messages)],
      chat_template=self.chat_template,
      add_generation_prompt=add_generation_prompt,
      **self._special_tokens(),
      **template_kwargs,
    )
    return rendered[0]

  def _special_tokens(self):
    ids = (self.bos_id, self.eos_id, self.pad_id)
    tokens = {
      key: self.backend.id_to_token(i)
      for key, i in zip(_SPECIAL, ids)
      if i is not None
    }
    return {key: token for key, token in tokens.items() if token is not None}


def byte_tokenizer() -> Tokenizer:
  """UTF-8 bytes as ids 0..255, EOS 256, pad 257; any text round-trips."""
  vocab = {char: i for i, char in enumerate(_byte_alphabet())}
  backend = tokenizers.Tokenizer(models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  return _with_end_and_pad(backend, len(vocab))


def char_tokenizer(alphabet: str) -> Tokenizer:
  """Characters of `alphabet` as ids 0..n-1 in that order, EOS n, pad n + 1."""
  vocab = {char: i for i, char in enumerate(alphabet)}
  if not alphabet or len(vocab) != len(alphabet):
    raise ValueError(
      f'alphabet must be distinct characters, at least one; got {alphabet!r}.'
    )
  # no unknown token: a character outside the alphabet is an error, not a hole
  backend = tokenizers.Tokenizer(models.WordLevel(vocab))
  backend.pre_tokenizer = pre_tokenizers.Split(
    tokenizers.Regex(r'(?m:.)'), 'isolated'
  )
  backend.decoder = decoders.Fuse()
  return _with_end_and_pad(backend, len(vocab))


def _with_end_and_pad(backend, first_id):
  backend.add_special_tokens(['<|eos|>', '<|pad|>'])
  return Tokenizer(backend, eos_ids=(first_id,), pad_id=first_id + 1)


def _byte_alphabet():
  """The characters that stand for bytes 0..255 in byte-level tokenizers.

  Printable Latin-1 stands for itself; the 68 others follow from U+0100, in
  order (the GPT-2 tokenizer).
  """
  shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
  others = itertools.count(0x100)
  return [chr(b if b in shown else next(others)) for b in range(256)]


def read_json(path: pathlib.Path) -> dict[str, Any]:
  """The object in a JSON file; empty where there is no file."""
  if not path.is_file():
    return {}
  try:
    value = json.loads(path.read_text(encoding='utf-8'))
  except ValueError as error:
    raise ValueError(f'{path} is not valid JSON: {error}') from error
  if not isinstance(value, dict):
    raise ValueError(f'{path} holds a {type(value).__name__}, not an object.')
  return value


def _content(token):
  """Special tokens are written as a string or as a record around one."""
  return token.get('content') if isinstance(token, dict) else token


def _read_template(directory, config):
  path = directory / _TEMPLATE_FILE
  if path.is_file():
    return path.read_text(encoding='utf-8')
  template = config.get('chat_template')
  if isinstance(template, list):  # several by name
    named = {entry['name']: entry['template'] for entry in template}
    return named.get('default')
  return template
