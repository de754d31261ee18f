"""`kill -9` at any moment: nothing is lost, repeated or left behind, and a neighbour is left alone."""

from pathlib import Path
from typing import Any

from shared.batch import Cursor
from shared.slots import SlotPool
from tests.support.crash import deadly_photo, install
from tests.support.daemons import Daemon, alive, kill_process, make_run, make_run_file, serving, wait_until
from tests.support.media import photo, write_tar
from tests.support.reader import RawReader, left_behind

READ = 24

Seen = list[tuple[str, int]]


def facts(batches: Any) -> Seen:
    return [(batch.batch_id, batch.checksum) for batch in batches]


def undisturbed(path: Path, config: Any) -> Seen:
    with serving(path), RawReader(config) as reader:
        reader.join()
        return facts(reader.read(READ))


def test_a_daemon_killed_three_times_serves_the_same_batches(tmp_path: Path) -> None:
    path, config = make_run(tmp_path)
    expected = undisturbed(path, config)
    neighbour = SlotPool.create(str(tmp_path / "shm"), config.job, 2, 4096)
    seen: Seen = []
    cursor = Cursor()
    workers: list[int] = []
    for _ in range(3):
        with serving(path) as daemon, RawReader(config) as reader:
            workers += daemon.workers()
            reader.join(cursor)
            batches = reader.read(6)
            cursor = batches[-1].after
            seen += facts(batches)
            reader.batch()
            daemon.kill()
    wait_until(lambda: not any(map(alive, workers)), "orphaned workers end")
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join(cursor)
        seen += facts(reader.read(READ - len(seen)))
        assert daemon.log.count("swept") == 1
        assert daemon.terminate() == 0
    assert seen == expected
    assert left_behind(tmp_path) == []
    assert left_behind(tmp_path / "shm") == [Path(neighbour.segment.path).name]
    neighbour.close()


def test_workers_killed_again_and_again_change_nothing(tmp_path: Path) -> None:
    path, config = make_run(tmp_path)
    expected = undisturbed(path, config)
    with serving(path, "--set", "loader.workers=2") as daemon, RawReader(config) as reader:
        reader.join()
        seen: Seen = []
        for _ in range(READ // 6):
            seen += facts(reader.read(6))
            for pid in daemon.workers()[:1]:
                kill_process(pid)
        assert "another takes over" in daemon.log
    assert seen == expected


def test_batches_do_not_depend_on_workers_or_threads(tmp_path: Path) -> None:
    path, config = make_run(tmp_path)
    expected = undisturbed(path, config)
    with serving(path, "--set", "loader.workers=3", "--set", "loader.threads=1"), RawReader(config) as reader:
        reader.join()
        assert facts(reader.read(READ)) == expected


def test_a_picture_that_kills_decoders_costs_only_itself(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "data").mkdir()
    members = []
    for i in range(16):
        picture = deadly_photo(128, 128, i) if i == 5 else photo(128, 128, i)
        members += [(f"k{i:02d}.jpg", picture), (f"k{i:02d}.txt", b"words")]
    write_tar(tmp_path / "data" / "a.tar", members)
    path, config = make_run_file(tmp_path)
    monkeypatch.setenv("PYTHONPATH", install(tmp_path / "hook"))
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join()
        batches = reader.read(8)
        wait_until(lambda: "k05 is left out: decoder_crash" in daemon.log, "the sample is named")
    ids = {i for batch in batches for i in batch.sample_ids}
    assert ids == set(range(16)) - {5}


def test_a_daemon_killed_while_it_starts_leaves_no_worker(tmp_path: Path) -> None:
    path, _ = make_run(tmp_path, 16, 1)
    daemon = Daemon(path)
    wait_until(lambda: daemon.workers(), "a worker starts")
    workers = daemon.workers()
    daemon.kill()
    wait_until(lambda: not any(map(alive, workers)), "its workers end")
    assert workers and not any(map(alive, workers))
