"""Laws of the client, against a daemon of one thread over a real socket and a real segment."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from shared import wire
from shared.batch import Cursor, groups
from shared.config import digest
from shared.errors import ConfigError, LoaderTimeout, ProtocolError, SlotError, TooManyBadSamples
from shared.sections import DataSection
from shared.slots import SlotPool
from tests.support.clients import eventually, take
from tests.support.fake_daemon import FakeDaemon, content
from tests.support.runs import run_config
from trainer.batches import Batch
from trainer.client import LoaderClient


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSection:
    return run_config(tmp_path_factory.mktemp("run"), "none-{0..1}.tar").data


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/loader.sock"


@pytest.fixture
def daemon(endpoint: str, tmp_path: Path, data: DataSection) -> Iterator[FakeDaemon]:
    with FakeDaemon(endpoint, tmp_path, data) as running:
        yield running


@dataclasses.dataclass
class Event:
    """Stands for a torch.cuda.Event: done when the test says so."""

    done: bool = False

    def query(self) -> bool:
        return self.done


CHAIN = [Cursor(0, s, m) for s in range(20) for m in range(2)]


def test_batches_come_in_order_with_the_bytes_of_their_cursor(daemon: FakeDaemon, endpoint: str, data: DataSection):
    with LoaderClient(endpoint, data=data, verify=True) as client:
        for cursor in CHAIN:
            batch = next(client)
            spec = daemon.specs[batch.group]
            assert batch.cursor == cursor
            assert client.position == batch.after
            assert {n: (tuple(t.shape), str(t.dtype)) for n, t in batch.fields.items()} == {
                f.name: (f.shape, f"torch.{f.dtype}") for f in spec.fields
            }
            assert batch.counts.tokens == groups(data)[batch.group].tokens
            assert np.array_equal(batch.payload.numpy(), content(groups(data)[batch.group], spec, cursor))


def test_views_lie_inside_the_mapping(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        batch = next(client)
        array = batch.attachment.segment.array
        start, end = array.ctypes.data, array.ctypes.data + array.nbytes
        filled = [t for t in batch.fields.values() if t.numel()]
        assert filled
        assert all(start <= t.data_ptr() < end for t in filled)
        daemon.pool.segment.payload(batch.header.slot)[:4] = 7
        assert batch.fields["tokens_T"][0] == 0x07070707


def test_a_view_outlives_client_and_daemon(endpoint: str, tmp_path: Path, data: DataSection):
    with FakeDaemon(endpoint, tmp_path, data), LoaderClient(endpoint) as client:
        batch = next(client).keep()
        before = batch.payload.clone()
    assert torch.equal(batch.payload, before)
    batch.release()


def test_release_is_sent_once_and_by_iterating(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        first = next(client)
        first.release()
        first.release()
        take(client, 5)
        eventually(lambda: len(daemon.got(wire.Release)) == 5)
        assert [r.cursor for r in daemon.got(wire.Release)] == CHAIN[:5]


def test_a_kept_batch_is_released_by_its_holder_alone(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        kept = next(client).keep()
        take(client, 3)
        eventually(lambda: len(daemon.got(wire.Release)) == 2)
        assert kept.cursor not in [r.cursor for r in daemon.got(wire.Release)]
        kept.release()
        eventually(lambda: kept.cursor in [r.cursor for r in daemon.got(wire.Release)])


def test_release_with_an_event_waits_for_it(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        event = Event()
        next(client).release(event)
        take(client, 2)
        eventually(lambda: daemon.got(wire.Release))
        assert [r.cursor for r in daemon.got(wire.Release)] == [CHAIN[1]]
        event.done = True
        client.poll()
        eventually(lambda: len(daemon.got(wire.Release)) == 2)
        assert daemon.got(wire.Release)[1].cursor == CHAIN[0]


def test_duplicates_are_dropped(daemon: FakeDaemon, endpoint: str):
    daemon.before_batch = lambda header, pool: [header, header]
    with LoaderClient(endpoint) as client:
        assert take(client, 8) == CHAIN[:8]


def test_a_gap_breaks_the_protocol(daemon: FakeDaemon, endpoint: str):
    daemon.before_batch = lambda header, pool: [] if header.cursor == CHAIN[2] else [header]
    with (
        LoaderClient(endpoint) as client,
        pytest.raises(ProtocolError, match=r"batch e0-s1-m1 .* where e0-s1-m0 is next"),
    ):
        take(client, 4)


def test_a_gap_that_was_asked_for_is_none(daemon: FakeDaemon, endpoint: str):
    gone = CHAIN[2:5]

    def skip(header: wire.Batch, pool: SlotPool) -> list[wire.Batch]:
        if header.cursor in gone:
            return []
        return [msgspec.structs.replace(header, skipped_from=gone[0] if header.cursor == CHAIN[5] else None)]

    daemon.before_batch = skip
    with LoaderClient(endpoint, credits=5) as client:
        assert take(client, 2) == CHAIN[:2]
        batch = next(client)
        assert (batch.cursor, batch.skipped_from) == (CHAIN[5], gone[0])
        assert client.position == CHAIN[6]
    with LoaderClient(endpoint, credits=5, cursor=CHAIN[3]) as client:
        assert take(client, 1) == [CHAIN[5]]


def test_a_gap_beyond_the_one_asked_for_breaks_the_protocol(daemon: FakeDaemon, endpoint: str):
    def skip(header: wire.Batch, pool: SlotPool) -> list[wire.Batch]:
        told = CHAIN[3] if header.cursor == CHAIN[5] else None
        return [] if header.cursor in CHAIN[2:5] else [msgspec.structs.replace(header, skipped_from=told)]

    daemon.before_batch = skip
    with LoaderClient(endpoint, credits=5) as client, pytest.raises(ProtocolError, match="where e0-s1-m0 is next"):
        take(client, 3)


@pytest.mark.parametrize(
    ("change", "text"),
    [({"slot": 99}, "slot 99 of 4"), ({"group": 99}, "group 99"), ({"after": Cursor()}, "followed by e0-s0-m0")],
)
def test_a_header_that_points_nowhere_breaks_the_protocol(
    daemon: FakeDaemon, endpoint: str, change: dict[str, object], text: str
):
    daemon.before_batch = lambda header, pool: [msgspec.structs.replace(header, **change)]
    with LoaderClient(endpoint) as client, pytest.raises(ProtocolError, match=text):
        next(client)


def test_a_lost_lease_is_named(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        batch = next(client)
        daemon.pool.segment.bump(batch.header.slot)
        with pytest.raises(SlotError, match=r"lease lost: slot \d of batch e0-s0-m0"):
            batch.release()
        assert next(client).cursor == CHAIN[1]


def test_a_lease_lost_before_it_was_read_is_asked_for_again(daemon: FakeDaemon, endpoint: str):
    seen: list[Cursor] = []

    def lose_the_third(header: wire.Batch, pool: SlotPool) -> list[wire.Batch]:
        if header.cursor == CHAIN[2] and header.cursor not in seen:
            pool.segment.bump(header.slot)
        seen.append(header.cursor)
        return [header]

    daemon.before_batch = lose_the_third
    with LoaderClient(endpoint) as client:
        assert take(client, 6) == CHAIN[:6]
        assert client.reconnects == 1


def test_verify_finds_wrong_bytes(daemon: FakeDaemon, endpoint: str):
    def spoil(header: wire.Batch, pool: SlotPool) -> list[wire.Batch]:
        pool.segment.payload(header.slot)[5] ^= 1
        return [header]

    daemon.before_batch = spoil
    with LoaderClient(endpoint, verify=True) as client, pytest.raises(SlotError, match="batch e0-s0-m0 has checksum"):
        next(client)


def test_a_restarted_daemon_continues_at_the_cursor(endpoint: str, tmp_path: Path, data: DataSection):
    with LoaderClient(endpoint, verify=True, credits=0) as client:  # nothing is sent ahead of what is asked for
        with FakeDaemon(endpoint, tmp_path, data):
            got = take(client, 5)
            held = next(client).keep()
        before = held.payload.clone()
        with FakeDaemon(endpoint, tmp_path, data) as second:
            got += [held.cursor, *take(client, 5)]
            assert second.got(wire.Hello)[0].cursor == CHAIN[6]
            assert torch.equal(held.payload, before)
            held.release()
            take(client, 1)
            assert CHAIN[5] not in [r.cursor for r in second.got(wire.Release)]
        assert got == CHAIN[:11]
        assert client.reconnects == 1


def test_a_daemon_that_forgot_the_session_gets_a_new_hello(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        got = take(client, 3)
        daemon.say(wire.Failure("unknown_session", "say HELLO first", True))
        eventually(lambda: not client.poll() or client.reconnects)
        got += take(client, 3)
        assert got == CHAIN[:6]


def test_a_batch_costs_no_message_before_it_is_handed_over(daemon: FakeDaemon, endpoint: str):
    def credits() -> list[int]:
        return [message.count for message in daemon.got(wire.Credit)]

    with LoaderClient(endpoint, credits=2) as client:
        take(client, 1)
        eventually(lambda: client.poll(0.05) and len(client._session.queue) == 2)
        assert credits() == [3]
        assert not daemon.got(wire.Release)
        take(client, 1)
        eventually(lambda: client.poll(0.05) and len(client._session.queue) == 2)
        assert credits() == [3, 1]
        assert [message.cursor for message in daemon.got(wire.Release)] == CHAIN[:1]


def test_a_silent_daemon_is_left(daemon: FakeDaemon, endpoint: str):
    daemon.batches_left = 1
    with LoaderClient(endpoint, credits=1) as client:
        take(client, 1)
        daemon.mute = True
        eventually(lambda: not client.poll(0.05) and len(daemon.got(wire.Hello)) == 2)
        daemon.mute, daemon.batches_left = False, 9
        daemon._sessions.clear()
        assert next(client).cursor == CHAIN[1]


def test_a_draining_daemon_hands_out_what_it_sent_first(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        take(client, 1)
        assert client.poll(5)
        daemon.say(wire.Drain("SIGTERM"))
        got = take(client, 8)
        assert got == CHAIN[1:9]
        assert client.reconnects == 1


def test_junk_is_ignored_and_counted(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        take(client, 1)
        for junk in (b"", b"\x80\x04N.", b"\xff" * 200):
            daemon.say(junk)
        eventually(lambda: client.poll() and client.junk == 3)
        assert take(client, 4) == CHAIN[1:5]


def test_timeout_names_endpoint_rank_reader_bound_and_state(endpoint: str):
    with (
        LoaderClient(endpoint, data_rank=1, data_ranks=2, reader=2, readers=4, wait_s=0.3) as client,
        pytest.raises(LoaderTimeout) as caught,
    ):
        next(client)
    text = str(caught.value)
    assert all(part in text for part in (endpoint, "data rank 1 of 2", "reader 2 of 4", "0.3 s", "never connected"))


def test_timeout_of_a_served_client_names_the_batch(daemon: FakeDaemon, endpoint: str):
    daemon.batches_left = 1
    with LoaderClient(endpoint, wait_s=0.3) as client:
        kept = next(client).keep()
        with pytest.raises(LoaderTimeout, match=r"waiting for batch e0-s0-m1 since 0\.. s; 1 batches are not released"):
            next(client)
        kept.release()


def test_a_refused_digest_shows_the_daemons_text(daemon: FakeDaemon, endpoint: str, data: DataSection):
    other = msgspec.structs.replace(data, seed=1)
    daemon.refuse = wire.Failure("digest", f"data digest {digest(other)}, served is {digest(data)}", False)
    with (
        LoaderClient(endpoint, data=other) as client,
        pytest.raises(ProtocolError, match=f"{digest(other)}, served is {digest(data)}"),
    ):
        next(client)


def test_another_digest_in_welcome_is_refused_here(daemon: FakeDaemon, endpoint: str, data: DataSection):
    other = msgspec.structs.replace(data, seed=1)
    with (
        LoaderClient(endpoint, data=other) as client,
        pytest.raises(ProtocolError, match=f"{digest(data)}.*{digest(other)}"),
    ):
        client.connect()


def test_too_many_bad_samples_is_its_own_error(daemon: FakeDaemon, endpoint: str):
    daemon.refuse = wire.Failure("too_many_bad_samples", "64 in a row", False)
    with LoaderClient(endpoint) as client, pytest.raises(TooManyBadSamples, match="64 in a row"):
        next(client)


def test_a_retryable_refusal_is_tried_again(daemon: FakeDaemon, endpoint: str):
    daemon.refuse = wire.Failure("busy", "no stream is free", True)
    with LoaderClient(endpoint) as client:
        eventually(lambda: not client.poll(0.05) and len(daemon.got(wire.Hello)) > 2)
        daemon.refuse = None
        assert next(client).cursor == CHAIN[0]


def test_an_endpoint_that_is_none_is_refused():
    with LoaderClient("nonsense") as client, pytest.raises(ConfigError, match=r"loader\.endpoint \(nonsense\)"):
        next(client)


def test_steps_end_the_iteration_at_a_step(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint, steps=3) as client:
        assert [batch.cursor for batch in client] == CHAIN[:6]
        assert not client.poll()
        assert client.position == CHAIN[6]


def test_resume_starts_at_the_cursor(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint, cursor=CHAIN[7]) as client:
        assert take(client, 3) == CHAIN[7:10]


def test_heartbeats_keep_their_interval(daemon: FakeDaemon, endpoint: str):
    daemon.batches_left = 0
    with LoaderClient(endpoint) as client:
        client.connect()
        eventually(lambda: not client.poll(0.05) and len(daemon.got(wire.Heartbeat)) >= 3)
        assert client.reconnects == 0


def test_pinning_is_undone_when_the_last_batch_is_back(daemon: FakeDaemon, endpoint: str):
    log: list[str] = []

    def register(array: np.ndarray) -> object:
        log.append(f"pinned {array.nbytes}")
        return lambda: log.append("unpinned")

    size = daemon.pool.segment.array.nbytes
    client = LoaderClient(endpoint, register=register)  # type: ignore[arg-type]
    kept: Batch = next(client).keep()
    client.close()
    assert log == [f"pinned {size}"]
    kept.release()
    assert log == [f"pinned {size}", "unpinned"]


def test_close_is_idempotent_and_final(daemon: FakeDaemon, endpoint: str):
    client = LoaderClient(endpoint)
    next(client)
    client.close()
    client.close()
    eventually(lambda: len(daemon.got(wire.Bye)) == 1)
    with pytest.raises(ProtocolError, match="is closed"):
        next(client)


def test_wait_stats_leave_the_first_wait_apart(daemon: FakeDaemon, endpoint: str):
    with LoaderClient(endpoint) as client:
        take(client, 5)
        stats = client.wait_stats()
        assert stats.first_s > 0
        assert stats.run.count == stats.recent.count == 4
        take(client, 2)
        stats = client.wait_stats()
        assert (stats.run.count, stats.recent.count) == (6, 2)
        assert stats.run.p50_s <= stats.run.p99_s <= stats.run.max_s
