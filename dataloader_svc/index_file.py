"""One index file: everything planning and reading need to know of one shard, memory-mapped.

Layout, little-endian: magic (8 bytes) | header size (u64) | header (msgpack) | rows (ROW) | keys (UTF-8) | problems
(msgpack). Rows start at a multiple of 64. Bad samples are rows too, with a verdict, so that row numbers never move.
A file appears whole or not at all.
"""

import hashlib
import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dataloader_svc.shards import INDEX_SUFFIX
from dataloader_svc.sources import Fingerprint, is_remote
from shared.errors import ShardError

MAGIC = b"MILLIDX1"
VERSION = 2
ALIGN = 64

ROW = np.dtype(
    [
        ("key_offset", "<u8"),
        ("key_size", "<u4"),
        ("image_offset", "<u8"),
        ("image_size", "<u8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("audio_offset", "<u8"),
        ("audio_size", "<u8"),
        ("frames", "<u8"),
        ("rate_hz", "<u4"),
        ("channels", "<u2"),
        ("text_offset", "<u8"),
        ("text_size", "<u8"),
        ("characters", "<u4"),
        ("tokens", "<u4"),
        ("verdict", "u1"),
    ]
)


class Fields(NamedTuple):
    """One row of ROW, in its order."""

    key_offset: int
    key_size: int
    image_offset: int
    image_size: int
    height: int
    width: int
    audio_offset: int
    audio_size: int
    frames: int
    rate_hz: int
    channels: int
    text_offset: int
    text_size: int
    characters: int
    tokens: int
    verdict: int


class Note(msgspec.Struct, frozen=True, array_like=True):
    """Something wrong, as stored: the sample's key, or "" for the shard as a whole."""

    key: str
    reason: str
    detail: str


class Header(msgspec.Struct, frozen=True):
    """What a file was built from. `rules` digests the limits that decided verdicts, `tokenizer` that counted tokens.

    `content` hashes all members' names, the bytes of images, clips and captions, and the verdicts: it is that of every
    copy of the shard, wherever it lies and however it was packed.
    """

    version: int
    fingerprint: Fingerprint
    rules: str
    tokenizer: str
    content: str
    rows: int
    keys_bytes: int
    problems_bytes: int


class IndexFile(msgspec.Struct, frozen=True):
    """An opened index file; arrays are views of the mapping."""

    header: Header
    rows: npt.NDArray[Any]
    keys: bytes | memoryview
    packed_problems: bytes | memoryview

    def row(self, number: int) -> Fields:
        """A sample's fields."""
        return Fields(*self.rows[number].item())

    def key(self, row: Fields) -> str:
        """A sample's key."""
        return str(self.keys[row.key_offset : row.key_offset + row.key_size], "utf-8", "surrogateescape")

    def problems(self) -> list[Note]:
        """Everything found wrong when the shard was indexed."""
        return msgspec.msgpack.decode(self.packed_problems, type=list[Note])


def index_path(shard: str, index_dir: Path | None) -> Path:
    """Where a shard's index lies: beside it, or in `index_dir` under a hash of its path and its name.

    Raises:
        ShardError: the shard is remote and there is no `index_dir`.
    """
    if index_dir is None:
        if is_remote(shard):
            raise ShardError(f"{shard} is remote, so its index needs a folder; set loader.index_dir")
        return Path(shard + INDEX_SUFFIX)
    where = shard if is_remote(shard) else str(Path(shard).absolute())
    name = Path(shard.partition("?")[0] if is_remote(shard) else shard).name
    return index_dir / f"{hashlib.sha256(os.fsencode(where)).hexdigest()[:16]}-{name}{INDEX_SUFFIX}"


def write(path: Path, header: Header, rows: npt.NDArray[Any], keys: bytes, problems: bytes) -> None:
    """Write a file whole: temporary name, fsync, rename.

    Raises:
        ShardError: the folder cannot be written.
    """
    packed = msgspec.msgpack.encode(header)
    head = MAGIC + len(packed).to_bytes(8, "little") + packed
    head += bytes(-len(head) % ALIGN)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_whole(path, [head, rows.tobytes(), keys, problems])
    except OSError as error:
        remedy = "make its folder writable, or set loader.index_dir"
        raise ShardError(f"index {path} cannot be written ({error.strerror}); {remedy}") from None


def replace_whole(path: Path, parts: Sequence[bytes | memoryview], durable: bool = True) -> None:
    """Put a file in place at once, under a temporary name first; `durable`: it outlives a crash of the machine.

    Raises:
        OSError: it cannot be written.
    """
    fd, name = tempfile.mkstemp(prefix=".tmp-", suffix=path.suffix, dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path) -> IndexFile | None:
    """Open a file, or None where there is none.

    Raises:
        ShardError: it cannot be read, is no index file, or of another version.
    """
    try:
        with open(path, "rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ShardError(f"index {path} cannot be read ({error}); run millstream-loader index again") from None
    try:
        return _parse(data)
    except (ValueError, msgspec.MsgspecError, KeyError) as error:
        raise ShardError(f"index {path} is damaged ({error}); run millstream-loader index again") from None


def _parse(data: memoryview) -> IndexFile:
    if data[:8] != MAGIC:
        raise ValueError("not an index of this version")
    size = 16 + int.from_bytes(data[8:16], "little")
    header = msgspec.msgpack.decode(data[16:size], type=Header)
    rows_at = -(-size // ALIGN) * ALIGN
    keys_at = rows_at + header.rows * ROW.itemsize
    problems_at = keys_at + header.keys_bytes
    if header.version != VERSION or len(data) != problems_at + header.problems_bytes:
        raise ValueError(f"version {header.version}, {len(data)} bytes")
    rows = np.frombuffer(data, ROW, header.rows, rows_at)
    return IndexFile(header, rows, data[keys_at:problems_at], data[problems_at:])
