"""A shop assistant with four objectives: one message, one reply.

  customers made here --> Task with the rewards, all in [0, 1]
    intent      the reply does what the customer came for
    relevance   it is about the product that was asked for
    conversion  the customer buys what is offered; only where they came to buy
    brevity     1.0 iff the reply has at most `limit_tokens`, EOS included
  The last three count only where intent > 0.7.

Single-turn: the customer reads one reply and decides; nobody answers back.

Who scores. `intent` and `relevance` are read by a model (`chat_reader`), never
counted from words: probabilities of a linear head on the last state of a
language model, fitted to labelled replies. `conversion` comes from a simulated
customer: a budget, a patience and a demand for clearness, drawn from a seed and
not told to the assistant, who reads through the same model, looks up the price
of the item that is named and buys or does not. Both are checked against the
replies that people labelled (`chat_labels`): `agreement`.

A customer is a product, an aim and a seed; which customers are held out depends
on product, aim and budget by a hash.
"""

import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from gdpo_jax.rewards import answers, calls
from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.tasks.base import Task, chat_prompt, weighted

CONDITION = 'intent>0.7'
HELDOUT_SHARE = 1 / 4
INSTRUCTION = (
  'You are the assistant of a shop. Reply in one or two short sentences.'
)
# What a reply can do; 'none' is small talk, refusal, nonsense.
ACTS = ('offer', 'return', 'delivery', 'care', 'none')
# Item names and prices in euros, cheap first.
CATALOGUE: dict[str, tuple[tuple[str, int], ...]] = {
  'kettle': (('Brisk', 22), ('Calor', 39), ('Zenit', 75)),
  'lamp': (('Glim', 15), ('Halo', 32), ('Aurora', 68)),
  'backpack': (('Trek', 28), ('Summit', 54), ('Nomad', 95)),
  'headphones': (('Echo', 25), ('Tonal', 60), ('Opus', 140)),
  'umbrella': (('Drizzle', 9), ('Gale', 21), ('Monsoon', 45)),
}
PRODUCTS = (*CATALOGUE, 'none')

_ASKED = {
  'offer': (
    'I am looking for a {product}, at most {budget} euros. What do you have?',
    'Which {product} would you recommend? I can spend {budget} euros.',
    'I need a new {product}. My budget is {budget} euros.',
  ),
  'return': (
    'The {product} I bought does not suit me. Can I send it back?',
    'How do I return a {product}?',
  ),
  'delivery': (
    'When will the {product} I ordered arrive?',
    'How long does it take until my {product} is here?',
  ),
  'care': (
    'How do I clean my {product}?',
    'How should I look after the {product} so that it lasts?',
  ),
}
_WORKED = (
  (
    'I want a kettle, at most 60 euros.',
    'I recommend the kettle Calor for 39 euros.',
  ),
  (
    'Can I give back a lamp?',
    'Yes, you can return the lamp within 30 days; we refund the price.',
  ),
)


class Reading(NamedTuple):
  """What replies say, to a reader."""

  acts: np.ndarray  # f32[n, len(ACTS)], probabilities
  products: np.ndarray  # f32[n, len(PRODUCTS)], probabilities


class Reader(Protocol):
  """Reads replies, without the question."""

  def __call__(self, texts: Sequence[str]) -> Reading: ...


class Customer(NamedTuple):
  """What a customer wants, and what the assistant is not told."""

  aim: str  # of ACTS, not 'none'
  product: str
  budget: int  # euros
  patience: int  # words that they will read
  clearness: float  # probability below which a reply has not been understood

  @classmethod
  def draw(cls, rng: random.Random) -> 'Customer':
    product = rng.choice(list(CATALOGUE))
    prices = [price for _, price in CATALOGUE[product]]
    aim = rng.choice(('offer', 'offer', 'return', 'delivery', 'care'))
    return cls(
      aim=aim,
      product=product,
      budget=rng.choice(prices) + rng.randint(0, 9),
      patience=rng.randint(25, 60),
      clearness=rng.uniform(0.4, 0.7),
    )

  def buys(self, reply: str, act: float, about: float) -> bool:
    """Whether this customer buys after this reply.

    Args:
      reply: its text.
      act: probability that it offers something.
      about: probability that it is about the product.
    """
    named = [price for item, price in CATALOGUE[self.product] if item in reply]
    # several items leave the choice to the customer, who takes the cheapest
    return (
      min(act, about) >= self.clearness
      and bool(named)
      and min(named) <= self.budget
      and len(reply.split()) <= self.patience
    )


