"""Notebooks are what their sources say, and run from top to bottom."""

import pathlib
import sys
import time

import pytest

nbformat = pytest.importorskip('nbformat')
ROOT = pathlib.Path(__file__).parents[2]
DIRECTORY = ROOT / 'experiments' / 'notebooks'
sys.path.insert(0, str(DIRECTORY))

import build  # noqa: E402

from gdpo_jax.policy import weights  # noqa: E402

NAMES = build.names()


def test_there_are_five():
  assert len(NAMES) == 5


@pytest.mark.parametrize('name', NAMES)
def test_the_notebook_is_its_source(name):
  """Change the source and run experiments/notebooks/build.py."""
  kept = nbformat.read(DIRECTORY / f'{name}.ipynb', as_version=4)
  made = build.build(name)
  nbformat.validate(kept)
  assert [(c.cell_type, c.source) for c in kept.cells] == [
    (c.cell_type, c.source) for c in made.cells
  ]
  assert kept.cells[0].source.startswith('# ')
  for cell in kept.cells:
    if cell.cell_type == 'code':
      compile(cell.source, name, 'exec')


def test_cells_by_hand():
  text = '# %% [markdown]\n# # Title\n#\n# text\n\n# %%\nx = 1\n\n\n# %%\nx\n'
  assert list(build.cells(text)) == [
    ('markdown', '# Title\n\ntext'),
    ('code', 'x = 1'),
    ('code', 'x'),
  ]
  with pytest.raises(ValueError, match='no comment'):
    list(build.cells('# %% [markdown]\nx = 1\n'))
  with pytest.raises(ValueError, match='before the first cell'):
    list(build.cells('x = 1\n# %%\n'))


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
  pytest.importorskip('nbclient')
  pytest.importorskip('ipykernel')
  if name == 'math_with_a_limit' and weights.path('smollm2-135m') is None:
    pytest.skip('no SmolLM2 weights; run make weights')
  # the kernel has the package, and one device as on Colab
  monkeypatch.setenv('PYTHONPATH', str(ROOT))
  monkeypatch.setenv('XLA_FLAGS', '')
  start = time.monotonic()
  notebook = build.build(name)
  build.execute(notebook, tmp_path)
  errors = [
    output
    for cell in notebook.cells
    if cell.cell_type == 'code'
    for output in cell.outputs
    if output.output_type == 'error'
  ]
  assert not errors
  print(f'{name}: {time.monotonic() - start:.0f} s')
