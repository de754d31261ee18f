"""How much of each dataset an epoch holds, and which samples: a pure function of (weights, seed, epoch).

Without weights every good sample comes once. With them the epoch has E entries, of dataset d round(weight_d x E):

- every dataset weighted: E is the number of good samples, and weights count relative to their sum;
- some weighted: the others come once each and fill what the weights leave: E = (their samples) / (1 - sum of weights).

A dataset of N good samples makes its n entries of n // N whole passes and n % N further samples: a window over one
fixed shuffle of the dataset that moves on by its own width every epoch, so that over epochs no sample lags behind by
more than one. `repeat_limit` caps n at repeat_limit x N; what that takes away is not given to others.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from dataloader_svc.bucket import Array
from dataloader_svc.hashing import mix64, shuffled
from shared.errors import ConfigError
from shared.sections import DatasetSection

# What a hash is for; 1 to 3 are epoch.py's and plan.py's.
WINDOW, PLACES, ROUND_PLACES = 4, 5, 6


class Quota(msgspec.Struct, frozen=True):
    """One dataset's part: `good` samples, `entries` an epoch, and the share of the epoch that was asked for."""

    dataset: str
    good: int
    entries: int
    asked: float


def weighted(datasets: Sequence[DatasetSection]) -> bool:
    """Whether any dataset has a weight."""
    return any(dataset.weight is not None for dataset in datasets)


def quotas(datasets: Sequence[DatasetSection], good: Sequence[int]) -> tuple[Quota, ...]:
    """Each dataset's part of every epoch; `good` are their numbers of good samples.

    Raises:
        ConfigError: a dataset with a weight has no good sample.
    """
    for dataset, count in zip(datasets, good, strict=True):
        if dataset.weight is not None and not count:
            rule = f"is set for data.datasets.{dataset.name}, which has no good sample"
            raise ConfigError("data.datasets.weight", f"{dataset.weight:g}", rule, "mend its shards, or take it out")
    total = _epoch_entries(datasets, good)
    scale = sum(d.weight or 0.0 for d in datasets) if all(d.weight is not None for d in datasets) else 1.0
    found = []
    for dataset, count in zip(datasets, good, strict=True):
        asked = count / max(1.0, total) if dataset.weight is None else dataset.weight / scale
        entries = count if dataset.weight is None else round(asked * total)
        most = entries if dataset.repeat_limit is None else dataset.repeat_limit * count
        found.append(Quota(dataset.name, count, min(entries, most), asked))
    return tuple(found)


def _epoch_entries(datasets: Sequence[DatasetSection], good: Sequence[int]) -> float:
    natural = [count for dataset, count in zip(datasets, good, strict=True) if dataset.weight is None]
    if not natural:
        return float(sum(good))
    return sum(natural) / (1.0 - sum(dataset.weight or 0.0 for dataset in datasets))


def draw(parts: Sequence[tuple[Quota, Array]], seed: int, epoch: int) -> Array:
    """Sample ids of a weighted epoch in order, repeats and all; `parts` are quotas and their good ids, ascending.

    Each dataset is spread evenly over the epoch and its passes follow one another, so a sample's repeats stand about a
    pass apart.
    """
    ids = [_passes(good, quota.entries, seed, epoch) for quota, good in parts]
    places = [_spread(len(entries), PLACES, seed, epoch, number) for number, entries in enumerate(ids)]
    order: Array = np.concatenate(ids)[np.argsort(np.concatenate(places), kind="stable")]
    return order


def _passes(good: Array, entries: int, seed: int, epoch: int) -> Array:
    """Whole passes, each in its own order, then the epoch's window."""
    if not len(good):
        return good
    whole, rest = divmod(entries, len(good))
    passes = [shuffled(good, WINDOW, seed, epoch, number) for number in range(whole)]
    window = (epoch * rest + np.arange(rest)) % len(good)
    last = shuffled(shuffled(good, WINDOW, seed)[window], WINDOW, seed, epoch, whole)
    return np.concatenate([*passes, last])


def spread_rounds(groups: Array, seed: int, epoch: int) -> Array:
    """An order of rounds in which those of each group keep theirs and lie evenly over the epoch. `groups` [R]."""
    places = np.zeros(len(groups))
    for group in np.unique(groups).tolist():
        mine = np.flatnonzero(groups == group)
        places[mine] = _spread(len(mine), ROUND_PLACES, seed, epoch, group)
    order: Array = np.argsort(places, kind="stable")
    return order


def _spread(count: int, *words: int) -> Array:
    """Places in [0, 1), ascending: one in each of `count` equal parts, anywhere in it (by hash)."""
    jitter = (mix64(*words, np.arange(count)) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    places: Array = (np.arange(count) + jitter) / max(1, count)
    return places
