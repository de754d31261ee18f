"""Device memory that readers lend for the pixels of their batches, and which slot's batch has which part of it.

A reader in the cuda lane lends memory of its own GPU; decode workers map it and write pixels there, all else goes to
the slot. The daemon itself never opens CUDA. Invariants: a part belongs to one slot from its claim until that slot is
free, and a task holds its slot until it is done, so no two writers and no reader meet in a part, whoever died or came
back meanwhile; memory is told to be returned only when no task is about to write to it and no worker maps it.
"""

from collections.abc import Iterator
from typing import Protocol

import msgspec

from dataloader_svc import metrics
from dataloader_svc.tasks import Target
from shared.batch import BatchSpec
from shared.cuda import HANDLE_BYTES
from shared.wire import Hello, Lend


class Mapper(Protocol):
    """What maps lent memory: the worker pool."""

    @property
    def device(self) -> str:
        """UUID of the GPU that decodes, or ""."""

    def forget(self, handle: bytes) -> None:
        """Have every worker unmap it."""

    def forgetting(self, handle: bytes) -> bool:
        """Whether a worker that was told to has not unmapped it yet."""


class Memory(msgspec.Struct):
    """Lent memory. `lender` is the reader whose session it serves, `left` the last one once that is over."""

    lent: Lend
    free: list[int]
    lender: bytes | None
    left: bytes = b""
    forgotten: bool = False

    @property
    def size_bytes(self) -> int:
        return self.lent.parts * self.lent.part_bytes


class Lending:
    """Parts for streams of one reader on the GPU that decodes: `parts` of them, for batches laid out as `specs` say."""

    def __init__(self, mapper: Mapper, specs: tuple[BatchSpec, ...], parts: int) -> None:
        self._mapper, self._specs, self._parts = mapper, specs, parts
        self._memories: dict[bytes, Memory] = {}
        self._held: dict[int, tuple[Memory, int]] = {}

    def offer(self, hello: Hello) -> tuple[int, str]:
        """How many parts the reader may lend, and in the cuda lane why it may lend none."""
        if hello.lane != "cuda":
            return 0, ""
        ours = self._mapper.device
        if not ours:
            return 0, "the daemon decodes on a CPU"
        if hello.device != ours:
            return 0, f"the daemon decodes on {ours}, and this reader is on {hello.device or 'no GPU'}"
        return (self._parts, "") if hello.readers == 1 else (0, f"{hello.readers} readers share the stream")

    def lend(self, identity: bytes, hello: Hello, lent: Lend) -> str:
        """Take the memory for the reader's session; returns what is wrong with it, or ""."""
        needed = max(spec.pixels.size_bytes for spec in self._specs)
        most, _ = self.offer(hello)
        if not 1 <= lent.parts <= most:
            return f"{lent.parts} parts of device memory were lent where {most} may be"
        if lent.part_bytes < needed or len(lent.handle) != HANDLE_BYTES:
            return f"parts of {lent.part_bytes} bytes were lent by a handle of {len(lent.handle)}, {needed} are needed"
        known = self._memories.get(lent.handle)
        if known and (known.lender is not None or known.lent != lent):
            return "device memory was lent that another session has, or otherwise than before"
        if any(memory.lender == identity for memory in self._memories.values()):
            return "device memory was lent twice"
        memory = known or Memory(lent, list(range(lent.parts)), identity)
        memory.lender, memory.forgotten = identity, False
        self._memories[lent.handle] = memory
        self._tell()
        return ""

    def claim(self, identity: bytes, slot: int, group: int) -> Target | None:
        """A part for the pixels of the slot's batch, or None: there are no pixels, no memory, or no part is free."""
        memory = next((m for m in self._memories.values() if m.lender == identity), None)
        if memory is None or not memory.free or not self._specs[group].pixels.size_bytes:
            return None
        part = memory.free.pop()
        self._held[slot] = memory, part
        return Target(memory.lent.handle, part * memory.lent.part_bytes, memory.lent.hashed)

    def part(self, slot: int) -> int:
        """The part that the slot's batch has, or -1."""
        return self._held[slot][1] if slot in self._held else -1

    def free(self, slot: int) -> None:
        """The slot is free, and so is its part if it has one."""
        if slot in self._held:
            memory, part = self._held.pop(slot)
            memory.free.append(part)

    def leave(self, identity: bytes) -> None:
        """The reader's session is over."""
        for memory in self._memories.values():
            if memory.lender == identity:
                memory.lender, memory.left = None, identity
        self._tell()

    def returned(self) -> Iterator[tuple[bytes, bytes]]:
        """(reader, handle) of memory that nobody here has open any more, each once."""
        for handle, memory in list(self._memories.items()):
            if memory.lender is not None or len(memory.free) < memory.lent.parts:
                continue
            if not memory.forgotten:
                self._mapper.forget(handle)
                memory.forgotten = True
            if not self._mapper.forgetting(handle):
                del self._memories[handle]
                yield memory.left, handle

    def _tell(self) -> None:
        lent = sum(memory.size_bytes for memory in self._memories.values() if memory.lender is not None)
        metrics.DEVICE_BYTES.labels("lent").set(lent)
