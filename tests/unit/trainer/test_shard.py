"""Pieces in, whole tensors out: whatever cut them up, and whatever part is asked for."""

import itertools
import json
import random
import struct
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch import Tensor

from shared.errors import CheckpointError
from trainer.saving import Writer
from trainer.shard import Box, Entry, Image, Piece, Room, image_of, write_image
from trainer.source import Source

WHOLE = torch.arange(6 * 4 * 5, dtype=torch.float32).view(6, 4, 5)


def boxes(*cuts: int) -> list[Box]:
    """The whole tensor cut into so many equal blocks along each dimension."""
    sizes = tuple(size // cut for size, cut in zip(WHOLE.shape, cuts, strict=True))
    places = itertools.product(*(range(cut) for cut in cuts))
    return [Box((6, 4, 5), tuple(at * size for at, size in zip(place, sizes, strict=True)), sizes) for place in places]


def flat(box: Box) -> Tensor:
    return WHOLE[box.slices].reshape(-1)


def write(folder: Path, shards: list[dict[str, Entry]]) -> Path:
    for number, entries in enumerate(shards):
        write_image(folder / f"state-{number:05d}.safetensors", image_of(entries))
    return folder


def cut_up(folder: Path, cuts: tuple[int, int, int], seed: int) -> Path:
    """Each block in pieces of random length, each piece in a file of its own, the files in no order."""
    draw, pieces = random.Random(seed), []
    for box in boxes(*cuts):
        marks = sorted({0, box.count, *(draw.randrange(box.count) for _ in range(3))})
        pieces += [Piece(box, low, high - low) for low, high in itertools.pairwise(marks)]
    draw.shuffle(pieces)
    spans = [Entry(flat(piece.box)[piece.start : piece.start + piece.count], piece) for piece in pieces]
    return write(folder, [{"weight/w": entry} for entry in spans])


CUTS = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (3, 2, 5)]


@pytest.mark.parametrize(("saved", "asked"), [*itertools.product(CUTS, CUTS)])
def test_any_part_can_be_read_whatever_cut_it(
    tmp_path: Path, saved: tuple[int, int, int], asked: tuple[int, int, int]
) -> None:
    source = Source(cut_up(tmp_path, saved, seed=1))
    assert torch.equal(source.whole("weight/w"), WHOLE)
    for box in boxes(*asked):
        for low, high in ((0, box.count), (1, box.count), (0, 1), (box.count // 2, box.count // 2 + 1)):
            assert torch.equal(source.read("weight/w", box, low, high - low), flat(box)[low:high])


def test_a_file_is_safetensors_and_its_hash_is_right(tmp_path: Path) -> None:
    box = Box((3,), (0,), (3,))
    tensors = {
        "a": torch.tensor([1, 2, 3], dtype=torch.uint8),
        "b": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "c": torch.tensor([7.0, 8.0, 9.0]),
        "d": torch.empty(0),
    }
    image = image_of({name: Entry(tensor, Piece(box, 0, 3)) for name, tensor in tensors.items()})
    entry = write_image(tmp_path / "x.safetensors", image)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    data = (tmp_path / "x.safetensors").read_bytes()
    assert (entry.size_bytes, entry.xxh3) == (len(data), xxhash.xxh3_64_hexdigest(data))


def test_every_tensor_lies_aligned_for_its_type(tmp_path: Path) -> None:
    odd = {"a": Entry(torch.ones(3, dtype=torch.uint8), None), "z": Entry(torch.ones(1), None)}
    data = b"".join(image_of(odd).chunks())
    size = struct.unpack("<Q", data[:8])[0]
    assert size % 8 == 0
    assert json.loads(data[8 : 8 + size])["z"]["data_offsets"] == [0, 4]


def test_a_copy_is_the_file_as_it_was(tmp_path: Path) -> None:
    tensors = [torch.arange(5.0), torch.arange(3, dtype=torch.uint8)]
    entries = {str(i): Entry(tensor, None) for i, tensor in enumerate(tensors)}
    image, room = image_of(entries), Room(torch.device("cpu"))
    for _ in range(2):
        before = b"".join(image.chunks())
        copied = room.copy(image)
        for tensor in tensors:
            tensor.add_(1)
        assert b"".join(copied.chunks()) == before != b"".join(image.chunks())


WHOLE_BOX = Box((6,), (0,), (6,))
BROKEN = {
    "gap": [Piece(WHOLE_BOX, 0, 2), Piece(WHOLE_BOX, 3, 3)],
    "overlap": [Piece(WHOLE_BOX, 0, 4), Piece(WHOLE_BOX, 3, 3)],
    "short": [Piece(WHOLE_BOX, 0, 5)],
    "a missing block": [Piece(Box((6,), (0,), (3,)), 0, 3)],
    "another age": [Piece(WHOLE_BOX, 0, 3, updates=1), Piece(WHOLE_BOX, 3, 3, updates=2)],
}


@pytest.mark.parametrize("pieces", BROKEN.values(), ids=BROKEN.keys())
def test_pieces_that_do_not_make_up_a_whole_are_refused(tmp_path: Path, pieces: list[Piece]) -> None:
    write(tmp_path, [{"weight/w": Entry(torch.zeros(piece.count), piece)} for piece in pieces])
    with pytest.raises(
        CheckpointError, match=r"weight/w (is not whole: its pieces have gaps or overlap|has pieces of)"
    ):
        Source(tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    source = Source(cut_up(tmp_path, (1, 1, 1), seed=2))
    box = Box((6, 4, 6), (0, 0, 0), (6, 4, 6))
    with pytest.raises(CheckpointError, match="has no exp_avg/w"):
        source.read("exp_avg/w", boxes(1, 1, 1)[0], 0, 1)
    with pytest.raises(CheckpointError, match=r"weight/w has shape \[6, 4, 5\], the model's is \[6, 4, 6\]"):
        source.read("weight/w", box, 0, 1)
    with pytest.raises(CheckpointError, match="has no random/cpu/0"):
        source.plain("random/cpu/0")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "state").symlink_to("/dev/full")
    writer = Writer(tmp_path / "state", Image(b"x" * 8, [torch.zeros(1 << 16)]))
    writer.run()
    assert not writer.done
    text = f"{tmp_path}/state cannot be written (No space left on device); make room there or lower train.keep"
    assert str(writer.failure).startswith(text)
