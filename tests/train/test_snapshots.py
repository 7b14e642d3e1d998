"""Past policies: kept in 8 bits, bounded, sampled from, or the reference."""

import jax
import numpy as np
import pytest
from tiny_runs import byte_model, settings, train

from gdpo_jax import sharding
from gdpo_jax.policy import eight_bit
from gdpo_jax.train.settings import Settings
from gdpo_jax.train.snapshots import Snapshots


@pytest.mark.parametrize('kind', eight_bit.FORMATS)
def test_store_is_bounded_and_gives_back_what_it_kept(tmp_path, kind):
  s = Settings(
    snapshot_every=2,
    snapshot_keep=2,
    snapshot_format=kind,
    snapshot_share=1.0,
    save_every=0,
  ).resolve()
  mesh = sharding.make_mesh(1, 2, 2)
  store = Snapshots(tmp_path, s, mesh)
  place = sharding.shardings(mesh, byte_model()[1])
  params = jax.device_put(byte_model()[1], place)
  key = jax.random.key(0)
  assert store.behaviour(0, key, params) is params  # nothing is kept yet
  for step in range(1, 8):
    now = jax.tree.map(lambda x, n=step: x * n, params)
    row = store.after(step, now)
    assert ('snapshots/relative_error' in row) == (step % 2 == 0)
  error = {'int8': 0.012, 'fp8': 0.04}[kind]
  assert 0 < row.get('snapshots/relative_error', error / 2) < error
  kept = sorted(p.name for p in (tmp_path / 'snapshots').iterdir())
  assert kept == ['4.safetensors', '6.safetensors']
  steps = set()
  for i in range(20):
    past = store.behaviour(7, jax.random.fold_in(key, i), params)
    scale = past['norm']['scale'][0] / params['norm']['scale'][0]
    steps.add(int(scale))
    want = eight_bit.restore(
      eight_bit.quantize(jax.tree.map(lambda x, f=scale: x * f, params), kind)
    )
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), past, want
    )
  assert steps == {4, 6}
  # at step 5 the one of step 6 is the future
  assert int(store.behaviour(5, key, params)['norm']['scale'][0]) == 4
  store.rewind(5)
  assert len(list((tmp_path / 'snapshots').iterdir())) == 1


def rows_of(result):
  return [
    {
      k: v
      for k, v in row.items()
      if not k.startswith(('time/', 'throughput/', 'memory/'))
    }
    for row in result.history
    if 'loss' in row
  ]


@pytest.mark.slow
def test_a_run_that_samples_from_its_past_resumes_exactly(tmp_path):
  changes = {
    'snapshot_every': 1,
    'snapshot_keep': 2,
    'snapshot_share': 0.5,
    'lora_rank': 2,
    'learning_rate': 1e-1,
  }
  s = settings(**changes, num_steps=6)
  whole = train(byte_model(), tmp_path / 'whole', s, heldout=[])
  # a past policy is not the one that is trained; one kept just now differs by
  # its 8 bits at most
  pairs = [
    (row['snapshots/age'], row['sampler_mismatch']) for row in rows_of(whole)
  ]
  assert {age for age, _ in pairs} == {0, 1}
  oldest = min(m for age, m in pairs if age)
  assert all(m < oldest / 2 for age, m in pairs if not age), pairs

  class Stop(Exception):
    pass

  def stop(step, row):
    if step == 5:  # one step, and one snapshot, after the checkpoint of step 4
      raise Stop

  with pytest.raises(Stop):
    train(byte_model(), tmp_path / 'cut', s, heldout=[], after_step=stop)
  resumed = train(byte_model(), tmp_path / 'cut', s, heldout=[])
  assert rows_of(resumed) == rows_of(whole)


def test_settings_that_do_not_fit_are_refused():
  with pytest.raises(ValueError, match='need kl_coef above 0'):
    Settings(snapshot_every=2, snapshot_use='reference').resolve()
  with pytest.raises(ValueError, match="snapshot_format is 'int4'"):
    Settings(snapshot_format='int4').resolve()
