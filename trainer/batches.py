"""`Batch`: one leased slot as torch tensors, without a copy. The slot is the daemon's shared memory or lies here.

The tensors of `fields` and `payload` lie over the slot itself. They hold the batch's bytes until the batch is
released, and never longer: whoever keeps data beyond that copies it. The mapping itself outlives the daemon.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from shared import wire
from shared.batch import PIXELS, BatchSpec, Cursor
from shared.errors import SlotError
from shared.logs import logger
from shared.slots import HEADER_BYTES, Segment

Unregister = Callable[[], None]
Register = Callable[[NDArray[np.uint8]], Unregister]

CHECKSUM_MASK = 2**63 - 1

_log = logger("client")


class Event(Protocol):
    """What a release can wait for, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether it has happened."""


class Counts(msgspec.Struct, frozen=True):
    """What a micro-batch holds; `labels` are the tokens that carry a loss."""

    samples: int
    images: int
    clips: int
    tokens: int
    labels: int


class Lent(Protocol):
    """Device memory that a daemon writes pixels into, in equal parts."""

    hashed: bool
    """Whether checksums cover the pixels there."""

    def part(self, number: int, size_bytes: int) -> torch.Tensor:
        """The first bytes of a part, uint8."""

    def lease(self) -> None:
        """One more batch may lie there."""

    def give_back(self) -> None:
        """One batch fewer."""


class Attachment:
    """A mapped segment, the device memory beside it if any was lent, and how many leases lie on both.

    The segment is unmapped once retired and free of leases.

    Tensors over a slot are made once for each layout and used again: making them costs more than all else in handing
    a batch over.
    """

    def __init__(self, segment: Segment, unregister: Unregister, memory: Lent | None = None) -> None:
        self.segment, self._unregister, self.memory = segment, unregister, memory
        self._leases, self._retired, self._open = 0, False, True
        self._tensors: dict[tuple[int, int], tuple[BatchSpec, torch.Tensor, dict[str, torch.Tensor]]] = {}

    def tensors(self, slot: int, spec: BatchSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(payload, fields) of a batch of `spec` in `slot`: tensors of the caller's own over the slot's memory."""
        made = self._tensors.get((slot, spec.group))
        if made is None or made[0] is not spec:
            payload = torch.from_numpy(self.segment.payload(slot)[: spec.size_bytes])
            made = self._tensors[slot, spec.group] = spec, payload, views(payload, spec)
        _, payload, fields = made
        return payload.detach(), {name: tensor.detach() for name, tensor in fields.items()}

    @property
    def idle(self) -> bool:
        """Whether no batch lies on the segment."""
        return self._leases == 0

    def lease(self) -> None:
        """One more batch lies on the segment."""
        self._leases += 1
        if self.memory:
            self.memory.lease()

    def give_back(self) -> None:
        """One batch fewer."""
        self._leases -= 1
        if self.memory:
            self.memory.give_back()
        self._close_if_idle()

    def retire(self) -> None:
        """No new leases come; unmap as soon as the last one ends. Safe to call twice."""
        self._retired = True
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self._open and self._retired and self._leases <= 0:
            self._open = False
            self._tensors.clear()
            self._unregister()
            self.segment.close()


class Batch:
    """One micro-batch, leased.

    Attributes:
        fields: name -> tensor over the slot, with dtypes and shapes of the group's `BatchSpec`.
        payload: all of the batch's bytes, uint8 of `spec.size_bytes`, in which `fields` lie at their offsets.
        pixels: None; or, where the pixels lie in device memory, their bytes there. Then `pixels_NHWC` is a tensor over
            them, and their place in `payload` holds nothing of use.
        cursor, after: place of this batch, and of the next one: the cursor to save once this one is consumed.
        batch_id, group, checksum: as the daemon sent them.
        counts: samples, images, clips, tokens and label tokens in this micro-batch.
        step_labels: label tokens of the whole global batch, the same on every rank.
        sample_ids: indexes of the samples, in order; `substituted` of them replace bad ones.
        skipped_from: where the steps begin that were passed over on request just before this batch, or None.
        wait_s: seconds the trainer waited for it.
    """

    def __init__(self, header: wire.Batch, spec: BatchSpec, attachment: Attachment, wait_s: float) -> None:
        self.header, self.spec, self.attachment, self.wait_s = header, spec, attachment, wait_s
        self.cursor, self.after = header.cursor, header.after
        self.batch_id, self.group, self.checksum = header.batch_id, header.group, header.checksum
        self.counts = Counts(*header.counts)
        self.step_labels, self.sample_ids, self.substituted = header.step_labels, header.sample_ids, header.substituted
        self.skipped_from = header.skipped_from
        self.payload, self.fields = attachment.tensors(header.slot, spec)
        self.pixels: torch.Tensor | None = None
        if header.device_part >= 0 and attachment.memory:
            self.pixels = attachment.memory.part(header.device_part, spec.pixels.size_bytes)
            self.fields[PIXELS] = self.pixels.view(spec.pixels.shape)
        self.kept = False
        self.released = False
        self.give_back: Callable[[Batch, Event | None], None] = _not_leased

    @property
    def ends_step(self) -> bool:
        """Whether this is the last micro-batch of its global step on this rank."""
        return (self.after.epoch, self.after.step) != (self.cursor.epoch, self.cursor.step)

    def keep(self) -> "Batch":
        """Do not release it when the next batch is asked for: the caller will."""
        self.kept = True
        return self

    def release(self, event: Event | None = None) -> None:
        """Give the slot back. With an event: as soon as a later client call finds the event done. Once is enough.

        Raises:
            SlotError: the daemon reused the slot while it was leased, so what was read cannot be trusted.
        """
        if not self.released:
            self.released = True
            self.give_back(self, event)

    def lost(self) -> bool:
        """Whether the slot was claimed anew since it was leased."""
        return self.attachment.segment.generation(self.header.slot) != self.header.generation

    def check_lease(self) -> None:
        """Raise SlotError when the lease was lost."""
        if self.lost():
            now = self.attachment.segment.generation(self.header.slot)
            raise SlotError(
                f"lease lost: slot {self.header.slot} of batch {self.batch_id} was reused before its release "
                f"(generation {self.header.generation} leased, {now} found); raise loader.lease_s"
            )

    def check_payload(self) -> None:
        """Raise SlotError when the bytes are not those the daemon summed (xxh3, 63 bits)."""
        found = checksum(*self._summed())
        if found != self.checksum:
            self.check_lease()
            text = f"batch {self.batch_id} has checksum {found:016x}, {self.checksum:016x} expected"
            raise SlotError(f"{text}: the slot's bytes are not those that were sent")

    def _summed(self) -> list[NDArray[np.uint8]]:
        """The bytes that the checksum is of, in order."""
        payload = self.payload.numpy()
        if self.pixels is None or self.attachment.memory is None:
            return [payload]
        start, end = self.spec.pixels.offset, self.spec.pixels.end
        pixels = [self.pixels.cpu().numpy()] if self.attachment.memory.hashed else []
        return [payload[:start], *pixels, payload[end:]]


