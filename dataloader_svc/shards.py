"""The one door to tar files and remote storage: naming shards, walking them, reading bytes by offset.

A shard is a plain (uncompressed) tar. `scan` walks its headers and never trusts them: payloads that run past the end
of the file, links, unsafe names and damaged headers are reported, not raised, so that one bad shard costs only what
is bad in it. Member names are labels here and everywhere; nothing is ever written under them.
"""

import glob
import hashlib
import os
import tarfile
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Literal, Protocol

import braceexpand
import fsspec
import msgspec

from shared.errors import ConfigError, ShardError
from shared.sections import DatasetSection
from shared.telemetry import logger

INDEX_SUFFIX = ".millstream-idx"
BLOCK = tarfile.BLOCKSIZE
EDGE_BYTES = 4096
MAX_EXTENSION_BYTES = 1 << 20
MAX_DIGITS = 19

log = logger("shards")


class Shard(msgspec.Struct, frozen=True):
    """One tar of one dataset."""

    dataset: str
    path: str


class Member(msgspec.Struct, frozen=True):
    """One regular file of a shard, or one that is refused: then `reject` is the reason and the span is unused."""

    name: str
    offset: int
    size: int
    reject: str = ""


class ScanProblem(msgspec.Struct, frozen=True):
    """Where a walk met something wrong with the shard itself. `name` is the member cut short, where known."""

    reason: str
    offset: int
    detail: str
    name: str = ""


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What tells one version of a shard from another; `edges` hashes its first and last 4 KiB."""

    size: int
    mtime_ns: int
    edges: str


# --- naming -----------------------------------------------------------------------------------------------------------


def expand(datasets: Sequence[DatasetSection], missing: Literal["fail", "skip"]) -> tuple[Shard, ...]:
    """Every shard the patterns name: datasets in their order, paths sorted within each, no path twice in one.

    A pattern is a path, a glob, a brace list such as `part-{000..009}.tar`, or `@file` with one pattern a line.

    Raises:
        ShardError: shards are missing or empty and `missing` is 'fail' (the text lists all of them), or none is left.
        ConfigError: a pattern's braces do not balance.
    """
    shards: list[Shard] = []
    absent: list[str] = []
    for dataset in datasets:
        for path in sorted({p for pattern in dataset.shards for p in _paths(pattern)}):
            trouble = _trouble(path)
            absent += [f"{path} ({trouble})"] if trouble else []
            shards += [] if trouble else [Shard(dataset.name, path)]
    if absent and missing == "fail":
        remedy = "restore them, or set data.missing_shards: skip"
        raise ShardError(f"{len(absent)} shards cannot be read: {', '.join(absent)}; {remedy}")
    if absent:
        log.warning("%d shards left out (data.missing_shards: skip): %s", len(absent), ", ".join(absent))
    if not shards:
        raise ShardError("no shard is left to read; check data.datasets")
    return tuple(shards)


def _paths(pattern: str) -> Iterator[str]:
    if pattern.startswith("@"):
        yield from _listed(Path(pattern[1:]))
        return
    try:
        plain = list(braceexpand.braceexpand(pattern))
    except ValueError:
        rule = "has braces that do not balance"
        raise ConfigError("data.datasets.shards", pattern, rule, "write {000..009} or {a,b}") from None
    for path in plain:
        found = [] if "://" in path or Path(path).exists() else glob.glob(path, recursive=True)  # noqa: PTH207
        yield from [p for p in found if not p.endswith(INDEX_SUFFIX)] or [path]


def _listed(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ShardError(f"shard list {path} cannot be read ({error}); give a text file, one pattern a line") from None
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        if line.startswith("@"):
            raise ConfigError("data.datasets.shards", line, f"stands inside {path}", "list patterns only, no @file")
        yield from _paths(line if "://" in line else str(path.parent / line))


def _trouble(path: str) -> str:
    if Path(path).is_dir():
        return "a folder; name the tars in it"
    try:
        source = _open(path)
    except ShardError as error:
        return str(error) if "://" in path or Path(path).exists() else "missing"
    source.close()
    return "" if source.size else "zero bytes"


# --- bytes ------------------------------------------------------------------------------------------------------------


class Source(Protocol):
    """An open shard. `read` may return less than asked at the end of the file."""

    size: int
    mtime_ns: int

    def read(self, offset: int, size: int) -> bytes: ...

    def close(self) -> None: ...


class _Local:
    """A local file, read without moving a shared position. Closed when the last reader lets go of it."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        stat = os.fstat(self._fd)
        self.size, self.mtime_ns = stat.st_size, stat.st_mtime_ns

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        while 0 < len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
            data += more
        return data

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.close()


