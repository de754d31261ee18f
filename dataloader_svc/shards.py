"""The one door to tar files: naming shards and walking them.

A shard is a plain (uncompressed) tar. `walk` walks its headers and never trusts them: payloads that run past the end
of the file, links, unsafe names and damaged headers are reported, not raised, so that one bad shard costs only what
is bad in it. Member names are labels here and everywhere; nothing is ever written under them.
"""

import glob
import tarfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Literal

import braceexpand
import msgspec

from dataloader_svc.sources import Source, is_remote
from dataloader_svc.store import Store
from shared.errors import ConfigError, ShardError
from shared.logs import logger
from shared.sections import DatasetSection

INDEX_SUFFIX = ".millstream-idx"
ASK_THREADS = 16
BLOCK = tarfile.BLOCKSIZE
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


# --- naming -----------------------------------------------------------------------------------------------------------


def expand(
    datasets: Sequence[DatasetSection], missing: Literal["fail", "skip"], store: Store | None = None
) -> tuple[Shard, ...]:
    """Every shard the patterns name: datasets in their order, paths sorted within each, no path twice in one.

    A pattern is a path or URL, a glob, a brace list such as `part-{000..009}.tar`, or `@file` with one pattern a line.
    Storage without listings (http) takes no glob.

    Raises:
        ShardError: shards are missing or empty and `missing` is 'fail' (the text lists all of them), or none is left.
        ConfigError: a pattern's braces do not balance, or it is a glob over http.
    """
    store = store or Store()
    named = [
        Shard(dataset.name, path)
        for dataset in datasets
        for path in sorted({p for pattern in dataset.shards for p in _paths(pattern, store)})
    ]
    with ThreadPoolExecutor(ASK_THREADS, "ask") as pool:
        troubles = list(pool.map(partial(_trouble, store), (shard.path for shard in named)))
    shards = [shard for shard, trouble in zip(named, troubles, strict=True) if not trouble]
    absent = [f"{shard.path} ({trouble})" for shard, trouble in zip(named, troubles, strict=True) if trouble]
    if absent and missing == "fail":
        remedy = "restore them, or set data.missing_shards: skip"
        raise ShardError(f"{len(absent)} shards cannot be read: {', '.join(absent)}; {remedy}")
    if absent:
        log.warning("%d shards left out (data.missing_shards: skip): %s", len(absent), ", ".join(absent))
    if not shards:
        raise ShardError("no shard is left to read; check data.datasets")
    return tuple(shards)


def _paths(pattern: str, store: Store) -> Iterator[str]:
    if pattern.startswith("@"):
        yield from _listed(pattern[1:], store)
        return
    try:
        plain = list(braceexpand.braceexpand(pattern))
    except ValueError:
        rule = "has braces that do not balance"
        raise ConfigError("data.datasets.shards", pattern, rule, "write {000..009} or {a,b}") from None
    for path in plain:
        yield from [p for p in _globbed(path, store) if not p.endswith(INDEX_SUFFIX)] or [path]


def _globbed(path: str, store: Store) -> list[str]:
    if not is_remote(path):
        return [] if Path(path).exists() else glob.glob(path, recursive=True)  # noqa: PTH207
    if "*" not in path:
        return []
    if path.startswith(("http://", "https://")):
        rule = "is a glob, and http has no listings"
        raise ConfigError("data.datasets.shards", path, rule, "write a brace list, such as part-{000..009}.tar")
    return store.glob(path)


def _listed(path: str, store: Store) -> Iterator[str]:
    """Patterns of a list file; relative ones are relative to it."""
    folder, slash, _ = path.rpartition("/")
    try:
        lines = store.text(path).splitlines()
    except (ShardError, UnicodeDecodeError) as error:
        raise ShardError(f"shard list {path} cannot be read ({error}); give a text file, one pattern a line") from None
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        if line.startswith("@"):
            raise ConfigError("data.datasets.shards", line, f"stands inside {path}", "list patterns only, no @file")
        yield from _paths(line if is_remote(line) or line.startswith("/") else folder + slash + line, store)


def _trouble(store: Store, path: str) -> str:
    if not is_remote(path) and Path(path).is_dir():
        return "a folder; name the tars in it"
    try:
        with closing(store.open(path)) as source:
            return "" if source.size else "zero bytes"
    except ShardError as error:
        return str(error) if is_remote(path) or Path(path).exists() else "missing"


# --- the tar walk -----------------------------------------------------------------------------------------------------


def scan(path: str, store: Store | None = None) -> Iterator[Member | ScanProblem]:
    """`walk` over a shard by name.

    Raises:
        ShardError: the shard cannot be opened or read.
    """
    with closing((store or Store()).stream(path)) as source:
        yield from walk(source)


def walk(source: Source) -> Iterator[Member | ScanProblem]:
    """Members in the order of the tar, directories left out; then at most one problem, which ends the walk.

    Understands ustar, GNU long names and PAX records. Reasons of problems: `truncated_tail`, `bad_header`,
    `no_end_marker`, `data_after_end`, `no_members`. Reasons of rejected members: `link_member`, `unsafe_name`,
    `special_member`.

    Raises:
        ShardError: the shard cannot be read.
    """
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
