"""Laws of a worker that writes into lent memory, with host memory in the GPU's place and real pictures."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler, views
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.lent import LentParts
from dataloader_svc.shards import expand
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Target, Task
from shared.batch import PIXELS, batch_spec, groups
from shared.errors import DeviceError
from tests.support.daemons import make_run
from tests.support.host_gpu import HostAllocator, HostGpu

OFFSET, STALE, SAMPLES = 4096, 0x77, 3


class Bench:
    """A filler with lent memory of host bytes, and SAMPLES pictures of its data."""

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
        rows = [self.index.row(i) for i in range(len(self.index))]
        self.ids = tuple(i for i, row in enumerate(rows) if row.image and not row.audio)[:SAMPLES]
        self.spec = self.specs[next(g.id for g in groups(config.data) if not g.clip_samples and g.images > SAMPLES)]

    def fill(self, target: Target | None, **changes: Any) -> tuple[Any, Any]:
        payload = np.full(self.spec.size_bytes, STALE, np.uint8)
        task = Task(1, 0, self.spec.group, self.ids, (), target=target)
        task = msgspec.structs.replace(task, **changes)
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


@pytest.mark.parametrize("skipped", [(), (0,), (1, 2)], ids=str)
def test_the_target_holds_what_the_slot_would(bench: Bench, skipped: tuple[int, ...]):
    """Also where samples fall out: those behind them move up, within the device."""
    skip = tuple(bench.ids[place] for place in skipped)
    plain, payload = bench.fill(None, skip=skip)
    done, _ = bench.fill(bench.target(), skip=skip)
    assert len(done.sample_ids) == len(bench.ids) - len(skip)
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