class _Remote:
    """A file behind a URL; one reader at a time."""

    def __init__(self, url: str) -> None:
        file: BinaryIO = fsspec.open(url, "rb").open()
        self._file, self._lock = file, threading.Lock()
        self.size, self.mtime_ns = file.seek(0, os.SEEK_END), 0

    def read(self, offset: int, size: int) -> bytes:
        with self._lock:
            self._file.seek(offset)
            return self._file.read(size)

    def close(self) -> None:
        self._file.close()


def _open(path: str) -> Source:
    try:
        return _Remote(path) if "://" in path else _Local(path)
    except (OSError, ImportError, ValueError) as error:
        raise ShardError(
            f"shard {path} cannot be opened ({error}); restore it or take it out of data.datasets"
        ) from None


class Reader:
    """Positioned reads from many shards through at most `max_open` open files. Safe to share between threads."""

    def __init__(self, max_open: int = 64) -> None:
        self._max_open, self._lock = max_open, threading.Lock()
        self._sources: OrderedDict[str, Source] = OrderedDict()

    def read(self, path: str, offset: int, size: int) -> bytes:
        """`size` bytes of the shard at `offset`.

        Raises:
            ShardError: the shard cannot be opened or read, or ends before.
        """
        try:
            data = self._source(path).read(offset, size)
        except OSError as error:
            raise ShardError(f"shard {path} cannot be read at {offset} ({error}); check its storage") from None
        if len(data) != size:
            raise ShardError(f"shard {path} ends at {offset + len(data)}, before {offset + size}; index it again")
        return data

    def close(self) -> None:
        """Let go of every file."""
        with self._lock:
            self._sources.clear()

    def _source(self, path: str) -> Source:
        with self._lock:
            if path not in self._sources:
                self._sources[path] = _open(path)
            self._sources.move_to_end(path)
            if len(self._sources) > self._max_open:
                self._sources.popitem(last=False)
            return self._sources[path]


def fingerprint(path: str) -> Fingerprint:
    """Size, modification time and a hash of both ends: cheap, and different for any rewritten shard.

    Raises:
        ShardError: the shard cannot be opened.
    """
    source = _open(path)
    try:
        edges = source.read(0, EDGE_BYTES) + source.read(max(0, source.size - EDGE_BYTES), EDGE_BYTES)
        return Fingerprint(source.size, source.mtime_ns, hashlib.blake2b(edges, digest_size=16).hexdigest())
    finally:
        source.close()


# --- the tar walk -----------------------------------------------------------------------------------------------------


def scan(path: str) -> Iterator[Member | ScanProblem]:
    """Members in the order of the tar, directories left out; then at most one problem, which ends the walk.

    Understands ustar, GNU long names and PAX records. Reasons of problems: `truncated_tail`, `bad_header`,
    `no_end_marker`, `data_after_end`, `no_members`. Reasons of rejected members: `link_member`, `unsafe_name`,
    `special_member`.

    Raises:
        ShardError: the shard cannot be opened or read.
    """
    source = _open(path)
    try:
        yield from _walk(source)
    except OSError as error:
        raise ShardError(f"shard {path} cannot be read ({error}); check its storage") from None
    finally:
        source.close()


