"""A whole daemon over remote shards: the very batches of the local run, or a loud end."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ConfigError
from shared.wire import Failure
from tests.support.daemons import STOP_S, Daemon, make_run_file, serving
from tests.support.media import write_dataset
from tests.support.reader import RawReader
from tests.support.remote import http_server, s3_server

BATCHES = 14
SHARDS = "part-{000000..000002}.tar"

Served = list[tuple[str, int, tuple[int, ...]]]


def served(folder: Path, pattern: str, **loader: Any) -> Served:
    """Batch ids, checksums and samples of the first batches of a daemon over `pattern`."""
    folder.mkdir()
    sets = [{"name": "set", "shards": [pattern]}]
    path, config = make_run_file(folder, data={"datasets": sets}, loader={"index_dir": str(folder / "idx"), **loader})
    with serving(path) as daemon, RawReader(config) as reader:
        reader.join()
        batches = reader.read(BATCHES)
        reader.bye()
        assert daemon.terminate() == 0, daemon.log
    return [(batch.batch_id, batch.checksum, batch.sample_ids) for batch in batches]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Served]:
    folder = tmp_path_factory.mktemp("local")
    write_dataset(folder / "www", 48, 3)
    return folder / "www", served(folder / "run", f"{folder}/www/{SHARDS}")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_batches_over_a_faulty_http_server_are_the_local_ones(
    tmp_path: Path, local: tuple[Path, Served], cached: bool
) -> None:
    with http_server(local[0]) as server:
        server.faults.extend(
            ["500", "cut", "short", "reset"] if cached else ["500", "", "cut", "", "short", "reset"] * 4
        )
        loader = {"cache_dir": str(tmp_path / "cache")} if cached else {}
        assert served(tmp_path / "run", f"{server.url}/{SHARDS}", **loader) == local[1]
        assert not server.faults


@pytest.mark.slow
def test_batches_over_s3_are_the_local_ones(tmp_path: Path, local: tuple[Path, Served]) -> None:
    with s3_server(local[0]) as bucket:
        loader = {"cache_dir": str(tmp_path / "cache")}
        assert served(tmp_path / "run", f"{bucket}/part-*.tar", **loader) == local[1]


@pytest.mark.slow
def test_two_daemons_that_start_on_one_index_and_one_cache_serve_the_same(
    tmp_path: Path, local: tuple[Path, Served]
) -> None:
    with http_server(local[0]) as server, contextlib.ExitStack() as stack:
        common = {"index_dir": str(tmp_path / "idx"), "cache_dir": str(tmp_path / "cache"), "cache_bytes": 2 << 20}
        sets = [{"name": "set", "shards": [f"{server.url}/{SHARDS}"]}]
        runs = []
        for name in "ab":
            (tmp_path / name).mkdir()
            runs.append(make_run_file(tmp_path / name, data={"datasets": sets}, loader=common))
        daemons = [Daemon(path) for path, _ in runs]
        for daemon in daemons:
            stack.callback(daemon.kill)
        for daemon, (_, config) in zip(daemons, runs, strict=True):
            daemon.wait_ready()
            with RawReader(config) as reader:
                reader.join()
                batches = reader.read(BATCHES)
                reader.bye()
            assert [(b.batch_id, b.checksum, b.sample_ids) for b in batches] == local[1]
        assert not list((tmp_path / "idx").glob(".tmp-*"))
        held = sum(p.stat().st_size for p in (tmp_path / "cache").glob("??/*"))
        assert 0 < held <= common["cache_bytes"]


@pytest.mark.slow
def test_an_outage_stops_the_daemon_loudly_and_changes_no_batch(tmp_path: Path, local: tuple[Path, Served]) -> None:
    with http_server(local[0]) as server:
        loader = {"index_dir": str(tmp_path / "idx"), "read_s": 1.0, "slots_per_stream": 2}
        sets = [{"name": "set", "shards": [f"{server.url}/{SHARDS}"]}]
        path, config = make_run_file(tmp_path, data={"datasets": sets}, loader=loader)
        with serving(path) as daemon, RawReader(config) as reader:
            reader.join(credits=2)
            before = reader.read(2)
            server.down.set()
            failure = reader.expect(Failure)
            assert daemon.process.wait(STOP_S) == 3
        assert failure.code == "daemon_error" and not failure.retryable
        assert "within loader.read_s, 1 s" in failure.text
        assert "cannot be read at" in daemon.log and "part-00000" in daemon.log
        assert [(b.batch_id, b.checksum, b.sample_ids) for b in before] == local[1][:2]
        server.down.clear()
        with serving(path) as daemon, RawReader(config) as reader:
            reader.join(before[-1].after)
            after = reader.read(3)
            reader.bye()
        assert [(b.batch_id, b.checksum, b.sample_ids) for b in after] == local[1][2:5]


@pytest.mark.slow
def test_a_cache_below_a_shard_stops_the_start(tmp_path: Path, local: tuple[Path, Served]) -> None:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "big.tar").write_bytes(bytes(3 << 20))
    with http_server(tmp_path / "www") as server:
        sets = [{"name": "set", "shards": [f"{server.url}/big.tar"]}]
        loader = {"index_dir": str(tmp_path / "idx"), "cache_dir": str(tmp_path / "cache"), "cache_bytes": 2 << 20}
        path, _ = make_run_file(tmp_path, data={"datasets": sets}, loader=loader)
        daemon = Daemon(path)
        assert daemon.process.wait(STOP_S) == 2
        assert f"loader.cache_bytes ({2 << 20}) must hold the largest shard" in daemon.log
        assert f"{3 << 20} bytes" in daemon.log


def test_a_bound_that_another_cuts_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loader.read_s \(60.0\) must be below loader.worker_s, 60"):
        make_run_file(tmp_path, loader={"read_s": 60})
