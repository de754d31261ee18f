"""Remote shards: the right bytes or a loud end, over a server that misbehaves."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloader_svc.cache import BLOCK_BYTES, BlockCache
from dataloader_svc.index import Index
from dataloader_svc.index_file import read
from dataloader_svc.indexing import build
from dataloader_svc.shards import Shard, expand, scan
from dataloader_svc.store import Reader, Store
from shared.errors import ConfigError, ShardError
from shared.sections import DataSection, DatasetSection, LoaderSection
from tests.support.media import write_dataset
from tests.support.remote import FAULTS, RangeServer, http_server, s3_server
from tests.support.tars import data_section

SIZE = 3 * BLOCK_BYTES + 12_345


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "big.tar").write_bytes(os.urandom(SIZE))
    with http_server(tmp_path / "www") as running:
        yield running


def content(server: RangeServer, name: str = "big.tar") -> bytes:
    return (server.folder / name).read_bytes()


def gets(server: RangeServer) -> list[tuple[int, int]]:
    return [(first, last) for method, _, first, last in server.served if method == "GET"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_tried_again_and_never_shows(server: RangeServer, fault: str) -> None:
    store, waited = Store(read_s=3.0), threading.Event()
    reader = Reader(store)
    server.faults.extend([fault, fault] if fault != "stall" else [fault])
    assert reader.read(f"{server.url}/big.tar", 1000, 5000, waited.set) == content(server)[1000:6000]
    assert store.tally.retries >= 1
    assert waited.is_set()


def test_an_outage_ends_loudly_at_the_bound(server: RangeServer) -> None:
    reader = Reader(Store(read_s=0.8))
    url = f"{server.url}/big.tar"
    reader.read(url, 0, 10)
    server.down.set()
    with pytest.raises(ShardError, match=rf"{url} cannot be read at 77 within loader.read_s, 0.8 s \(\d attempts.*503"):
        reader.read(url, 77, 10)


def test_what_cannot_change_by_waiting_fails_at_once(server: RangeServer) -> None:
    store = Store(read_s=60.0)
    with pytest.raises(ShardError, match=r"none.tar cannot be opened"):
        store.open(f"{server.url}/none.tar")
    with pytest.raises(ShardError, match=r"cannot be opened .*Protocol not known"):
        store.open("nosuch://x/y.tar")
    assert store.tally.retries == 0


def test_a_server_without_ranges_is_refused_in_words(server: RangeServer) -> None:
    server.ranges = False
    with pytest.raises(ShardError, match="does not answer byte ranges"):
        Reader(Store(read_s=60.0)).read(f"{server.url}/big.tar", 5, 5)


def test_a_shard_that_changes_while_it_is_read_is_noticed(server: RangeServer) -> None:
    reader = Reader(Store(read_s=60.0))
    reader.read(f"{server.url}/big.tar", 0, 5)
    (server.folder / "big.tar").write_bytes(os.urandom(SIZE))
    with pytest.raises(ShardError, match="changed since it was opened: index it again"):
        reader.read(f"{server.url}/big.tar", 0, 5)


@pytest.mark.parametrize("size", [SIZE, SIZE + 512])
def test_a_local_shard_that_changes_while_it_is_open_is_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "big.tar"
    path.write_bytes(bytes(SIZE))
    os.utime(path, ns=(1, 1))
    reader = Reader()
    assert reader.read(str(path), 0, 5) == bytes(5)
    path.write_bytes(os.urandom(size))
    with pytest.raises(ShardError, match="changed since it was opened: index it again"):
        reader.read(str(path), 0, 5)


def test_a_shard_that_changed_since_it_was_indexed_is_not_read(server: RangeServer) -> None:
    url = f"{server.url}/big.tar"
    expected = {url: Store().fingerprint(url)}
    assert Reader(expected=expected).read(url, 0, 5) == content(server)[:5]
    (server.folder / "big.tar").write_bytes(bytes(SIZE))
    with pytest.raises(ShardError, match="changed since it was indexed; index it again"):
        Reader(expected=expected).read(url, 0, 5)


@pytest.mark.parametrize("tags", [True, False])
def test_a_changed_object_has_another_fingerprint(server: RangeServer, tags: bool) -> None:
    server.tags = tags
    first = Store().fingerprint(f"{server.url}/big.tar")
    assert Store().fingerprint(f"{server.url}/big.tar") == first
    assert (bool(first.tag), bool(first.edges), first.size) == (tags, not tags, SIZE)
    (server.folder / "big.tar").write_bytes(bytes(SIZE))
    assert Store().fingerprint(f"{server.url}/big.tar") != first


def test_reading_to_the_end_and_beyond_is_as_with_a_file(server: RangeServer, tmp_path: Path) -> None:
    local, remote = Store().open(str(server.folder / "big.tar")), Store().open(f"{server.url}/big.tar")
    cached = Store(cache=BlockCache.open(tmp_path / "c", SIZE * 2)).open(f"{server.url}/big.tar")
    spans = [(0, 0), (SIZE - 5, 5), (SIZE - 5, 50), (SIZE, 5), (SIZE + 9, 5), (BLOCK_BYTES - 1, 2), (0, SIZE)]
    for offset, size in spans:
        expected = local.read(offset, size)
        assert remote.read(offset, size) == expected
        assert cached.read(offset, size) == expected
    local.close()


def test_the_cache_holds_what_was_read_and_outlives_the_server(server: RangeServer, tmp_path: Path) -> None:
    url, cache = f"{server.url}/big.tar", BlockCache.open(tmp_path / "cache", SIZE * 2)
    first = Reader(Store(cache=cache)).read(url, BLOCK_BYTES + 7, BLOCK_BYTES)
    assert gets(server) == [(BLOCK_BYTES, 3 * BLOCK_BYTES - 1)]
    again = Reader(Store(cache=BlockCache.open(tmp_path / "cache", SIZE * 2)))
    assert again.read(url, BLOCK_BYTES + 7, BLOCK_BYTES) == first == content(server)[BLOCK_BYTES + 7 :][:BLOCK_BYTES]
    assert len(gets(server)) == 1


def test_a_cache_below_the_largest_shard_is_refused_with_both_numbers(server: RangeServer, tmp_path: Path) -> None:
    limit = 2 * BLOCK_BYTES
    store = Store.of(LoaderSection(cache_dir=str(tmp_path / "cache"), cache_bytes=limit))
    with pytest.raises(
        ConfigError, match=rf"loader.cache_bytes \({limit}\) must hold the largest shard, .*{SIZE} bytes"
    ):
        expand([DatasetSection("set", (f"{server.url}/big.tar",))], "skip", store)


def test_brace_lists_and_list_files_name_urls(tmp_path: Path) -> None:
    write_dataset(tmp_path / "www", 8, 3)
    with http_server(tmp_path / "www") as server:
        (server.folder / "list").write_text("part-{000000..000001}.tar\npart-000002.tar # the last\n")
        (tmp_path / "list").write_text(f"{server.url}/part-{{000000..000002}}.tar\n")
        expected = tuple(Shard("set", f"{server.url}/part-{i:06d}.tar") for i in range(3))
        for pattern in (f"{server.url}/part-{{000000..000002}}.tar", f"@{server.url}/list", f"@{tmp_path}/list"):
            assert expand([DatasetSection("set", (pattern,))], "fail") == expected
        with pytest.raises(ConfigError, match="is a glob, and http has no listings; write a brace list"):
            expand([DatasetSection("set", (f"{server.url}/*.tar",))], "fail")
        with pytest.raises(ShardError, match=r"1 shards cannot be read: .*part-000003.tar"):
            expand([DatasetSection("set", (f"{server.url}/part-{{000000..000003}}.tar",))], "fail")


@pytest.mark.parametrize("cached", [True, False])
def test_indexing_fetches_every_byte_once_and_finds_what_is_found_locally(tmp_path: Path, cached: bool) -> None:
    write_dataset(tmp_path / "www", 60, 2)
    local = data_section(f"{tmp_path}/www/*.tar")
    build(expand(local.datasets, "fail"), local, tmp_path / "local")
    with http_server(tmp_path / "www") as server:
        data = data_section(f"{server.url}/part-{{000000..000001}}.tar")
        store = Store(cache=BlockCache.open(tmp_path / "cache", 1 << 24) if cached else None)
        shards, seen = expand(data.datasets, "fail", store), []
        server.faults.extend(["cut", "500"])
        report = build(shards, data, tmp_path / "idx", 2, lambda done, of: seen.append((done, of)), store)
        total = sum(path.stat().st_size for path in server.folder.glob("*.tar"))
        assert (report.built, report.samples) == (2, 60)
        assert sum(last - first + 1 for first, last in gets(server)) == total == store.tally.fetched_bytes
        assert seen[-1] == (total, total)
        assert Index.open(shards, data, tmp_path / "idx", store).facts.height.tolist() == heights(local, tmp_path)
        (server.folder / "part-000001.tar").write_bytes((server.folder / "part-000000.tar").read_bytes())
        with pytest.raises(ShardError, match=r"part-000001.tar is older than its tar"):
            Index.open(shards, data, tmp_path / "idx", store)
    assert rows_and_keys(tmp_path / "local") == rows_and_keys(tmp_path / "idx")


def rows_and_keys(folder: Path) -> list[tuple[bytes, bytes]]:
    """What every index file in a folder holds, by the shard's name."""
    files = [read(path) for path in sorted(folder.iterdir(), key=lambda path: path.name.partition("-")[2])]
    return [(file.rows.tobytes(), bytes(file.keys)) for file in files if file]


