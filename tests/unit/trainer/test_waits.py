"""Laws of the wait histogram."""

import numpy as np
import pytest

from trainer.waits import BUCKETS, WaitHistogram, Waits


def test_percentiles_are_right_to_five_percent():
    waits = np.random.default_rng(0).lognormal(-6, 2, 5000)
    histogram = WaitHistogram()
    for wait in waits:
        histogram.add(float(wait))
    found = histogram.summary()
    assert found.p50_s == pytest.approx(np.quantile(waits, 0.50, method="inverted_cdf"), rel=0.05)
    assert found.p99_s == pytest.approx(np.quantile(waits, 0.99, method="inverted_cdf"), rel=0.05)
    assert found.mean_s == pytest.approx(waits.mean())
    assert (found.count, found.max_s) == (5000, waits.max())


def test_memory_is_bounded_and_extremes_are_counted():
    histogram = WaitHistogram()
    for wait in (0.0, 1e-9, 1e-6, 1e5):
        histogram.add(wait)
    assert histogram.summary().count == 4
    assert len(histogram._counts) == BUCKETS < 500


def test_no_waits_are_all_zero():
    assert WaitHistogram().summary() == Waits()
