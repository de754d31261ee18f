"""Laws of the tcp lane and of reading from several daemons, against daemons of one thread over real sockets."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from shared import wire
from shared.batch import Cursor, groups
from shared.errors import ConfigError, ProtocolError, SlotError
from shared.sections import DataSection
from tests.support.clients import eventually, take
from tests.support.fake_daemon import FakeDaemon, content
from tests.support.ports import free_port
from tests.support.runs import run_config
from trainer.batches import Batch
from trainer.client import LoaderClient

CHAIN = [Cursor(0, step, micro) for step in range(60) for micro in range(2)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSection:
    return run_config(tmp_path_factory.mktemp("run"), "none-{0..1}.tar").data


@pytest.fixture
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def daemon(endpoint: str, tmp_path: Path, data: DataSection) -> Iterator[FakeDaemon]:
    with FakeDaemon(endpoint, tmp_path, data) as running:
        yield running


@pytest.fixture
def pair(tmp_path: Path, data: DataSection) -> Iterator[list[FakeDaemon]]:
    """Two daemons with the same data."""
    first, second = (FakeDaemon(f"ipc://{tmp_path}/{name}.sock", tmp_path, data) for name in "ab")
    with first, second:
        yield [first, second]


def expected(batch: Batch, data: DataSection) -> np.ndarray:
    group = groups(data)[batch.group]
    return content(group, batch.spec, batch.cursor)


def test_frames_carry_the_bytes_of_the_slots(daemon: FakeDaemon, endpoint: str, data: DataSection):
    with LoaderClient(endpoint, lane="tcp", verify=True) as client:
        for place in CHAIN[:12]:
            batch = next(client)
            assert batch.cursor == place
            assert np.array_equal(batch.payload.numpy(), expected(batch, data))
    assert {hello.lane for hello in daemon.got(wire.Hello)} == {"tcp"}


def test_tensors_alias_landing_slots_that_are_locked_once_and_used_again(daemon: FakeDaemon, endpoint: str):
    log: list[tuple[int, int]] = []
    unpinned: list[int] = []

    def register(array: np.ndarray) -> object:
        log.append((array.ctypes.data, array.nbytes))
        return lambda: unpinned.append(array.nbytes)

    with LoaderClient(endpoint, lane="tcp", credits=2, register=register) as client:  # type: ignore[arg-type]
        for _ in range(20):
            batch = next(client)
            for tensor in (t for t in batch.fields.values() if t.numel()):
                assert any(start <= tensor.data_ptr() < start + size for start, size in log)
        kept = batch.keep()
    assert 1 <= len(log) <= 4
    assert len(unpinned) == len(log) - 1
    kept.release()
    assert len(unpinned) == len(log)


def test_a_kept_batch_keeps_its_bytes_and_nothing_of_the_daemons(daemon: FakeDaemon, endpoint: str, data: DataSection):
    with LoaderClient(endpoint, lane="tcp") as client:
        kept = [next(client).keep() for _ in range(6)]
        eventually(lambda: len(daemon.got(wire.Release)) >= 6)
        take(client, 10)
        for batch in kept:
            assert np.array_equal(batch.payload.numpy(), expected(batch, data))
            batch.release()


def test_auto_takes_slots_where_they_can_be_mapped_and_frames_elsewhere(
    daemon: FakeDaemon, endpoint: str, data: DataSection
):
    with LoaderClient(endpoint) as client:
        assert next(client).attachment.segment.path == daemon.pool.segment.path
    daemon.segment_path = "/nonexistent/segment"
    with LoaderClient(endpoint) as client:
        batch = next(client)
        assert batch.attachment.segment.path == ""
        assert np.array_equal(batch.payload.numpy(), expected(batch, data))
    with LoaderClient(endpoint, lane="slots") as client, pytest.raises(SlotError, match="cannot be opened"):
        next(client)


DAMAGE: dict[str, list[bytes | str]] = {
    "missing": [],
    "short": [b"short"],
    "three frames": ["whole", b"x"],
    "empty first": [b"", "whole"],
    "too large": [bytes(1 << 20)],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_batch_that_does_not_come_whole_is_counted_and_asked_for_again(daemon: FakeDaemon, endpoint: str, kind: str):
    frames = [DAMAGE[kind]]

    def spoil(payload: bytes) -> list[bytes]:
        if frames and len(daemon.got(wire.Release)) >= 3:
            return [payload if frame == "whole" else frame for frame in frames.pop()]  # type: ignore[misc]
        return [payload]

    daemon.payload_frames = spoil
    with LoaderClient(endpoint, lane="tcp", verify=True) as client:
        assert take(client, 12) == CHAIN[:12]
        assert (client.junk, client.reconnects) == (1, 1)
    assert not frames


def test_oversize_and_junk_are_ignored_and_counted(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint, lane="tcp") as client:
        take(client, 1)
        daemon.say(b"\xff" * (wire.MAX_MESSAGE_BYTES + 1))
        daemon.say(b"\x80\x04N.")
        eventually(lambda: client.poll() and client.junk == 2)
        assert take(client, 4) == CHAIN[1:5]


def test_a_lost_daemon_is_followed_by_the_next_with_nothing_lost_or_repeated(pair: list[FakeDaemon], data: DataSection):
    with LoaderClient([d.endpoint for d in pair], verify=True) as client:
        got = take(client, 5)
        held = next(client).keep()
        before = held.payload.clone()
        pair[0].kill()
        got += [held.cursor, *take(client, 9)]
        assert got == CHAIN[:15]
        assert torch.equal(held.payload, before)
        held.release()
        assert pair[1].got(wire.Hello)[0].cursor in CHAIN[6:9], (
            "what was queued when the daemon died may be handed over"
        )


def test_data_ranks_begin_with_different_daemons(pair: list[FakeDaemon]):
    for rank in range(2):
        with LoaderClient([d.endpoint for d in pair], data_rank=rank, data_ranks=2) as client:
            client.connect()
    assert [d.got(wire.Hello)[0].data_rank for d in pair] == [0, 1]


def test_a_daemon_that_is_not_there_is_passed_by(pair: list[FakeDaemon], tmp_path: Path):
    with LoaderClient([f"ipc://{tmp_path}/nobody.sock", pair[1].endpoint]) as client:
        assert take(client, 3) == CHAIN[:3]


def test_a_silent_daemon_is_followed_by_the_next(pair: list[FakeDaemon]):
    pair[0].batches_left = 2
    with LoaderClient([d.endpoint for d in pair], credits=1) as client:
        got = take(client, 2)
        pair[0].mute = True
        assert got + take(client, 4) == CHAIN[:6]
    assert pair[1].got(wire.Hello)


@pytest.mark.parametrize(
    "said", [wire.Drain("SIGTERM"), wire.Failure("daemon_error", "the disk is gone", False)], ids=["drain", "error"]
)
def test_a_daemon_that_ends_is_followed_by_the_next(pair: list[FakeDaemon], said: wire.Message):
    with LoaderClient([d.endpoint for d in pair]) as client:
        got = take(client, 3)
        pair[0].say(said)
        eventually(lambda: not client.poll(0.01) or pair[1].got(wire.Hello) or (got.extend(take(client, 1)) or False))
        got += take(client, 6)
        assert got == [Cursor(0, *divmod(place, 2)) for place in range(len(got))]
    assert pair[1].got(wire.Hello)


def test_a_daemon_that_ends_alone_ends_the_run(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        take(client, 1)
        daemon.say(wire.Failure("daemon_error", "the disk is gone", False))
        with pytest.raises(ProtocolError, match="the disk is gone"):
            take(client, 50)


def test_leaving_a_daemon_unmaps_its_slots(pair: list[FakeDaemon]):
    log: list[str] = []

    def register(array: np.ndarray) -> object:
        log.append("pinned")
        return lambda: log.append("unpinned")

    with LoaderClient([d.endpoint for d in pair], register=register) as client:  # type: ignore[arg-type]
        take(client, 2)
        pair[0].kill()
        take(client, 6)
        assert sorted(log) == ["pinned", "pinned", "unpinned"]


def test_no_daemon_and_no_lane_are_refused(endpoint: str):
    with pytest.raises(ConfigError, match=r"loader\.endpoints \(\(\)\) must name at least one"):
        LoaderClient([])
    with pytest.raises(ConfigError, match=r"loader\.lane \(pigeon\) must be one of auto, slots, tcp"):
        LoaderClient(endpoint, lane="pigeon")  # type: ignore[arg-type]


def test_keys_that_are_not_there_are_refused_before_anything_is_sent(endpoint: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"loader\.keys_dir .*daemon\.public\) cannot be read"):
        LoaderClient(endpoint, keys_dir=str(tmp_path))