def heights(data: DataSection, folder: Path) -> list[int]:
    shards = expand(data.datasets, "fail")
    return Index.open(shards, data, folder / "local").facts.height.tolist()


def test_s3_globs_lists_and_ranges_are_read(tmp_path: Path) -> None:
    write_dataset(tmp_path / "www", 12, 3)
    (tmp_path / "www" / "list").write_text("part-000002.tar\n")
    with s3_server(tmp_path / "www") as bucket:
        urls = tuple(Shard("set", f"{bucket}/part-{i:06d}.tar") for i in range(3))
        assert expand([DatasetSection("set", (f"{bucket}/*.tar",))], "fail") == urls
        assert expand([DatasetSection("set", (f"@{bucket}/list",))], "fail") == urls[2:]
        assert list(scan(urls[1].path)) == list(scan(f"{tmp_path}/www/part-000001.tar"))
        reader, raw = Reader(), (tmp_path / "www" / "part-000000.tar").read_bytes()
        assert reader.read(urls[0].path, 100, 3000) == raw[100:3100]
        with pytest.raises(ShardError, match="cannot be opened"):
            Store(read_s=60).open(f"{bucket}/none.tar")
        replace_object(urls[0].path, raw[::-1])
        with pytest.raises(ShardError, match="changed since it was opened"):
            reader.read(urls[0].path, 100, 3000)


def replace_object(url: str, data: bytes) -> None:
    import boto3

    bucket, _, key = url.partition("://")[2].partition("/")
    with contextlib.closing(boto3.client("s3")) as client:
        client.put_object(Bucket=bucket, Key=key, Body=data)
