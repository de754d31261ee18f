"""Laws of a worker that writes into lent memory, with host memory in the GPU's place and real pictures."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler, views
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.lent import DeviceRow, LentParts
from dataloader_svc.plan import Pack, Planner
from dataloader_svc.shards import expand
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Target, Task
from shared.batch import PIXELS, Cursor, batch_spec, groups
from shared.errors import DeviceError
from tests.support.daemons import make_run
from tests.support.host_gpu import HostAllocator, HostGpu

OFFSET, STALE = 4096, 0x77


class Bench:
    """A filler with lent memory of host bytes, and the fullest pack of pictures of its plan."""

    def __init__(self, folder: Any) -> None:
        _, config = make_run(folder)
        shards = expand(config.data.datasets, "fail")
        build(shards, config.data, None)
        self.index, self.gpu = Index.open(shards, config.data, None), HostGpu()
        self.decoder = Decoder(config.data, config.loader)
        gpu: Any = self.gpu
        self.lent = LentParts(gpu)
        self.filler = Filler(config.data, self.index, Reader(), self.decoder, 2, self.lent)
        self.specs = [batch_spec(group) for group in groups(config.data)]
        self.memory = HostAllocator(self.gpu).allocate(OFFSET + max(spec.size_bytes for spec in self.specs))
        planner = Planner(config.data, self.index)
        packs = [planner.pack(Cursor(0, step, 0), 0, 1) for step in range(planner.steps(0))]
        self.pack: Pack = max(
            packs, key=lambda pack: len(pack.sample_ids) * bool(self.specs[pack.group].pixels.size_bytes)
        )
        self.spec = self.specs[self.pack.group]

    def fill(self, target: Target | None, **changes: Any) -> tuple[Any, Any]:
        payload = np.full(self.spec.size_bytes, STALE, np.uint8)
        task = Task(1, 0, self.pack.group, self.pack.sample_ids, self.pack.spares, target=target, **changes)
        return self.filler.fill(task, payload, print), payload

    def target(self, hashed: bool = False, handle: bytes = b"") -> Target:
        return Target(handle or self.memory.handle, OFFSET, hashed)

    def there(self) -> np.ndarray:
        return self.memory.array[OFFSET : OFFSET + self.spec.pixels.size_bytes]

    def pixels(self, payload: np.ndarray) -> np.ndarray:
        return views(self.spec, payload.copy())[PIXELS].reshape(-1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("lent"))
    yield made
    made.filler.close()
    made.decoder.close()


@pytest.fixture
def bench(made: Bench) -> Bench:
    made.gpu.broken = made.gpu.lost = False
    made.lent.forget(made.memory.handle)
    made.memory.array[:] = HostAllocator.POISON
    return made


@pytest.mark.parametrize("skipped", [0, 1])
def test_the_target_holds_what_the_slot_would(bench: Bench, skipped: int):
    skip = bench.pack.sample_ids[:skipped]
    plain, payload = bench.fill(None, skip=skip)
    done, _ = bench.fill(bench.target(), skip=skip)
    assert done.on_device and not plain.on_device
    assert done.sample_ids == plain.sample_ids
    assert np.array_equal(bench.there(), bench.pixels(payload))
    rest = np.delete(bench.memory.array, np.s_[OFFSET : OFFSET + bench.spec.pixels.size_bytes])
    assert (rest == HostAllocator.POISON).all()


def test_all_but_pixels_is_in_the_slot_and_in_the_checksum(bench: Bench):
    plain, payload = bench.fill(None)
    done, slot = bench.fill(bench.target())
    start, end = bench.spec.pixels.offset, bench.spec.pixels.offset + bench.spec.pixels.size_bytes
    assert np.array_equal(slot[:start], payload[:start]) and np.array_equal(slot[end:], payload[end:])
    again, _ = bench.fill(bench.target())
    assert done.checksum == again.checksum != plain.checksum


def test_a_hashed_target_has_the_checksum_of_the_slot(bench: Bench):
    plain, _ = bench.fill(None)
    done, _ = bench.fill(bench.target(hashed=True))
    assert done.on_device
    assert done.checksum == plain.checksum


def test_memory_that_cannot_be_opened_or_written_leaves_pixels_in_the_slot(bench: Bench):
    plain, payload = bench.fill(None)
    for broken in (False, True):
        bench.gpu.broken = broken
        done, slot = bench.fill(bench.target(handle=b"" if broken else b"\1" * 64))
        assert not done.on_device
        assert done.checksum == plain.checksum and np.array_equal(slot, payload)


def test_a_handle_that_failed_is_not_tried_again_until_it_is_forgotten(bench: Bench):
    bench.gpu.broken = True
    bench.fill(bench.target())
    bench.gpu.broken = False
    assert not bench.fill(bench.target())[0].on_device
    bench.lent.forget(bench.memory.handle)
    assert bench.fill(bench.target())[0].on_device


def test_a_gpu_that_is_lost_ends_the_task(bench: Bench):
    bench.gpu.broken = bench.gpu.lost = True
    with pytest.raises(DeviceError, match="ILLEGAL_ADDRESS"):
        bench.fill(bench.target())


def test_memory_is_mapped_once_and_forgotten(bench: Bench):
    bench.fill(bench.target())
    bench.fill(bench.target())
    address = bench.memory.array.ctypes.data
    assert bench.gpu.opened[address] == 1
    bench.lent.forget(bench.memory.handle)
    bench.lent.forget(bench.memory.handle)
    assert bench.gpu.opened[address] == 0


def test_pictures_on_the_gpu_are_copied_from_there(bench: Bench):
    """Rows of both kinds, in any order; what was decoded on the GPU can also be fetched for the slot."""
    field = bench.spec.pixels
    rows = [np.full(field.shape[1:], value, np.uint8) for value in (1, 2)]
    mixed = [DeviceRow(rows[0].ctypes.data, rows[0]), rows[1]]
    assert bench.lent.write(bench.target(), mixed, field)
    shaped = bench.there().reshape(field.shape)
    assert [int(row.max()) for row in shaped[:3]] == [1, 2, 0] and shaped[0].min() == 1
    assert all(np.array_equal(bench.lent.fetch(a, shaped[0]), b) for a, b in zip(mixed, rows, strict=True))
