"""How long the trainer waited for batches: a histogram of fixed size, exact mean and maximum.

Buckets are spaced by 5 % from 1 µs to 1,000 s (about 430 of them), so a percentile is right to 5 % of its value.
"""

import math

import msgspec
import numpy as np

LOWEST_S = 1e-6
HIGHEST_S = 1e3
RATIO = 1.05
BUCKETS = math.ceil(math.log(HIGHEST_S / LOWEST_S) / math.log(RATIO)) + 1


class Waits(msgspec.Struct, frozen=True):
    """Waits of one span of a run, in seconds. All zero for a span without batches."""

    count: int = 0
    mean_s: float = 0.0
    p50_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


class WaitStats(msgspec.Struct, frozen=True):
    """`run` covers every batch but the first, `recent` those since the last call; `first_s` includes connecting."""

    run: Waits
    recent: Waits
    first_s: float


class WaitHistogram:
    """Takes in one wait at a time."""

    def __init__(self) -> None:
        self._counts = np.zeros(BUCKETS, dtype=np.int64)
        self._sum_s = 0.0
        self._max_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one wait; what lies outside the range goes to the outermost bucket."""
        place = round(math.log(max(seconds, LOWEST_S) / LOWEST_S) / math.log(RATIO))
        self._counts[min(place, BUCKETS - 1)] += 1
        self._sum_s += seconds
        self._max_s = max(self._max_s, seconds)

    def summary(self) -> Waits:
        """Percentiles by nearest rank."""
        count = int(self._counts.sum())
        if not count:
            return Waits()
        return Waits(count, self._sum_s / count, self._quantile(0.50), self._quantile(0.99), self._max_s)

    def _quantile(self, share: float) -> float:
        rank = math.ceil(share * int(self._counts.sum()))
        place = int(np.searchsorted(np.cumsum(self._counts), rank))
        return float(min(LOWEST_S * RATIO**place, self._max_s))
