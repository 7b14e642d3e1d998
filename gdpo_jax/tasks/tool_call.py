"""The right tool with the right arguments, in the right form.

  records in ToolRL's form | problems made here --> Task with the rewards
    format   1.0 iff the blocks of the right answer are there, and no others
    correct  names, parameter names and values of the calls, in [-3, 3]

ToolRL (arXiv:2504.13958) asks for `<think>`, then a `<tool_call>` block with a
JSON object per line, a `<response>`, or both; the GDPO paper trains on it with
these two rewards (arXiv:2601.05242). Single-turn: what a tool would answer is
part of the prompt, nothing is executed.

The generator makes requests to five small tools for a chat model that sees two
worked examples. A problem is a tool and its arguments; which of them are held
out is decided by a hash, whatever the seed and the words.
"""

import functools
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gdpo_jax.rewards import tool_calls
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks import records
from gdpo_jax.tasks.base import (
  Layout,
  Task,
  chat_prompt,
  demonstrations,
  load,
  weighted,
)

HELDOUT_SHARE = 1 / 4
PUBLIC_HELDOUT_SHARE = 1 / 8  # of the prompts of a file without a second one

INSTRUCTION = """Call one tool. First say in <think> which one, then call it.
Tools:
{tools}
Form:
<think>...</think>
<tool_call>
{{"name": ..., "parameters": {{...}}}}
</tool_call>"""


class Tool(NamedTuple):
  """A tool, how people ask for it, and what they put in."""

  name: str
  parameters: Mapping[str, Sequence[Any]]  # values to draw from
  requests: Sequence[str]

  @property
  def described(self) -> str:
    return f'{self.name}({", ".join(self.parameters)})'


_CITIES = (
  'Oslo', 'Lima', 'Cairo', 'Kyoto', 'Quito', 'Riga', 'Turin', 'Delhi',
  'Accra', 'Perth', 'Porto', 'Hanoi',
)  # fmt: skip
TOOLS = (
  Tool(
    'get_weather',
    {'city': _CITIES, 'day': ('today', 'tomorrow', 'Sunday')},
    (
      'What is the weather in {city} {day}?',
      'Will it rain {day} in {city}?',
    ),
  ),
  Tool(
    'convert_money',
    {'amount': tuple(range(10, 60)), 'to': ('USD', 'EUR', 'JPY', 'GBP')},
    ('Convert {amount} to {to}.', 'How much is {amount} in {to}?'),
  ),
  Tool(
    'set_timer',
    {'minutes': tuple(range(2, 60))},
    ('Set a timer for {minutes} minutes.', 'Wake me in {minutes} minutes.'),
  ),
  Tool(
    'play_song',
    {
      'title': (
        'Blue Sky',
        'Old River',
        'Night Train',
        'First Snow',
        'Lantern',
      ),
      'volume': (1, 2, 3, 4, 5),
    },
    (
      'Play {title} at volume {volume}.',
      'I want to hear {title}, volume {volume}.',
    ),
  ),
  Tool(
    'find_train',
    {'origin': _CITIES, 'target': _CITIES},
    (
      'Find a train from {origin} to {target}.',
      'How do I get from {origin} to {target} by train?',
    ),
  ),
)
_WORKED = (
  (TOOLS[2], {'minutes': 61}, 'Set a timer for 61 minutes.'),
  (
    TOOLS[0],
    {'city': 'Bern', 'day': 'today'},
    'What is the weather in Bern today?',
  ),
)


def gold(tool: str, parameters: Mapping[str, Any]) -> str:
  """The right answer, in the form that is asked for."""
  call = json.dumps({'name': tool, 'parameters': dict(parameters)})
  return f'<think>I need {tool}.</think>\n<tool_call>\n{call}\n</tool_call>'