def generated(
  num_train: int = 300,
  num_heldout: int = 100,
  seed: int = 0,
  worked: int = 2,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
  """Makes customers and their messages.

  Args:
    num_train, num_heldout: number of examples.
    seed: of all draws.
    worked: examples, 0 to 2, before the message.
  Returns:
    (train, heldout); an example has 'prompt' and 'customer', the record of a
    Customer. The prompt lists the items of its product and of another one.
  """
  if not 0 <= worked <= len(_WORKED):
    raise ValueError(f'worked must be 0 to {len(_WORKED)}, got {worked}.')
  rng = random.Random(seed)
  sides: tuple[list, list] = [], []
  seen: set[str] = set()
  for _ in range(200 * (num_train + num_heldout)):
    customer = Customer.draw(rng)
    side = _held_out(customer)
    other = rng.choice([p for p in CATALOGUE if p != customer.product])
    asked = rng.choice(_ASKED[customer.aim]).format(
      product=customer.product, budget=customer.budget
    )
    listed = '\n'.join(
      f'{product}: '
      + ', '.join(f'{item} {price} euros' for item, price in CATALOGUE[product])
      for product in sorted((customer.product, other))
    )
    question = f'{listed}\nCustomer: {asked}'
    if question in seen or len(sides[side]) >= (num_train, num_heldout)[side]:
      continue
    seen.add(question)
    sides[side].append(
      {
        'prompt': chat_prompt(question, INSTRUCTION, _WORKED[:worked]),
        'customer': customer._asdict(),
      }
    )
    if (len(sides[0]), len(sides[1])) == (num_train, num_heldout):
      return sides
  raise ValueError(
    f'found only {len(sides[0])} of {num_train} training and {len(sides[1])} of '
    f'{num_heldout} held-out customers; ask for fewer.'
  )


def _held_out(customer: Customer) -> bool:
  key = f'{customer.aim} {customer.product} {customer.budget}'
  digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
  return int.from_bytes(digest) < HELDOUT_SHARE * 2**64


def scores(
  reader: Reader, replies: Sequence[str], customers: Sequence[Mapping[str, Any]]
) -> dict[str, list[float | None]]:
  """`intent`, `relevance` and `conversion` of n replies to n customers.

  `conversion` is None for those who did not come to buy.
  """
  reading = reader(replies)
  people = [Customer(**record) for record in customers]
  intent, relevance, conversion = [], [], []
  for row, (who, reply) in enumerate(zip(people, replies)):
    act = float(reading.acts[row, ACTS.index(who.aim)])
    about = float(reading.products[row, PRODUCTS.index(who.product)])
    intent.append(act)
    relevance.append(about)
    conversion.append(
      float(who.buys(reply, act, about)) if who.aim == 'offer' else None
    )
  return {'intent': intent, 'relevance': relevance, 'conversion': conversion}


def chat(
  reader: Reader,
  *,
  limit_tokens: int,
  conditioned: bool = True,
  weights: Mapping[str, float] | None = None,
  **settings: Any,
) -> Task:
  """Makes the task; settings beyond these go to `generated`.

  Args:
    reader: reads replies; it is called on the main thread, as it may use the
      training devices.
    limit_tokens: of the reward `brevity`, EOS counted.
    conditioned: the other rewards count only where intent > 0.7.
    weights: by name of the reward; those not named have weight 1.
  Raises:
    ValueError: an unknown reward, or what `generated` refuses.
  """
  train, heldout = generated(**settings)
  rewards = [
    Reward(
      _score(reader, name),
      name=name,
      range=(0.0, 1.0),
      isolation='main',
      condition=CONDITION if conditioned and name != 'intent' else None,
    )
    for name in ('intent', 'relevance', 'conversion')
  ]
  rewards.append(
    Reward(
      answers.length(limit_tokens),
      name='brevity',
      range=(0.0, 1.0),
      condition=CONDITION if conditioned else None,
    )
  )
  return Task(
    name='chat',
    train=train,
    heldout=heldout,
    rewards=weighted(rewards, weights),
  )


def _score(reader: Reader, name: str) -> Callable[..., list[float | None]]:
  def score(completions, customer, **_: Any) -> list[float | None]:
    return scores(reader, list(map(calls.text_of, completions)), customer)[name]

  return score


class Agreement(NamedTuple):
  """How often the scores and people agree, with the number of replies."""

  accuracy: dict[str, float]
  count: dict[str, int]


def agreement(
  reader: Reader, labelled: Sequence[tuple[Mapping[str, Any], str, tuple]]
) -> Agreement:
  """Compares scores, cut at 0.5, with labels.

  Args:
    labelled: (customer record, reply, labels), with the labels of `intent`,
      `relevance` and `conversion`: True, False, or None where it does not apply.
  """
  customers, replies, labels = zip(*labelled)
  made = scores(reader, replies, customers)
  accuracy, count = {}, {}
  for k, (name, values) in enumerate(made.items()):
    pairs = [
      (value >= 0.5, label[k])
      for value, label in zip(values, labels)
      if value is not None and label[k] is not None
    ]
    accuracy[name] = sum(a == b for a, b in pairs) / len(pairs)
    count[name] = len(pairs)
  return Agreement(accuracy, count)
