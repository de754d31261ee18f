"""Which samples, in which order, in which micro-batch of which rank: a pure function of (data section, index, epoch).

An epoch: good samples are shuffled, or drawn and mixed as weights say (`mixture`); within each group consecutive ones
are packed into micro-batches (packs) by next-fit; `round` packs of one group form a round; rounds are shuffled (in a
mixture spread evenly, so that repeats stay apart); micro_batches/round rounds form a step. What is left at the end of a
group or of the epoch is completed (`leftovers: pad`: a short round by halving its packs, then by empty ones; a short
step by empty rounds) or dropped and counted (`drop`).

Rank r of D reads, as its micro-batch m, pack `rho * round + k * D + r` of the step, with rho, k = divmod(m, round / D):
so the global batch never depends on D, and at every micro-step all ranks hold one shape.
"""

import hashlib
import threading
from collections import OrderedDict

import msgspec
import numpy as np

from dataloader_svc import mixture
from dataloader_svc.bucket import Array, Facts, assign, padding_share, sample_tokens
from dataloader_svc.hashing import mix64, shuffled
from shared.batch import Cursor, Group, groups
from shared.errors import ConfigError, ProtocolError
from shared.sections import DataSection

SPARES = 8
EPOCHS_KEPT = 2
EMPTY = -1

# What a hash is for: different uses of one (seed, epoch) must not be correlated.
SAMPLES, ROUNDS, SUBSTITUTES = 1, 2, 3


class Pack(msgspec.Struct, frozen=True):
    """One planned micro-batch of one data rank. `sample_ids` is empty in packs that only complete a step.

    `label_tokens` counts caption tokens and one eos for each sample, `step_labels` the same over the whole global
    batch. `spares` are samples of the same group, in order of preference, to stand in for ones that fail to decode;
    a spare may be longer than the sample it replaces, so whoever uses it must see that it fits.
    """

    cursor: Cursor
    batch_id: str
    group: int
    sample_ids: tuple[int, ...]
    label_tokens: int
    step_labels: int
    spares: tuple[int, ...]


class DatasetShare(msgspec.Struct, frozen=True):
    """One dataset's part of an epoch: its `good` samples, the share asked for, the one served, in `samples` entries."""

    dataset: str
    good: int
    samples: int
    asked: float
    served: float


class PlanSummary(msgspec.Struct, frozen=True):
    """One epoch in numbers. Padding shares are as `bucket.padding_share` defines them."""

    epoch: int
    steps: int
    packs: int
    empty_packs: int
    samples: int
    dropped_samples: int
    padding_naive: float
    padding_bucketed: float
    samples_per_group: dict[str, int]
    shares: tuple[DatasetShare, ...]


class EpochPlan(msgspec.Struct, frozen=True):
    """An epoch's order. Pack p holds ids[starts[p] : starts[p + 1]]; rounds [R, round] holds packs, EMPTY for none."""

    ids: Array
    starts: Array
    labels: Array
    rounds: Array
    round_group: Array
    members: dict[int, Array]

    def samples(self, pack: int) -> tuple[int, ...]:
        """Sample ids of a pack."""
        return () if pack == EMPTY else tuple(self.ids[self.starts[pack] : self.starts[pack + 1]].tolist())

    def sizes(self) -> Array:
        """How many samples each pack that is used holds, in the order of use."""
        sizes: Array = np.diff(self.starts)[self.rounds[self.rounds != EMPTY]]
        return sizes

    def chosen(self) -> Array:
        """Which of `ids` are in packs that are used: all, but for dropped leftovers. bool."""
        per_pack = np.diff(self.starts)
        return np.isin(np.repeat(np.arange(len(per_pack)), per_pack), self.rounds[self.rounds != EMPTY])


def pack_starts(tokens: Array, most_tokens: int, most_samples: int) -> Array:
    """Next-fit: where each pack starts in a row of samples of `tokens` [S] tokens, and S at the end.

    Every start's successor is found at once; only packs are walked in Python.
    """
    ends = np.concatenate([[0], np.cumsum(tokens)])
    last_fit = np.searchsorted(ends, ends[:-1] + most_tokens, side="right") - 1
    following = np.minimum(last_fit, np.arange(len(tokens)) + most_samples)
    starts, at = [], 0
    while at < len(tokens):
        starts.append(at)
        at = following.item(at)
    return np.array([*starts, len(tokens)], np.int64)