def generated(
  num_train: int = 300,
  num_heldout: int = 100,
  seed: int = 0,
  worked: int = 2,
  layout: Layout = 'turns',
  num_tools: int = len(TOOLS),
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Makes requests for a chat model.

  Args:
    num_train: number of training examples; at most about 350.
    num_heldout: number of held-out examples; at most about 110.
    seed: of the choice and the order.
    worked: examples, 0 to 2, before the request.
    layout: see `base.chat_prompt`.
    num_tools: the first so many of TOOLS, 3 to 5.
  Returns:
    (train, heldout); an example has 'prompt', 'answer' (a right completion) and
    'tool'. No request is on both sides, in whatever words.
  Raises:
    ValueError: a number out of range, or more than there are.
  """
  if not 0 <= worked <= 2 or not 3 <= num_tools <= len(TOOLS):
    raise ValueError(
      f'worked must be 0 to 2 and num_tools 3 to {len(TOOLS)}, got {worked} '
      f'and {num_tools}.'
    )
  tools = TOOLS[:num_tools]
  instruction = INSTRUCTION.format(
    tools='\n'.join(tool.described for tool in tools)
  )
  shown = [(asked, gold(t.name, args)) for t, args, asked in _WORKED[:worked]]
  rng = random.Random(seed)
  sides: tuple[list, list] = [], []
  for tool, arguments in _in_turn(tools, rng):
    right = gold(tool.name, arguments)
    request = rng.choice(tool.requests).format(**arguments)
    sides[_held_out(right)].append(
      {
        'prompt': chat_prompt(request, instruction, shown, layout),
        'answer': right,
        'tool': tool.name,
      }
    )
  for side, wanted in zip(sides, (num_train, num_heldout)):
    if not 0 < wanted <= len(side):
      raise ValueError(
        f'there are {len(sides[0])} training and {len(sides[1])} held-out '
        f'requests, asked for {num_train} and {num_heldout}.'
      )
  return sides[0][:num_train], sides[1][:num_heldout]


def _in_turn(tools: Sequence[Tool], rng: random.Random):
  """All calls of all tools, shuffled, a tool after the other as far as it goes."""
  queues = []
  for tool in tools:
    calls = [
      dict(zip(tool.parameters, values))
      for values in itertools.product(*tool.parameters.values())
      if len(set(values)) == len(values)  # no train from Oslo to Oslo
    ]
    rng.shuffle(calls)
    queues.append([(tool, call) for call in calls])
  for turn in itertools.zip_longest(*queues):
    yield from (each for each in turn if each is not None)


def _held_out(key: str) -> bool:
  digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
  return int.from_bytes(digest) < HELDOUT_SHARE * 2**64


def public(
  train: str | os.PathLike,
  heldout: str | os.PathLike | None = None,
  num_train: int | None = None,
  num_heldout: int | None = None,
  max_prompt_chars: int | None = None,
  seed: int = 0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Reads data of ToolRL: its JSON, or verl's parquet, from a file or the hub.

  Args:
    train: file, or id of a hub data set.
    heldout: the same; by default an eighth of the prompts of `train`.
    num_train, num_heldout: the first so many.
    max_prompt_chars: longer prompts are left out. Prompts of this data have 2 to
      8 thousand characters, about four to a token.
    seed: of the choice of what is held out.
  Raises:
    ValueError: as `records.read`; answers that are no texts with tool calls or
      a response; nothing left.
  """
  found = _read(train, 'train', max_prompt_chars)
  if heldout is None:
    found, held = records.split_off(found, PUBLIC_HELDOUT_SHARE, seed)
  else:
    held = _read(heldout, 'test', max_prompt_chars)
  return found[:num_train], held[:num_heldout]


def _read(source, split, max_prompt_chars) -> list[dict[str, Any]]:
  advice = (
    'Download rlla_sft.json or the rlla_4k parquet files from '
    'github.com/qiancheng0/ToolRL (dataset/) and give the path.'
  )
  examples = records.examples(records.read(source, split, advice=advice))
  for i, example in enumerate(examples):
    text = example.get('answer')
    marked = isinstance(text, str) and (
      '<tool_call>' in text or '<response>' in text
    )
    if not marked:
      raise ValueError(
        f"{source}, record {i}: 'answer' should be a text with <tool_call> or "
        f'<response>, got {text!r:.120}.'
      )
  return records.at_most_chars(examples, max_prompt_chars)


SOURCES: dict[str, Callable] = {'generated': generated, 'public': public}


def tool_call(
  source: str = 'generated',
  *,
  preset: tool_calls.Preset = 'paper',
  weights: Mapping[str, float] | None = None,
  **settings: Any,
) -> Task:
  """Makes the task; settings beyond these go to `generated` or `public`.

  Args:
    source: 'generated' or 'public'.
    preset: how calls are compared, see `rewards.tool_calls`.
    weights: by name of the reward; those not named have weight 1.
  Raises:
    ValueError: an unknown source or reward, or what the source refuses.
  """
  train, heldout = load(SOURCES, source, settings)
  rewards = (
    Reward(tool_calls.correct_format, name='format', range=(0.0, 1.0)),
    Reward(
      functools.partial(tool_calls.correct_calls, preset=preset),
      name='correct',
      range=(-3.0, 3.0),
    ),
  )
  return Task(
    name=f'tool_call/{source}',
    train=train,
    heldout=heldout,
    rewards=weighted(rewards, weights),
    demonstrate=demonstrations(train, lambda example: example['answer']),
  )
