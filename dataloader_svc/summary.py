"""One epoch in numbers, for tables, logs and metrics. Steps are looked at in stretches, so memory stays flat."""

from collections.abc import Iterator

import msgspec
import numpy as np

from dataloader_svc import mixture
from dataloader_svc.balance import Imbalance, ratios
from dataloader_svc.block import Block, build_block
from dataloader_svc.bucket import Array, Facts, padding_share, present, unused_slots
from dataloader_svc.epoch import SAMPLES, EpochPlan, per_dataset
from dataloader_svc.hashing import shuffled
from shared.batch import groups
from shared.sections import DataSection

STRETCH_STEPS = 1 << 13


class DatasetShare(msgspec.Struct, frozen=True):
    """One dataset's part of an epoch: its `good` samples, the share asked for, the one served, in `samples` entries."""

    dataset: str
    good: int
    samples: int
    asked: float
    served: float


class PlanSummary(msgspec.Struct, frozen=True):
    """One epoch in numbers. Padding shares are as `bucket.padding_share` and `unused_slots` define them.

    `imbalance` is the mean over steps, and `worst_imbalance` the largest, for as many data ranks as `round` allows.
    `groups` are those that packs of any epoch may be of.
    """

    epoch: int
    steps: int
    packs: int
    empty_packs: int
    samples: int
    dropped_samples: int
    padding_naive: float
    padding_bucketed: float
    unused_images: float
    unused_clips: float
    imbalance: Imbalance
    worst_imbalance: Imbalance
    samples_per_group: dict[str, int]
    shares: tuple[DatasetShare, ...]
    groups: tuple[int, ...]


def summarize(data: DataSection, facts: Facts, group_of: Array, plan: EpochPlan, epoch: int) -> PlanSummary:
    """`plan` is the epoch's, `group_of` [I] what `bucket.assign` gives."""
    table, per_step = groups(data), data.batch.micro_batches // data.batch.round
    ids = shuffled_chosen(plan, data.seed, epoch)
    looked = [(block.sizes, block.packed_costs, block.costs) for block in _stretches(plan, data)]
    sizes, *costs = (np.concatenate(parts) for parts in zip(*looked, strict=True))
    spread = [ratios(each, per_step, each.shape[1]) for each in costs]
    imbalances = Imbalance(*(float(r.mean()) for r in spread)), Imbalance(*(float(r.max()) for r in spread))
    share = padding_share(facts, group_of[ids], ids, sizes[sizes > 0], sizes.size, data)
    unused = unused_slots(facts, ids, np.repeat(plan.round_group, sizes.shape[1]), table)
    counts = np.bincount(group_of[ids]).tolist()
    names = {table[group].name: count for group, count in enumerate(counts) if count}
    numbers = (len(plan.bounds) // per_step, sizes.size, int((sizes == 0).sum()), len(ids), len(plan.ids) - len(ids))
    padding = (share.naive, share.bucketed, *unused)
    shares = _shares(data, facts, group_of, np.sort(ids))
    return PlanSummary(epoch, *numbers, *padding, *imbalances, names, shares, present(group_of))


def shuffled_chosen(plan: EpochPlan, seed: int, epoch: int) -> Array:
    """The epoch's ids in shuffled order, those that come more than once side by side."""
    found, times = np.unique(plan.chosen(), return_counts=True)
    order = shuffled(found, SAMPLES, seed, epoch)
    return np.repeat(order, times[np.searchsorted(found, order)])


def _stretches(plan: EpochPlan, data: DataSection) -> Iterator[Block]:
    table, width = groups(data), STRETCH_STEPS * (data.batch.micro_batches // data.batch.round)
    for first in range(0, len(plan.bounds), width):
        yield build_block(plan, slice(first, first + width), table, data)


def _shares(data: DataSection, facts: Facts, group_of: Array, ids: Array) -> tuple[DatasetShare, ...]:
    """`ids` are the epoch's, ascending."""
    good = [len(part) for part in per_dataset(facts, np.flatnonzero(group_of >= 0))]
    if len(good) != len(data.datasets):
        return ()
    asked = [quota.asked for quota in mixture.quotas(data.datasets, good)]
    served = [len(part) for part in per_dataset(facts, ids)]
    return tuple(
        DatasetShare(dataset.name, count, n, share, n / max(1, len(ids)))
        for dataset, count, n, share in zip(data.datasets, good, served, asked, strict=True)
    )
