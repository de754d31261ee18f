"""Where shards' bytes come from, as configured: plain or remote, through the cache or not, all at once or in passing.

`Store` opens shards, `Reader` keeps some of them open for positioned reads.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from dataloader_svc.cache import BlockCache, Cached
from dataloader_svc.sources import (
    PIECE_BYTES,
    Fingerprint,
    Local,
    Source,
    Tally,
    Waiting,
    is_remote,
    nothing,
)
from shared.errors import ConfigError, ShardError
from shared.sections import LoaderSection

READ_S = LoaderSection().read_s


class Store:
    """Opens shards. `read_s` bounds a remote read; `cache` holds remote bytes, where there is one. Thread-safe."""

    def __init__(self, read_s: float = READ_S, cache: BlockCache | None = None) -> None:
        self.read_s, self.cache, self.tally = read_s, cache, Tally()

    @classmethod
    def of(cls, loader: LoaderSection) -> "Store":
        """As the loader section says.

        Raises:
            ConfigError: the cache folder cannot be used.
        """
        cache = BlockCache.open(Path(loader.cache_dir), loader.cache_bytes) if loader.cache_dir else None
        return cls(loader.read_s, cache)

    def open(self, path: str) -> Source:
        """The shard, by a path or a URL.

        Raises:
            ShardError: it cannot be opened.
            ConfigError: the cache is smaller than the shard.
        """
        if not is_remote(path):
            return Local(path)
        from dataloader_svc.remote import Remote

        source = Remote.open(path, self.read_s, self.tally)
        if not self.cache:
            return source
        if source.size > self.cache.limit_bytes:
            rule = f"must hold the largest shard, {path} of {source.size} bytes"
            raise ConfigError("loader.cache_bytes", self.cache.limit_bytes, rule, "raise it, or set no cache_dir")
        return Cached(path, source, self.cache)

    def stream(self, path: str) -> Source:
        """The shard, for one pass from its start to its end: a remote one is fetched in large pieces, each byte once.

        Raises:
            ShardError, ConfigError: as `open`.
        """
        source = self.open(path)
        return Passing(source) if is_remote(path) else source

    def fingerprint(self, path: str) -> Fingerprint:
        """What is different for any rewritten shard, cheaply.

        Raises:
            ShardError: the shard cannot be opened.
        """
        with closing(self.open(path)) as source:
            return source.fingerprint()

    def glob(self, pattern: str) -> list[str]:
        """URLs that a remote pattern names.

        Raises:
            ShardError: the storage cannot be listed.
        """
        from dataloader_svc.remote import listing

        return listing(pattern, self.read_s)

    def text(self, path: str) -> str:
        """A whole text file.

        Raises:
            ShardError: it cannot be read.
            UnicodeDecodeError: it is no UTF-8.
        """
        with closing(self.open(path)) as source:
            return source.read(0, source.size).decode()


class Passing:
    """A source read from start to end: keeps the piece around the last read, so that small steps cost no requests."""

    def __init__(self, source: Source) -> None:
        self.size, self._source = source.size, source
        self._start, self._held = 0, b""

    def read(self, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        stop, held_to = min(self.size, offset + size), self._start + len(self._held)
        if not self._start <= offset <= held_to:
            self._start, self._held, held_to = offset, b"", offset
        if stop > held_to:
            more = self._source.read(held_to, max(stop - held_to, PIECE_BYTES), waiting)
            self._held = self._held[offset - self._start :] + more
            self._start = offset
        return self._held[offset - self._start : stop - self._start]

    def fingerprint(self) -> Fingerprint:
        return self._source.fingerprint()

    def close(self) -> None:
        self._source.close()


class Reader:
    """Positioned reads from many shards through at most `max_open` open files. Safe to share between threads.

    A remote shard is asked for its size and tag once, held against `expected`, and then kept: it holds nothing open.
    """

    def __init__(
        self, store: Store | None = None, max_open: int = 64, expected: Mapping[str, Fingerprint] | None = None
    ) -> None:
        self.store, self._max_open, self._lock = store or Store(), max_open, threading.Lock()
        self._expected = expected or {}
        self._files: OrderedDict[str, Source] = OrderedDict()
        self._remote: dict[str, Source] = {}

    def read(self, path: str, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        """`size` bytes of the shard at `offset`; `waiting` is called now and then while storage takes its time.

        Raises:
            ShardError: the shard cannot be opened or read, or ends before.
        """
        data = self._source(path).read(offset, size, waiting)
        if len(data) != size:
            raise ShardError(f"shard {path} ends at {offset + len(data)}, before {offset + size}; index it again")
        return data

    def close(self) -> None:
        """Let go of every shard."""
        with self._lock:
            self._files.clear()
            self._remote.clear()

    def _source(self, path: str) -> Source:
        """The open shard. Opening a remote one takes time, so that happens without the lock."""
        if is_remote(path):
            return self._remote.get(path) or self._remote.setdefault(path, self._checked(path))
        with self._lock:
            if path not in self._files:
                self._files[path] = self.store.open(path)
            self._files.move_to_end(path)
            if len(self._files) > self._max_open:
                self._files.popitem(last=False)
            return self._files[path]

    def _checked(self, url: str) -> Source:
        source = self.store.open(url)
        if self._expected.get(url, now := source.fingerprint()) != now:
            raise ShardError(f"shard {url} changed since it was indexed; index it again")
        return source
