"""The table in the documentation says what the code says."""

import re

import numpy as np

from experiments import objectives_table


def numbers(text):
  return np.array([float(x) for x in re.findall(r'(?<= )-?\d+\.\d+', text)])


def test_the_documented_table_is_current():
  written = objectives_table.OUT.read_text(encoding='utf-8')
  made = objectives_table.document()
  np.testing.assert_allclose(numbers(written), numbers(made), atol=2e-3)
  strip = re.compile(r'-?\d+\.\d+')
  assert strip.sub('', written) == strip.sub('', made)
