"""A whole run with packed lines is the run without them."""

import copy
import dataclasses

import jax
import numpy as np
import pytest
import tiny_runs
from tiny_runs import byte_model, settings, task, train

from gdpo_jax.rewards.pipeline import Reward
from gdpo_jax.train.settings import Settings


def by_length(completion_ids, **_):
  """Differs within every group."""
  return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize('kl', [0.0, 0.1])
def test_parameters_after_a_run(tmp_path, kl, monkeypatch):
  model = byte_model()
  # An untrained model that ends rows: one token in three does.
  tokenizer = copy.copy(tiny_runs.TOKENIZER)
  tokenizer.eos_ids = (*tokenizer.eos_ids, *range(97, 97 + 96))
  monkeypatch.setattr(tiny_runs, 'TOKENIZER', tokenizer)
  s = settings(num_steps=2, save_every=0, max_new_tokens=16, kl_coef=kl)
  found = {}
  for tokens in (0, 16):
    result = train(
      model,
      tmp_path / str(tokens),
      dataclasses.replace(s, pack_tokens=tokens),
      the_task=task(Reward(by_length)),
      heldout=[],
    )
    found[tokens] = jax.device_get(result.state.params)
    packed = [row.get('packing/lines_per_row') for row in result.history]
    assert all(x in (0.5, 0.75) if tokens else x is None for x in packed)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5),
    found[16],
    found[0],
  )


def test_sub_policies_are_refused():
  with pytest.raises(ValueError, match='sub-policies'):
    Settings(pack_tokens=64, subpolicy_rank=4).resolve()
