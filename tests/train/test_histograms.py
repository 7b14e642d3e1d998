"""Bins by hand."""

import numpy as np

from gdpo_jax.train import histograms


def test_sign_zero_and_missing_are_kept_apart():
  found = histograms.log_histogram(
    np.array([1.0, 1.2, 10.0, -10.0, 0.0, 1e-12, np.nan, np.inf])
  )
  assert found == {'nan': 2, '0': 2, '+0': 2, '+5': 1, '-5': 1}


def test_every_power_of_ten_opens_a_bin():
  for exponent in range(-7, 8):
    (label,) = histograms.log_histogram(np.array([10.0**exponent]))
    assert label == f'+{5 * exponent}'
    low, high = histograms.edges(label)
    np.testing.assert_allclose((low, high / low), (10.0**exponent, 10**0.2))


def test_values_lie_in_their_bins_in_order():
  values = np.random.default_rng(0).standard_cauchy(1000)
  found = histograms.log_histogram(values)
  for label, count in found.items():
    low, high = histograms.edges(label)
    inside = (
      (np.abs(values) >= min(abs(low), abs(high)) * (1 - 1e-9))
      & (np.abs(values) < max(abs(low), abs(high)) * (1 + 1e-9))
    ) & (np.sign(values) == np.sign(low + high))
    assert inside.sum() == count
  middles = [histograms.order(k) for k in sorted(found, key=histograms.order)]
  assert middles == sorted(middles)
