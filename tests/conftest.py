"""Shared by all tests: the compilation cache, and where optional things are."""

import os
import pathlib

# Four host devices for every test, so that sharding is exercised everywhere.
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=4')
os.environ.setdefault('PJRT_NPROC', '16')  # see room_for_collectives
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import hypothesis
import jax
import pytest

_CACHE = pathlib.Path(
  os.environ.get('XDG_CACHE_HOME', pathlib.Path.home() / '.cache')
)
jax.config.update('jax_compilation_cache_dir', str(_CACHE / 'gdpo_jax' / 'xla'))
# Low, because a test compiles many small programs once and never again.
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.05)


def pytest_addoption(parser):
  parser.addoption(
    '--slow', action='store_true', help='run the tests marked slow as well'
  )


def pytest_configure(config):
  # The same examples every time; `make test-slow` looks for new ones.
  hypothesis.settings.register_profile('steady', derandomize=True)
  if not config.getoption('--slow'):
    hypothesis.settings.load_profile('steady')


def pytest_collection_modifyitems(config, items):
  if config.getoption('--slow'):
    return
  skip = pytest.mark.skip(reason='slow; run by make test-slow')
  for item in items:
    if 'slow' in item.keywords:
      item.add_marker(skip)
