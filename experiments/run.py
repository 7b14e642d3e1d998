"""A finished run: talk to it, evaluate it, export it.

  python experiments/run.py sample RUN [--prompt='What is 3 + 4?'] [--n=4]
  python experiments/run.py evaluate RUN [--samples=8] [--k=1,4,8]
  python experiments/run.py export RUN DIRECTORY

`sample` without a prompt is a conversation, a line for each turn; /new starts
another one, an empty line ends it. `evaluate` answers the held-out problems of
the run greedily, and again `samples` times at random: every reward, the share
solved by the best of k (pass@k) and by the most frequent answer of k (maj@k),
with 95% bootstrap intervals over the problems; RUN/evaluation.json keeps them.
`export` writes a directory for transformers: adapters merged; of a policy with
sub-policies, whose mixture is no single model, the one of `--head`. The last
checkpoint is taken.
"""

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import analysis
import jax
import launcher
import ml_collections
import numpy as np
import rich.console
import rich.table

from gdpo_jax.policy import decoupled, hf
from gdpo_jax.policy.hf import Pretrained
from gdpo_jax.rewards import answers
from gdpo_jax.rewards.pipeline import Pipeline
from gdpo_jax.sampler import generate
from gdpo_jax.sampling import Sampling
from gdpo_jax.tasks.base import encode_prompts, evaluation_batches
from gdpo_jax.train import monitor, policies, scoring
from gdpo_jax.train.checkpoint import read_state
from gdpo_jax.train.settings import Settings

SUBSETS = 200  # of size k for maj@k, drawn for each problem
_WIDTHS = tuple(2**i for i in range(6, 16))  # of prompts, so that few compile


class Finished(NamedTuple):
  """What a run directory holds."""

  directory: pathlib.Path
  config: ml_collections.ConfigDict
  settings: Settings
  model: Pretrained  # with the parameters of the last checkpoint
  policy: Any
  step: int


def open_run(directory: pathlib.Path) -> Finished:
  """Reads config, settings and the newest checkpoint.

  Raises:
    ValueError: no run there, no checkpoint, or parameters of another shape.
  """
  path = directory / 'config.json'
  if not path.is_file():
    raise ValueError(f'{directory} is no run of a launcher: no config.json.')
  config = ml_collections.ConfigDict(json.loads(path.read_text()))
  # the devices of this machine, not those of the run
  config.update(mesh_data=-1, mesh_fsdp=1, mesh_tensor=1)
  fields = json.loads((directory / 'settings.json').read_text())
  known = set(launcher.SETTINGS)
  settings = Settings(**{k: v for k, v in fields.items() if k in known})
  start = launcher.load_model(config)
  if (directory / 'warm_start').is_dir():  # what the run itself started from
    start = start._replace(params=hf.load(directory / 'warm_start')[1])
  step, state = read_state(directory / 'checkpoints')
  trained = state['params']
  policy = launcher.policy_of(start.config, settings)
  if 'heads' in trained:
    about = monitor.read_about(directory)
    names = tuple(r.name for r in about.rewards if r.declared)
    policy, params = policies.finished(
      policy,
      policies.adapted(policy, settings, names),
      {**start.params, **trained},
      settings,
    )
    abstract = jax.eval_shape(policy.init, jax.random.key(0))
    want = jax.tree.map(np.shape, abstract)
  else:
    params = policies.plain(start.params, trained, settings)
    want = jax.tree.map(np.shape, start.params)
  have = jax.tree.map(np.shape, params)
  if want != have:
    raise ValueError(
      f'{directory}: the checkpoint does not hold the parameters of '
      f'{config.model!r}; was it written by another version?'
    )
  model = start._replace(params=params)
  return Finished(directory, config, settings, model, policy, step)


def _sampling(
  run: Finished, n: int, temperature: float, new: int | None = None
):
  tokenizer = run.model.tokenizer
  return Sampling(
    group_size=n,
    max_new_tokens=new or run.settings.max_new_tokens,
    temperature=temperature,
    eos_ids=tuple(tokenizer.eos_ids),
    pad_id=tokenizer.pad_id,
  )


def answer(
  run: Finished, prompt, n: int = 1, temperature: float = 0.0, seed: int = 0
) -> list[str]:
  """`n` completions of one prompt (a string or messages)."""
  tokenizer = run.model.tokenizer
  example = [{'prompt': prompt}]
  length = len(
    tokenizer.encode(prompt, add_bos=True)
    if isinstance(prompt, str)
    else tokenizer.chat(prompt)
  )
  limit = run.model.config.max_positions - run.settings.max_new_tokens
  if length > limit:
    raise ValueError(f'the prompt has {length} tokens; at most {limit} fit.')
  width = min(next(w for w in _WIDTHS if w >= length), limit)
  prompts = encode_prompts(example, tokenizer, width)
  rollout = generate(
    run.policy,
    run.model.params,
    prompts,
    jax.random.key(seed),
    _sampling(run, n, temperature),
  )
  return scoring.decode_completions(tokenizer, rollout)


