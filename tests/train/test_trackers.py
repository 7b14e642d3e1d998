"""Event files and offline runs, read back by their own libraries."""

import pytest

from gdpo_jax.train import trackers


def test_tensorboard_reads_what_was_written(tmp_path):
  pytest.importorskip('tensorboard', reason='extra `track`')
  from tensorboard.backend.event_processing import event_accumulator

  tracker = trackers.TensorBoard(tmp_path, {})
  tracker.write(1, {'step': 1, 'loss': 0.5, 'rewards/a/mean': None})
  tracker.write(2, {'loss': 0.25})
  tracker.close()
  read = event_accumulator.EventAccumulator(str(tmp_path / 'tensorboard'))
  read.Reload()
  assert [(e.step, e.value) for e in read.Scalars('loss')] == [
    (1, 0.5),
    (2, 0.25),
  ]
  assert read.Tags()['scalars'] == ['loss']


@pytest.mark.slow
def test_wandb_works_offline(tmp_path, monkeypatch):
  pytest.importorskip('wandb', reason='extra `track`')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  monkeypatch.setenv('WANDB_SILENT', 'true')
  for step in (1, 2):  # the second time as a continued run
    tracker = trackers.WeightsAndBiases(tmp_path, {'algorithm': 'gdpo'})
    tracker.write(step, {'loss': 0.5 / step})
    tracker.close()
  files = list((tmp_path / 'wandb').glob('offline-run-*/run-*.wandb'))
  name = (tmp_path / 'wandb_id').read_text()
  assert files and all(name in f.name for f in files)


def test_a_wrong_name_is_refused():
  assert trackers.parse('') == ()
  with pytest.raises(ValueError, match="'tensorbord'.*tensorboard, wandb"):
    trackers.parse('tensorbord')
