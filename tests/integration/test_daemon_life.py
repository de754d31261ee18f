"""How a daemon ends, what it refuses before it starts, and what bad data does to it."""

import signal
from pathlib import Path

import pytest

from shared.slots import HEADER_BYTES, PAGE_BYTES
from shared.wire import Drain, Failure, Welcome
from tests.support.daemons import STOP_S, Daemon, make_run, make_run_file, serving, wait_until
from tests.support.media import photo, write_dataset, write_tar
from tests.support.ports import free_port
from tests.support.reader import RawReader, left_behind
from tests.support.site import Site, count_steps


def test_sigterm_tells_readers_and_leaves_nothing(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, 16, 1)
    with serving(path) as daemon, RawReader(config) as reader:
        workers = daemon.workers()
        reader.join()
        held = [reader.batch(), reader.batch()]
        daemon.process.send_signal(signal.SIGTERM)
        assert reader.expect(Drain).reason
        for batch in held:
            reader.arrays(batch)
            reader.release(batch)
        assert daemon.process.wait(STOP_S) == 0
        assert reader.next(0.3) is None
    assert left_behind(tmp_path) == left_behind(tmp_path / "shm") == []
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    assert "Traceback" not in daemon.log


def test_socket_and_slots_are_their_users_alone(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, 16, 1)
    with serving(path), RawReader(config) as reader:
        welcome = reader.join()
        for guarded in (Path(config.loader.endpoint.removeprefix("ipc://")), Path(welcome.segment)):
            assert guarded.stat().st_mode & 0o077 == 0
        reader.bye()


