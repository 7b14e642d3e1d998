"""Tokenizers: round trips, exactly one BOS, what ends a completion."""

import json
import sys

import jinja2
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from gdpo_jax.policy.tokenizer import Tokenizer, byte_tokenizer, char_tokenizer

SPECIAL = ['<s>', '</s>', '<|end|>', '<pad>']
BOS, EOS, END, PAD = range(256, 260)
LLAMA_LIKE = (
  "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}"
  '</s>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}'
)
BYTES = byte_tokenizer()
CHAT = [{'role': 'user', 'content': 'Hi'}]


def make_backend(post_processor=False):
  """Bytes, then four control tokens."""
  alphabet = byte_tokenizer().backend.get_vocab()
  vocab = {token: i for token, i in alphabet.items() if i < 256}
  backend = tokenizers.Tokenizer(models.BPE(vocab, []))
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(SPECIAL)
  if post_processor:
    backend.post_processor = processors.TemplateProcessing(
      single='<s> $A', special_tokens=[('<s>', BOS)]
    )
  return backend


def write(directory, post_processor=False, **files):
  make_backend(post_processor).save(str(directory / 'tokenizer.json'))
  for name, value in files.items():
    (directory / f'{name}.json').write_text(json.dumps(value))
  return directory


@given(st.text(st.characters(codec='utf-8')))
def test_bytes_round_trip(text):
  if '<|eos|>' in text or '<|pad|>' in text:
    return
  ids = BYTES.encode(text)
  assert ids == list(text.encode('utf-8'))
  ended = [*ids, BYTES.eos_id, BYTES.pad_id, BYTES.pad_id]
  assert BYTES.decode(ended) == text


def test_byte_tokenizer_ids():
  tokenizer = byte_tokenizer()
  assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (
    258,
    256,
    257,
  )
  assert tokenizer.eos_ids == (256,)
  assert tokenizer.bos_id is None
  assert tokenizer.encode('A', add_bos=True) == [65]
  assert tokenizer.decode([65, 256], skip_special=False) == 'A<|eos|>'


def test_char_tokenizer():
  tokenizer = char_tokenizer('0123+=\n ')
  ids = tokenizer.encode('12 +\n3=')
  assert ids == [1, 2, 7, 4, 6, 3, 5]
  assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (
    10,
    8,
    9,
  )
  assert tokenizer.decode([*ids, 8, 9, 9]) == '12 +\n3='
  with pytest.raises(ValueError, match=r"\['x'\]"):
    tokenizer.encode('1x')
  with pytest.raises(ValueError, match='distinct'):
    char_tokenizer('aa')
  with pytest.raises(ValueError, match='distinct'):
    char_tokenizer('')


@pytest.mark.parametrize('post_processor', [False, True])
def test_exactly_one_bos(post_processor):
  tokenizer = Tokenizer(
    make_backend(post_processor),
    eos_ids=(EOS,),
    bos_id=BOS,
    adds_bos=True,
    chat_template=LLAMA_LIKE,
  )
  # the template writes BOS itself
  ids = tokenizer.chat(CHAT)
  assert ids.count(BOS) == 1
  assert ids[0] == BOS
  # a raw string gets one, also where its text spells it out
  assert tokenizer.encode('Hi', add_bos=True) == [BOS, 72, 105]
  assert tokenizer.encode('<s>Hi', add_bos=True) == [BOS, 72, 105]
  assert tokenizer.encode('Hi') == [72, 105]


def test_a_model_trained_without_bos_gets_none():
  # SmolLM2 has a BOS id, the opening of a turn, and no BOS before a string
  tokenizer = Tokenizer(make_backend(), bos_id=BOS, adds_bos=False)
  assert tokenizer.encode('Hi', add_bos=True) == [72, 105]


def test_generation_header_is_at_the_end():
  tokenizer = Tokenizer(
    make_backend(), eos_ids=(EOS,), bos_id=BOS, chat_template=LLAMA_LIKE
  )
  text = tokenizer.render(CHAT)
  assert text == '<s>[user] Hi</s>[assistant] '
  assert tokenizer.chat(CHAT) == tokenizer.encode(text)
  assert tokenizer.render(CHAT, add_generation_prompt=False) == (
    '<s>[user] Hi</s>'
  )


def test_template_variables_reach_the_template():
  tokenizer = Tokenizer(
    make_backend(), chat_template='{{ enable_thinking }}{{ eos_token }}'
  )
  assert tokenizer.render(CHAT, enable_thinking=False) == 'False'


@pytest.mark.parametrize(
  'template',
  [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.append({'role': 'user', 'content': 'forged'}) }}",
    '{{ cycler.__init__.__globals__.os }}',
  ],
)
def test_templates_run_in_a_sandbox(template):
  tokenizer = Tokenizer(make_backend(), chat_template=template)
  with pytest.raises(
    (jinja2.exceptions.SecurityError, jinja2.exceptions.UndefinedError)
  ):
    tokenizer.render(CHAT)


def test_no_template_is_an_error_that_says_what_to_do():
  with pytest.raises(ValueError, match='no chat template'):
    byte_tokenizer().chat(CHAT)


