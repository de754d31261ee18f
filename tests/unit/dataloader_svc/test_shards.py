"""Naming shards, walking tars, reading bytes by offset."""

import logging
import os
import random
import tarfile
import threading
from pathlib import Path

import fsspec
import pytest

from dataloader_svc.samples import group
from dataloader_svc.shards import Member, ScanProblem, Shard, expand, scan
from dataloader_svc.store import Reader, Store
from shared.errors import ConfigError, ShardError
from shared.sections import DatasetSection
from tests.support.media import write_tar
from tests.support.tars import entry, tar4, write_entries


def members(path: Path) -> list[Member]:
    return [item for item in scan(str(path)) if isinstance(item, Member)]


def problems(path: Path) -> list[ScanProblem]:
    return [item for item in scan(str(path)) if isinstance(item, ScanProblem)]


def sets(*patterns: str) -> list[DatasetSection]:
    return [DatasetSection("set", patterns)]


# --- naming ---


def test_patterns_of_every_kind_name_the_same_shards(tmp_path: Path) -> None:
    paths = [str(tar4(tmp_path / f"p-{i:03d}.tar")) for i in range(3)]
    (tmp_path / "list").write_text("# a comment\np-{000..001}.tar\n\np-002.tar\n")
    patterns = (f"{tmp_path}/p-{{000..002}}.tar", f"{tmp_path}/*.tar", f"@{tmp_path}/list")
    for pattern in patterns:
        assert expand(sets(pattern), "fail") == tuple(Shard("set", path) for path in paths)
    assert expand(sets(*patterns), "fail") == expand(sets(patterns[0]), "fail")


def test_order_is_the_datasets_then_the_sorted_paths(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        tar4(tmp_path / f"{name}.tar")
    datasets = [DatasetSection("two", (f"{tmp_path}/c.tar",)), DatasetSection("one", (f"{tmp_path}/{{b,a}}.tar",))]
    assert [Path(s.path).stem for s in expand(datasets, "fail")] == ["c", "a", "b"]


def test_indexes_beside_shards_are_no_shards(tmp_path: Path) -> None:
    tar4(tmp_path / "p.tar")
    (tmp_path / "p.tar.millstream-idx").write_bytes(b"x")
    assert len(expand(sets(f"{tmp_path}/*"), "fail")) == 1


def test_all_missing_and_empty_shards_are_named_at_once(tmp_path: Path) -> None:
    for i in (0, 1, 2, 3, 5, 6, 7, 8, 9):
        tar4(tmp_path / f"p-{i}.tar")
    (tmp_path / "p-7.tar").write_bytes(b"")
    with pytest.raises(ShardError, match=r"2 shards.*p-4\.tar \(missing\).*p-7\.tar \(zero bytes\).*missing_shards"):
        expand(sets(f"{tmp_path}/p-{{0..9}}.tar"), "fail")


def test_missing_shards_are_skipped_when_asked_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("millstream"), "propagate", True)
    tar4(tmp_path / "p-0.tar")
    left = expand(sets(f"{tmp_path}/p-{{0..2}}.tar"), "skip")
    assert [Path(s.path).name for s in left] == ["p-0.tar"]
    assert len(caplog.records) == 1
    assert "p-1.tar" in caplog.text
    assert "p-2.tar" in caplog.text


def test_no_shard_left_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no shard is left"):
        expand(sets(f"{tmp_path}/none.tar"), "skip")


@pytest.mark.timeout(30)
def test_what_is_no_regular_file_is_refused_in_words_and_never_waited_for(tmp_path: Path) -> None:
    tar4(tmp_path / "a.tar")
    os.mkfifo(tmp_path / "b.tar")
    (tmp_path / "c.tar").symlink_to("/dev/zero")
    with pytest.raises(ShardError, match=r"2 shards.*b\.tar.*no regular file.*FIFO.*c\.tar.*device.*missing_shards"):
        expand(sets(f"{tmp_path}/*.tar"), "fail")
    assert [Path(s.path).name for s in expand(sets(f"{tmp_path}/*.tar"), "skip")] == ["a.tar"]
    with pytest.raises(ShardError, match=r"shard list .*b\.tar cannot be read .*no regular file"):
        expand(sets(f"@{tmp_path}/b.tar"), "fail")


