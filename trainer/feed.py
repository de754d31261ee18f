"""From the preprocessor's batches to what the engine pulls, with a record of what each step consumed."""

from collections.abc import Iterator, Sequence

import msgspec
import torch

from shared.batch import Cursor
from shared.consumed import Consumed
from shared.errors import DataError, ProtocolError
from trainer.flops import FlopCounter, Work
from trainer.loss import Targets, loss_scale
from trainer.models.fusion import Inputs
from trainer.preprocess import DeviceBatch

MicroBatch = tuple[Inputs, Targets]
"""What the first pipeline stage needs, and what the last one needs."""


class Taken(msgspec.Struct):
    """What one step consumed on this rank. `after` is the cursor to save."""

    lines: list[Consumed]
    tokens: int = 0
    samples: int = 0
    waits_s: list[float] = msgspec.field(default_factory=list)
    preprocess_s: list[float] = msgspec.field(default_factory=list)
    after: Cursor = Cursor()
    flops: float = 0.0


class Feed:
    """Iterates `MicroBatch`es; `take` tells what was handed out since the last call.

    `micro_batches` is their number in a global batch, over all data-parallel ranks. With a `counter`, `Taken.flops` are
    the model FLOPs of training on it.
    """

    def __init__(
        self,
        batches: Iterator[DeviceBatch],
        micro_batches: int,
        data_rank: int,
        data_ranks: int,
        counter: FlopCounter | None = None,
    ) -> None:
        self._batches, self._micro_batches, self._counter = batches, micro_batches, counter
        self._data_rank, self._data_ranks = data_rank, data_ranks
        self._taken, self._work = Taken([]), Work()

    def __iter__(self) -> Iterator[MicroBatch]:
        return self

    def __next__(self) -> MicroBatch:
        """The next one.

        Raises:
            DataError: the loader has no more.
        """
        batch = next(self._batches, None)
        if batch is None:
            raise DataError("the loader ended its stream in the middle of the run")
        self._note(batch)
        scale = torch.full((), loss_scale(self._micro_batches, batch.step_labels), device=batch.tensors.tokens_T.device)
        tokens, labels, *rest = batch.tensors
        return (tokens, *rest), (labels, scale)  # type: ignore[return-value]

    def take(self) -> Taken:
        """What was handed out since the last call. With a counter this waits for the device."""
        taken, self._taken = self._taken, Taken([])
        work, self._work = self._work, Work()
        if self._counter:
            taken.flops = self._counter.flops(work)
        return taken

    def _note(self, batch: DeviceBatch) -> None:
        taken, cursor = self._taken, batch.cursor
        place = (cursor.epoch, cursor.step, cursor.micro, self._data_rank, self._data_ranks)
        named = (batch.batch_id, batch.sample_ids, batch.substituted, batch.group, batch.checksum)
        taken.lines.append(Consumed(*place, *named, skipped_from=batch.skipped_from))
        taken.tokens += batch.counts.tokens
        taken.samples += batch.counts.samples
        taken.waits_s.append(batch.wait_s)
        taken.preprocess_s.append(batch.preprocess_s)
        taken.after = batch.after
        if self._counter:
            self._counter.add(self._work, batch)


def check_same(mine: Sequence[Consumed], fingerprints: Sequence[Sequence[int]], readers: Sequence[int]) -> None:
    """Hold that all readers of one data coordinate trained on the same micro-batches.

    Raises:
        ProtocolError: two of them did not; the text names both ranks and the first micro-batch that differs.
    """
    own = [line.fingerprint for line in mine]
    for rank, theirs in zip(readers, fingerprints, strict=True):
        for line, one, other in zip(mine, own, theirs, strict=True):
            if one != other:
                raise ProtocolError(
                    f"readers of one stream read different data: micro-batch {line.micro} of step {line.step}, epoch "
                    f"{line.epoch}, is batch {line.batch_id} ({one:016x}) here and {other:016x} on rank {rank}"
                )
