"""Samplers of other projects, each in an environment and process of its own.

`Peer('tunix', directory, job)` sets up the environment at the first use (pip,
under the cache directory), starts the process and answers calls: one call is
one timed turn. The directory holds weights in Hugging Face format; llama.cpp
reads a GGUF file in float16 that is written from the fetched one.

  tunix      google-tunix, its own JAX sampler (`tunix.generate.sampler`),
             float32; a batch runs until its longest row has ended
  llama.cpp  by xllamacpp, its server with one slot per row and continuous
             batching; float16 weights
"""

import json
import os
import pathlib
import subprocess
import sys
import time
import venv

PACKAGES = {
  'tunix': ('google-tunix==0.1.7', 'jax==0.10.2'),
  'llama.cpp': ('xllamacpp==2026.10.11549',),
}


class Missing(RuntimeError):
  """A peer that cannot run here, and why."""


class Peer:
  """A function of no arguments: all rows of the job, once more.

  Args:
    side: a name in PACKAGES.
    directory: of weights.
    job: 'prompts', N lists of token ids; 'lengths', N numbers of new tokens;
      'config', of the policy, as a dict.
  Raises:
    Missing: the environment cannot be set up, or the peer fails.
  """

  def __init__(self, side: str, directory: str, job: dict):
    self._side = side
    self._log = pathlib.Path(directory, f'{side}.log')
    with self._log.open('w') as log:
      self._process = subprocess.Popen(
        [environment(side), __file__, side, directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
      )
    self._ask(json.dumps(job))

  def __call__(self):
    self._ask('go')

  def _ask(self, line):
    try:
      self._process.stdin.write(line + '\n')
      self._process.stdin.flush()
      answer = self._process.stdout.readline()
    except BrokenPipeError:
      answer = ''
    if answer != 'done\n':
      said = self._log.read_text().strip().splitlines() or ['nothing']
      raise Missing(f'{self._side} ended; it last said: {said[-1]}')

  def close(self):
    self._process.stdin.close()
    self._process.wait(60)


def environment(side: str) -> str:
  """The Python that has the peer's packages; pip fetches them once."""
  cache = os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
  home = pathlib.Path(cache) / 'gdpo_jax' / 'peers' / side
  python = home / ('Scripts' if os.name == 'nt' else 'bin') / 'python'
  complete = home / 'complete'
  if not complete.exists():
    print(f'  setting up {side} in {home}', flush=True)
    venv.create(home, with_pip=True, clear=True)
    done = subprocess.run(
      [python, '-m', 'pip', 'install', '--quiet', *PACKAGES[side]],
      capture_output=True,
      text=True,
    )
    if done.returncode:
      said = done.stderr.strip().splitlines() or ['nothing']
      raise Missing(f'{side} does not install: {said[-1]}')
    complete.write_text('\n'.join(PACKAGES[side]) + '\n')
  return str(python)


def write_float16(source: pathlib.Path, target: pathlib.Path) -> None:
  """A copy of a GGUF file in which every matrix is float16."""
  import gguf

  reader = gguf.GGUFReader(source)
  architecture = reader.fields['general.architecture'].contents()
  writer = gguf.GGUFWriter(target, architecture)
  given = ('GGUF.', 'general.architecture', 'general.file_type')
  for name, field in reader.fields.items():
    if name.startswith(given):
      continue
    kind = field.types[0]
    inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(name, field.contents(), kind, inner)
  writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
  for tensor in reader.tensors:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    vector = len(tensor.shape) == 1
    writer.add_tensor(tensor.name, values.astype('f4' if vector else 'f2'))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def tunix(directory, job):
  import jax
  import jax.numpy as jnp
  from tunix.generate.sampler import CacheConfig, Sampler
  from tunix.models.llama3 import model, params

  cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME', '~/.cache'))
  jax.config.update(
    'jax_compilation_cache_dir',
    str(cache.expanduser() / 'gdpo_jax' / 'peers' / 'xla'),
  )
  c = job['config']
  config = model.ModelConfig(
    num_layers=c['num_layers'],
    vocab_size=c['vocab_size'],
    embed_dim=c['width'],
    hidden_dim=c['mlp_width'],
    num_heads=c['num_heads'],
    head_dim=c['head_dim'],
    num_kv_heads=c['num_kv_heads'],
    rope_theta=int(c['rope_base']),
    norm_eps=c['norm_eps'],
    weight_tying=c['tied'],
  )
  mesh = jax.make_mesh(
    (1, 1),
    ('fsdp', 'tp'),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
  )

  class Ids:
    """The prompts are token ids already, written as numbers."""

    def encode(self, text, **_):
      return [int(token) for token in text.split()]

    def decode(self, ids, **_):
      return ' '.join(map(str, ids))

    def bos_id(self):
      return 1

    def eos_id(self):
      return 2

    def pad_id(self):
      return c['pad_id']

  network = params.create_model_from_safe_tensors(
    directory, config, mesh, jnp.float32
  )
  longest = max(map(len, job['prompts']))
  steps = max(job['lengths'])
  sampler = Sampler(
    network,
    Ids(),
    CacheConfig(
      longest + steps,
      *(c[name] for name in ('num_layers', 'num_kv_heads', 'head_dim')),
    ),
  )
  # its tokenizer puts the first token before every prompt by itself
  texts = [' '.join(map(str, ids[1:])) for ids in job['prompts']]
  seeds = iter(range(10**6))

  def turn():
    out = sampler(
      texts,
      steps,
      max_prompt_length=longest,
      temperature=1.0,
      top_p=1.0,
      seed=next(seeds),
      eos_tokens=[c['vocab_size']],  # none: rows run to the limit
    )
    assert {len(ids) for ids in out.tokens} == {steps}, 'a row ended early'

  return turn


def llama_cpp(directory, job):
  from concurrent import futures

  import xllamacpp

  rows = len(job['prompts'])
  params = xllamacpp.CommonParams()
  params.model.path = str(pathlib.Path(directory, 'float16.gguf'))
  params.n_parallel = rows
  longest = max(map(len, job['prompts'])) + max(job['lengths'])
  params.n_ctx = rows * -(-longest // 256) * 256
  params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
  params.n_gpu_layers = 0
  params.warmup = False
  server = xllamacpp.Server(params)
  threads = futures.ThreadPoolExecutor(rows)
  seeds = iter(range(10**9))

  def ask(ids, length, seed):
    out = server.handle_completions(
      {
        'prompt': ids,
        'n_predict': length,
        'max_tokens': length,
        'ignore_eos': True,
        'temperature': 1.0,
        'top_k': 0,
        'top_p': 1.0,
        'min_p': 0.0,
        'samplers': ['temperature'],
        'seed': seed,
      }
    )
    return out

  def turn():
    asked = [
      threads.submit(ask, ids, length, next(seeds))
      for ids, length in zip(job['prompts'], job['lengths'])
    ]
    for future, length in zip(asked, job['lengths']):
      got = future.result()['usage']['completion_tokens']
      assert got == length, f'{got} tokens where {length} were asked for'

  return turn


def main(side, directory):
  answers, sys.stdout = sys.stdout, sys.stderr  # peers print what they like
  turn = None
  for line in sys.stdin:
    if turn is None:
      sides = {'tunix': tunix, 'llama.cpp': llama_cpp}
      turn = sides[side](directory, json.loads(line))
    else:
      start = time.perf_counter()
      turn()
      print(f'{time.perf_counter() - start:.3f} s', flush=True)
    print('done', file=answers, flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
