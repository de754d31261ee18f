"""A rank's share of a checkpoint as one safetensors file, and where each of its numbers belongs in the whole model.

Keys are `<kind>/<parameter>`, for example `exp_avg/1.q.weight`; parameters are named as in the whole model, kinds are
`weight` (fp32, or as held where nothing is trained) and the optimizer's names for its moments. Each tensor is flat; a
`Piece` in the file's metadata tells its place, so a file needs no other to be understood, and no layout is written down
anywhere. Keys `random/...` have no piece: they are a rank's own.
"""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

from trainer.manifest import CHUNK_BYTES, FileEntry

PIECES = "pieces"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names (https://huggingface.co/docs/safetensors, "Format")."""


class Box(msgspec.Struct, frozen=True):
    """A block of a whole tensor of `shape`: `sizes` elements from `offsets` on along each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Its elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place, as an index of the whole tensor."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))


class Piece(msgspec.Struct, frozen=True):
    """Elements `start` .. `start + count` of a flattened box. `updates`: steps of an optimizer that counts them."""

    box: Box
    start: int
    count: int
    updates: int | None = None


class Entry(NamedTuple):
    """A flat tensor to save, and its place in the whole model."""

    tensor: Tensor
    piece: Piece | None


class Image(msgspec.Struct, eq=False):
    """A safetensors file that is yet to be written: its header, then the bytes of `tensors` in order."""

    header: bytes
    tensors: list[Tensor]

    @property
    def data_bytes(self) -> int:
        """Size without the header."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def chunks(self) -> Iterator[memoryview]:
        """Everything, in pieces of at most `CHUNK_BYTES`."""
        yield memoryview(self.header)
        for tensor in self.tensors:
            data = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().data
            yield from (data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES))


class Room:
    """CPU memory for one image, kept from save to save; page-locked where the tensors are on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def copy(self, image: Image) -> Image:
        """The image with its tensors as they are now, whatever becomes of them."""
        on_gpu = self._device.type == "cuda"
        if self._bytes.numel() < image.data_bytes:
            self._bytes = torch.empty(image.data_bytes, dtype=torch.uint8, pin_memory=on_gpu)
        at = 0
        for tensor in image.tensors:
            place = self._bytes[at : at + tensor.nbytes].view(tensor.dtype)
            place.copy_(tensor.detach(), non_blocking=on_gpu)
            at += tensor.nbytes
        if on_gpu:
            torch.cuda.current_stream(self._device).synchronize()
        return Image(image.header, [self._bytes[:at]])


def image_of(entries: Mapping[str, Entry]) -> Image:
    """The file of these entries; widest types first, so that each tensor lies aligned."""
    names = sorted(entries, key=lambda name: (-entries[name].tensor.itemsize, name))
    pieces = {name: entry.piece for name, entry in entries.items() if entry.piece}
    table: dict[str, object] = {"__metadata__": {PIECES: msgspec.json.encode(pieces).decode()}}
    at = 0
    for name in names:
        tensor = entries[name].tensor
        place = [at, at + tensor.nbytes]
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": [tensor.numel()], "data_offsets": place}
        at += tensor.nbytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % 8)
    return Image(len(text).to_bytes(8, "little") + text, [entries[name].tensor for name in names])


def write_image(path: Path, image: Image) -> FileEntry:
    """Write the file through to the disk; it is hashed on the way.

    Raises:
        OSError: the system cannot; no file is left then.
    """
    summed, size_bytes = xxhash.xxh3_64(), 0
    try:
        with path.open("wb") as file:
            for chunk in image.chunks():
                file.write(chunk)
                summed.update(chunk)
                size_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return FileEntry(size_bytes, summed.hexdigest())
