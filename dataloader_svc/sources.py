"""Bytes of one shard by offset: what all sources have in common, and local files. URLs are `remote.py`'s."""

import contextlib
import hashlib
import os
import stat
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec

from shared.errors import ShardError

Waiting = Callable[[], None]

EDGE_BYTES = 4096
PIECE_BYTES = 8 << 20


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What tells one version of a shard from another.

    `edges` hashes the first and last 4 KiB, `tag` is the ETag or else the time of change that remote storage tells:
    a shard with a tag has no `edges`, a remote one no `mtime_ns`.
    """

    size: int
    mtime_ns: int
    edges: str
    tag: str = ""


class Source(Protocol):
    """An open shard, read by any number of threads. `waiting` is called when a read takes long.

    `read` gives less than asked only where the shard ends before, and raises ShardError when it cannot. `expect` tells
    that a span will be read soon, and returns at once.
    """

    size: int

    def read(self, offset: int, size: int, waiting: Waiting = ...) -> bytes: ...

    def expect(self, offset: int, size: int) -> None: ...

    def fingerprint(self) -> Fingerprint: ...

    def close(self) -> None: ...


class Tally:
    """How often remote reads had to be tried again, and bytes that came over the network."""

    def __init__(self) -> None:
        self.retries = self.fetched_bytes = 0
        self._lock = threading.Lock()

    def add(self, retries: int = 0, fetched_bytes: int = 0) -> None:
        """Count, from any thread."""
        with self._lock:
            self.retries += retries
            self.fetched_bytes += fetched_bytes

    def take(self) -> tuple[int, int]:
        """Retries and bytes since the last call."""
        with self._lock:
            found = self.retries, self.fetched_bytes
            self.retries = self.fetched_bytes = 0
        return found


def nothing() -> None:
    """For who does not wait with us."""


def is_remote(path: str) -> bool:
    """Whether the path is a URL."""
    return "://" in path


class Local:
    """A local file, read without moving a shared position. Closed when the last reader lets go of it.

    Opening never waits: whatever is no regular file (a FIFO, a device) is refused.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            raise _unopened(path, error) from None
        info = os.fstat(self._fd)
        if not stat.S_ISREG(info.st_mode):
            self.close()
            raise _unopened(path, "it is no regular file, but a folder, FIFO, socket or device")
        self.size, self._mtime_ns = info.st_size, info.st_mtime_ns

    def read(self, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        """What stands there, if the file is still the one that was opened: bytes of another would pass for samples."""
        try:
            data = os.pread(self._fd, size, offset)
            while 0 < len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise ShardError(f"shard {self._path} cannot be read at {offset} ({error}); check its storage") from None
        info = os.fstat(self._fd)
        if (info.st_size, info.st_mtime_ns) != (self.size, self._mtime_ns):
            raise ShardError(f"shard {self._path} changed since it was opened: index it again")
        return data

    def expect(self, offset: int, size: int) -> None:
        with contextlib.suppress(OSError):  # a file system that takes no such hint
            os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.size, self._mtime_ns, edges(self))

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


def edges(source: Source) -> str:
    """Hash of the first and last EDGE_BYTES."""
    ends = source.read(0, EDGE_BYTES) + source.read(max(0, source.size - EDGE_BYTES), EDGE_BYTES)
    return hashlib.blake2b(ends, digest_size=16).hexdigest()


def _unopened(path: str, reason: object) -> ShardError:
    return ShardError(f"shard {path} cannot be opened ({reason}); restore it or take it out of data.datasets")
