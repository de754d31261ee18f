"""What a checkpoint folder must hold: the manifest, its signature, and how both are checked. No DeepSpeed here."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from shared.batch import Cursor
from shared.config import digest
from shared.errors import CheckpointError
from shared.sections import RunConfig

CHUNK_BYTES = 1 << 22
MANIFEST = "manifest.json"


class Signature(msgspec.Struct, frozen=True):
    """What must be the same when a checkpoint is loaded: digests, and the layout in words."""

    layout: str
    data: str
    model: str
    training: str


class FileEntry(msgspec.Struct, frozen=True):
    """Size and 64-bit xxh3 of a file."""

    size_bytes: int
    xxh3: str


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint holds. `step` steps are done; `cursor` is the first batch not yet consumed."""

    step: int
    cursor: Cursor
    signature: Signature
    files: dict[str, FileEntry]


REMEDIES = {
    "layout": "resume with the mesh and train.zero_stage it was saved with, or start anew in another train.run_dir",
    "data": "its cursor is a place in other data: restore the data section, or start anew in another train.run_dir",
    "model": "restore the model section, or start anew in another train.run_dir",
    "training": "restore train.precision and train.optim.name, or start anew in another train.run_dir",
}


def signature_of(config: RunConfig) -> Signature:
    """The signature of a run file's checkpoints."""
    mesh, train = config.mesh, config.train
    expert = f", expert {mesh.expert}" if mesh.expert > 1 else ""
    layout = f"pipe {mesh.pipe}, data {mesh.data}, tensor {mesh.tensor}{expert}, ZeRO {train.zero_stage}"
    model = hashlib.sha256(msgspec.json.encode(config.model)).hexdigest()[:16]
    return Signature(layout, digest(config.data), model, f"{train.precision} {train.optim.name}")


def check_signature(name: str, saved: Signature, asked: Signature) -> None:
    """Hold that a checkpoint fits the run.

    Raises:
        CheckpointError: some part differs; the text gives both values and the remedy.
    """
    for part, remedy in REMEDIES.items():
        was, now = getattr(saved, part), getattr(asked, part)
        if was != now:
            raise CheckpointError(f"checkpoint {name} was saved with {part} ({was}), asked is ({now}); {remedy}")


def verify(folder: Path) -> Manifest:
    """Recompute every hash of a checkpoint and return its manifest.

    Raises:
        CheckpointError: a file is missing, too many, or not as it was saved.
    """
    manifest = read_manifest(folder)
    present = {str(path.relative_to(folder)) for path in payload(folder)}
    if odd := present ^ manifest.files.keys():
        raise CheckpointError(f"{folder}: files and manifest differ by {', '.join(sorted(odd))}")
    for name, entry in manifest.files.items():
        path = folder / name
        if path.stat().st_size != entry.size_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {entry.size_bytes} were saved")
        if f"{hash_file(path):016x}" != entry.xxh3:
            raise CheckpointError(f"{path} is damaged: its xxh3 is not {entry.xxh3}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none that can be read.
    """
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest ({error})") from None


def complete(folder: Path) -> Iterator[Path]:
    """Folders that were committed, in no order."""
    return (path for path in folder.glob("step-*") if path.is_dir() and path.suffix != ".tmp")


def payload(folder: Path) -> Iterator[Path]:
    """Every file of a checkpoint but its manifest, in one order on all ranks."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def hash_file(path: Path, sync: bool = False) -> int:
    """xxh3-64 of a file's bytes, read in pieces; with `sync` they are on the disk when this returns."""
    summed = xxhash.xxh3_64()
    with path.open("rb+" if sync else "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            summed.update(chunk)
        if sync:
            os.fsync(file.fileno())
    return summed.intdigest()


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps; names sort as steps do."""
    return f"step-{step:08d}"
