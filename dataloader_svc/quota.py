"""Which job holds which slot, and which slots ZeroMQ still reads from.

Invariants: a job never holds more than its own slots, so none starves another, whatever it does or leaves undone; and a
slot is free only when every frame that was sent from it has left the process.
"""

from collections import Counter
from typing import Protocol

from shared.slots import SlotPool


class Pending(Protocol):
    """A frame on its way, such as a zmq.MessageTracker."""

    @property
    def done(self) -> bool:
        """Whether its memory is read no more."""


class Quota:
    """Claims and frees the slots of `pool` for jobs, each of which has `each` of them."""

    def __init__(self, pool: SlotPool, each: int) -> None:
        self._pool, self._each = pool, each
        self._owner: dict[int, str] = {}
        self._pending: dict[int, list[Pending]] = {}
        self._leaving: set[int] = set()

    def claim(self, job: str) -> int | None:
        """A slot for filling, or None while the job holds all of its own."""
        self.reap()
        if self.held()[job] >= self._each or (slot := self._pool.claim()) is None:
            return None
        self._owner[slot] = job
        return slot

    def sending(self, slot: int, frame: Pending) -> None:
        """The slot's bytes are being sent."""
        frames = self._pending.setdefault(slot, [])
        frames[:] = [one for one in frames if not one.done] + [frame]

    def free(self, slot: int) -> None:
        """Nobody wants the slot any more: it is free now, or as soon as its frames are sent."""
        self._leaving.add(slot)
        self.reap()

    def reap(self) -> None:
        """Free the slots that were waiting for their frames only."""
        for slot in list(self._leaving):
            if all(frame.done for frame in self._pending.get(slot, ())):
                self._leaving.remove(slot)
                self._pending.pop(slot, None)
                del self._owner[slot]
                self._pool.free(slot)

    def leaving(self) -> int:
        """How many slots wait for their frames."""
        return len(self._leaving)

    def held(self) -> Counter[str]:
        """Slots held by each job."""
        return Counter(self._owner.values())
