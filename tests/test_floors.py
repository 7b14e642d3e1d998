"""The house's floors: imports go down only, and reward workers stay light."""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FLOORS = {
  'gdpo_jax.types': 0,
  'gdpo_jax.sharding': 0,
  'gdpo_jax.processes': 0,
  'gdpo_jax.objectives': 0,
  'gdpo_jax.rewards': 1,
  'gdpo_jax.policy': 1,
  'gdpo_jax.tasks': 2,
  'gdpo_jax.sampling': 2,
  'gdpo_jax.sampler': 2,
  'gdpo_jax.judge': 2,
  'gdpo_jax.train': 3,
  'gdpo_jax.trainer': 3,
  'experiments': 4,
  'launch': 4,
}
# Neighbours on one floor that must not know each other.
APART = {('gdpo_jax.rewards', 'gdpo_jax.policy')}
ONLY_AT_THE_DOOR = {'absl', 'ml_collections'}


def room(module: str) -> str | None:
  """The longest prefix of `module` that stands in FLOORS."""
  parts = module.split('.')
  for n in range(len(parts), 0, -1):
    if '.'.join(parts[:n]) in FLOORS:
      return '.'.join(parts[:n])
  return None


def imports(path: pathlib.Path) -> list[str]:
  found = []
  for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
    if isinstance(node, ast.Import):
      found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}: relative imports hide their floor'
      found += [f'{node.module}.{alias.name}' for alias in node.names]
  return found


def module_of(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(ROOT).with_suffix('').parts)


FILES = sorted((ROOT / 'gdpo_jax').rglob('*.py'))


@pytest.mark.parametrize('path', FILES, ids=module_of)
def test_imports_go_down(path):
  here = room(module_of(path))
  if here is None:  # gdpo_jax/__init__.py loads lazily, by name
    return
  for name in imports(path):
    there = room(name)
    if there is not None:
      assert FLOORS[there] <= FLOORS[here], f'{path} imports {name}, a floor up'
      pair = (here, there)
      assert pair not in APART and pair[::-1] not in APART, f'{path}: {name}'
    assert name.split('.')[0] not in ONLY_AT_THE_DOOR, f'{path} imports {name}'


def test_every_module_has_a_floor():
  homeless = [p for p in FILES if room(module_of(p)) is None]
  assert [p.relative_to(ROOT).as_posix() for p in homeless] == [
    'gdpo_jax/__init__.py'
  ]


def test_rewards_do_not_load_jax():
  code = (
    'import sys, gdpo_jax, gdpo_jax.rewards.pipeline, gdpo_jax.rewards.answers;'
    "print([m for m in ('jax', 'jaxlib', 'flax') if m in sys.modules])"
  )
  out = subprocess.run(
    [sys.executable, '-c', code],
    capture_output=True,
    text=True,
    check=True,
    cwd=ROOT,
  )
  assert out.stdout.strip() == '[]'


def test_public_names_load():
  import gdpo_jax

  for name in gdpo_jax.__all__:
    assert getattr(gdpo_jax, name) is not None
