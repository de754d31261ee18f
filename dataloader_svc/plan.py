"""Every micro-batch of every rank, on demand: a pure function of (data section, index, cursor). `epoch` has the order.

Rank r of D reads, as its micro-batch m, pack k * D + r of round rho of the step, with rho, k = divmod(m, round / D):
so the global batch never depends on D, and at every micro-step all ranks hold one shape.
"""

import hashlib
import threading
from collections import OrderedDict

import msgspec
import numpy as np

from dataloader_svc import mixture
from dataloader_svc.balance import Imbalance, ratios
from dataloader_svc.bucket import Array, Facts, assign, padding_share, unused_slots
from dataloader_svc.epoch import SAMPLES, EpochPlan, build_epoch, per_dataset
from dataloader_svc.hashing import mix64, shuffled
from dataloader_svc.skipping import Skips
from shared.batch import Cursor, groups
from shared.errors import ConfigError, ProtocolError
from shared.sections import DataSection

SPARES = 8
EPOCHS_KEPT = 2

# What a hash is for; 1 and 2 are epoch.py's.
SUBSTITUTES = 3


class Pack(msgspec.Struct, frozen=True):
    """One planned micro-batch of one data rank. `sample_ids` is empty in packs that only complete a step.

    `label_tokens` counts caption tokens and one eos for each sample, `step_labels` the same over the whole global
    batch. `spares` are samples of the same group, in order of preference, to stand in for ones that fail to decode;
    a spare may be longer than the sample it replaces, so whoever uses it must see that it fits. `imbalance` is the
    step's, over the data ranks that this pack was asked for.
    """

    cursor: Cursor
    batch_id: str
    group: int
    sample_ids: tuple[int, ...]
    label_tokens: int
    step_labels: int
    spares: tuple[int, ...]
    imbalance: Imbalance


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


