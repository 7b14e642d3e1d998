import io
import json
import pathlib
import sys

import jax
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / 'experiments'))

import launcher  # noqa: E402
import run as run_module  # noqa: E402
from configs.math_len import get_config  # noqa: E402

from gdpo_jax.policy import hf  # noqa: E402
from gdpo_jax.policy.tokenizer import Tokenizer  # noqa: E402


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """A run of two steps, without a warm start: it knows nothing."""
  directory = tmp_path_factory.mktemp('run')
  config = get_config('tiny')
  config.update(
    num_steps=2,
    prompts_per_step=4,
    group_size=4,
    heldout=6,
    eval_batch_size=8,
    warm_start_updates=0,
    max_new_tokens=8,
  )
  config.task.num_train, config.task.num_heldout = 16, 6
  config.task.limit_tokens = 7
  settings = launcher.settings_of(config)
  task = launcher.task_function('math_len')(config)
  model = launcher.load_model(config)
  result = launcher.run(model, task, settings, config, directory)
  return directory, result


@pytest.mark.slow
def test_opens_with_the_parameters_that_were_trained(finished):
  directory, result = finished
  run = run_module.open_run(directory)
  assert run.step == 2
  same = jax.tree.map(
    lambda a, b: np.array_equal(a, b), run.model.params, result.state.params
  )
  assert all(jax.tree.leaves(same))


@pytest.mark.slow
def test_samples_and_talks(finished, capsys, monkeypatch):
  directory, _ = finished
  arguments = ['sample', str(directory), '--prompt=12+34:', '--n=3']
  run_module.main([*arguments, '--temperature=1', '--seed=4'])
  drawn = capsys.readouterr().out
  assert drawn.count('---') == 3
  run_module.main([*arguments, '--temperature=1', '--seed=4'])
  assert capsys.readouterr().out == drawn
  monkeypatch.setattr('sys.stdin', io.StringIO('12+34:\n/new\n10+10:\n\n99'))
  run_module.main(['sample', str(directory)])
  assert capsys.readouterr().out.count('> ') == 2
  long = 'x' * 200
  with pytest.raises(SystemExit):
    run_module.main(['sample', str(directory), f'--prompt={long}'])
  assert 'the prompt has 200 tokens; at most 120 fit' in capsys.readouterr().err


@pytest.mark.slow
def test_evaluates_as_the_run_did(finished, capsys):
  directory, result = finished
  run_module.main(['evaluate', str(directory), '--samples=4', '--k=1,4'])
  assert 'pass@4' in capsys.readouterr().out
  found = json.loads((directory / 'evaluation.json').read_text())
  assert found['problems'] == 6 and found['solved'] == 'correct >= 1.0'
  for k, name in enumerate(result.final.names):
    mean = found['greedy'][name]['mean']
    assert mean == pytest.approx(result.final.values[:, k].mean(), abs=1e-6)
  assert set(found['sampled']) >= {'pass@1', 'pass@4', 'maj@1', 'maj@4'}
  with pytest.raises(SystemExit):
    run_module.main(['evaluate', str(directory), '--reward=beauty'])
  assert "no reward 'beauty'" in capsys.readouterr().err


@pytest.mark.slow
def test_exports_for_others(finished, tmp_path):
  directory, result = finished
  where = tmp_path / 'out'
  run_module.main(['export', str(directory), str(where), '--dtype=float32'])
  _, params = hf.load(where)
  same = jax.tree.map(
    lambda a, b: np.array_equal(a, b), params, result.state.params
  )
  assert all(jax.tree.leaves(same))
  assert Tokenizer.from_hf(where).encode('12') == [49, 50]


def test_what_is_no_run_is_said(tmp_path, capsys):
  with pytest.raises(SystemExit):
    run_module.main(['sample', str(tmp_path)])
  assert 'no run of a launcher' in capsys.readouterr().err


def test_pass_at_k_by_hand():
  solved = np.array([[1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], bool)
  np.testing.assert_allclose(run_module.pass_at_k(solved, 1), [0.25, 1, 0])
  # of the 6 pairs, 3 hold the right one
  np.testing.assert_allclose(run_module.pass_at_k(solved, 2), [0.5, 1, 0])
  np.testing.assert_allclose(run_module.pass_at_k(solved, 4), [1, 1, 0])
  with pytest.raises(ValueError, match='needs at least 5 samples'):
    run_module.pass_at_k(solved, 5)


def test_maj_at_k_by_hand():
  texts = [['It is 7', 'Answer: 7', '9', '5'], ['4', '4', '8', '4']]
  solved = np.array([[1, 1, 0, 0], [0, 0, 1, 0]], bool)
  np.testing.assert_array_equal(run_module.maj_at_k(texts, solved, 4), [1, 0])
  one = run_module.maj_at_k(texts, solved, 1)
  np.testing.assert_allclose(one, [0.5, 0.25], atol=0.1)
