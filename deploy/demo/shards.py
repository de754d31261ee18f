"""Writes WebDataset shards that are byte-identical whenever their samples are."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MTIME_S = 0.0
OWNER = "millstream"


@dataclass(frozen=True)
class Shard:
    """A finished shard."""

    name: str
    samples: int
    bytes: int
    sha256: str


def write_shard(path: Path, samples: Iterable[dict[str, str | bytes]]) -> Shard:
    """Write `samples` (`__key__` and one entry per extension) to a tar that appears under `path` only when whole."""
    from webdataset import TarWriter  # imports torch, seconds

    count = 0
    with _renamed(path) as stream, TarWriter(stream, user=OWNER, group=OWNER, mtime=MTIME_S) as tar:
        for sample in samples:
            tar.write(sample)
            count += 1
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return Shard(path.name, count, path.stat().st_size, digest)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file that appears only when whole."""
    with _renamed(path) as stream:
        stream.write(text.encode())


@contextmanager
def _renamed(path: Path) -> Iterator[BinaryIO]:
    """A stream to a temporary file beside `path`, renamed to `path` when all went well and removed when not."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            yield stream
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