@pytest.mark.parametrize(
  'files, eos_ids, pad_id',
  [
    # a record around the token, as older files have it
    ({'tokenizer_config': {'eos_token': {'content': '</s>'}}}, (EOS,), EOS),
    # the tokenizer's own first, then the list of generation_config
    (
      {
        'tokenizer_config': {'eos_token': '</s>', 'pad_token': '<pad>'},
        'generation_config': {'eos_token_id': [END, EOS]},
        'config': {'eos_token_id': 7},
      },
      (EOS, END),
      PAD,
    ),
    (
      {
        'tokenizer_config': {},
        'generation_config': {'pad_token_id': PAD},
        'config': {'eos_token_id': END},
      },
      (END,),
      PAD,
    ),
    ({'special_tokens_map': {'eos_token': '<|end|>'}}, (END,), END),
    ({}, (), 0),
  ],
)
def test_what_ends_and_what_pads(tmp_path, files, eos_ids, pad_id):
  tokenizer = Tokenizer.from_hf(write(tmp_path, **files))
  assert tokenizer.eos_ids == eos_ids
  assert tokenizer.eos_id == (eos_ids[0] if eos_ids else None)
  assert tokenizer.pad_id == pad_id


@pytest.mark.parametrize(
  'post_processor, said, expected',
  [
    (True, None, True),
    (False, None, False),
    (True, False, False),
    (False, True, True),
  ],
)
def test_from_hf_learns_whether_strings_begin_with_bos(
  tmp_path, post_processor, said, expected
):
  config = {'bos_token': '<s>'}
  if said is not None:
    config['add_bos_token'] = said
  write(tmp_path, post_processor, tokenizer_config=config)
  tokenizer = Tokenizer.from_hf(tmp_path)
  assert tokenizer.adds_bos == expected
  assert tokenizer.encode('H', add_bos=True) == [BOS] * expected + [72]


def test_chat_template_from_each_place(tmp_path):
  named = [
    {'name': 'tool_use', 'template': 'tools'},
    {'name': 'default', 'template': 'list'},
  ]
  write(tmp_path, tokenizer_config={'chat_template': named})
  assert Tokenizer.from_hf(tmp_path).render(CHAT) == 'list'
  write(tmp_path, tokenizer_config={'chat_template': 'string'})
  assert Tokenizer.from_hf(tmp_path).render(CHAT) == 'string'
  (tmp_path / 'chat_template.jinja').write_text('file')
  assert Tokenizer.from_hf(tmp_path).render(CHAT) == 'file'


def test_padding_and_truncation_in_the_file_are_not_ours(tmp_path):
  backend = make_backend()
  backend.enable_padding(length=8)
  backend.enable_truncation(2)
  backend.save(str(tmp_path / 'tokenizer.json'))
  assert Tokenizer.from_hf(tmp_path).encode('abc') == [97, 98, 99]


def test_damaged_files_are_named(tmp_path):
  with pytest.raises(ValueError, match='no tokenizer.json'):
    Tokenizer.from_hf(tmp_path)
  (tmp_path / 'tokenizer.json').write_text('{"model": ')
  with pytest.raises(ValueError, match='tokenizer.json is not a usable'):
    Tokenizer.from_hf(tmp_path)
  write(tmp_path)
  (tmp_path / 'tokenizer_config.json').write_text('{"eos')
  with pytest.raises(ValueError, match='tokenizer_config.json is not valid'):
    Tokenizer.from_hf(tmp_path)


@pytest.mark.parametrize('adds_bos', [False, True])
def test_save_and_read_back(tmp_path, adds_bos):
  tokenizer = Tokenizer(
    make_backend(post_processor=adds_bos),
    eos_ids=(EOS, END),
    bos_id=BOS,
    pad_id=PAD,
    adds_bos=adds_bos,
    chat_template=LLAMA_LIKE,
  )
  tokenizer.save(tmp_path)
  again = Tokenizer.from_hf(tmp_path)
  for name in (
    'vocab_size',
    'eos_ids',
    'eos_id',
    'bos_id',
    'pad_id',
    'adds_bos',
    'chat_template',
  ):
    assert getattr(again, name) == getattr(tokenizer, name), name
  assert again.chat(CHAT) == tokenizer.chat(CHAT)

  transformers = pytest.importorskip('transformers')
  theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
  assert theirs('Hi')['input_ids'] == tokenizer.encode('Hi', add_bos=True)
  chat = theirs.apply_chat_template(CHAT, add_generation_prompt=True)
  assert chat['input_ids'] == tokenizer.chat(CHAT)
  assert theirs.pad_token_id == PAD
  assert theirs.eos_token_id == EOS


def test_rendering_does_not_need_torch(tmp_path):
  """The part of transformers that renders must not pull torch in."""
  import subprocess

  script = (
    'import sys; sys.modules["torch"] = None\n'
    'from gdpo_jax.policy.tokenizer import Tokenizer, byte_tokenizer\n'
    't = byte_tokenizer(); t.chat_template = "{{ messages[0].content }}"\n'
    'assert t.chat([{"role": "user", "content": "A"}]) == [65]\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', script], capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
