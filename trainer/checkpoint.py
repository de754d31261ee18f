"""Checkpoints as one transaction: weights, optimizer, random state and the loader's cursor together, or nothing.

Layout of `<run_dir>/checkpoints`::

    step-00000100/               complete: renamed to this name only after every file was hashed and synced
        manifest.json            step, cursor, signature, and size and xxh3 of every other file
        state-00000.safetensors  what rank 0 held, each piece with its place in the whole model (`trainer.shard`)
        ...
    step-00000200.tmp/           being written, or left by a killed run: never read
    step-00000050.old/           being deleted, likewise
    latest                       name of the newest complete one, for people

A save has two halves. `save` copies this rank's share to CPU memory and lets a thread write it; once all ranks have
said, at a step's end, that theirs is on the disk, the main rank commits. So training never waits for a disk, no thread
communicates, and a checkpoint that a rank could not write is never committed by another. All ranks must see the folder
on one shared file system. Methods of `Checkpoints` are collective.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from shared.batch import Cursor
from shared.errors import CheckpointError
from shared.logs import logger
from shared.sections import CheckpointSection
from trainer import metrics
from trainer.launch import Ranks
from trainer.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    Signature,
    check_signature,
    complete,
    read_manifest,
    step_name,
    verify,
)
from trainer.saving import Writer, unwritable
from trainer.shard import Entry, Room, image_of
from trainer.source import Source

NONE, UNUSABLE = -1, -2

_log = logger("checkpoint")


class Stateful(Protocol):
    """What is checkpointed: the engine."""

    def entries(self) -> dict[str, Entry]:
        """This rank's share, as views of the live tensors."""

    def fill(self, source: Source) -> None:
        """Take it back."""


class Pending(msgspec.Struct):
    """A checkpoint that is being written."""

    step: int
    cursor: Cursor
    partial: Path
    writer: Writer
    content: str


