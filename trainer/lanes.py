"""How a batch's bytes reach this process. A lane turns a header into memory that the tensors alias, nothing else.

`slots`: the daemon's shared memory is mapped, and a header names a slot of it.
`tcp`: the bytes follow the header as a frame, which is received into a landing slot of our own, laid out like the
daemon's slots, page-locked like them, used again when its batch is released. There are as many landing slots as
batches were held at once: the credits granted and what the trainer keeps.
`cuda` (`cuda_lane.py`): slots, but for pixels, which the daemon writes into device memory that we lend it.
"""

import mmap
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared import wire
from shared.batch import BatchSpec
from shared.errors import ProtocolError, SlotError
from shared.slots import HEADER_BYTES, PAGE_BYTES, Segment
from trainer.batches import Attachment, Register

MIN_BYTES_PER_S = 8_000_000
"""A daemon whose link carries less than this counts as silent: a heartbeat may stand behind whole batches."""


class Arrival(msgspec.Struct, frozen=True):
    """A batch that has come: its header, and the memory that holds it, leased for it."""

    header: wire.Batch
    attachment: Attachment


class Lane(Protocol):
    """One way for batches, used by session after session with one daemon."""

    name: wire.Lane
    max_bytes: int
    """Of a frame on the link."""
    device: str
    """UUID of the GPU whose memory may be lent, or ""."""

    def attach(self, welcome: wire.Welcome) -> None:
        """Make ready for what the session grants; raises SlotError where that cannot be."""

    def land(self) -> NDArray[np.uint8] | None:
        """Memory for a payload frame that is about to be received, or None: it is not wanted."""

    def arrive(self, header: wire.Batch, spec: BatchSpec, frames: int, payload_bytes: int) -> Arrival:
        """The batch; raises SlotError when its bytes did not come whole, ProtocolError when they lie nowhere."""

    def slack_s(self, credits: int) -> float:
        """How much longer than usual a living daemon may be silent."""

    @property
    def returns_at_once(self) -> bool:
        """Whether the daemon's slot is free as soon as the batch is here."""

    @property
    def parts(self) -> int:
        """Parts of lent device memory that a header may name."""

    @property
    def lent(self) -> bool:
        """Whether the daemon's processes may have device memory of ours open."""

    def lend(self) -> wire.Lend | None:
        """What is lent to the session that was attached last."""

    def returned(self, handle: bytes) -> None:
        """The daemon's processes have that device memory open no more."""

    def daemon_gone(self) -> None:
        """The daemon's processes are gone, and what they had open with them."""

    def close(self) -> None:
        """Unmap, once nothing is leased; the lane may be used again."""

    def end(self) -> None:
        """Close for good."""


class HostLane:
    """What lanes without device memory have in common."""

    device = ""

    @property
    def parts(self) -> int:
        """None."""
        return 0

    @property
    def lent(self) -> bool:
        """Nothing is."""
        return False

    def lend(self) -> wire.Lend | None:
        """Nothing."""
        return None

    def returned(self, handle: bytes) -> None:
        """Nothing was lent."""

    def daemon_gone(self) -> None:
        """Nothing was lent."""

    def close(self) -> None:
        """Unmap, once nothing is leased."""

    def end(self) -> None:
        """Close for good."""
        self.close()


class SlotsLane(HostLane):
    """Shared memory. `register` page-locks it."""

    name: wire.Lane = "slots"
    max_bytes = wire.MAX_MESSAGE_BYTES
    returns_at_once = False

    def __init__(self, register: Register) -> None:
        self._register = register
        self._attachment: Attachment | None = None

    def attach(self, welcome: wire.Welcome) -> None:
        """Map the segment, unless it is the one that is mapped."""
        old = self._attachment
        if old and old.segment.path == welcome.segment:
            return
        segment = Segment.attach(welcome.segment, welcome.slots, welcome.slot_bytes)
        if old:
            old.retire()
        self._attachment = Attachment(segment, self._register(segment.array))

    def land(self) -> None:
        """No payload comes this way."""

    def arrive(self, header: wire.Batch, spec: BatchSpec, frames: int, payload_bytes: int) -> Arrival:
        """The slot that the header names."""
        assert self._attachment
        if frames != 1:
            raise SlotError(f"batch {header.batch_id} came in {frames} frames, 1 expected")
        if not 0 <= header.slot < self._attachment.segment.slots:
            raise ProtocolError(
                f"batch {header.batch_id} is said to be in slot {header.slot} of {self._attachment.segment.slots}"
            )
        self._attachment.lease()
        return Arrival(header, self._attachment)

    def slack_s(self, credits: int) -> float:
        """None: headers are small."""
        return 0.0

    def close(self) -> None:
        """Unmap, once nothing is leased."""
        if self._attachment:
            self._attachment.retire()
            self._attachment = None


class TcpLane(HostLane):
    """Payload frames. `register` page-locks each landing slot once."""

    name: wire.Lane = "tcp"
    max_bytes = wire.MAX_PAYLOAD_BYTES
    returns_at_once = True

    def __init__(self, register: Register) -> None:
        self._register = register
        self._slots: list[Attachment] = []
        self._slot_bytes = 0
        self._next: Attachment | None = None

    def attach(self, welcome: wire.Welcome) -> None:
        """Landing slots as large as the daemon's; others go when they are free."""
        if not HEADER_BYTES < welcome.slot_bytes <= wire.MAX_PAYLOAD_BYTES + PAGE_BYTES:
            raise SlotError(f"slots of {welcome.slot_bytes} bytes do not fit the limit of {wire.MAX_PAYLOAD_BYTES}")
        if welcome.slot_bytes != self._slot_bytes:
            self.close()
            self._slot_bytes = welcome.slot_bytes

    def land(self) -> NDArray[np.uint8] | None:
        """The payload of a free landing slot."""
        if not self._slot_bytes:
            return None
        self._next = next((slot for slot in self._slots if slot.idle), None) or self._another()
        return self._next.segment.payload(0)

    def arrive(self, header: wire.Batch, spec: BatchSpec, frames: int, payload_bytes: int) -> Arrival:
        """The landing slot that the payload is in; from here on the header names that."""
        if frames != 2 or payload_bytes != spec.size_bytes or self._next is None:
            came = f"{frames} frames, the payload with {payload_bytes} bytes"
            raise SlotError(f"batch {header.batch_id} came in {came}; 2 and {spec.size_bytes} expected")
        landed, self._next = self._next, None
        landed.lease()
        return Arrival(msgspec.structs.replace(header, slot=0, generation=landed.segment.bump(0)), landed)

    def slack_s(self, credits: int) -> float:
        """The time of all batches that may be on their way, at MIN_BYTES_PER_S."""
        return (credits + 1) * self._slot_bytes / MIN_BYTES_PER_S

    def close(self) -> None:
        """Unmap each landing slot, once its batch is released."""
        for slot in self._slots:
            slot.retire()
        self._slots, self._slot_bytes, self._next = [], 0, None

    def _another(self) -> Attachment:
        segment = Segment("", 1, self._slot_bytes, mmap.mmap(-1, self._slot_bytes))
        slot = Attachment(segment, self._register(segment.array))
        self._slots.append(slot)
        return slot