def sample(run: Finished, args) -> None:
  """One prompt, or a conversation on the terminal."""
  chats = run.model.tokenizer.chat_template is not None
  if args.prompt is not None:
    prompt = args.prompt
    if chats:
      prompt = [{'role': 'user', 'content': prompt}]
    for text in answer(run, prompt, args.n, args.temperature, args.seed):
      print(text, end='\n---\n' if args.n > 1 else '\n')
    return
  messages: list[dict[str, str]] = []
  for turn, line in enumerate(sys.stdin):
    line = line.rstrip('\n')
    if not line:
      break
    if line == '/new':
      messages = []
      continue
    messages.append({'role': 'user', 'content': line})
    prompt = messages if chats else line
    [text] = answer(run, prompt, 1, args.temperature, args.seed + turn)
    messages.append({'role': 'assistant', 'content': text})
    print(f'> {text}', flush=True)


class Sampled(NamedTuple):
  """Answers of n problems, s each."""

  names: tuple[str, ...]
  values: np.ndarray  # f[n, s, K], NaN where missing
  texts: list[list[str]]
  tokens: np.ndarray  # i[n, s]


def draw(
  run: Finished,
  pipeline: Pipeline,
  examples: Sequence[dict[str, Any]],
  samples: int,
  temperature: float,
  seed: int,
) -> Sampled:
  """Answers every example `samples` times and scores all of them."""
  tokenizer, settings = run.model.tokenizer, run.settings
  size = max(1, min(run.config.eval_batch_size // samples, len(examples)))
  sampling = _sampling(run, samples, temperature)
  values, texts, tokens = [], [], []
  batches = evaluation_batches(
    examples, tokenizer, size, settings.max_prompt_tokens
  )
  for i, (prompts, real) in enumerate(batches):
    key = jax.random.fold_in(jax.random.key(seed), i)
    rollout = jax.device_get(
      generate(run.policy, run.model.params, prompts, key, sampling)
    )
    count = int(real.sum())
    rollout = jax.tree.map(lambda x, n=count: x[: n * samples], rollout)
    prompts = prompts._replace(examples=prompts.examples[:count])
    decoded = scoring.decode_completions(tokenizer, rollout)
    scores = scoring.submit_rollout(
      pipeline, prompts, rollout, decoded, run.step
    ).result()
    values.append(scores.values.reshape(count, samples, -1))
    tokens.append(rollout.mask.sum(-1).reshape(count, samples))
    texts += [
      decoded[j : j + samples] for j in range(0, count * samples, samples)
    ]
  names = tuple(reward.name for reward in pipeline.rewards)
  return Sampled(names, np.concatenate(values), texts, np.concatenate(tokens))


def pass_at_k(solved: np.ndarray, k: int) -> np.ndarray:
  """f[n]: chance that one of k of the s answers is right (arXiv:2107.03374).

  Args:
    solved: bool[n, s].
    k: at most s.
  """
  s = solved.shape[1]
  if not 1 <= k <= s:
    raise ValueError(f'pass@{k} needs at least {k} samples, got {s}.')
  wrong = s - solved.sum(axis=1)
  return np.array([1 - math.comb(w, k) / math.comb(s, k) for w in wrong])


def maj_at_k(
  texts: Sequence[Sequence[str]], solved: np.ndarray, k: int, seed: int = 0
) -> np.ndarray:
  """f[n]: chance that the most frequent answer of k is right.

  Answers are what `rewards.answers.extract` finds, or else the whole text; of
  equally frequent ones the first drawn counts. An estimate over SUBSETS draws
  of k of the s answers; exact for k = s but for the order.
  """
  s = solved.shape[1]
  if not 1 <= k <= s:
    raise ValueError(f'maj@{k} needs at least {k} samples, got {s}.')
  rng = np.random.default_rng(seed)
  out = np.empty(len(texts))
  for i, row in enumerate(texts):
    found = [answers.extract(text) or text.strip() for text in row]
    hits = 0
    for _ in range(SUBSETS):
      chosen = [int(j) for j in rng.permutation(s)[:k]]
      votes = [found[j] for j in chosen]
      winner = max(dict.fromkeys(votes), key=votes.count)
      hits += bool(solved[i, chosen[votes.index(winner)]])
    out[i] = hits / SUBSETS
  return out


def figures(
  sampled: Sampled, ks: Sequence[int], reward: str, solved: float
) -> dict[str, analysis.Interval]:
  """Means of every reward, pass@k and maj@k, with intervals over problems."""
  if reward not in sampled.names:
    raise ValueError(
      f'there is no reward {reward!r} to tell what is solved; choose from '
      f'{", ".join(sampled.names)} with --reward.'
    )
  values = sampled.values
  right = values[:, :, sampled.names.index(reward)] >= solved  # NaN: not
  out = {
    name: analysis.bootstrap(_over_samples(values[:, :, i])[None])
    for i, name in enumerate(sampled.names)
  }
  out['tokens'] = analysis.bootstrap(sampled.tokens.mean(axis=1)[None])
  for k in ks:
    out[f'pass@{k}'] = analysis.bootstrap(pass_at_k(right, k)[None])
    maj = maj_at_k(sampled.texts, right, k)
    out[f'maj@{k}'] = analysis.bootstrap(maj[None])
  return out


def _over_samples(values: np.ndarray) -> np.ndarray:
  """f[n]: mean of what exists; NaN where nothing does."""
  seen = np.isfinite(values)
  total = np.where(seen, values, 0.0).sum(axis=1)
  count = seen.sum(axis=1)
  return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def evaluate(run: Finished, args) -> dict[str, Any]:
  """Prints a table, writes evaluation.json; returns what stands there."""
  task = launcher.task_function(run.config.experiment)(run.config)
  examples = list(task.heldout)[: args.problems or run.config.heldout]
  if not examples:
    raise ValueError('the task of this run has no held-out problems.')
  ks = [int(k) for k in args.k.split(',')]
  reward = args.reward or next(
    (r.name for r in task.rewards if r.name in ('correct', 'passed')),
    task.rewards[0].name,
  )
  with Pipeline(task.rewards) as pipeline:
    greedy = figures(
      draw(run, pipeline, examples, 1, 0.0, args.seed), (), reward, args.solved
    )
    drawn = draw(
      run, pipeline, examples, args.samples, args.temperature, args.seed
    )
  random = figures(drawn, ks, reward, args.solved)
  table = rich.table.Table(
    title=f'{run.directory}, step {run.step}, {len(examples)} problems'
  )
  for title in ('', 'greedy', f'{args.samples} samples each'):
    table.add_column(title)
  for name, value in random.items():
    table.add_row(name, str(greedy.get(name, '')), str(value))
  rich.console.Console().print(table, markup=False)
  found = {
    'step': run.step,
    'problems': len(examples),
    'samples': args.samples,
    'temperature': args.temperature,
    'solved': f'{reward} >= {args.solved}',
    'greedy': {k: v._asdict() for k, v in greedy.items()},
    'sampled': {k: v._asdict() for k, v in random.items()},
  }
  path = run.directory / 'evaluation.json'
  path.write_text(json.dumps(found, indent=2), encoding='utf-8')
  return found


def export(run: Finished, args) -> None:
  """Writes weights and tokenizer in Hugging Face's layout."""
  where = pathlib.Path(args.directory)
  config, params = run.model.config, run.model.params
  if args.head:
    config, params = decoupled.alone(
      config, params, run.policy.heads, args.head
    )
  hf.save(where, config, params, run.model.tokenizer, args.dtype)
  print(
    f'{where}: step {run.step}; open it with transformers.'
    f'AutoModelForCausalLM.from_pretrained({str(where)!r})'
  )


def parse(argv: Sequence[str] | None = None):
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  commands = parser.add_subparsers(dest='command', required=True)

  def command(name, function):
    sub = commands.add_parser(name, help=function.__doc__)
    sub.set_defaults(function=function)
    sub.add_argument('run', type=pathlib.Path, help='directory of the run')
    sub.add_argument('--seed', type=int, default=0)
    return sub

  sub = command('sample', sample)
  sub.add_argument('--prompt', help='one prompt, instead of a conversation')
  sub.add_argument('--n', type=int, default=1, help='completions of it')
  sub.add_argument('--temperature', type=float, default=0.0, help='0: greedy')
  sub = command('evaluate', evaluate)
  sub.add_argument('--problems', type=int, help='the first so many')
  sub.add_argument('--samples', type=int, default=8, help='per problem')
  sub.add_argument('--temperature', type=float, default=1.0)
  sub.add_argument('--k', default='1,4,8', help='of pass@k and maj@k')
  sub.add_argument('--reward', help='which tells whether a problem is solved')
  sub.add_argument('--solved', type=float, default=1.0, help='from this value')
  sub = command('export', export)
  sub.add_argument('directory', help='where to write')
  sub.add_argument(
    '--dtype', default='bfloat16', choices=('bfloat16', 'float32')
  )
  sub.add_argument('--head', help='the sub-policy of this reward, alone')
  return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
  args = parse(argv)
  launcher.use_compilation_cache()
  try:
    args.function(open_run(args.run), args)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)


if __name__ == '__main__':
  main()
