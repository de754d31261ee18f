"""A real daemon and bare readers: order, sharing, leases, refusals."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec
import pytest

from shared.batch import Cursor
from shared.wire import (
    MAX_TO_DAEMON_BYTES,
    PROTOCOL,
    Bye,
    Credit,
    Failure,
    Heartbeat,
    Process,
    Release,
    Welcome,
    this_process,
)
from tests.support.daemons import ROOT, Daemon, make_run, serving, wait_until
from tests.support.ports import free_port
from tests.support.reader import RawReader
from tests.support.site import Site, count_steps

SAMPLES = 48


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path, config = make_run(tmp_path_factory.mktemp("site"), SAMPLES, loader={"metrics_port": free_port()})
    with serving(path) as daemon:
        yield Site(path, config, daemon)


def test_an_epoch_holds_every_sample_exactly_once_for_one_rank_or_two(site: Site) -> None:
    with RawReader(site.config) as reader:
        count = count_steps(reader)
    with RawReader(site.config) as one:
        one.join()
        whole = one.read(count)
        one.bye()
    with RawReader(site.config, 0, 2) as a, RawReader(site.config, 1, 2) as b:
        a.join()
        b.join()
        halves = [*a.read(count // 2), *b.read(count // 2)]
        a.bye()
        b.bye()
    ids = [i for batch in whole for i in batch.sample_ids]
    assert sorted(ids) == list(range(SAMPLES))
    assert Counter(b.batch_id for b in whole) == Counter(b.batch_id for b in halves)
    assert {b.batch_id: b.checksum for b in whole} == {b.batch_id: b.checksum for b in halves}


def test_cursors_follow_one_another(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.join()
        batches = reader.read(9)
        reader.bye()
    assert all(a.after == b.cursor for a, b in pairwise(batches))
    assert [b.cursor.micro for b in batches[:5]] == [0, 1, 2, 3, 0]


def test_a_reader_that_comes_back_with_a_cursor_continues_bit_for_bit(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.join()
        whole = reader.read(12)
        reader.bye()
    with RawReader(site.config) as reader:
        reader.join(whole[4].after)
        rest = reader.read(7)
        reader.bye()
    assert [(b.batch_id, b.checksum) for b in rest] == [(b.batch_id, b.checksum) for b in whole[5:]]


def test_two_readers_of_one_stream_share_slot_and_decode(site: Site) -> None:
    before = site.metric("loader_batches_filled_total")
    with RawReader(site.config) as first, RawReader(site.config) as last:
        first.join(reader=0, readers=2)
        last.join(reader=1, readers=2)
        for _ in range(10):
            a, b = first.batch(), last.batch()
            assert (a.batch_id, a.slot, a.generation, a.checksum) == (b.batch_id, b.slot, b.generation, b.checksum)
            first.arrays(a)
            last.arrays(b)
            first.release(a)
            last.release(b)
        first.bye()
        last.bye()
    ahead = site.config.loader.slots_per_stream
    assert site.metric("loader_batches_filled_total") - before <= 10 + ahead


def test_slots_of_a_reader_that_left_are_ready_for_the_other(site: Site) -> None:
    slots = site.config.loader.slots_per_stream
    with RawReader(site.config) as first, RawReader(site.config) as last:
        last.join(reader=1, readers=2, credits=0)
        first.join(reader=0, readers=2, credits=slots)
        for _ in range(slots):
            first.batch()
        wait_until(lambda: site.metric("loader_slots", state="leased") == slots, "all are leased")
        first.bye()
        wait_until(lambda: site.metric("loader_slots", state="ready") == slots, "all are ready")
        last.bye()
    wait_until(lambda: site.metric("loader_slots", state="leased") == 0, "no lease is left")


def test_a_reader_kept_from_its_batch_is_told_by_whom_and_goes_on_when_it_can(site: Site) -> None:
    slots = site.config.loader.slots_per_stream
    with RawReader(site.config) as first, RawReader(site.config) as last:
        first.join(Cursor(0, 2, 0), reader=0, readers=2, credits=slots)
        held = [first.batch() for _ in range(slots)]
        last.join(reader=1, readers=2)
        failure = last.expect(Failure)
        assert (failure.code, failure.retryable) == ("slots_held", True)
        assert f"readers [0] hold all {slots} slots" in failure.text
        first.release(held[-1], credits=0)
        last.join(reader=1, readers=2)
        assert last.read(2)[0].cursor == Cursor()
        last.bye()
        first.bye()


def test_no_more_than_the_slots_are_filled_whatever_credit_is_given(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.join(credits=1000)
        slots = site.config.loader.slots_per_stream
        held = [reader.batch() for _ in range(slots)]
        assert reader.next(0.7) is None
        assert len({batch.slot for batch in held}) == slots
        reader.release(held[0], 0)
        assert reader.batch().cursor == held[-1].after
        reader.bye()


def test_a_killed_readers_leases_return_and_another_is_served(site: Site) -> None:
    code = "import sys; sys.path.insert(0, sys.argv[2])\n"
    code += "from shared.config import load\nfrom tests.support.reader import RawReader\nimport time\n"
    code += "r = RawReader(load(sys.argv[1])); r.join(credits=9); r.batch(); print('held', flush=True); time.sleep(600)"
    command = [sys.executable, "-c", code, str(site.path), str(ROOT)]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert victim.stdout
    try:
        assert victim.stdout.readline() == b"held\n"
        with RawReader(site.config) as reader:
            for _ in range(3):
                reader.send(reader.hello())
                refused = reader.expect(Failure)
                assert (refused.code, refused.retryable) == ("reader_taken", True)
                assert f"process {victim.pid}" in refused.text
        assert site.daemon.log.count(refused.text) == 1
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
    with RawReader(site.config) as reader:
        reader.join()
        assert reader.read(6)[0].cursor == Cursor()
        reader.bye()
    wait_until(lambda: site.metric("loader_slots", state="leased") == 0, "leases return")
    wait_until(lambda: not [s for s in site.scrape() if s[0] == "loader_reader_lag"], "the dead reader's series go")


def test_a_process_that_never_was_is_noticed_without_waiting_for_the_lease(site: Site) -> None:
    me = Process(os.getpid(), 1, this_process().namespace)
    with RawReader(site.config) as reader:
        reader.send(reader.hello(process=me))
        reader.expect(Welcome)
        answers: list[object] = []
        while not any(answers):
            reader.send(Heartbeat())
            answers.append(reader.next(0.2))
        assert isinstance(answers[-1], Failure)
        assert answers[-1].code == "unknown_session"


def test_a_reader_on_another_host_is_not_taken_for_dead(site: Site) -> None:
    """Its process id means nothing here, although the first pid namespace has the same number on every host."""
    namespace = this_process().namespace.rpartition("/")[2]
    with RawReader(site.config) as reader:
        reader.join(process=Process(1 << 30, 1, f"another-boot/{namespace}"))
        assert len(reader.read(12)) == 12
        reader.hear_beats(2)
        assert site.metric("loader_clients") == 1
        assert len(reader.read(2)) == 2
        reader.bye()


REFUSALS = {
    "protocol": ({"protocol": 99}, f"protocol version 99 of the reader is not {PROTOCOL} of the daemon"),
    "digest": (
        {"digest": "feedfacefeedface"},
        "the data section differs: its digest is feedfacefeedface at the reader",
    ),
    "job": ({"job": "other"}, "job 'other' of the reader is not 'test'"),
    "data_ranks": ({"data_ranks": 3}, "data_ranks (3) must divide data.batch.round, 2"),
    "data_rank": ({"data_rank": 2, "data_ranks": 2}, "data_rank (2) must be 0 to 1"),
    "reader": ({"reader": 2, "readers": 2}, "reader (2) must be below readers (2)"),
    "cursor": ({"cursor": Cursor(0, 10**6, 0)}, "is no place of the plan"),
}


@pytest.mark.parametrize("code", REFUSALS)
def test_a_greeting_that_does_not_fit_is_refused_in_words(site: Site, code: str) -> None:
    changes, text = REFUSALS[code]
    with RawReader(site.config) as reader:
        reader.send(reader.hello(**changes))
        failure = reader.expect(Failure)
    assert failure.code == code
    assert text in failure.text
    assert not failure.retryable


def test_a_refused_digest_names_both(site: Site) -> None:
    with RawReader(site.config) as reader:
        ours = reader.hello().digest
        reader.send(reader.hello(digest="0" * 16))
        text = reader.expect(Failure).text
    assert "0" * 16 in text
    assert ours in text


def test_a_client_without_a_data_section_takes_what_is_served(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.send(reader.hello(digest=""))
        assert reader.expect(Welcome).digest == reader.hello().digest
        reader.send(Bye())


def test_the_dead_never_stand_in_the_way_of_another_layout(site: Site) -> None:
    dead = Process(os.getpid(), 1, this_process().namespace)
    with RawReader(site.config) as first, RawReader(site.config) as other:
        for _ in range(5):
            first.send(first.hello(reader=0, readers=2, process=dead))
            first.expect(Welcome)
            other.send(other.hello(reader=0, readers=1))
            other.expect(Welcome)
            other.bye()
            wait_until(lambda: site.metric("loader_clients") == 0, "the living reader has left")


def test_one_stream_has_one_number_of_readers(site: Site) -> None:
    with RawReader(site.config) as first, RawReader(site.config) as other:
        first.join(reader=0, readers=2)
        other.send(other.hello(reader=1, readers=3))
        assert other.expect(Failure).code == "readers"
        first.bye()


def test_streams_beyond_the_slots_are_refused_for_now(site: Site) -> None:
    with RawReader(site.config) as one, RawReader(site.config, 0, 2) as two, RawReader(site.config, 1, 2) as three:
        one.join()
        two.join()
        three.send(three.hello())
        failure = three.expect(Failure)
        assert (failure.code, failure.retryable) == ("no_slots", True)
        assert "loader.max_streams (2)" in failure.text
        one.bye()
        two.bye()


def test_messages_without_a_session_are_answered(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.send(Credit(1))
        failure = reader.expect(Failure)
    assert (failure.code, failure.retryable) == ("unknown_session", True)


REASONS = ("junk", "oversize", "frames")


def test_junk_is_counted_and_harms_nobody(site: Site) -> None:
    before = [site.metric("loader_messages_rejected_total", reason=reason) for reason in REASONS]
    with RawReader(site.config) as reader:
        reader.join()
        junk = [b"", b"\x80\x04\x95", b"\xff" * 1000, msgspec.msgpack.encode({"type": "Hello", "pid": 1})]
        for frame in junk:
            reader.socket.send(frame)
        reader.socket.send(bytes(MAX_TO_DAEMON_BYTES + 1))
        reader.socket.send_multipart([b"a", b"b"])
        reader.send(Release(Cursor(5, 5, 5)))
        assert len(reader.read(4)) == 4
        reader.bye()
    after = [site.metric("loader_messages_rejected_total", reason=reason) for reason in REASONS]
    assert [b - a for a, b in zip(before, after, strict=True)] == [len(junk), 1, 1]


def test_the_metrics_tell_what_happened(site: Site) -> None:
    with RawReader(site.config) as reader:
        reader.join()
        reader.read(8)
        reader.bye()
    names = {name for name, _, _ in site.scrape()}
    assert {"loader_ready", "loader_shards", "loader_index_seconds", "loader_padding_ratio", "loader_slots"} <= names
    for stage in ("queue", "read", "decode", "assemble", "handover"):
        wait_until(lambda stage=stage: site.metric("loader_stage_seconds_count", stage=stage) >= 8, f"{stage} is told")
    assert site.metric("loader_samples_total", modality="sample") > 0
    assert site.metric("loader_read_bytes_total") > 0
    assert 0 <= site.metric("loader_padding_ratio", kind="bucketed") < 1
    assert 0 < site.metric("loader_unused_slots_ratio", modality="image") < 1
    assert 0 < site.metric("loader_unused_slots_ratio", modality="audio") < 1
    with RawReader(site.config, 1, 2) as reader:
        reader.join()
        told = {batch.imbalance for batch in reader.read(4)}
        wait_until(
            lambda: 1 < site.metric("loader_step_imbalance_ratio", kind="balanced") < 2,
            "the step being filled is measured",
        )
        reader.bye()
    assert all(1 <= ratio < 2 for ratio in told)


def test_a_second_daemon_on_the_endpoint_is_refused_and_names_the_first(site: Site) -> None:
    other = Daemon(site.path, "--set", "loader.metrics_port=0")
    assert other.process.wait(90) == 2
    assert f"is in use by process {site.daemon.process.pid}" in other.log
    assert "Traceback" not in other.log
    with RawReader(site.config) as reader:
        reader.join()
        assert reader.read(2)
        reader.bye()


def test_a_metrics_port_in_use_is_refused(site: Site) -> None:
    other = Daemon(site.path, "--set", f"loader.endpoint=ipc://{site.folder}/other.sock")
    assert other.process.wait(90) == 2
    assert f"loader.metrics_port ({site.config.loader.metrics_port}) cannot be bound" in other.log


def test_top_shows_stages_slots_and_buckets(site: Site) -> None:
    url = f"http://127.0.0.1:{site.config.loader.metrics_port}/metrics"
    command = [sys.executable, "-m", "dataloader_svc", "top", "--once", "--url", url]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    for word in ("ready", "decode", "handover", "p99", "free", "text", "fullest rank"):
        assert word in shown
