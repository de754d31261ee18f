"""Every micro-batch of every rank, on demand: a pure function of (data section, index, cursor). `epoch` has the order.

Rank r of D reads, as its micro-batch m, pack k * D + r of round rho of the step, with rho, k = divmod(m, round / D):
so the global batch never depends on D, and at every micro-step all ranks hold one shape.
"""

import hashlib
import threading
from collections import OrderedDict

import msgspec
import numpy as np

from dataloader_svc.balance import Imbalance
from dataloader_svc.block import Block, build_block
from dataloader_svc.bucket import Array, Facts
from dataloader_svc.epoch import EpochPlan
from dataloader_svc.epochs import Epochs
from dataloader_svc.hashing import mix64
from dataloader_svc.plan_file import PlanFiles
from dataloader_svc.skipping import Skips
from dataloader_svc.summary import PlanSummary
from shared.batch import Cursor, Group, groups
from shared.errors import ProtocolError
from shared.sections import DataSection

SPARES = 8
# Steps balanced together, and how many such blocks are kept.
BLOCK_STEPS = 256
BLOCKS_KEPT = 8

# The next epoch is planned while the last part of so many of this one is read.
AHEAD = 8

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


class Planner:
    """Every micro-batch of every epoch, on demand. Safe to share between threads.

    Keeps the last two epochs and the last few balanced blocks of steps, and plans an epoch in the background when the
    last eighth of the one before it is read. With `files` plans are kept between runs. `skips` tells where the order
    goes on after steps that are passed over; nothing else here looks at it.
    """

    def __init__(self, data: DataSection, index: Facts, files: PlanFiles | None = None) -> None:
        self._data, self._groups = data, groups(data)
        self._epochs = Epochs(data, index, files)
        self._blocks: OrderedDict[tuple[int, int], Block] = OrderedDict()
        self._step_counts: dict[int, int] = {}
        self._lock = threading.Lock()
        self.skips = Skips(data.skip_steps, self.steps)

    def steps(self, epoch: int) -> int:
        """Global batches in an epoch.

        Raises:
            ConfigError: fewer good samples than one global batch can be made of.
        """
        if epoch not in self._step_counts:
            self._step_counts[epoch] = self._epochs.steps(epoch, self._per_step)
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
        batch = self._data.batch
        turn, k = divmod(cursor.micro, batch.round // data_ranks)
        column, place = k * data_ranks + data_rank, turn * batch.round + k * data_ranks + data_rank
        plan, block, first = self._epochs.plan(cursor.epoch), *self._block(cursor)
        group = int(plan.round_group[cursor.step * self._per_step + turn])
        ids = block.samples(first + turn, column)
        return Pack(
            cursor,
            f"e{cursor.epoch}-s{cursor.step}-p{place}-{_digest(self._data.seed, ids)}",
            group,
            ids,
            int(block.labels[first + turn, column]),
            int(block.labels[first : first + self._per_step].sum()),
            self._spares(plan, cursor, place, group, ids) if ids else (),
            block.imbalances(self._per_step, data_ranks)[first // self._per_step],
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
        return self._epochs.summary(epoch)

    def groups(self) -> tuple[Group, ...]:
        """Groups that packs of any epoch may be of."""
        return tuple(self._groups[number] for number in self._epochs.groups())

    def times(self, epoch: int) -> Array:
        """How often each sample stands in the epoch. int64 [I]."""
        return self._epochs.times(epoch)

    @property
    def _per_step(self) -> int:
        """Rounds in a step."""
        return self._data.batch.micro_batches // self._data.batch.round

    def _block(self, cursor: Cursor) -> tuple[Block, int]:
        """The balanced block that holds the cursor's step, and the step's first round in it."""
        number, step = divmod(cursor.step, BLOCK_STEPS)
        with self._lock:
            if (key := (cursor.epoch, number)) not in self._blocks:
                self._blocks[key] = self._build_block(*key)
                if len(self._blocks) > BLOCKS_KEPT:
                    self._blocks.popitem(last=False)
            self._blocks.move_to_end(key)
            return self._blocks[key], step * self._per_step

    def _build_block(self, epoch: int, number: int) -> Block:
        first, end = number * BLOCK_STEPS, min((number + 1) * BLOCK_STEPS, self.steps(epoch))
        if end * AHEAD > self.steps(epoch) * (AHEAD - 1):
            self._epochs.ahead(epoch + 1)
        rounds = slice(first * self._per_step, end * self._per_step)
        return build_block(self._epochs.plan(epoch), rounds, self._groups, self._data)

    def _spares(self, plan: EpochPlan, cursor: Cursor, place: int, group: int, ids: tuple[int, ...]) -> tuple[int, ...]:
        members, seed = plan.of_group(group), self._data.seed
        draws = mix64(SUBSTITUTES, seed, cursor.epoch, cursor.step, place, np.arange(SPARES * SPARES))
        drawn = members[draws % np.uint64(len(members))].tolist()
        return tuple([i for i in dict.fromkeys(drawn) if i not in ids][:SPARES])


def _digest(seed: int, ids: tuple[int, ...]) -> str:
    return hashlib.blake2b(f"{seed}:{ids}".encode(), digest_size=4).hexdigest()


def _place(cursor: Cursor) -> str:
    return f"epoch {cursor.epoch}, step {cursor.step}, micro-batch {cursor.micro}"
