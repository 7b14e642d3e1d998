"""Replies written and labelled by hand, to check the scores of `chat` by.

Labels are what a person said about (customer, reply): did it do what they came
for, was it about their product, would they have bought (None: did not come to
buy). Among them are refusals that name the right item, heaps of the right
words, items that cost too much, and answers to another question.
"""

from typing import Any


def _customer(aim: str, product: str, budget: int = 50) -> dict[str, Any]:
  return {
    'aim': aim,
    'product': product,
    'budget': budget,
    'patience': 40,
    'clearness': 0.5,
  }


_KETTLE = _customer('offer', 'kettle', 45)
_LAMP = _customer('offer', 'lamp', 35)
_BACKPACK = _customer('offer', 'backpack', 60)
_PHONES = _customer('offer', 'headphones', 70)
_UMBRELLA = _customer('offer', 'umbrella', 25)
_T, _F, _N = True, False, None

LABELLED = (
  (_KETTLE, 'The kettle Calor would be right for you, it is 39 euros.', (_T, _T, _T)),
  (_KETTLE, 'You could have the Brisk kettle for just 22 euros.', (_T, _T, _T)),
  (_KETTLE, 'My choice would be the Zenit, our best kettle, for 75 euros.', (_T, _T, _F)),
  (_KETTLE, 'I would get the lamp Halo, it is 32 euros.', (_T, _F, _F)),
  (_KETTLE, 'We are out of kettles at the moment, the Calor too.', (_F, _T, _F)),
  (_KETTLE, 'kettle Calor kettle euros buy Brisk recommend kettle 39 39', (_F, _T, _F)),
  (_KETTLE, 'A kettle is best cleaned with vinegar and water.', (_F, _T, _F)),
  (_KETTLE, 'I am fine, thanks for asking.', (_F, _F, _F)),
  (_LAMP, 'The Glim is a nice lamp and costs 15 euros.', (_T, _T, _T)),
  (_LAMP, 'May I suggest the lamp Halo? You pay 32 euros.', (_T, _T, _T)),
  (_LAMP, 'Aurora is the lamp I would buy, at 68 euros.', (_T, _T, _F)),
  (_LAMP, 'Your lamp gets to you on Monday.', (_F, _T, _F)),
  (_LAMP, 'That is a difficult question.', (_F, _F, _F)),
  (_BACKPACK, 'Summit is a sturdy backpack for 54 euros, I would take it.', (_T, _T, _T)),
  (_BACKPACK, 'I think the Trek backpack at 28 euros is what you need.', (_T, _T, _T)),
  (_BACKPACK, 'Have a look at the umbrella Gale, 21 euros.', (_T, _F, _F)),
  (_BACKPACK, 'No, I will not advise you on a backpack.', (_F, _T, _F)),
  (_PHONES, 'With the headphones Tonal for 60 euros you cannot go wrong.', (_T, _T, _T)),
  (_PHONES, 'The Echo headphones are 25 euros and sound great.', (_T, _T, _T)),
  (_PHONES, 'euros headphones Opus Tonal Echo 140 60 25', (_F, _T, _F)),
  (_UMBRELLA, 'The umbrella Gale holds in a storm and costs 21 euros.', (_T, _T, _T)),
  (_UMBRELLA, 'Drizzle, an umbrella for 9 euros, should do.', (_T, _T, _T)),
  (_UMBRELLA, 'Bring the umbrella back and you get your money.', (_F, _T, _F)),
  (_customer('return', 'kettle'), 'Sure, post the kettle to us within a month and we pay you back.', (_T, _T, _N)),
  (_customer('return', 'lamp'), 'You have 30 days to give the lamp back.', (_T, _T, _N)),
  (_customer('return', 'umbrella'), 'The umbrella Gale costs 21 euros.', (_F, _T, _N)),
  (_customer('return', 'backpack'), 'Sadly a backpack cannot be returned.', (_F, _T, _N)),
  (_customer('return', 'headphones'), 'Put the headphones in the box with the receipt and send them back.', (_T, _T, _N)),
  (_customer('delivery', 'kettle'), 'The kettle should be at your door on Wednesday.', (_T, _T, _N)),
  (_customer('delivery', 'headphones'), 'Two more days, then your headphones are there.', (_T, _T, _N)),
  (_customer('delivery', 'lamp'), 'Dust the lamp with a dry cloth.', (_F, _T, _N)),
  (_customer('delivery', 'backpack'), 'It was shipped this morning, so the backpack comes tomorrow.', (_T, _T, _N)),
  (_customer('delivery', 'umbrella'), 'I am sorry, I really cannot say.', (_F, _F, _N)),
  (_customer('care', 'backpack'), 'Brush the backpack off and wash stains with soap.', (_T, _T, _N)),
  (_customer('care', 'kettle'), 'Boil water with a little vinegar in the kettle, then rinse.', (_T, _T, _N)),
  (_customer('care', 'umbrella'), 'Let the umbrella dry open before you fold it.', (_T, _T, _N)),
  (_customer('care', 'lamp'), 'You can return the lamp for 30 days.', (_F, _T, _N)),
  (_customer('care', 'headphones'), 'Wipe the ear pads of the headphones with a damp cloth.', (_T, _T, _N)),
)  # fmt: skip