def _not_leased(batch: Batch, event: Event | None) -> None:
    """A batch that no client holds has nothing to give back."""


class Leases:
    """The batches handed over and not yet given back, each with the session that granted it.

    `give_back(batch, session)` is told once of every batch whose reads are over and whose lease still held.
    """

    def __init__(self, give_back: Callable[[Batch, object], None]) -> None:
        self._give_back = give_back
        self._held: dict[Cursor, object] = {}
        self._pending: deque[tuple[Batch, Event]] = deque()

    def __len__(self) -> int:
        return len(self._held)

    def holds(self, cursor: Cursor) -> bool:
        """Whether the batch of `cursor` is still leased."""
        return cursor in self._held

    def hold(self, batch: Batch, session: object) -> None:
        """From here on the lease under the batch is ours, until its `release`."""
        self._held[batch.cursor] = session
        batch.give_back = self._release

    def flush(self) -> None:
        """Give back every batch whose event is done by now.

        Raises:
            SlotError: one of them had lost its lease.
        """
        for _ in range(len(self._pending)):
            self._release(*self._pending.popleft())

    def finish(self, within_s: float) -> None:
        """Flush until nothing waits for its event, so long at most; lost leases are logged."""
        deadline = time.monotonic() + within_s
        while self._pending:
            try:
                self.flush()
            except SlotError as error:
                _log.error("%s", error)
            if time.monotonic() > deadline:
                _log.warning("%d batches still wait for their CUDA events", len(self._pending))
                return
            time.sleep(0.001)

    def _release(self, batch: Batch, event: Event | None) -> None:
        if event is not None and not event.query():
            self._pending.append((batch, event))
            return
        session = self._held.pop(batch.cursor)
        try:
            batch.check_lease()
        finally:
            batch.attachment.give_back()
        self._give_back(batch, session)


def checksum(*pieces: NDArray[np.uint8]) -> int:
    """xxh3-64 of the bytes of all pieces, without the top bit (it travels as a signed integer)."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece.data)
    return digest.intdigest() & CHECKSUM_MASK


def gather(out: torch.Tensor, batch: Batch) -> None:
    """Queue copies of all of a batch's bytes to `out` (uint8, on any device), pixels from wherever they lie."""
    if batch.pixels is None:
        out[: batch.spec.size_bytes].copy_(batch.payload, non_blocking=True)
        return
    start, end = batch.spec.pixels.offset, batch.spec.pixels.end
    out[:start].copy_(batch.payload[:start], non_blocking=True)
    out[start:end].copy_(batch.pixels, non_blocking=True)
    out[end : batch.spec.size_bytes].copy_(batch.payload[end:], non_blocking=True)


def views(payload: torch.Tensor, spec: BatchSpec) -> dict[str, torch.Tensor]:
    """The fields of a batch whose bytes are `payload` (uint8, on any device), sharing its memory."""
    return {
        field.name: _view(payload, field.dtype, field.shape, field.offset, field.size_bytes) for field in spec.fields
    }


def _view(payload: torch.Tensor, dtype: str, shape: tuple[int, ...], offset: int, size_bytes: int) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return payload[offset : offset + size_bytes].view(kind).view(shape)


def room_for(spec: BatchSpec, slot_bytes: int) -> bool:
    """Whether a batch of `spec` fits a slot of `slot_bytes`."""
    return 0 < spec.size_bytes <= slot_bytes - HEADER_BYTES
