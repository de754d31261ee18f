"""A checkpoint as whole tensors, whatever layout wrote it: each reader asks for the part that it needs."""

from collections import defaultdict
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.sections import RunConfig
from trainer.manifest import check_signature, signature_of, verify
from trainer.models import build
from trainer.shard import PIECES, Box, Piece
from trainer.weights import open_tensors


class Stored(NamedTuple):
    """A piece, and the open file that has it."""

    file: Any
    piece: Piece


class Source:
    """The tensors of a checkpoint's folder by key; `trainer.shard` tells what keys there are.

    Files are mapped into memory, so only what is asked for is read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stored: dict[str, list[Stored]] = defaultdict(list)
        self._plain: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            self._add(open_tensors(path).__enter__())
        for key, stored in self._stored.items():
            stored.sort(key=lambda each: (each.piece.box.offsets, each.piece.start))
            _check_whole(f"{folder.name}: {key}", [each.piece for each in stored])

    def keys(self) -> list[str]:
        """Keys of everything that has a place in the model."""
        return sorted(self._stored)

    def kinds(self, name: str) -> list[str]:
        """What there is of a parameter: `weight`, and the optimizer's moments."""
        return sorted(kind for kind, _, of in (key.partition("/") for key in self._stored) if of == name)

    def updates(self, name: str) -> int | None:
        """How often the optimizer has stepped a parameter; None for an optimizer that does not count."""
        return self._find(f"weight/{name}")[0].piece.updates

    def read(self, key: str, box: Box, start: int, count: int) -> Tensor:
        """Elements `start` .. `start + count` of the flattened box.

        Raises:
            CheckpointError: the checkpoint has no such tensor, or has it in another shape.
        """
        stored = self._find(key)
        if stored[0].piece.box.shape != box.shape:
            shapes = f"{[*stored[0].piece.box.shape]}, the model's is {[*box.shape]}"
            raise CheckpointError(f"{self._folder.name}: {key} has shape {shapes}")
        fitting = [each for each in stored if each.piece.box == box]
        if not fitting:
            return self.whole(key)[box.slices].reshape(-1)[start : start + count]
        return torch.cat([_cut(key, each, start, start + count) for each in fitting])

    def whole(self, key: str) -> Tensor:
        """The whole tensor.

        Raises:
            CheckpointError: there is none of this key.
        """
        stored = self._find(key)
        boxes = {box: [*each] for box, each in groupby(stored, key=lambda each: each.piece.box)}
        flats = {box: torch.cat([each.file.get_tensor(key) for each in parts]) for box, parts in boxes.items()}
        found = torch.empty(stored[0].piece.box.shape, dtype=next(iter(flats.values())).dtype)
        for box, flat in flats.items():
            found[box.slices] = flat.view(box.sizes)
        return found

    def has(self, key: str) -> bool:
        """Whether there is a tensor of this key that has no place in the model."""
        return key in self._plain

    def plain(self, key: str) -> Tensor:
        """A tensor that belongs to one rank and has no place in the model."""
        if not self.has(key):
            raise CheckpointError(f"{self._folder.name} has no {key}")
        found: Tensor = self._plain[key].get_tensor(key)
        return found

    def _find(self, key: str) -> list[Stored]:
        if key not in self._stored:
            raise CheckpointError(f"{self._folder.name} has no {key}")
        return self._stored[key]

    def _add(self, file: Any) -> None:
        text = (file.metadata() or {}).get(PIECES, "{}")
        pieces = msgspec.json.decode(text, type=dict[str, Piece])
        self._plain |= dict.fromkeys(file.keys() - pieces.keys(), file)
        for key, piece in pieces.items():
            self._stored[key].append(Stored(file, piece))


def _cut(key: str, stored: Stored, start: int, stop: int) -> Tensor:
    first = stored.piece.start
    low, high = (min(max(at - first, 0), stored.piece.count) for at in (start, stop))
    found: Tensor = stored.file.get_slice(key)[low:high]
    return found


def _check_whole(key: str, pieces: list[Piece]) -> None:
    """Hold that pieces, in order, make up a whole tensor and agree about it."""
    missing = CheckpointError(f"{key} is not whole: its pieces have gaps or overlap")
    if len({(piece.box.shape, piece.updates) for piece in pieces}) > 1:
        raise CheckpointError(f"{key} has pieces of different shapes or ages")
    counted = 0
    for box, parts in groupby(pieces, key=lambda piece: piece.box):
        at = 0
        for piece in parts:
            if piece.start != at:
                raise missing
            at += piece.count
        if at != box.count:
            raise missing
        counted += at
    if counted != Box(pieces[0].box.shape, (), pieces[0].box.shape).count:
        raise missing


def read_checkpoint(config: RunConfig, folder: Path) -> dict[str, Tensor]:
    """Every weight of the model by name, whole, in fp32: what the optimizer steps wherever something is trained.

    Raises:
        CheckpointError: the checkpoint is damaged, or not of this run file's model.
    """
    check_signature(folder.name, verify(folder).signature, signature_of(config), parts=("model",))
    source = Source(folder)
    return {name: source.whole(f"weight/{name}").float() for name in build.shapes(config)}