class Checkpoints:
    """The checkpoints of one run; at most one of them is being written."""

    def __init__(
        self, folder: Path, ranks: Ranks, layout: str, signature: Signature, keep: int, how: CheckpointSection
    ) -> None:
        self.folder, self._ranks, self._layout, self._signature = folder, ranks, layout, signature
        self._keep, self._how = keep, how
        self._room = Room(ranks.device)
        self._pending: Pending | None = None

    def save(self, engine: Stateful, step: int, cursor: Cursor, content: str = "") -> None:
        """Begin to save the state after `step` steps; it counts once `poll` or `finish` has committed it.

        `content` is the client's: what the cursor is a place in.

        Raises:
            CheckpointError: this one, or the one before, cannot be written.
        """
        if self._pending and self._ranks.is_main:
            _log.warning("step %d waits: checkpoint %d is still being written", step, self._pending.step)
        self.finish()
        partial = self.folder / f"{step_name(step)}.tmp"
        self._on_main(partial, lambda: self._clear(partial))
        image = image_of({**engine.entries(), **random_state(self._ranks)})
        path = partial / shard_name(self._ranks.rank)
        if self._how.asynchronous:
            self._pending = Pending(step, cursor, partial, Writer(path, self._room.copy(image)), content)
            self._pending.writer.start()
        else:
            self._pending = Pending(step, cursor, partial, Writer(path, image), content)
            self._pending.writer.run()
            self.finish()

    def poll(self) -> None:
        """Commit what is being written, if every rank has written it; call it after each step.

        Raises:
            CheckpointError: some rank cannot write its share.
        """
        if self._pending:
            self._agree(self._pending)

    def finish(self) -> None:
        """Wait for what is being written, and commit it.

        Raises:
            CheckpointError: some rank cannot write its share, or not within `write_s`.
        """
        if self._pending:
            self._pending.writer.wait(self._how.write_s)
            self._agree(self._pending)

    def load_newest(self, engine: Stateful) -> Manifest | None:
        """Load the newest complete checkpoint; None if there is none at all.

        Raises:
            CheckpointError: it belongs to another model, data or optimizer, or all that there are are damaged.
        """
        newest = self._ranks.from_main(self._newest() if self._ranks.is_main else 0)
        if newest == UNUSABLE:
            raise CheckpointError(f"no checkpoint in {self.folder} can be used; the log of rank 0 says why of each")
        if newest == NONE:
            return None
        folder = self.folder / step_name(newest)
        manifest = read_manifest(folder)
        check_signature(folder.name, manifest.signature, self._signature)
        source = Source(folder)
        engine.fill(source)
        if manifest.layout == self._layout:
            load_random_state(self._ranks, source)
        elif self._ranks.is_main:
            _log.info("%s was saved with %s, goes on with %s", folder.name, manifest.layout, self._layout)
        return manifest

    def _newest(self) -> int:
        for partial in self.folder.glob("step-*.tmp"):
            _log.warning("checkpoint %s passed over: it was never finished", partial.name)
        found = sorted(complete(self.folder), reverse=True)
        for folder in found:
            try:
                return verify(folder).step
            except CheckpointError as error:
                _log.warning("checkpoint %s passed over: %s", folder.name, error)
        return UNUSABLE if found else NONE

    def _clear(self, partial: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("step-*.*"):
            shutil.rmtree(stale)
        partial.mkdir()

    def _agree(self, pending: Pending) -> None:
        """Let all ranks tell how far they are: commit, fail, or go on, all of them alike."""
        writer = pending.writer
        failure = writer.failure
        written, failed = self._ranks.sum([int(writer.done), int(failure is not None)])
        if failed:
            self._pending = None
            raise failure or CheckpointError(f"{failed} other rank(s) could not write {pending.partial}; they say why")
        if written == self._ranks.mesh.world:
            self._pending = None
            files = self._gather(writer)
            signature = msgspec.to_builtins(self._signature)
            manifest = Manifest(pending.step, pending.cursor, self._layout, signature, files, content=pending.content)
            self._on_main(pending.partial, lambda: self._commit(pending.partial, manifest))
            metrics.CHECKPOINT_WRITE_SECONDS.observe(writer.seconds)

    def _gather(self, writer: Writer) -> dict[str, FileEntry]:
        """What every rank has written, on every rank."""
        assert writer.entry is not None
        world, rank = self._ranks.mesh.world, self._ranks.rank
        mine = [0] * (2 * world)
        mine[2 * rank : 2 * rank + 2] = writer.entry.size_bytes, _signed(int(writer.entry.xxh3, 16))
        found = self._ranks.sum(mine)
        return {shard_name(r): FileEntry(found[2 * r], f"{found[2 * r + 1] % 2**64:016x}") for r in range(world)}

    def _on_main(self, path: Path, act: Callable[[], None]) -> None:
        """Let the main rank act on the folder; where it cannot, all ranks fail."""
        failure: CheckpointError | None = None
        try:
            if self._ranks.is_main:
                act()
        except OSError as error:
            failure = unwritable(path, error)
        if self._ranks.any(failure is not None):
            raise failure or CheckpointError(f"rank 0 could not write {path}; it says why")

    def _commit(self, partial: Path, manifest: Manifest) -> None:
        write_synced(partial / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest)))
        sync_folder(partial)
        final = partial.with_suffix("")
        if final.exists():
            remove(final)
        partial.rename(final)
        sync_folder(self.folder)
        write_synced(self.folder / "latest.tmp", final.name.encode())
        (self.folder / "latest.tmp").replace(self.folder / "latest")
        sync_folder(self.folder)
        for old in superseded(self.folder, final, self._keep):
            remove(old)


def superseded(folder: Path, newest: Path, keep: int) -> list[Path]:
    """What gives way to `newest`, the one just committed; newer ones, which the run passed over, count for nothing."""
    return sorted(path for path in complete(folder) if path <= newest)[:-keep]


def random_state(ranks: Ranks) -> dict[str, Entry]:
    """torch's generators, which are all that this trainer may draw from; nothing does after the weights are made."""
    state = {"cpu": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(ranks.device)
    return {f"random/{kind}/{ranks.rank}": Entry(tensor, None) for kind, tensor in state.items()}


def load_random_state(ranks: Ranks, source: Source) -> None:
    """Continue this rank's generators where they were; a GPU's starts anew where the checkpoint was made on a CPU."""
    torch.set_rng_state(source.plain(f"random/cpu/{ranks.rank}"))
    if ranks.device.type == "cuda" and source.has(f"random/cuda/{ranks.rank}"):
        torch.cuda.set_rng_state(source.plain(f"random/cuda/{ranks.rank}"), ranks.device)


def remove(folder: Path) -> None:
    """Delete a checkpoint; a kill meanwhile leaves no part of it under its name."""
    doomed = folder.with_suffix(".old")
    folder.rename(doomed)
    shutil.rmtree(doomed)


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


def shard_name(rank: int) -> str:
    """File name of a rank's share."""
    return f"state-{rank:05d}.safetensors"


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value
