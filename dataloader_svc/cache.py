"""A bounded cache of remote bytes in a local folder, shared by every process of the node.

Fixed-size blocks, one file each: eight bytes of xxh3 over the rest, then the block. A block's name digests the shard's
URL and fingerprint, so a changed object never meets old blocks. All writing happens under one file lock, so the folder
never holds more than `limit_bytes`; the blocks used longest ago go first. A block that fails its checksum is fetched
anew. Losing any file, or the folder, costs a download and nothing else.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import xxhash

from dataloader_svc.sources import Fingerprint, Source, Waiting, nothing
from shared.errors import ConfigError
from shared.logs import logger

BLOCK_BYTES = 1 << 20
SUM_BYTES = 8
FREE_SHARE = 0.1
LOCK_S = 2.0

log = logger("cache")


class BlockCache:
    """Blocks by name. Open one with `BlockCache.open`; threads and processes may share the folder."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes

    @classmethod
    def open(cls, folder: Path, limit_bytes: int) -> "BlockCache":
        """The cache in `folder`, made where it is missing and cut down where it is over the limit.

        Raises:
            ConfigError: the folder cannot be written, or the limit is below one block.
        """
        if limit_bytes < BLOCK_BYTES + SUM_BYTES:
            rule = f"must hold at least one block, {BLOCK_BYTES + SUM_BYTES} bytes"
            raise ConfigError("loader.cache_bytes", limit_bytes, rule, "raise it, or set loader.cache_dir to ''")
        cache = cls(folder, limit_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with cache._locked() as mine:
                if mine:
                    cache._evict(0)
        except OSError as error:
            rule = f"cannot be used ({error.strerror})"
            raise ConfigError("loader.cache_dir", folder, rule, "name a folder that can be written") from None
        return cache

    def get(self, name: str) -> bytes | None:
        """The block, or None where it is not held or not as it was written."""
        path = self._path(name)
        try:
            stored = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        block = stored[SUM_BYTES:]
        if stored[:SUM_BYTES] == _sum(block):
            return block
        log.warning("cached block %s is damaged and is fetched again", path)
        path.unlink(missing_ok=True)
        return None

    def put(self, name: str, block: bytes) -> None:
        """Hold a block, in place of the ones used longest ago. Where the disk refuses, it is not held."""
        try:
            with self._locked() as mine:
                if mine:
                    self._write(self._path(name), _sum(block) + block)
        except OSError as error:
            log.warning("block cannot be cached in %s: %s", self.folder, error.strerror)

    def used_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(size for _, size, _ in self._blocks())

    def _write(self, path: Path, data: bytes) -> None:
        """Under the lock."""
        if (total := self._counted() + len(data)) > self.limit_bytes:
            total = self._evict(len(data)) + len(data)
        self._count(total)
        path.parent.mkdir(exist_ok=True)
        scratch = self.folder / "writing"
        scratch.write_bytes(data)
        scratch.replace(path)

    def _evict(self, wanted: int) -> int:
        """Under the lock: when `wanted` more bytes do not fit, make room for a tenth more; the bytes then held."""
        blocks = sorted(self._blocks())
        total = sum(size for _, size, _ in blocks)
        goal = self.limit_bytes if total + wanted <= self.limit_bytes else int(self.limit_bytes * (1 - FREE_SHARE))
        for _, size, path in blocks:
            if total + wanted <= max(goal, wanted):
                break
            path.unlink(missing_ok=True)
            total -= size
        self._count(total)
        return total

    def _blocks(self) -> Iterator[tuple[int, int, Path]]:
        for path in self.folder.glob("??/*"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                yield stat.st_mtime_ns, stat.st_size, path

    def _counted(self) -> int:
        try:
            return int((self.folder / "bytes").read_text())
        except (OSError, ValueError):
            return self.limit_bytes

    def _count(self, total: int) -> None:
        (self.folder / "bytes").write_text(f"{total}\n")

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    @contextlib.contextmanager
    def _locked(self) -> Iterator[bool]:
        """Whether the folder's lock could be had within LOCK_S."""
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            yield _lock(fd, time.monotonic() + LOCK_S)
        finally:
            os.close(fd)


class Cached:
    """A source whose blocks are looked up first; what is missing is fetched in one range where it stands together."""

    def __init__(self, url: str, source: Source, cache: BlockCache) -> None:
        self.size, self._source, self._cache = source.size, source, cache
        self._name = hashlib.blake2b(f"{url}\0{source.fingerprint()}".encode(), digest_size=16).hexdigest()

    def read(self, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        end = min(self.size, offset + size)
        if offset >= end:
            return b""
        first = offset // BLOCK_BYTES
        numbers = range(first, -(-end // BLOCK_BYTES))
        held = {number: self._cache.get(self._key(number)) for number in numbers}
        blocks: list[bytes] = []
        for missing, run in groupby(numbers, lambda number: held[number] is None):
            together = list(run)
            blocks += self._fetch(together, waiting) if missing else [held[number] or b"" for number in together]
        return b"".join(blocks)[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def fingerprint(self) -> Fingerprint:
        return self._source.fingerprint()

    def close(self) -> None:
        self._source.close()

    def _fetch(self, numbers: list[int], waiting: Waiting) -> list[bytes]:
        data = self._source.read(numbers[0] * BLOCK_BYTES, len(numbers) * BLOCK_BYTES, waiting)
        blocks = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        for number, block in zip(numbers, blocks, strict=True):
            self._cache.put(self._key(number), block)
        return blocks

    def _key(self, number: int) -> str:
        return f"{self._name}-{number}"


def _sum(block: bytes) -> bytes:
    return xxhash.xxh3_64_digest(block)


def _lock(fd: int, deadline: float) -> bool:
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.002)
