"""The `cuda` lane: the slots lane, but for pixels, which a daemon on our GPU writes into memory that we lend it."""

from shared import wire
from shared.errors import DeviceError
from shared.logs import logger
from shared.slots import Segment
from trainer.batches import Attachment, Register
from trainer.lanes import SlotsLane
from trainer.lending import Allocator, LentMemory

_log = logger("client")


class CudaLane(SlotsLane):
    """Shared memory and lent device memory. With `hashed` the daemon sums pixels there too.

    As many memories are kept as sessions' batches were held at once, which is one unless a session was lost meanwhile.
    """

    name: wire.Lane = "cuda"

    def __init__(self, register: Register, allocator: Allocator, hashed: bool) -> None:
        super().__init__(register)
        self.device = allocator.device
        self._allocator, self._hashed = allocator, hashed
        self._memories: list[LentMemory] = []
        self._memory: LentMemory | None = None

    @property
    def parts(self) -> int:
        """Parts of device memory that the session may name."""
        return self._memory.parts if self._memory else 0

    @property
    def lent(self) -> bool:
        """Whether the daemon's processes may have our memory open."""
        return bool(self._memory and self._memory.lent)

    def attach(self, welcome: wire.Welcome) -> None:
        """Map the segment, and have memory for what the daemon offers to write there."""
        old, memory = self._attachment, self._memory_for(welcome)
        if not (old and old.segment.path == welcome.segment and old.memory is memory):
            segment = Segment.attach(welcome.segment, welcome.slots, welcome.slot_bytes)
            if old:
                old.retire()
            self._attachment = Attachment(segment, self._register(segment.array), memory)
        self._memory = memory

    def lend(self) -> wire.Lend | None:
        """What tells the daemon of the session's memory."""
        return self._memory.lend() if self._memory else None

    def returned(self, handle: bytes) -> None:
        """The daemon's processes have that memory open no more."""
        for memory in self._memories:
            if memory.handle == handle:
                memory.returned()

    def daemon_gone(self) -> None:
        """The daemon is no more, and its workers are not either: the kernel ends them with it."""
        if self._memory:
            self._memory.returned()

    def end(self) -> None:
        """Unmap, and free memory, as soon as nothing is leased and the daemon has let go."""
        self.close()
        for memory in self._memories:
            memory.close()
        self._memories, self._memory = [], None

    def _memory_for(self, welcome: wire.Welcome) -> LentMemory | None:
        parts, size_bytes = welcome.device_parts, max(spec.pixels.size_bytes for spec in welcome.specs)
        if not parts:
            _log.warning("pixels come through slots: %s", welcome.device_refusal)
            return None
        fitting = next((memory for memory in self._memories if memory.fits(parts, size_bytes)), None)
        return fitting or self._another(parts, size_bytes)

    def _another(self, parts: int, size_bytes: int) -> LentMemory | None:
        try:
            memory = LentMemory(self._allocator, parts, size_bytes, self._hashed)
        except DeviceError as error:
            _log.warning("pixels come through slots: no room for %d parts of %d bytes: %s", parts, size_bytes, error)
            return None
        self._memories.append(memory)
        shown = f"{parts} parts of {memory.part_bytes} bytes, {memory.size_bytes / 2**20:.0f} MiB"
        _log.info("lending %s of %s to the daemon for pixels", shown, self.device)
        return memory