def _walk(source: Source) -> Iterator[Member | ScanProblem]:
    offset, members = 0, 0
    extra: dict[str, str] = {}
    while isinstance(head := _header(source, offset, members), tarfile.TarInfo):
        name, size = extra.get("path", head.name), _payload(head, extra)
        data, end = offset + BLOCK, offset + BLOCK + size
        if end > source.size:
            detail = f"member {name!r} ends at byte {end}, the shard at {source.size}"
            yield ScanProblem("truncated_tail", offset, detail, name)
            return
        offset = data + -(-size // BLOCK) * BLOCK
        if head.type in _EXTENSIONS:
            extra |= _EXTENSIONS[head.type](source.read(data, size))
            continue
        if not head.isdir():
            yield Member(name, data, size, _reject(head, name))
        members, extra = members + 1, {}
    if head:
        yield head


def _header(source: Source, offset: int, members: int) -> tarfile.TarInfo | ScanProblem | None:
    """The header at `offset`; at the end of the walk what is wrong there, or None."""
    block = source.read(offset, BLOCK)
    if not block:
        return ScanProblem("no_end_marker", offset, "the tar ends without its end marker: perhaps cut short")
    if len(block) < BLOCK:
        return ScanProblem("truncated_tail", offset, f"the shard ends inside a header, at byte {source.size}")
    if not any(block):
        return _at_end(source, offset, members)
    try:
        head = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        kind = "gzip data: shards must be plain tars" if block[:2] == b"\x1f\x8b" else str(error)
        return ScanProblem("bad_header", offset, kind)
    if head.size < 0 or head.type == tarfile.GNUTYPE_SPARSE:
        return ScanProblem("bad_header", offset, f"member {head.name!r} is sparse or has no valid size", head.name)
    if head.type in _EXTENSIONS and head.size > MAX_EXTENSION_BYTES:
        return ScanProblem("bad_header", offset, f"a name record of {head.size} bytes")
    return head


def _at_end(source: Source, offset: int, members: int) -> ScanProblem | None:
    after = source.read(offset + 2 * BLOCK, BLOCK)
    if len(after) == BLOCK and any(after):
        return ScanProblem("data_after_end", offset, "data follows the end marker (joined tars?) and is not read")
    return None if members else ScanProblem("no_members", 0, "the tar is valid and holds no members")


def _payload(head: tarfile.TarInfo, extra: dict[str, str]) -> int:
    """Bytes after the header. Links, folders and devices have none, whatever their size field says."""
    if head.type in tarfile.SUPPORTED_TYPES and not head.isreg() and head.type not in _EXTENSIONS:
        return 0
    declared = extra.get("size", "") if head.type not in _EXTENSIONS else ""
    return int(declared) if declared.isdecimal() and len(declared) <= MAX_DIGITS else head.size


def _pax(record: bytes) -> dict[str, str]:
    """`path` and `size` of PAX records, each `<length> <key>=<value>\\n`."""
    found: dict[str, str] = {}
    while record:
        digits, _, _ = record.partition(b" ")
        if not digits.isdigit() or len(digits) > MAX_DIGITS or not len(digits) < int(digits) <= len(record):
            break
        key, _, value = record[len(digits) + 1 : int(digits) - 1].partition(b"=")
        if key in (b"path", b"size"):
            found[key.decode()] = value.decode("utf-8", "surrogateescape")
        record = record[int(digits) :]
    return found


def _gnu_name(record: bytes) -> dict[str, str]:
    return {"path": record.partition(b"\0")[0].decode("utf-8", "surrogateescape")}


def _nothing(record: bytes) -> dict[str, str]:
    return {}


_EXTENSIONS = {
    tarfile.XHDTYPE: _pax,
    tarfile.SOLARIS_XHDTYPE: _pax,
    tarfile.XGLTYPE: _nothing,
    tarfile.GNUTYPE_LONGNAME: _gnu_name,
    tarfile.GNUTYPE_LONGLINK: _nothing,
}


def _reject(head: tarfile.TarInfo, name: str) -> str:
    if head.issym() or head.islnk():
        return "link_member"
    if not head.isreg():
        return "special_member"
    return "unsafe_name" if name.startswith("/") or ".." in name.split("/") or "\0" in name else ""
