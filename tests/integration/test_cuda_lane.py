"""Laws of the cuda lane, with host memory where device memory would be: all else, sockets and plan too, is real."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from shared.batch import PIXELS, Cursor
from shared.errors import ProtocolError, SlotError
from shared.sections import RunConfig
from shared.wire import Lend, Returned, Welcome
from tests.support.clients import eventually
from tests.support.daemons import make_run, serving
from tests.support.host_gpu import UUID, HostAllocator, HostGpu
from tests.support.inline_daemon import InlinePool, inline_daemon
from tests.support.reader import RawReader
from trainer.batches import Batch
from trainer.client import LoaderClient
from trainer.preprocess import Preprocessor, Tensors

SEEN = tuple[Cursor, str, tuple[int, ...], dict[str, bytes]]
STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return make_run(tmp_path_factory.mktemp("lane"))[1]


@pytest.fixture
def gpu() -> HostGpu:
    return HostGpu()


@pytest.fixture
def allocator(gpu: HostGpu) -> HostAllocator:
    return HostAllocator(gpu)


@pytest.fixture
def pool(config: RunConfig, gpu: HostGpu) -> Iterator[InlinePool]:
    with inline_daemon(config, gpu) as pool:
        yield pool


def client_of(config: RunConfig, allocator: HostAllocator | None = None, **options: Any) -> LoaderClient:
    lane: Any = "cuda" if allocator else "slots"
    options = {"steps": STEPS, "wait_s": 60, "verify": True, "lane": lane, "allocator": allocator, **options}
    return LoaderClient(config.loader.endpoint, data=config.data, **options)


def look(batch: Batch) -> SEEN:
    fields = {name: tensor.numpy().tobytes() for name, tensor in batch.fields.items()}
    return batch.cursor, batch.batch_id, batch.sample_ids, fields


def poison_on_release(client: LoaderClient) -> None:
    """Whoever reads a part after its release reads nonsense."""
    tell = client._leases._give_back

    def spoil(batch: Batch, session: object) -> None:
        if batch.pixels is not None:
            batch.pixels.fill_(0xFF)
        tell(batch, session)

    client._leases._give_back = spoil


def test_both_lanes_give_the_same_fields(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    with client_of(config) as client:
        slots = [look(batch) for batch in client]
    with client_of(config, allocator) as client:
        poison_on_release(client)
        found, there = [], 0
        for batch in client:
            found.append(look(batch))
            there += batch.pixels is not None
            assert allocator.holds(batch.fields[PIXELS]) == (batch.pixels is not None)
    assert found == slots
    assert there > len(found) / 4  # of 48 samples in 4 modality sets, about half of the batches have pictures
    assert not allocator.live


def test_what_is_verified_has_the_checksum_of_the_slots_lane_and_what_is_not_covers_all_but_pixels(
    config: RunConfig, pool: InlinePool, allocator: HostAllocator
):
    sums = {}
    for name, options in {"slots": {}, "verified": {"allocator": allocator}}.items():
        with client_of(config, **options) as client:  # type: ignore[arg-type]
            sums[name] = [batch.checksum for batch in client]
    with client_of(config, allocator, verify=False) as client:
        differ = 0
        for batch, whole in zip(client, sums["slots"], strict=True):
            batch.check_payload()
            assert (batch.checksum == whole) == (batch.pixels is None)
            if batch.pixels is not None:
                batch.pixels[0] ^= 1
                batch.check_payload()
                batch.payload[0] ^= 1
                with pytest.raises(SlotError, match="checksum"):
                    batch.check_payload()
                differ += 1
    assert sums["verified"] == sums["slots"]
    assert differ


def test_pixels_that_changed_in_device_memory_are_found_when_asked_for(
    config: RunConfig, pool: InlinePool, allocator: HostAllocator
):
    with client_of(config, allocator, verify=True) as client:
        batch = next(batch for batch in client if batch.pixels is not None)
        assert batch.pixels is not None
        batch.pixels[-1] ^= 1
        with pytest.raises(SlotError, match="checksum"):
            batch.check_payload()


def test_preprocessing_takes_pixels_from_where_they_lie(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    def tensors(allocator: HostAllocator | None) -> list[Tensors]:
        with client_of(config, allocator) as client:
            poison_on_release(client)
            preprocess = Preprocessor(config.data, config.model, "cpu")
            return [batch.tensors for batch in preprocess.prefetch(client)]

    for one, other in zip(tensors(None), tensors(allocator), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_memory_is_freed_only_when_no_worker_maps_it(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    """`HostAllocation.free` holds that nobody has it open."""
    for _ in range(3):
        with client_of(config, allocator, steps=None) as client:
            next(batch for batch in client if batch.pixels is not None)
            assert len(allocator.live) == 1
        assert not allocator.live
    assert not +allocator.gpu.opened


def test_memory_that_a_daemon_does_not_give_back_is_not_freed(
    config: RunConfig, pool: InlinePool, allocator: HostAllocator
):
    with client_of(config, allocator) as client:
        next(batch for batch in client if batch.pixels is not None)
        pool.held = True
    assert len(allocator.live) == 1


def test_a_batch_held_through_a_lost_session_stays_whole(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    with client_of(config, allocator, credits=3) as client:
        held = next(batch for batch in client if batch.pixels is not None).keep()
        assert held.pixels is not None
        before = held.pixels.clone()
        client._session.lose("a test wants it")
        there = sum(next(client).pixels is not None for _ in range(12))
        assert there
        assert torch.equal(held.pixels, before)
        assert len(allocator.live) == 2
        held.released = True  # its slot was given to others with the session; only the part was ours to keep
        held.attachment.give_back()
        client._session.lose("and again")
        next(client)
        assert len(allocator.live) == 2
    del held


def test_a_part_waits_for_the_task_of_a_session_that_is_over(
    config: RunConfig, pool: InlinePool, allocator: HostAllocator
):
    """Its late pixels must not land under a batch of the next session, which lends the same memory."""
    with client_of(config) as client:
        slots = [look(batch) for batch in client]
    ahead = config.loader.slots_per_stream
    with client_of(config, allocator) as client:
        first = [look(next(client)) for _ in range(3)]
        eventually(lambda: client.poll(0.05) and pool.last == slots[2 + ahead - 1][2])  # one held, all slots filled
        pool.held = pool.newest_first = True
        first += [look(next(client)) for _ in range(ahead - 1)]
        client._previous.release()  # type: ignore[union-attr]
        eventually(lambda: client.poll(0.05) or len(pool.tasks) == ahead)
        assert any(task.target for task in pool.tasks)
        client._session.lose("a test wants it")
        eventually(lambda: client.poll(0.01) or client._session.opened == 2)
        pool.held = False
        eventually(lambda: client.poll(0.01) and not pool.tasks)
        assert first + [look(batch) for batch in client] == slots
        assert len(allocator.live) == 1


def test_memory_that_fails_sends_pixels_to_slots(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    with client_of(config) as client:
        slots = [look(batch) for batch in client]
    with client_of(config, allocator) as client:
        found = []
        for number, batch in enumerate(client):
            found.append(look(batch))
            allocator.gpu.broken = number >= 8
            last = batch.pixels
    assert found == slots
    assert last is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "GPU-of-another"}, f"the daemon decodes on {UUID}, and this reader is on GPU-of-another"),
        ({"readers": 2}, "2 readers share the stream"),
        ({"lane": "slots"}, ""),
    ],
)
def test_the_lane_is_for_one_reader_on_the_gpu_that_decodes(
    config: RunConfig, pool: InlinePool, changes: dict[str, Any], why: str
):
    with RawReader(config, lane="cuda") as reader:
        reader.send(reader.hello(**{"device": UUID, **changes}))
        welcome = reader.expect(Welcome)
        assert (welcome.device_parts, welcome.device_refusal) == (0, why)
        assert welcome.segment


def test_a_daemon_on_a_cpu_serves_the_lane_by_slots(tmp_path: Path, allocator: HostAllocator):
    path, config = make_run(tmp_path)
    with serving(path), client_of(config, allocator) as client:
        assert all(batch.pixels is None for batch in client)
    assert not allocator.live


def test_a_reader_without_room_goes_on_by_slots(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    allocator.full = True
    with client_of(config, allocator) as client:
        assert all(batch.pixels is None for batch in client)


@pytest.mark.parametrize(
    ("lent", "text"),
    [
        (Lend(bytes(64), 5, 1 << 20), "5 parts of device memory were lent where 4 may be"),
        (Lend(bytes(64), 0, 1 << 20), "0 parts"),
        (Lend(bytes(64), 4, 64), "parts of 64 bytes were lent"),
        (Lend(bytes(9), 4, 1 << 20), "by a handle of 9"),
    ],
)
def test_memory_of_another_form_is_refused(config: RunConfig, pool: InlinePool, lent: Lend, text: str):
    with RawReader(config, lane="cuda") as reader:
        reader.send(reader.hello(device=UUID))
        assert reader.expect(Welcome).device_parts == config.loader.slots_per_stream
        reader.send(lent)
        failure: Any = reader.next()
        assert (failure.code, failure.retryable) == ("lend", False)
        assert text in failure.text


def test_memory_is_lent_once(config: RunConfig, pool: InlinePool):
    with RawReader(config, lane="cuda") as reader:
        reader.send(reader.hello(device=UUID))
        reader.expect(Welcome)
        reader.send(Lend(bytes(64), 4, 1 << 20))
        reader.send(Lend(b"\1" * 64, 4, 1 << 20))
        failure: Any = reader.next()
        assert failure.code == "lend" and "twice" in failure.text
        reader.bye()
        assert reader.expect(Returned).handle == bytes(64)


def test_a_header_cannot_name_memory_that_was_not_lent(config: RunConfig, pool: InlinePool, allocator: HostAllocator):
    with client_of(config, allocator) as client:
        session = client._session
        header = next(batch for batch in client if batch.pixels is not None).header
        for part in (-2, 4):
            changed = msgspec.structs.replace(header, cursor=session._expected, after=Cursor(9), device_part=part)
            with pytest.raises(ProtocolError, match="device memory, of which 4 parts are lent"):
                session._check_header(changed, session.granted)  # type: ignore[arg-type]
