"""Notebooks out of readable sources.

  sources/NAME.py --cells at '# %%'--> NAME.ipynb (--execute: with outputs)

  python experiments/notebooks/build.py [--execute] [NAME ...]

The sources are what is edited: plain Python, in which '# %% [markdown]' starts a
cell of comments and '# %%' one of code.
"""

import argparse
import pathlib
from collections.abc import Iterator, Sequence

import nbformat

HERE = pathlib.Path(__file__).parent
SOURCES = HERE / 'sources'
TIMEOUT_S = 1800  # of one cell; the aim is ten minutes for all of them


def names() -> list[str]:
  return sorted(path.stem for path in SOURCES.glob('*.py'))


def cells(text: str) -> Iterator[tuple[str, str]]:
  """(kind, source) of each cell, kind 'markdown' or 'code'.

  Raises:
    ValueError: something before the first cell, or text that is no comment in a
      cell of text.
  """
  kind, lines = '', []
  for line in [*text.splitlines(), '# %%']:
    if line.startswith('# %%'):
      body = '\n'.join(lines).strip('\n')
      if kind:
        yield kind, body
      elif body:
        raise ValueError(f'text before the first cell: {body[:60]!r}')
      kind = 'markdown' if '[markdown]' in line else 'code'
      lines = []
    elif kind == 'markdown':
      if line and not line.startswith('#'):
        raise ValueError(f'a line of text that is no comment: {line!r}')
      lines.append(line.removeprefix('#').removeprefix(' '))
    else:
      lines.append(line)


def build(name: str) -> nbformat.NotebookNode:
  """The notebook of a source, without outputs; equal sources, equal files."""
  text = (SOURCES / f'{name}.py').read_text(encoding='utf-8')
  make = {
    'markdown': nbformat.v4.new_markdown_cell,
    'code': nbformat.v4.new_code_cell,
  }
  made = []
  for i, (kind, source) in enumerate(cells(text)):
    cell = make[kind](source)
    cell.id = f'cell-{i}'  # a random one would change at every build
    made.append(cell)
  notebook = nbformat.v4.new_notebook(cells=made)
  notebook.metadata = {
    'kernelspec': {
      'name': 'python3',
      'display_name': 'Python 3',
      'language': 'python',
    },
    'language_info': {'name': 'python'},
    'colab': {'name': f'{name}.ipynb', 'provenance': []},
  }
  nbformat.validate(notebook)
  return notebook


def execute(notebook: nbformat.NotebookNode, directory: pathlib.Path) -> None:
  """Runs all cells from top to bottom in a fresh kernel; raises on an error."""
  import nbclient

  client = nbclient.NotebookClient(
    notebook,
    timeout=TIMEOUT_S,
    kernel_name='python3',
    resources={'metadata': {'path': str(directory)}},
  )
  client.execute()
  for cell in notebook.cells:
    cell.metadata.pop('execution', None)  # times of day
    if cell.cell_type == 'code':  # what the compiler says about the machine
      cell.outputs = [o for o in cell.outputs if o.get('name') != 'stderr']


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('names', nargs='*', help='all by default')
  parser.add_argument('--execute', action='store_true')
  args = parser.parse_args(argv)
  for name in args.names or names():
    notebook = build(name)
    if args.execute:
      import tempfile

      with tempfile.TemporaryDirectory() as directory:
        execute(notebook, pathlib.Path(directory))
    nbformat.write(notebook, HERE / f'{name}.ipynb')
    print(HERE / f'{name}.ipynb')


if __name__ == '__main__':
  main()
