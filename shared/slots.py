"""Fixed slots of shared memory: FREE -> FILLING -> READY -> LEASED -> FREE.

The pool's owner (the daemon) keeps the states; workers fill and readers map the same file. A segment is one file
`millstream-<uid>-<job>-<random>` in the shared-memory folder, locked (flock) by its owner for life: a file whose lock
can be had belongs to nobody alive and is swept, whatever its name. Each slot is a 64-byte header, of which the first
eight bytes are the generation, and the payload. A reader that finds another generation than it was sent knows that
its lease was lost.
"""

import contextlib
import enum
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError, SlotError

HEADER_BYTES = 64
PAGE_BYTES = 4096


class State(enum.Enum):
    """What a slot is being used for."""

    FREE = "free"
    FILLING = "filling"
    READY = "ready"
    LEASED = "leased"


class Segment:
    """A mapped segment: `payload(i)` is a writable uint8 array over slot i, valid while the segment is open."""

    def __init__(self, path: str, slots: int, slot_bytes: int, mapped: mmap.mmap) -> None:
        self.path, self.slots, self.slot_bytes, self._map = path, slots, slot_bytes, mapped
        self.array: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)

    @classmethod
    def attach(cls, path: str, slots: int, slot_bytes: int) -> "Segment":
        """Map an existing segment.

        Raises:
            SlotError: it is not there or has another size.
        """
        want = slots * slot_bytes
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise SlotError(f"segment {path} cannot be opened: {error.strerror}; is the daemon on this host?") from None
        try:
            if (size := os.fstat(fd).st_size) != want:
                raise SlotError(f"segment {path} has {size} bytes, {want} expected")
            return cls(path, slots, slot_bytes, mmap.mmap(fd, want))
        finally:
            os.close(fd)

    def payload(self, slot: int) -> NDArray[np.uint8]:
        """The slot's payload bytes."""
        start = slot * self.slot_bytes
        return self.array[start + HEADER_BYTES : start + self.slot_bytes]

    def generation(self, slot: int) -> int:
        """How many times the slot has been claimed."""
        return int(self._header(slot)[0])

    def bump(self, slot: int) -> int:
        """Mark the slot claimed anew, which ends every older lease on it; return the new generation."""
        self._header(slot)[0] += 1
        return self.generation(slot)

    def _header(self, slot: int) -> NDArray[np.uint64]:
        start = slot * self.slot_bytes
        return self.array[start : start + 8].view(np.uint64)

    def close(self) -> None:
        """Unmap, unless arrays over it are still alive (then the mapping lives as long as they do)."""
        self.array = np.empty(0, dtype=np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()


class SlotPool:
    """The owner's side: a new segment and the state of each slot."""

    def __init__(self, segment: Segment, lock_fd: int) -> None:
        self.segment, self._lock_fd = segment, lock_fd
        self.states = [State.FREE] * segment.slots

    @classmethod
    def create(cls, folder: str, job: str, slots: int, payload_bytes: int) -> "SlotPool":
        """Make a segment of `slots` slots for payloads up to `payload_bytes`, every page of it there and mapped.

        Raises:
            ConfigError: the shared-memory file system has no room for it.
        """
        slot_bytes = -(-(HEADER_BYTES + payload_bytes) // PAGE_BYTES) * PAGE_BYTES
        size = slots * slot_bytes
        _check_room(folder, slots, slot_bytes)
        path = os.path.join(folder, f"millstream-{os.getuid()}-{job}-{secrets.token_hex(4)}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size)
            everywhere = mmap.MAP_SHARED | mmap.MAP_POPULATE  # a fifth of the time of touching each page
            segment = Segment(path, slots, slot_bytes, mmap.mmap(fd, size, flags=everywhere))
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise
        return cls(segment, fd)

    def claim(self) -> int | None:
        """Take a FREE slot for filling, or None."""
        for slot, state in enumerate(self.states):
            if state is State.FREE:
                self._move(slot, State.FREE, State.FILLING)
                self.segment.bump(slot)
                return slot
        return None

    def commit(self, slot: int) -> None:
        """FILLING -> READY: from here readers may be told of it."""
        self._move(slot, State.FILLING, State.READY)

    def lease(self, slot: int) -> None:
        """READY -> LEASED (or another reader's lease on a LEASED slot)."""
        if self.states[slot] is not State.LEASED:
            self._move(slot, State.READY, State.LEASED)

    def give_back(self, slot: int) -> None:
        """LEASED -> READY: nobody holds it at the moment, and somebody has yet to read it."""
        self._move(slot, State.LEASED, State.READY)

    def free(self, slot: int) -> None:
        """Back to FREE, from wherever it was; the bytes stay until it is claimed again."""
        self.states[slot] = State.FREE

    def count(self, state: State) -> int:
        """How many slots are in `state`."""
        return self.states.count(state)

    def close(self) -> None:
        """Unlink and unmap. Readers that still map the segment keep their bytes. Safe to call twice."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.segment.path)
        self.segment.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _move(self, slot: int, old: State, new: State) -> None:
        if self.states[slot] is not old:
            raise SlotError(f"slot {slot} is {self.states[slot].value}, {old.value} expected")
        self.states[slot] = new


def _check_room(folder: str, slots: int, slot_bytes: int) -> None:
    try:
        stat = os.statvfs(folder)
    except OSError as error:
        raise ConfigError("loader.shm_dir", folder, f"cannot be used ({error.strerror})", "name a tmpfs") from None
    free = stat.f_bavail * stat.f_frsize
    if slots * slot_bytes > free:
        value = f"{slots} slots of {slot_bytes} bytes = {slots * slot_bytes} bytes"
        remedy = "lower loader.slots_per_stream, loader.max_streams or data.batch.tokens, or enlarge the file system"
        raise ConfigError("loader slots", value, f"must fit the {free} bytes free in {folder}", remedy)


def sweep(folder: str, job: str) -> list[str]:
    """Unlink this user's segments of `job` whose owner is dead; return their paths."""
    return [str(p) for p in _segments(folder, job) if _unlink_if_dead(p)]


def _segments(folder: str, job: str) -> Iterator[Path]:
    prefix = f"millstream-{os.getuid()}-{job}-"
    for path in Path(folder).glob(prefix + "*"):
        if len(path.name) == len(prefix) + 8:
            yield path


def _unlink_if_dead(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