class Planner:
    """Every micro-batch of every epoch, on demand. Safe to share between threads; keeps the last two epochs.

    `skips` tells where the order goes on after steps that are passed over; nothing else here looks at it.
    """

    def __init__(self, data: DataSection, index: Facts) -> None:
        self._data, self._index = data, index
        self._groups, self._group_of = groups(data), assign(index, data)
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._step_counts: dict[int, int] = {}
        self._lock = threading.Lock()
        self.skips = Skips(data.skip_steps, self.steps)

    def steps(self, epoch: int) -> int:
        """Global batches in an epoch.

        Raises:
            ConfigError: fewer good samples than one global batch can be made of.
        """
        if epoch not in self._step_counts:
            self._step_counts[epoch] = len(self._plan(epoch).bounds) // self._per_step
        return self._step_counts[epoch]

    def check(self, cursor: Cursor, data_ranks: int) -> None:
        """Refuse what is no place of the plan.

        Raises:
            ProtocolError: the cursor lies outside it, or `data_ranks` does not divide data.batch.round.
        """
        batch = self._data.batch
        if data_ranks < 1 or batch.round % data_ranks:
            raise ProtocolError(f"{data_ranks} data ranks do not divide data.batch.round, {batch.round}")
        if min(cursor.epoch, cursor.step, cursor.micro) < 0:
            raise ProtocolError(f"{_place(cursor)} is no place of the plan: nothing is below 0")
        if cursor.step >= (steps := self.steps(cursor.epoch)):
            raise ProtocolError(f"{_place(cursor)} is no place of the plan: the epoch has {steps} steps")
        if cursor.micro >= (each := batch.micro_batches // data_ranks):
            raise ProtocolError(f"{_place(cursor)} is no place of the plan: a rank has {each} micro-batches a step")

    def pack(self, cursor: Cursor, data_rank: int, data_ranks: int) -> Pack:
        """The micro-batch of `data_rank` at `cursor`.

        Raises:
            ProtocolError: there is none; see `check`.
        """
        self.check(cursor, data_ranks)
        if not 0 <= data_rank < data_ranks:
            raise ProtocolError(f"data rank {data_rank} is not one of {data_ranks}")
        plan, batch = self._plan(cursor.epoch), self._data.batch
        block, k = divmod(cursor.micro, batch.round // data_ranks)
        column, rounds = k * data_ranks + data_rank, self._rounds(cursor)
        number, place = rounds.start + block, block * batch.round + column
        group, ids = int(plan.round_group[number]), plan.samples(number, column)
        return Pack(
            cursor,
            f"e{cursor.epoch}-s{cursor.step}-p{place}-{_digest(self._data.seed, ids)}",
            group,
            ids,
            int(plan.labels[number, column]),
            int(plan.labels[rounds].sum()),
            self._spares(plan, cursor, place, group, ids) if ids else (),
            self._imbalance(plan, rounds, data_ranks),
        )

    def after(self, cursor: Cursor, data_ranks: int) -> Cursor:
        """The place after `cursor`: the next micro-batch, else the next step, else the next epoch.

        Raises:
            ProtocolError: see `check`.
        """
        self.check(cursor, data_ranks)
        if cursor.micro + 1 < self._data.batch.micro_batches // data_ranks:
            return Cursor(cursor.epoch, cursor.step, cursor.micro + 1)
        if cursor.step + 1 < self.steps(cursor.epoch):
            return Cursor(cursor.epoch, cursor.step + 1)
        return Cursor(cursor.epoch + 1)

    def summary(self, epoch: int) -> PlanSummary:
        """One epoch in numbers: for tables and the simulator."""
        plan = self._plan(epoch)
        ids = shuffled(np.sort(plan.chosen()), SAMPLES, self._data.seed, epoch)
        group_of, sizes = self._group_of[ids], plan.sizes()
        share = padding_share(self._index, group_of, ids, sizes[sizes > 0], sizes.size, self._data)
        found, counts = np.unique(group_of, return_counts=True)
        names = {self._groups[g].name: int(n) for g, n in zip(found.tolist(), counts.tolist(), strict=True)}
        unused = unused_slots(self._index, ids, np.repeat(plan.round_group, sizes.shape[1]), self._groups)
        spread = [ratios(costs, self._per_step, costs.shape[1]) for costs in (plan.packed_costs, plan.costs)]
        imbalances = Imbalance(*(float(r.mean()) for r in spread)), Imbalance(*(float(r.max()) for r in spread))
        numbers = (self.steps(epoch), sizes.size, int((sizes == 0).sum()), len(ids), len(plan.ids) - len(ids))
        padding = (share.naive, share.bucketed, *unused)
        return PlanSummary(epoch, *numbers, *padding, *imbalances, names, self._shares(np.sort(ids)))

    def times(self, epoch: int) -> Array:
        """How often each sample stands in the epoch. int64 [I]."""
        plan = self._plan(epoch)
        return np.bincount(plan.chosen(), minlength=len(self._group_of))

    @property
    def _per_step(self) -> int:
        """Rounds in a step."""
        return self._data.batch.micro_batches // self._data.batch.round

    def _rounds(self, cursor: Cursor) -> slice:
        """The rounds of the cursor's step."""
        return slice(cursor.step * self._per_step, (cursor.step + 1) * self._per_step)

    def _imbalance(self, plan: EpochPlan, rounds: slice, data_ranks: int) -> Imbalance:
        both = (plan.packed_costs[rounds], plan.costs[rounds])
        return Imbalance(*(float(ratios(costs, self._per_step, data_ranks)[0]) for costs in both))

    def _shares(self, ids: Array) -> tuple[DatasetShare, ...]:
        """`ids` are the epoch's, ascending."""
        datasets = self._data.datasets
        good = [len(part) for part in per_dataset(self._index, np.flatnonzero(self._group_of >= 0))]
        if len(good) != len(datasets):
            return ()
        asked = [quota.asked for quota in mixture.quotas(datasets, good)]
        served = [len(part) for part in per_dataset(self._index, ids)]
        return tuple(
            DatasetShare(dataset.name, count, n, share, n / max(1, len(ids)))
            for dataset, count, n, share in zip(datasets, good, served, asked, strict=True)
        )

    def _plan(self, epoch: int) -> EpochPlan:
        with self._lock:
            if epoch not in self._plans:
                self._plans[epoch] = self._build(epoch)
                if len(self._plans) > EPOCHS_KEPT:
                    self._plans.popitem(last=False)
            self._plans.move_to_end(epoch)
            return self._plans[epoch]

    def _build(self, epoch: int) -> EpochPlan:
        batch, good = self._data.batch, self._entries()
        least, remedy = batch.micro_batches, "lower it, or add data"
        if good < least:
            rule = f"must not exceed the good samples, {good}: one global batch needs a sample a micro-batch"
            raise ConfigError("data.batch.micro_batches", least, rule, remedy)
        plan = build_epoch(self._data, self._index, self._group_of, epoch)
        if not len(plan.bounds):
            rule = f"makes no whole global batch of {good} good samples: no {least} micro-batches in whole rounds"
            raise ConfigError("data.batch.micro_batches", least, rule, "lower it, or set data.batch.leftovers: pad")
        return plan

    def _entries(self) -> int:
        """How many samples an epoch holds, counted as often as they come."""
        good = np.flatnonzero(self._group_of >= 0)
        if not mixture.weighted(self._data.datasets):
            return len(good)
        counts = [len(part) for part in per_dataset(self._index, good)]
        return sum(quota.entries for quota in mixture.quotas(self._data.datasets, counts))

    def _spares(self, plan: EpochPlan, cursor: Cursor, place: int, group: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        members, seed = plan.members[group], self._data.seed
        draws = mix64(SUBSTITUTES, seed, cursor.epoch, cursor.step, place, np.arange(SPARES * SPARES))
        drawn = members[draws % np.uint64(len(members))].tolist()
        return tuple([i for i in dict.fromkeys(drawn) if i not in ids][:SPARES])


def _digest(seed: int, ids: tuple[int, ...]) -> str:
    return hashlib.blake2b(f"{seed}:{ids}".encode(), digest_size=4).hexdigest()


def _place(cursor: Cursor) -> str:
    return f"epoch {cursor.epoch}, step {cursor.step}, micro-batch {cursor.micro}"