def test_folders_bad_braces_and_bad_lists_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="a folder; name the tars in it"):
        expand(sets(str(tmp_path)), "fail")
    with pytest.raises(ConfigError, match="braces that do not balance"):
        expand(sets(f"{tmp_path}/p-{{0..2.tar"), "fail")
    with pytest.raises(ShardError, match=r"shard list .*nolist"):
        expand(sets(f"@{tmp_path}/nolist"), "fail")
    (tmp_path / "list").write_text("@other")
    with pytest.raises(ConfigError, match="@other"):
        expand(sets(f"@{tmp_path}/list"), "fail")


# --- walking ---


def test_members_carry_the_place_of_their_bytes(tmp_path: Path) -> None:
    path = tar4(tmp_path / "p.tar")
    found = members(path)
    assert [m.name for m in found[:3]] == ["000.jpg", "000.txt", "001.jpg"]
    assert [(m.offset, m.size) for m in found[:3]] == [(512, 1000), (2048, 2), (3072, 1000)]
    assert problems(path) == []


@pytest.mark.parametrize("cut", [7680 + 1024, 7680 + 512 + 999])
def test_a_cut_payload_ends_the_walk_and_is_reported_with_its_offset(tmp_path: Path, cut: int) -> None:
    path = tar4(tmp_path / "p.tar", cut=cut)
    [problem] = problems(path)
    assert (problem.reason, problem.offset, problem.name) == ("truncated_tail", 7680, "003.jpg")
    samples, _ = group(scan(str(path)))
    assert [(s.key, s.reason) for s in samples] == [("000", ""), ("001", ""), ("002", "")]


@pytest.mark.parametrize(
    ("cut", "reason", "last"),
    [
        (7680 + 100, "truncated_tail", ("002", "")),
        (7680, "no_end_marker", ("002", "")),
        (7680 + 1536, "no_end_marker", ("003", "truncated_tail")),
        (7680 + 1536 + 514, "no_end_marker", ("003", "")),
        (7680 + 1536 + 513, "truncated_tail", ("003", "truncated_tail")),
    ],
)
def test_only_whole_samples_survive_a_cut(tmp_path: Path, cut: int, reason: str, last: tuple[str, str]) -> None:
    path = tar4(tmp_path / "p.tar", cut=cut)
    samples, found = group(scan(str(path)))
    assert (samples[-1].key, samples[-1].reason) == last
    assert [p.reason for p in found] == [reason]


def test_a_caption_whose_image_was_cut_off_is_never_trained_alone(tmp_path: Path) -> None:
    body = [(f"{k}.{f}", bytes(512)) for k in ("0", "1") for f in ("txt", "wav")]
    path = write_tar(tmp_path / "p.tar", body)
    path.write_bytes(path.read_bytes()[: 3 * 1024])
    samples, _ = group(scan(str(path)))
    assert [s.reason for s in samples] == ["", "truncated_tail"]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_and_foreign_names_are_whole(tmp_path: Path, form: int) -> None:
    names = ["d" * 120 + "/" + "k" * 130 + ".txt", "ключ/ж.txt", "short.txt"]
    path = write_entries(tmp_path / "p.tar", [(name, b"x") for name in names], form)
    assert [m.name for m in members(path)] == names
    assert problems(path) == []


def test_folders_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "0.txt").write_text("hello")
    with tarfile.open(tmp_path / "p.tar", "w") as tar:
        tar.add(tmp_path / "dir", "dir")
    assert [m.name for m in members(tmp_path / "p.tar")] == ["dir/0.txt"]


def test_links_and_unsafe_names_are_rejected_and_never_become_half_samples(tmp_path: Path) -> None:
    entries = [
        ("../../x.jpg", b"x"),
        ("/abs/x.jpg", b"x"),
        entry("a.jpg", tarfile.SYMTYPE, "/etc/passwd"),
        ("a.txt", b"caption"),
        entry("b.jpg", tarfile.LNKTYPE, "a.txt"),
        ("b.txt", b"caption"),
        entry("c.jpg", tarfile.FIFOTYPE),
        ("d.txt", b"caption"),
    ]
    path = write_entries(tmp_path / "p.tar", entries)
    samples, found = group(scan(str(path)))
    reasons = {s.key: s.reason for s in samples}
    assert reasons == {
        "../../x": "unsafe_name",
        "/abs/x": "unsafe_name",
        "a": "link_member",
        "b": "link_member",
        "c": "special_member",
        "d": "",
    }
    assert found == []


