"""Plans kept as files: a daemon that starts again maps its epoch instead of making it, and holds none of it in memory.

Layout, little-endian: magic (8 bytes) | header size (u64) | header (msgpack) | the arrays of `EpochPlan`, each at a
multiple of 64. A file appears whole or not at all. It is trusted when its key (what the plan is a function of) is ours
and its bytes have the checksum that the header tells; else it is made anew, so none is ever needed. Beside the newest
plans lies how many rounds each epoch has that was ever planned: to count steps over epochs no plan is made twice.
"""

import hashlib
import mmap
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from dataloader_svc.bucket import Array
from dataloader_svc.epoch import ORDER, EpochPlan
from dataloader_svc.index_file import replace_whole
from dataloader_svc.summary import PlanSummary
from shared.logs import logger
from shared.sections import DataSection

MAGIC = b"MILLPLAN"
ALIGN = 64
KEPT = 2
PLAN, SUMMARY = ".plan", ".summary"

T = TypeVar("T")

log = logger("plan")


class Part(msgspec.Struct, frozen=True, array_like=True):
    """One array: its name, dtype, shape, and place in bytes from the first one's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """Where its bytes end."""
        return self.offset + int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class Header(msgspec.Struct, frozen=True):
    """What a file holds: whose plan of which epoch, xxh3 of all arrays' bytes, and where they lie."""

    key: str
    epoch: int
    checksum: int
    parts: tuple[Part, ...]


class Told(msgspec.Struct, frozen=True):
    """A summary, and what it is one of."""

    key: str
    summary: PlanSummary


class Counted(msgspec.Struct, frozen=True):
    """Epochs' rounds, and whose."""

    key: str
    rounds: dict[int, int]


class PlanFiles:
    """The newest plans of one job in `folder`. What cannot be read or written is told in the log, and done without."""

    def __init__(self, folder: Path, job: str, key: str) -> None:
        self._folder, self._job, self._key = folder, job, key
        self._counting = threading.Lock()

    def plan(self, epoch: int) -> EpochPlan | None:
        """The plan that was kept; its arrays are views of the file. None where there is none that can be trusted."""
        path = self._path(epoch, PLAN)
        try:
            with open(path, "rb") as file:
                return self._parsed(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), epoch)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            log.warning("%s is not used: %s; the plan is made anew", path, error)
            return None

    def keep_plan(self, epoch: int, plan: EpochPlan) -> None:
        """Write a plan, and remove those of epochs long past."""
        arrays = [np.ascontiguousarray(getattr(plan, name)) for name in plan.__struct_fields__]
        parts, checksum, end = [], xxhash.xxh3_64(), 0
        for name, array in zip(plan.__struct_fields__, arrays, strict=True):
            parts.append(Part(name, array.dtype.str, array.shape, -(-end // ALIGN) * ALIGN))
            end = parts[-1].end
            checksum.update(array.data)
        header = msgspec.msgpack.encode(Header(self._key, epoch, checksum.intdigest() >> 1, tuple(parts)))
        head = MAGIC + len(header).to_bytes(8, "little") + header
        pieces: list[bytes | memoryview] = [head, bytes(-len(head) % ALIGN)]
        for array in arrays:
            pieces += [array.data, bytes(-array.nbytes % ALIGN)]
        self._write(self._path(epoch, PLAN), pieces)
        with self._counting:
            counted = Counted(self._key, self._rounds() | {epoch: len(plan.bounds)})
            self._write(self._count_path, [msgspec.json.encode(counted)])

    def rounds(self, epoch: int) -> int | None:
        """How many rounds the epoch has, or None where it was never planned."""
        return self._rounds().get(epoch)

    def summary(self, epoch: int) -> PlanSummary | None:
        """The summary that was kept, or None."""
        told = _read(self._path(epoch, SUMMARY), Told)
        return told.summary if told and told.key == self._key else None

    def keep_summary(self, summary: PlanSummary) -> None:
        """Write a summary."""
        self._write(self._path(summary.epoch, SUMMARY), [msgspec.json.encode(Told(self._key, summary))])

    def _rounds(self) -> dict[int, int]:
        counted = _read(self._count_path, Counted)
        return counted.rounds if counted and counted.key == self._key else {}

    @property
    def _count_path(self) -> Path:
        return self._folder / f"{self._job}.rounds"

    def _path(self, epoch: int, suffix: str) -> Path:
        return self._folder / f"{self._job}.{epoch}{suffix}"

    def _parsed(self, data: memoryview, epoch: int) -> EpochPlan | None:
        if data[:8] != MAGIC:
            raise ValueError("it is no plan")
        size = 16 + int.from_bytes(data[8:16], "little")
        header = msgspec.msgpack.decode(data[16:size], type=Header)
        if (header.key, header.epoch) != (self._key, epoch):
            return None
        data = data[-(-size // ALIGN) * ALIGN :]
        checksum, arrays = xxhash.xxh3_64(), {}
        for part in header.parts:
            piece = data[part.offset : part.end]
            checksum.update(piece)
            arrays[part.name] = _array(piece, part)
        if checksum.intdigest() >> 1 != header.checksum:
            raise ValueError("it is damaged")
        return EpochPlan(**arrays)

    def _write(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            replace_whole(path, pieces, durable=False)
            old = sorted(self._folder.glob(f"{self._job}.*{path.suffix}"), key=lambda p: p.stat().st_mtime)
            for past in old[:-KEPT]:
                past.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be kept (%s); every start makes it anew", path, error.strerror)


def _read(path: Path, kind: type[T]) -> T | None:
    """A JSON file's content; None where it is not there, or (as is told) is of no use."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("%s is not used: %s", path, error)
        return None


def key_of(data: DataSection, index_digest: str) -> str:
    """Digest of all that an epoch's plan is a function of, but for the epoch. Skipped steps change no plan."""
    plain = msgspec.structs.replace(data, skip_steps=())
    text = msgspec.json.encode((ORDER, plain, index_digest))
    return hashlib.blake2b(text, digest_size=16).hexdigest()


def _array(piece: memoryview, part: Part) -> Array:
    return np.frombuffer(piece, np.dtype(part.dtype)).reshape(part.shape)
