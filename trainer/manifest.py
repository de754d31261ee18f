"""What a checkpoint folder must hold: the manifest, its signature, and how both are checked. No torch here.

A signature keeps sections of the run file, not digests: a key that this version added has its default in an older
checkpoint, and a real difference is told by key and values.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from shared.batch import Cursor
from shared.config import portable
from shared.errors import CheckpointError
from shared.model_sections import ModelSection
from shared.section import Section
from shared.sections import DataSection, OptimSection, RunConfig

CHUNK_BYTES = 1 << 22
MANIFEST = "manifest.json"
FORMAT = 2


class Optimizer(Section, frozen=True):
    """What decides which tensors an optimizer keeps."""

    name: str = OptimSection().name
    momentum: float = OptimSection().momentum


class Training(Section, frozen=True):
    """Keys of the train section that must stay."""

    precision: str
    optim: Optimizer
    freeze: tuple[str, ...] = ()


class Signature(Section, frozen=True):
    """What must be the same when a checkpoint is loaded. `layout` may differ."""

    data: DataSection
    model: ModelSection
    train: Training


class FileEntry(msgspec.Struct, frozen=True):
    """Size and 64-bit xxh3 of a file."""

    size_bytes: int
    xxh3: str


class Versioned(msgspec.Struct, frozen=True):
    """What every manifest has, of whatever version; the first had no number."""

    format: int = 1


class Manifest(msgspec.Struct, frozen=True):
    """What a complete checkpoint holds. `step` steps are done; `cursor` is the first batch not yet consumed.

    `layout` says in words what saved it; `signature` is a `Signature` of the version that did. `content` tells the
    shards that the cursor is a place in from others ("" in older checkpoints).
    """

    step: int
    cursor: Cursor
    layout: str
    signature: dict[str, Any]
    files: dict[str, FileEntry]
    format: int = FORMAT
    content: str = ""


REMEDIES = {
    "data": "its cursor is a place in other data: restore the data section, or start anew in another train.run_dir",
    "model": "restore the model section, or start anew in another train.run_dir",
    "train": "restore these keys, or start anew in another train.run_dir",
}


def layout_of(config: RunConfig) -> str:
    """The layout of a run file, in words."""
    mesh, train = config.mesh, config.train
    expert = f", expert {mesh.expert}" if mesh.expert > 1 else ""
    return f"pipe {mesh.pipe}, data {mesh.data}, tensor {mesh.tensor}{expert}, ZeRO {train.zero_stage}"


def signature_of(config: RunConfig) -> Signature:
    """The signature of a run file's checkpoints. Steps may be skipped or not: a cursor stays the same place."""
    optim = config.train.optim
    training = Training(
        config.train.precision, Optimizer(optim.name, optim.momentum), tuple(sorted(config.train.freeze))
    )
    data = msgspec.structs.replace(config.data, skip_steps=())
    return Signature(portable(data), config.model, training)


def check_signature(
    name: str, saved: dict[str, Any], asked: Signature, parts: Sequence[str] = ("data", "model", "train")
) -> None:
    """Hold that these parts of a checkpoint fit the run.

    Raises:
        CheckpointError: some part differs; the text gives every key that does, both values and the remedy.
    """
    for part in parts:
        was = _keys(part, _with_defaults(name, part, saved, asked))
        now = _keys(part, msgspec.to_builtins(getattr(asked, part)))
        differ = [f"{key} ({was.get(key)}), asked is ({now.get(key)})" for key in now if was.get(key) != now[key]]
        if differ:
            raise CheckpointError(f"checkpoint {name} was saved with {'; '.join(differ)}; {REMEDIES[part]}")


def verify(folder: Path) -> Manifest:
    """Recompute every hash of a checkpoint and return its manifest.

    Raises:
        CheckpointError: a file is missing, too many, not as it was saved, or cannot be read.
    """
    manifest = read_manifest(folder)
    present = {str(path.relative_to(folder)) for path in payload(folder)}
    if odd := present ^ manifest.files.keys():
        raise CheckpointError(f"{folder}: files and manifest differ by {', '.join(sorted(odd))}")
    for name, entry in manifest.files.items():
        path = folder / name
        if path.stat().st_size != entry.size_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, {entry.size_bytes} were saved")
        try:
            found = hash_file(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror})") from None
        if found != entry.xxh3:
            raise CheckpointError(f"{path} is damaged: its xxh3 is not {entry.xxh3}")
    return manifest


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none that can be read, or another version's.
    """
    try:
        data = (folder / MANIFEST).read_bytes()
        if (found := msgspec.json.decode(data, type=Versioned).format) != FORMAT:
            rule = f"is of format {found}, this version reads {FORMAT}: load it with the version that saved it"
            raise CheckpointError(f"{folder / MANIFEST} {rule}")
        return msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{folder / MANIFEST} is not a manifest ({error})") from None


def complete(folder: Path) -> Iterator[Path]:
    """Folders that were committed, in no order."""
    return (path for path in folder.glob("step-*") if path.is_dir() and not path.suffix)


def payload(folder: Path) -> Iterator[Path]:
    """Every file of a checkpoint but its manifest."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != MANIFEST)


def hash_file(path: Path) -> str:
    """xxh3-64 of a file's bytes, read in pieces, in hex."""
    summed = xxhash.xxh3_64()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            summed.update(chunk)
    return summed.hexdigest()


def step_name(step: int) -> str:
    """Folder name of the checkpoint after `step` steps; names sort as steps do."""
    return f"step-{step:08d}"


def _with_defaults(name: str, part: str, saved: dict[str, Any], asked: Signature) -> Any:
    """A part as saved, with what this version has added to it."""
    try:
        return msgspec.to_builtins(msgspec.convert(saved.get(part), type(getattr(asked, part))))
    except msgspec.ValidationError as error:
        text = f"checkpoint {name} was saved with a {part} section that this version does not know ({error})"
        raise CheckpointError(f"{text}; load it with the version that saved it") from None


def _keys(path: str, tree: Any) -> dict[str, Any]:
    """Dotted key -> value of every leaf of a tree of sections."""
    if not isinstance(tree, dict):
        return {path: tree}
    return {key: value for name, branch in tree.items() for key, value in _keys(f"{path}.{name}", branch).items()}
