r"""How math is written: boxes, marks around it, one spelling for the rest."""

import re
import unicodedata

BOX = re.compile(r'\\(?:boxed|fbox|framebox)(?![a-zA-Z])')
# Digits with or without thousands separators and a decimal part.
PLAIN_NUMBER = r'(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+'


def box_content(text: str, boxes: list[re.Match]) -> str | None:
  """Content of the last outermost box; nested boxes are opened.

  None where it is not closed, or more than ten lie in each other.
  """
  for _ in range(10):
    content, end = None, -1
    for box in boxes:
      if box.start() < end:
        continue  # inside the box before
      rest = text[box.end() :].lstrip()
      if rest.startswith('{'):
        content = balanced(rest)
        length = len(rest) if content is None else len(content)
        end = len(text) - len(rest) + length
      else:
        bare = re.match(r'[^\s$.,;]+', rest)
        content = bare.group() if bare else ''
    if content is None:
      return None
    text, boxes = content, list(BOX.finditer(content))
    if not boxes:
      return trim(text)
  return None


def balanced(text: str) -> str | None:
  r"""What is between the `{` at the start and its `}`; `\{` is no brace."""
  depth = 0
  for match in re.finditer(r'\\.|[{}]', text, re.DOTALL):
    depth += {'{': 1, '}': -1}.get(match.group(), 0)
    if depth == 0 and match.group() == '}':
      return text[1 : match.start()]
  return None


def trim(text: str) -> str:
  r"""Takes off Markdown and math marks, and \text{} around the whole."""
  text = text.strip().strip('*`').strip()
  for opening, closing in (
    (r'\(', r'\)'),
    (r'\[', r'\]'),
    ('$$', '$$'),
    ('$', '$'),
  ):
    inner = text[len(opening) : -len(closing)]
    if (
      text.startswith(opening)
      and text.endswith(closing)
      and len(text) > len(opening)
      and opening not in inner
    ):
      text = inner.strip()
  wrapped = re.match(
    r'\\(?:text|textbf|mathrm|mathbf)\s*(\{.*)', text, re.DOTALL
  )
  if wrapped:
    content = balanced(wrapped.group(1))
    if content is not None and len(content) + 2 == len(wrapped.group(1)):
      return content.strip()
  return text


_SPACE_COMMANDS = re.compile(
  r'\\(?:left|right|[bB]ig[lr]?|displaystyle|q?quad)(?![a-zA-Z])'
  r'|\\[!,;: ]|~'
)
_TEXT_COMMANDS = re.compile(
  r'\\(?:text|textbf|textit|textrm|mathrm|mathbf|operatorname|mbox)\s*'
  r'\{([^{}]*)\}'
)
_CHARACTERS = str.maketrans({
  **dict.fromkeys('\u2212\u2010\u2011\u2012\u2013\u2014\ufe63\uff0d', '-'),
  **dict.fromkeys('\u00a0\u2007\u2009\u202f', ' '),
  '\u00d7': r'\times ', '\u00b7': r'\cdot ', '\u00f7': '/', '\u2044': '/',
  '\u03c0': r'\pi ', '\u221e': r'\infty ', '\u222a': r'\cup ',
  '\u00b1': r'\pm ', '\u2264': r'\le ', '\u2265': r'\ge ',
  '\u00b0': ' degrees', '\u221a': r'\sqrt ',
})  # fmt: skip


def normalize(text: str) -> str:
  """One spelling for marks, spaces, dashes and fractions."""
  text = ''.join(
    f' {unicodedata.normalize("NFKC", c)}' if _is_vulgar(c) else c for c in text
  )
  text = trim(text.translate(_CHARACTERS))
  if (match := BOX.match(text)) is not None:
    text = box_content(text, [match]) or ''
  text = text.replace('{,}', ',').replace(r'\$', '$').replace(r'\%', '%')
  text = re.sub(r'(?<=\d)\\[,!;:](?=\d{3})', ',', text)  # 1\,234
  text = re.sub(  # 1 234 567, but not 1 234/567
    r'(?<![\d/.,])\d{1,3}(?: \d{3})+(?![\d/])',
    lambda match: match.group().replace(' ', ''),
    text,
  )
  text = re.sub(r'\\[dtc]frac', r'\\frac', text)
  text = re.sub(r'\^\s*\{?\s*\\circ\s*\}?|\\degree', ' degrees', text)
  text = re.sub(r'(?<![\\A-Za-z])pi(?![A-Za-z])', r'\\pi ', text)
  text = _SPACE_COMMANDS.sub(' ', text)
  text = _TEXT_COMMANDS.sub(r' \1 ', text)
  text = text.strip().rstrip('.').strip('*`')
  text = re.sub(r'\s+', ' ', text).strip()
  if re.fullmatch(r'\(\s*[A-Za-z]\s*\)', text):  # a choice: (B) is B
    text = text.strip('() ')
  return text


def _is_vulgar(character: str) -> bool:
  return '\u2044' in unicodedata.normalize('NFKC', character) and (
    character != '\u2044'
  )