def test_odd_shards_are_reported_not_raised(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar", "w"):
        pass
    whole = tar4(tmp_path / "p.tar").read_bytes()
    (tmp_path / "joined.tar").write_bytes(whole[: 4 * 2560 + 1024] + whole)
    (tmp_path / "junk.tar").write_bytes(b"<html>" * 500)
    (tmp_path / "middle.tar").write_bytes(whole[:5120] + b"\x55" * 512 + whole[5632:])
    with tarfile.open(tmp_path / "z.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "p.tar", "0.txt")
    (tmp_path / "z.tar.gz").write_bytes((tmp_path / "z.tar.gz").read_bytes().ljust(600, b"\1"))
    expected = {"empty.tar": "no_members", "joined.tar": "data_after_end", "junk.tar": "bad_header"}
    expected |= {"middle.tar": "bad_header", "z.tar.gz": "bad_header"}
    for name, reason in expected.items():
        assert [p.reason for p in problems(tmp_path / name)] == [reason], name
    assert "gzip" in problems(tmp_path / "z.tar.gz")[0].detail
    assert [s.reason for s in group(scan(str(tmp_path / "middle.tar")))[0]] == ["", ""]


def test_the_walk_agrees_with_tarfile(tmp_path: Path) -> None:
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        body = [(f"k{i}/{'n' * (i % 90)}.x", bytes(i * 37 % 3000)) for i in range(60)]
        path = write_entries(tmp_path / "p.tar", body, form)
        with tarfile.open(path) as tar:
            known = [(m.name, m.offset_data, m.size) for m in tar if m.isfile()]
        assert [(m.name, m.offset, m.size) for m in members(path)] == known


def test_a_damaged_tar_never_raises_and_never_yields_bytes_outside_it(tmp_path: Path) -> None:
    rng = random.Random(0)
    body = [(f"{'k' * (i * 30 % 140)}{i}.txt", b"caption") for i in range(8)]
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        whole = write_entries(
            tmp_path / "p.tar", [*body, entry("l.txt", tarfile.SYMTYPE, "x" * 200)], form
        ).read_bytes()
        for _ in range(150):
            data = bytearray(whole[: rng.randrange(512, len(whole))])
            for _ in range(rng.randrange(1, 20)):
                data[rng.randrange(len(data))] = rng.choice(b"\0\xff019x=\n ")
            (tmp_path / "p.tar").write_bytes(bytes(data))
            samples, found = group(scan(str(tmp_path / "p.tar")))
            assert len(found) <= 1
            held = [m for s in samples for m in (s.image, s.audio, s.text) if m]
            assert all(m.offset + m.size <= len(data) for m in held)


# --- reading ---


def test_reader_reads_by_offset_from_many_threads_with_few_open_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.bin" for i in range(9)]
    for i, path in enumerate(paths):
        path.write_bytes(bytes([i]) * 5000)
    reader = Reader(max_open=2)
    wrong: list[int] = []

    def work(start: int) -> None:
        for n in range(300):
            i = (start + n) % len(paths)
            if reader.read(str(paths[i]), n, 100) != bytes([i]) * 100:
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == []
    assert len(reader._files) <= 2
    open_files = [p for p in Path("/proc/self/fd").iterdir() if p.exists() and str(p.resolve()).endswith(".bin")]
    assert len(open_files) <= 2
    reader.close()
    assert not [p for p in Path("/proc/self/fd").iterdir() if p.exists() and str(p.resolve()).endswith(".bin")]


def test_reads_past_the_end_and_of_absent_shards_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    reader = Reader()
    assert reader.read(str(tmp_path / "a"), 1, 3) == b"234"
    with pytest.raises(ShardError, match="ends at 5, before 9"):
        reader.read(str(tmp_path / "a"), 3, 6)
    with pytest.raises(ShardError, match=r"nowhere cannot be opened"):
        reader.read(str(tmp_path / "nowhere"), 0, 1)
    reader.close()


def test_remote_shards_are_walked_and_read_like_local_ones(tmp_path: Path) -> None:
    url = "memory://bucket/p.tar"
    with fsspec.open(url, "wb") as file:
        file.write(tar4(tmp_path / "p.tar").read_bytes())
    assert expand(sets(url), "fail") == (Shard("set", url),)
    assert list(scan(url)) == list(scan(str(tmp_path / "p.tar")))
    reader = Reader()
    assert reader.read(url, 2048, 2) == b"ok"
    reader.close()
    assert Store().fingerprint(url).size == (tmp_path / "p.tar").stat().st_size


def test_fingerprint_tells_rewritten_shards_apart(tmp_path: Path) -> None:
    path = tar4(tmp_path / "p.tar")
    first = Store().fingerprint(str(path))
    assert Store().fingerprint(str(path)) == first
    data = bytearray(path.read_bytes())
    data[600] ^= 1
    path.write_bytes(bytes(data))
    assert Store().fingerprint(str(path)).edges != first.edges