def test_slots_hold_the_largest_group_that_the_data_have_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "text.tar", [(f"{n:03d}.txt", b"words") for n in range(16)])
    path, config = make_run_file(tmp_path)
    with serving(path), RawReader(config) as reader:
        welcome = reader.join()
        batch = reader.batch()
        assert len(reader.arrays(batch)["tokens_T"]) == config.data.batch.tokens
        needed = HEADER_BYTES + welcome.specs[batch.group].size_bytes
        assert welcome.slot_bytes == -(-needed // PAGE_BYTES) * PAGE_BYTES
        assert max(spec.size_bytes for spec in welcome.specs) > welcome.slot_bytes
        reader.release(batch)
        reader.bye()


def test_a_reader_that_sleeps_on_its_lease_does_not_keep_the_daemon(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, 16, 1)
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join()
        batch = reader.batch()
        assert daemon.terminate() == 0
        reader.arrays(batch)
    assert "leases out" in daemon.log


def test_a_second_signal_ends_the_wait(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, 16, 1, loader={"drain_s": 2 * STOP_S, "grace_s": 3 * STOP_S})
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join(credits=1)
        reader.batch()
        daemon.process.send_signal(signal.SIGTERM)
        reader.expect(Drain)
        daemon.process.send_signal(signal.SIGINT)
        assert daemon.process.wait(STOP_S) == 0
    assert left_behind(tmp_path) == left_behind(tmp_path / "shm") == []


def test_damaged_members_are_counted_by_reason_and_the_rest_is_served(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", 24, 1)
    rotten = bytearray(photo(128, 128, 1, "PNG"))
    rotten[len(rotten) // 2 : len(rotten) // 2 + 40] = bytes(40)
    bad = [
        ("x0.jpg", b"<html>"),
        ("x0.txt", b"not a picture"),
        ("x1.jpg", photo(128, 128)[:900]),
        ("x1.txt", b"cut"),
        ("x2.jpg", bytes(rotten)),
        ("x2.txt", b"found by decoding"),
        ("x3.wav", b"noise"),
        ("x3.txt", b"not a clip"),
    ]
    write_tar(tmp_path / "data" / "bad.tar", bad)
    path, config = make_run_file(tmp_path, loader={"metrics_port": free_port()})
    with serving(path) as daemon:
        with RawReader(config) as reader:
            count = count_steps(reader)
        with RawReader(config) as reader:
            reader.join()
            batches = reader.read(count)
            reader.bye()
        site = Site(path, config, daemon)
        for reason in ("junk_image", "junk_audio", "truncated_image"):
            assert site.metric("loader_samples_quarantined_total", reason=reason) == 1
        wait_until(lambda: site.metric("loader_samples_quarantined_total", reason="image_decode") >= 1, "it is counted")
        assert "x2 is left out: image_decode" in daemon.log
        assert daemon.log.count("x2 is left out") == 1
    ids = {i for batch in batches for i in batch.sample_ids}
    assert len(ids) == 24


def test_too_many_bad_samples_stop_the_daemon_loudly(tmp_path: Path) -> None:
    rotten = bytearray(photo(128, 128, 1, "PNG"))
    rotten[len(rotten) // 2 : len(rotten) // 2 + 40] = bytes(40)
    (tmp_path / "data").mkdir()
    members = [m for i in range(24) for m in ((f"k{i:02d}.png", bytes(rotten)), (f"k{i:02d}.txt", b"bad"))]
    write_tar(tmp_path / "data" / "a.tar", members)
    path, config = make_run_file(tmp_path, loader={"quarantine": {"max_consecutive": 16}})
    with serving(path) as daemon, RawReader(config) as reader:
        reader.send(reader.hello())
        reader.expect(Welcome)
        failure = reader.expect(Failure)
        assert (failure.code, failure.retryable) == ("too_many_bad", False)
        assert "max_consecutive" in failure.text
        assert daemon.process.wait(STOP_S) == 4
    assert "millstream-loader: " in daemon.log
    assert left_behind(tmp_path) == left_behind(tmp_path / "shm") == []


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("loader.slots_per_stream=100000000", "must fit the"),
        ("loader.endpoint=tcp://0.0.0.0:7000", "is open to the network, which needs keys"),
        ("loader.endpoint=udp://127.0.0.1:7000", "must be ipc://PATH or tcp://HOST:PORT"),
        ("loader.keys_dir=/no/such/folder", "has no .public file of a reader"),
        ("loader.endpoint=ipc:///tmp/" + "x" * 120, "a Unix socket takes at most 107"),
        ("loader.endpoint=ipc:///no/such/folder/a.sock", "which is no folder"),
        ("data.datasets=[]", "must name at least one dataset"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path: Path, override: str, text: str) -> None:
    path, _ = make_run(tmp_path, 16, 1)
    daemon = Daemon(path, "--set", override)
    assert daemon.process.wait(90) == 2
    assert text in daemon.log
    assert "Traceback" not in daemon.log
    assert left_behind(tmp_path / "shm") == []


def test_batches_are_kept_for_an_absent_reader_for_as_long_as_is_asked(tmp_path: Path) -> None:
    """With the default the second wait would end with a batch."""
    path, config = make_run(tmp_path, loader={"absent_s": 300})
    slots = config.loader.slots_per_stream
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join(reader=0, readers=2, credits=slots + 1)
        for batch in [reader.batch() for _ in range(slots)]:
            reader.release(batch)
        assert reader.next(7.0) is None
        reader.bye()
    assert "goes on without" not in daemon.log


def test_a_daemon_that_starts_again_takes_up_the_plan_that_was_kept(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, loader={"index_dir": str(tmp_path / "idx")})
    seen, made = [], set()
    for _ in range(2):
        with serving(path) as daemon, RawReader(config) as reader:
            reader.join()
            seen.append([batch.batch_id for batch in reader.read(3)])
            reader.bye()
        made.add((tmp_path / "idx" / "test.0.plan").stat().st_mtime_ns)
        assert "is not used" not in daemon.log
    assert seen[0] == seen[1]
    assert len(made) == 1


def test_a_missing_shard_is_a_data_error(tmp_path: Path) -> None:
    path, _ = make_run(tmp_path, 16, 1)
    daemon = Daemon(path, "--set", f"data.datasets=[{{name: set, shards: [{tmp_path}/gone.tar]}}]")
    assert daemon.process.wait(90) == 3
    assert "gone.tar" in daemon.log
