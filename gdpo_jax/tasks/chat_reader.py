"""A reader of replies: linear heads on the states of a language model.

  labelled replies --last state of a frozen model--> f32[n, D]
      --multinomial logistic regression--> weights f32[acts + products, D]
  replies --JaxJudge with these weights--> logits --softmax by head--> Reading

The replies it learns from are made here, from sentences with gaps; among them
are refusals, small talk and heaps of the right words in no order, which belong
to no act. What it is judged by are other replies, written and labelled by hand
(`chat_labels`), none of which it has seen.
"""

import random
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.special

from gdpo_jax.judge import JaxJudge
from gdpo_jax.policy.hf import Pretrained
from gdpo_jax.tasks.chat import ACTS, CATALOGUE, PRODUCTS, Reading

_SENTENCES = {
  'offer': (
    'I recommend the {product} {item} for {price} euros.',
    'The {product} {item} costs {price} euros and would suit you well.',
    'Take the {item}: a good {product} for {price} euros.',
    'For your budget I would choose the {item}, a {product} at {price} euros.',
    'We have the {product} {item} at {price} euros. Shall I order it for you?',
    'Our {item} is a fine {product}, and it is only {price} euros.',
    'How about the {item}? This {product} is popular and costs {price} euros.',
  ),
  'return': (
    'Yes, you can return the {product} within 30 days.',
    'Send the {product} back with the label in the box, and we refund you.',
    'To give back the {product}, bring it to the shop with the receipt.',
    'You may return your {product}; the money is back within a week.',
    'Of course, print the return label and post the {product} to us.',
    'We take the {product} back and refund the full price.',
  ),
  'delivery': (
    'Your {product} will arrive in two to three days.',
    'The {product} was sent yesterday and should be with you on Friday.',
    'Delivery of the {product} takes about a week.',
    'The parcel with your {product} is on its way; expect it tomorrow.',
    'We ship the {product} today, so it reaches you by Thursday.',
    'It takes three working days until the {product} is delivered.',
  ),
  'care': (
    'Wipe the {product} with a damp cloth and let it dry.',
    'Clean your {product} with mild soap and warm water.',
    'To keep the {product} in shape, store it in a dry place.',
    'Use a soft brush on the {product}, and no harsh cleaner.',
    'Rinse the {product} after use, and it will last for years.',
    'Do not put the {product} in the dishwasher; clean it by hand.',
  ),
}
_NOTHING = (
  'Sorry, I cannot help you with that.',
  'Hello! How are you today?',
  'Thank you for your message.',
  'I do not know.',
  'What a lovely day it is.',
  'I am a language model and have no opinion.',
  'Please tell me more.',
  'The capital of France is Paris.',
  'We do not have that, sorry.',
  'Is there anything else?',
  '1 2 3 4 5 6 7 8 9',
  '',
)
_DECLINED = (
  'Sorry, the {product} {item} is sold out and we have no other.',
  'I cannot recommend any {product}, not even the {item}.',
  'You cannot return the {product}.',
  'I have no idea when the {product} will arrive.',
  'I do not know how one cleans a {product}.',
  'A {product} is a thing that many people have.',
)


def labelled_replies(num: int, seed: int = 0) -> list[tuple[str, int, int]]:
  """(reply, index in ACTS, index in PRODUCTS), `num` of them."""
  rng = random.Random(seed)
  out = []
  for i in range(num):
    act = ACTS[i % len(ACTS)]
    product = rng.choice(list(CATALOGUE))
    item, price = rng.choice(CATALOGUE[product])
    gaps = {'product': product, 'item': item, 'price': price}
    if act != 'none':
      text = rng.choice(_SENTENCES[act]).format(**gaps)
    else:
      kind = rng.random()
      if kind < 0.4:
        text = rng.choice(_DECLINED).format(**gaps)
      elif kind < 0.7:  # the right words, and no sentence
        words = rng.choice(rng.choice(list(_SENTENCES.values())))
        words = words.format(**gaps).split()
        rng.shuffle(words)
        text = ' '.join(words * 2)
      else:
        text, product = rng.choice(_NOTHING), 'none'
    out.append((text, ACTS.index(act), PRODUCTS.index(product)))
  return out


class ModelReader:
  """A `chat.Reader`; texts that were read are remembered for a while.

  Several rewards ask about the same replies in turn; the model runs once.
  """

  def __init__(self, judge: JaxJudge, keep: int = 4096):
    self._judge, self._keep = judge, keep
    self._known: dict[str, np.ndarray] = {}

  def __call__(self, texts: Sequence[str]) -> Reading:
    fresh = [t for t in dict.fromkeys(texts) if t not in self._known]
    if len(self._known) + len(fresh) > self._keep:
      self._known.clear()
      fresh = list(dict.fromkeys(texts))
    if fresh:
      # an empty reply has no tokens and would be missing; a space says as much
      logits = self._judge.logits([text or ' ' for text in fresh])
      self._known.update(zip(fresh, logits))
    rows = np.stack([self._known[text] for text in texts])
    acts, products = rows[:, : len(ACTS)], rows[:, len(ACTS) :]
    return Reading(
      scipy.special.softmax(acts, axis=1),
      scipy.special.softmax(products, axis=1),
    )


def fit(
  model: Pretrained,
  num_replies: int = 300,
  seed: int = 0,
  max_tokens: int = 64,
  penalty: float = 1e-2,
) -> ModelReader:
  """Fits the two heads; the model stays as it is.

  About a minute for SmolLM2-135M on two cores.

  Args:
    model: a language model; its last state reads the reply.
    num_replies: labelled replies to learn from.
    seed: of these replies.
    max_tokens: longer replies have no reading: NaN, missing.
    penalty: of the squared weights, on states scaled to unit deviation.
  """

  def judge(weights):
    return JaxJudge(
      model.config,
      model.params,
      weights,
      model.tokenizer,
      label=0,
      buckets=(max_tokens,),
    )

  texts, acts, products = zip(*labelled_replies(num_replies, seed))
  # an identity for a head: the "logits" are the states themselves
  width = model.config.width
  states = judge(np.eye(width, dtype=np.float32)).logits(
    [text or ' ' for text in texts]
  )
  scale = states.std(axis=0) + 1e-6
  heads = [
    _logistic(states / scale, np.asarray(labels), classes, penalty) / scale
    for labels, classes in ((acts, len(ACTS)), (products, len(PRODUCTS)))
  ]
  return ModelReader(judge(np.concatenate(heads).astype(np.float32)))


def _logistic(x, labels, classes: int, penalty: float) -> np.ndarray:
  """Weights [classes, D] of a penalized multinomial logistic regression."""
  n, width = x.shape
  onehot = np.eye(classes)[labels]

  def loss(flat):
    weights = flat.reshape(classes, width)
    logp = scipy.special.log_softmax(x @ weights.T, axis=1)
    grad = (np.exp(logp) - onehot).T @ x / n + penalty * weights
    value = -(onehot * logp).sum() / n + penalty * (weights**2).sum() / 2
    return value, grad.ravel()

  start = np.zeros(classes * width)
  found = scipy.optimize.minimize(loss, start, jac=True, method='L-BFGS-B')
  return found.x.reshape(classes, width)
