"""A student between teachers: the gap falls, to what both find likely."""

import jax
import pytest
from tiny_runs import TOKENIZER, byte_model, settings, task

from gdpo_jax.train.distill import distill


def test_the_student_goes_where_its_teachers_are():
  policy, params = byte_model()
  # Teachers that share most of their tastes: between strangers the geometric
  # mean has little mass, and the gap a high floor.
  table = params['embed']['embedding']
  common, own = (
    jax.random.normal(jax.random.key(k), table.shape) for k in (1, 2)
  )
  teachers = [
    (policy, {**params, 'embed': {'embedding': table + 0.2 * common + x}})
    for x in (0.0, 0.05 * own)
  ]
  rows = []
  s = settings(num_steps=40, learning_rate=1e-2, mesh_data=2, mesh_fsdp=2)
  new = distill(
    policy,
    params,
    teachers,
    (2.0, 2.0),
    TOKENIZER,
    task().train,
    s,
    report=lambda step, row: rows.append(row['distill/gap']),
  )
  assert len(rows) == 40
  assert sum(rows[-5:]) / 5 < 0.75 * sum(rows[:3]) / 3
  assert jax.tree.structure(new) == jax.tree.structure(params)


@pytest.mark.parametrize(
  ('count', 'shares', 'words'),
  [
    (1, (1.0, 1.0), '1 teachers and 2 shares'),
    (2, (1.0, -1.0), 'not negative'),
    (0, (), '0 teachers'),
  ],
)
def test_what_does_not_fit_is_refused(count, shares, words):
  policy, params = byte_model()
  teachers = [(policy, params)] * count
  with pytest.raises(ValueError, match=words):
    distill(policy, params, teachers, shares, TOKENIZER, [], settings())
