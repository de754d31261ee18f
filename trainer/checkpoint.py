"""Checkpoints as one transaction: weights, optimizer, random state and the loader's cursor together, or nothing.

Layout of `<run_dir>/checkpoints`::

    step-00000100/            complete: renamed to this name only after every file was hashed and synced
        manifest.json         step, cursor, signature, and size and xxh3 of every other file
        rng-00000.bin         random state of a rank
        ...                   DeepSpeed's files
    step-00000200.tmp/        being written, or left by a killed run: never read
    latest                    name of the newest complete one, for people

All ranks must see this folder on one shared file system. Methods of `Checkpoints` are collective.
"""

import os
import shutil
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import torch

from shared.batch import Cursor
from shared.errors import CheckpointError
from shared.telemetry import logger
from trainer.launch import Ranks
from trainer.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Signature,
    check_signature,
    complete,
    hash_file,
    payload,
    read_manifest,
    step_name,
    verify,
)

_log = logger("checkpoint")


class Stateful(Protocol):
    """What is checkpointed: the engine."""

    def save(self, folder: Path, tag: str) -> None:
        """Write this rank's share into `folder / tag`."""

    def load(self, folder: Path, tag: str) -> None:
        """Read it back."""


class RandomState(msgspec.Struct, frozen=True):
    """torch's generators of one rank; `cuda` is empty without a GPU."""

    cpu: bytes
    cuda: bytes


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, ranks: Ranks, signature: Signature, keep: int) -> None:
        self.folder, self._ranks, self._signature, self._keep = folder, ranks, signature, max(1, keep)

    def save(self, engine: Stateful, step: int, cursor: Cursor) -> Path:
        """Commit the state after `step` steps; a kill at any moment leaves the older ones whole."""
        name = step_name(step)
        partial = self.folder / f"{name}.tmp"
        if self._ranks.is_main:
            self._clear(partial)
        self._ranks.barrier()
        engine.save(self.folder, partial.name)
        self._save_random(partial)
        self._ranks.barrier()
        files = self._hash_together(partial)
        if self._ranks.is_main:
            self._commit(partial, Manifest(step, cursor, self._signature, files))
        self._ranks.barrier()
        return self.folder / name

    def load_newest(self, engine: Stateful) -> Manifest | None:
        """Load the newest complete checkpoint; None if there is none.

        Raises:
            CheckpointError: it belongs to another layout, model, data or optimizer.
        """
        newest = self._ranks.from_main(self._newest() if self._ranks.is_main else 0)
        if newest < 0:
            return None
        folder = self.folder / step_name(newest)
        manifest = read_manifest(folder)
        check_signature(folder.name, manifest.signature, self._signature)
        engine.load(self.folder, folder.name)
        self._load_random(folder)
        return manifest

    def _newest(self) -> int:
        for partial in self.folder.glob("step-*.tmp"):
            _log.warning("checkpoint %s passed over: it was never finished", partial.name)
        for folder in sorted(complete(self.folder), reverse=True):
            try:
                return verify(folder).step
            except CheckpointError as error:
                _log.warning("checkpoint %s passed over: %s", folder.name, error)
        return -1

    def _clear(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("step-*.tmp"):
            shutil.rmtree(stale)
        partial.mkdir()

    def _save_random(self, folder: Path) -> None:
        device = self._ranks.device
        cuda = torch.cuda.get_rng_state(device).numpy().tobytes() if device.type == "cuda" else b""
        state = RandomState(torch.get_rng_state().numpy().tobytes(), cuda)
        (folder / random_name(self._ranks.rank)).write_bytes(msgspec.msgpack.encode(state))

    def _load_random(self, folder: Path) -> None:
        data = (folder / random_name(self._ranks.rank)).read_bytes()
        state = msgspec.msgpack.decode(data, type=RandomState)
        torch.set_rng_state(_byte_tensor(state.cpu))
        if state.cuda:
            torch.cuda.set_rng_state(_byte_tensor(state.cuda), self._ranks.device)

    def _hash_together(self, folder: Path) -> dict[str, FileEntry]:
        """Each rank hashes and syncs its share of all files; the sum over ranks has every hash."""
        paths = list(payload(folder))
        hashes = [0] * len(paths)
        for i in range(self._ranks.rank, len(paths), self._ranks.mesh.world):
            hashes[i] = _signed(hash_file(paths[i], sync=True))
        sizes = [path.stat().st_size for path in paths]
        found = self._ranks.sum(hashes)  # from here on the main rank may rename the folder
        return {
            str(path.relative_to(folder)): FileEntry(size, f"{total % 2**64:016x}")
            for path, size, total in zip(paths, sizes, found, strict=True)
        }

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        write_synced(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync_folder(partial)
        final = partial.with_suffix("")
        if final.exists():
            shutil.rmtree(final)
        partial.rename(final)
        sync_folder(self.folder)
        write_synced(self.folder / "latest.tmp", final.name.encode())
        (self.folder / "latest.tmp").replace(self.folder / "latest")
        sync_folder(self.folder)
        for old in sorted(complete(self.folder))[: -self._keep]:
            shutil.rmtree(old)


def write_synced(path: Path, data: bytes) -> None:
    """Write a file through to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the folder's names durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def random_name(rank: int) -> str:
    """File name of a rank's random state."""
    return f"rng-{rank:05d}.bin"


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
