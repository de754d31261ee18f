"""Laws of pictures decoded straight into their rows of the slot."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dataloader_svc.fill import Filler, views
from dataloader_svc.pool import KEPT_MEMORY, _around
from dataloader_svc.sources import Waiting, nothing
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Task
from shared.batch import Group, groups
from tests.support.daemons import make_run_file
from tests.support.filling import POISON, Shop, rotten_png
from tests.support.media import photo, write_tar

FORMS = ("JPEG", "JPEG", "JPEG", "PNG", "WEBP")
CUT, ROTTEN, KILLER = 3, 7, 8  # the first was refused when it was indexed: it has no room that a spare would fit in
GOOD = [i for i in range(16) if i not in (CUT, ROTTEN, KILLER)]


def member(number: int) -> bytes:
    """Pictures larger and smaller than a bucket, in every format and orientation; two of them bad."""
    if number == ROTTEN:
        return rotten_png()
    side = (40, 150, 700)[number % 3]
    whole = photo(side, side * 3 // 4, number, FORMS[number % 5], orientation=1 + number % 8)
    return whole[: len(whole) // 2] if number == CUT else whole


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    folder: Path = tmp_path_factory.mktemp("rows")
    (folder / "data").mkdir()
    members = [(f"k{i:02d}.{ext}", data) for i in range(16) for ext, data in (("jpg", member(i)), ("txt", b"words"))]
    write_tar(folder / "data" / "a.tar", members)
    shop = Shop(make_run_file(folder)[1])
    yield shop
    shop.close()


def group_of(shop: Shop) -> Group:
    return max((g for g in groups(shop.config.data) if g.bucket and not g.clip_samples), key=lambda g: g.samples)


def alone(shop: Shop, number: int) -> NDArray[Any]:
    """The picture in an array of its own."""
    bucket = group_of(shop).bucket
    assert bucket
    (pixels,) = shop.decoder.decode_images([member(number)], bucket)
    assert isinstance(pixels, np.ndarray), pixels
    return pixels


@pytest.mark.parametrize("careful", [False, True])
@pytest.mark.parametrize(
    ("planned", "spares", "kept"),
    [
        ((0, 1, 2), (), (0, 1, 2)),
        ((CUT, 0, ROTTEN, 1, KILLER, 2), (), (0, 1, 2)),
        ((CUT, 0, ROTTEN, 1, KILLER, 2), (4, 5, 6), (0, 4, 1, 5, 2)),
        ((0, ROTTEN, 1, CUT, 2), (KILLER, 4), (0, 4, 1, 2)),
        ((0, ROTTEN, 1), (CUT, KILLER, 9), (0, 9, 1)),
        ((ROTTEN, KILLER, CUT), (), ()),
        ((ROTTEN, ROTTEN, 0, 0), (1,), (1, 0, 0)),
    ],
)
def test_each_row_holds_what_its_sample_decodes_to_alone_whatever_failed_beside_it(
    shop: Shop, planned: tuple[int, ...], spares: tuple[int, ...], kept: tuple[int, ...], careful: bool
) -> None:
    group = group_of(shop)
    assert group.samples >= len(planned)
    task = Task(1, 0, group.id, planned, spares, skip=(KILLER,), careful=careful)
    payload, done = shop.fill(task)
    rows = views(shop.specs[group.id], payload.copy())["pixels_NHWC"]
    assert done.sample_ids == kept
    for row, number in zip(rows, kept, strict=False):
        assert np.array_equal(row, alone(shop, number))
    assert not rows[len(kept) :].any()
    assert np.array_equal(shop.fill(task, poison=POISON ^ 0xFF)[0], payload)


def test_a_decoder_writes_into_the_places_it_is_given(shop: Shop) -> None:
    bucket = group_of(shop).bucket
    assert bucket
    places = list(np.full((len(GOOD), bucket.height, bucket.width, 3), POISON, np.uint8))
    outcomes = shop.decoder.decode_images([member(i) for i in GOOD], bucket, places)
    for number, outcome, place in zip(GOOD, outcomes, places, strict=True):
        assert outcome is place
        assert np.array_equal(place, alone(shop, number))


def test_workers_keep_freed_memory_unless_the_environment_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    name, usual = next(iter(KEPT_MEMORY.items()))
    monkeypatch.delenv(name, raising=False)
    assert _around({})[name] == usual
    monkeypatch.setenv(name, "4096")
    assert _around({})[name] == "4096"


class Told(Reader):
    """A reader that keeps what it was told to expect and asked for, and by which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[tuple[int, int]] = []
        self.read_first: list[bool] = []
        self.threads: set[int] = set()

    def expect(self, path: str, offset: int, size: int) -> None:
        self.expected.append((offset, offset + size))
        super().expect(path, offset, size)

    def read(self, path: str, offset: int, size: int, waiting: Waiting = nothing) -> bytes:
        self.read_first.append(not any(start <= offset and offset + size <= end for start, end in self.expected))
        self.threads.add(threading.get_ident())
        return super().read(path, offset, size, waiting)


def test_local_storage_is_told_of_all_pictures_and_asked_by_the_filling_thread(shop: Shop) -> None:
    """Also with several threads: what is read from memory, they would only hand the interpreter lock around for."""
    reader = Told()
    filler = Filler(shop.config.data, shop.index, reader, shop.decoder, threads=4)
    payload = np.full(shop.specs[group_of(shop).id].size_bytes, POISON, np.uint8)
    filler.fill(Task(1, 0, group_of(shop).id, (0, 1, 2, 4), ()), payload, print)
    filler.close()
    assert len(reader.expected) == 4
    assert reader.read_first == [False] * 8
    assert reader.threads == {threading.get_ident()}