def spread(starts: Array, width: int) -> Array:
    """`starts` with the largest packs of a last, short round halved until it is full, so that no rank idles there."""
    short = (len(starts) - 1) % width
    tail = starts[len(starts) - 1 - short :].tolist()
    while short and len(tail) <= width:
        sizes = np.diff(tail)
        if sizes.max() == 1:
            break
        largest = int(sizes.argmax())
        tail.insert(largest + 1, tail[largest] + (int(sizes[largest]) + 1) // 2)
    return np.concatenate([starts[: len(starts) - 1 - short], np.array(tail, np.int64)])


def build_epoch(data: DataSection, facts: Facts, group_of: Array, epoch: int) -> EpochPlan:
    """The whole order of one epoch. `group_of` [I] is what `bucket.assign` gives."""
    order = _drawn(data, facts, group_of, epoch)
    order = order[np.argsort(group_of[order], kind="stable")]
    bounds = np.searchsorted(group_of[order], np.arange(len(table := groups(data)) + 1))
    starts, blocks, block_group, members = [np.zeros(1, np.int64)], [], [], {}
    for group in table:
        low, high = int(bounds[group.id]), int(bounds[group.id + 1])
        if low == high:
            continue
        members[group.id] = order[low:high]
        first = sum(map(len, starts)) - 1
        starts.append(low + _group_starts(order[low:high], group, data, facts)[1:])
        packs = np.arange(first, first + len(starts[-1]))
        blocks.append(_whole(packs, data.batch.round, data.batch.leftovers))
        block_group.append(np.full(len(blocks[-1]), group.id, np.int16))
    rounds, round_group = _steps(blocks, block_group, data, epoch)
    all_starts = np.concatenate(starts)
    labels = np.add.reduceat(facts.text_tokens[order].astype(np.int64) + 1, all_starts[:-1])
    return EpochPlan(order, all_starts, labels, rounds, round_group, members)


def _drawn(data: DataSection, facts: Facts, group_of: Array, epoch: int) -> Array:
    """Ids of the epoch's samples in shuffled order; in a mixture an id may stand there several times, or not at all."""
    good = np.flatnonzero(group_of >= 0)
    if not mixture.weighted(data.datasets):
        return shuffled(good, SAMPLES, data.seed, epoch)
    parts = _per_dataset(facts, good)
    quotas = mixture.quotas(data.datasets, [len(part) for part in parts])
    return mixture.draw(list(zip(quotas, parts, strict=True)), data.seed, epoch)


def _per_dataset(facts: Facts, ids: Array) -> list[Array]:
    """Ascending ids, cut where datasets begin."""
    return np.split(ids, np.searchsorted(ids, facts.dataset_starts[1:-1]))


def _group_starts(ids: Array, group: Group, data: DataSection, facts: Facts) -> Array:
    tokens = sample_tokens(group, facts.clip_samples[ids], facts.text_tokens[ids], data.audio)
    if (longest := int(tokens.max())) > group.tokens:
        rule = f"must hold the largest sample, {longest} tokens (group {group.name})"
        raise ConfigError("data.batch.tokens", group.tokens, rule, "raise it, or lower data.text.max_tokens")
    starts = pack_starts(tokens, group.tokens, group.samples)
    return starts if data.batch.leftovers == "drop" else spread(starts, data.batch.round)


def _whole(packs: Array, width: int, leftovers: str) -> Array:
    """`packs` in rows of `width`; a last short row is completed with EMPTY, or dropped."""
    if leftovers == "drop":
        return packs[: len(packs) // width * width].reshape(-1, width)
    return np.concatenate([packs, np.full(-len(packs) % width, EMPTY)]).reshape(-1, width)


def _steps(blocks: list[Array], block_group: list[Array], data: DataSection, epoch: int) -> tuple[Array, Array]:
    """All rounds in order, in whole steps: the last is completed with empty rounds of the last real one's group."""
    rounds, group = np.concatenate(blocks), np.concatenate(block_group)
    if mixture.weighted(data.datasets):
        order = mixture.spread_rounds(group, data.seed, epoch)
    else:
        order = shuffled(np.arange(len(rounds)), ROUNDS, data.seed, epoch)
    rounds, group = rounds[order], group[order]
    per_step = data.batch.micro_batches // data.batch.round
    if data.batch.leftovers == "drop":
        whole = len(rounds) // per_step * per_step
        return rounds[:whole], group[:whole]
    lacking = -len(rounds) % per_step
    rounds = np.concatenate([rounds, np.full((lacking, data.batch.round), EMPTY)])
    return rounds, np.concatenate([group, np.full(lacking, group[-1])])


class Planner:
    """Every micro-batch of every epoch, on demand. Safe to share between threads; keeps the last two epochs."""

    def __init__(self, data: DataSection, index: Facts) -> None:
        self._data, self._index = data, index
        self._groups, self._group_of = groups(data), assign(index, data)
        self._plans: OrderedDict[int, EpochPlan] = OrderedDict()
        self._lock = threading.Lock()

    def steps(self, epoch: int) -> int:
        """Global batches in an epoch.

        Raises:
            ConfigError: fewer good samples than one global batch can be made of.
        """
        return len(self._plan(epoch).rounds) * self._data.batch.round // self._data.batch.micro_batches

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
        column = k * data_ranks + data_rank
        rows = slice(cursor.step * (per_step := batch.micro_batches // batch.round), (cursor.step + 1) * per_step)
        number, group = int(plan.rounds[rows][block, column]), int(plan.round_group[rows][block])
        step_packs = plan.rounds[rows][plan.rounds[rows] != EMPTY]
        place, ids = block * batch.round + column, plan.samples(number)
        return Pack(
            cursor,
            f"e{cursor.epoch}-s{cursor.step}-p{place}-{_digest(self._data.seed, ids)}",
            group,
            ids,
            0 if number == EMPTY else int(plan.labels[number]),
            int(plan.labels[step_packs].sum()),
            self._spares(plan, cursor, place, group, ids) if ids else (),
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
        ids = shuffled(plan.ids[plan.chosen()], SAMPLES, self._data.seed, epoch)
        group_of = self._group_of[ids]
        share = padding_share(self._index, group_of, ids, plan.sizes(), plan.rounds.size, self._data)
        found, counts = np.unique(group_of, return_counts=True)
        names = {self._groups[g].name: int(n) for g, n in zip(found.tolist(), counts.tolist(), strict=True)}
        empty, dropped = int((plan.rounds == EMPTY).sum()), len(plan.ids) - len(ids)
        sizes = (self.steps(epoch), plan.rounds.size, empty, len(ids), dropped)
        return PlanSummary(epoch, *sizes, share.naive, share.bucketed, names, self._shares(np.sort(ids)))

    def times(self, epoch: int) -> Array:
        """How often each sample stands in the epoch. int64 [I]."""
        plan = self._plan(epoch)
        return np.bincount(plan.ids[plan.chosen()], minlength=len(self._group_of))

    def _shares(self, ids: Array) -> tuple[DatasetShare, ...]:
        """`ids` are the epoch's, ascending."""
        datasets = self._data.datasets
        good = [len(part) for part in _per_dataset(self._index, np.flatnonzero(self._group_of >= 0))]
        if len(good) != len(datasets):
            return ()
        asked = [quota.asked for quota in mixture.quotas(datasets, good)]
        served = [len(part) for part in _per_dataset(self._index, ids)]
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
        if not len(plan.rounds):
            rule = f"makes no whole global batch of {good} good samples in {len(plan.starts) - 1} micro-batches"
            raise ConfigError("data.batch.micro_batches", least, rule, "lower it, or set data.batch.leftovers: pad")
        return plan

    def _entries(self) -> int:
        """How many samples an epoch holds, counted as often as they come."""
        good = np.flatnonzero(self._group_of >= 0)
        if not mixture.weighted(self._data.datasets):
            return len(good)
        counts = [len(part) for part in _per_dataset(self._index, good)]
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
