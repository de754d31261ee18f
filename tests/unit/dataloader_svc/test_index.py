"""Index files: built once, fresh or refused, bad samples kept as rows with a verdict."""

import gc
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataloader_svc.index import Index, build
from dataloader_svc.index_file import ROW, Fields, index_path, read
from dataloader_svc.samples import REASONS
from dataloader_svc.shards import expand
from shared.errors import ShardError
from shared.sections import AudioSection, DataSection, ImageSection, TextSection
from tests.support.media import photo, tone, write_dataset, write_tar
from tests.support.tars import built, data_section, entry, tar4, trained, write_entries


def reasons(index: Index) -> dict[str, str]:
    return {index.row(i).key: index.row(i).reason for i in range(len(index))}


def changed(data: DataSection, **fields: object) -> DataSection:
    return msgspec.structs.replace(data, **fields)


def reopened(data: DataSection) -> Index:
    return Index.open(expand(data.datasets, "fail"), data, None)


def test_rows_hold_the_place_and_facts_of_every_member(tmp_path: Path) -> None:
    picture, clip = photo(60, 40, orientation=6), tone(1.25, 8000, channels=2)
    members = [("d/a.jpg", picture), ("d/a.txt", "né".encode()), ("d/a.wav", clip), ("d/b.txt", b"")]
    path = write_tar(tmp_path / "p.tar", members)
    index, report = built(data_section(path))
    raw = path.read_bytes()
    row = index.row(0)
    for span, data in ((row.image, picture), (row.text, "né".encode()), (row.audio, clip)):
        assert span is not None
        assert raw[span[0] : sum(span)] == data
    assert (row.height, row.width) == (60, 40)
    assert (row.frames, row.rate_hz, row.channels) == (10_000, 8000, 2)
    assert (row.characters, row.tokens, row.text_tokens, row.clip_samples) == (2, 3, 3, 20_000)
    assert (row.dataset, row.shard, row.key, row.reason) == ("set", str(path), "d/a", "good")
    empty = index.row(1)
    assert (empty.image, empty.audio, empty.tokens, empty.reason) == (None, None, 0, "good")
    assert empty.text is not None
    assert index.name(0) == "set/p.tar/d/a"
    assert (report.built, report.samples, report.counts) == (1, 2, {})


def test_columns_agree_with_rows_over_many_shards(tmp_path: Path) -> None:
    write_dataset(tmp_path, 40, 3)
    index, _ = built(data_section(f"{tmp_path}/*.tar", text=TextSection(max_tokens=15)))
    assert len(index) == 40
    for i in range(40):
        row = index.row(i)
        assert (index.height[i], index.width[i]) == (row.height, row.width)
        assert (index.clip_samples[i], index.text_tokens[i]) == (row.clip_samples, row.text_tokens)
        assert REASONS[index.verdict[i]] == row.reason
        assert row.text_tokens == min(15, row.tokens)
    assert index.clip_samples.dtype == np.int64
    assert index.verdict.dtype == np.uint8
    with pytest.raises(IndexError, match="sample 40 of 40"):
        index.row(40)


def test_clip_lengths_round_up_to_the_common_rate(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "p.tar", [("a.txt", b"x"), ("a.wav", tone(0.1, 11_025))])
    index, _ = built(data_section(path))
    frames = index.row(0).frames
    assert index.clip_samples[0] == -(-frames * 16_000 // 11_025)


def test_every_bad_sample_is_a_row_with_its_reason(tmp_path: Path) -> None:
    good = photo(30, 30)
    members = [
        ("bomb.jpg", photo(40, 40)),
        ("bomb.txt", b"x"),
        ("cut.jpg", photo(90, 90)[:-40]),
        ("cut.txt", b"x"),
        ("good.jpg", good),
        ("good.txt", b"x"),
        ("html.jpg", b"<html></html>"),
        ("html.txt", b"x"),
        ("late.txt", b"x"),
        ("late.wav", tone(3)),
        ("notext.jpg", good),
        ("thin.jpg", photo(300, 5, form="PNG")),
        ("thin.txt", b"x"),
        ("zero.jpg", b""),
        ("zero.txt", b"x"),
        ("zero2.txt", b"x"),
        ("zero2.wav", tone(0)),
    ]
    limits = ImageSection(pixel_budget=64 * 64, max_pixels=1550, max_ratio=50)
    data = data_section(write_tar(tmp_path / "p.tar", members), image=limits, audio=AudioSection(max_s=2))
    index, report = built(data)
    expected = {
        "bomb": "image_too_large",
        "cut": "image_too_large",
        "good": "good",
        "html": "junk_image",
        "late": "audio_too_long",
        "notext": "missing_text",
        "thin": "odd_ratio",
        "zero": "junk_image",
        "zero2": "empty_audio",
    }
    expected["cut"] = "truncated_image"
    assert reasons(index) == expected
    assert index.counts() == report.counts
    assert (index.verdict == 0).sum() == 1
    assert {(p.key, p.reason) for p in index.problems()} == {(k, r) for k, r in expected.items() if r != "good"}


def test_a_cut_shard_keeps_its_whole_samples_and_is_reported_once(tmp_path: Path) -> None:
    for i, name in enumerate("abc"):
        tar4(tmp_path / f"{name}.tar", first=f"{4 * i:03d}")
    tar4(tmp_path / "d.tar", cut=7680 + 1024, first="100")
    index, report = built(data_section(f"{tmp_path}/*.tar"))
    assert (index.verdict == 0).sum() == len(index) == report.samples == 15
    [problem] = index.problems()
    assert (problem.reason, problem.key, Path(problem.shard).name) == ("truncated_tail", "", "d.tar")
    assert "at byte 7680" in problem.detail


def test_links_and_unsafe_names_are_counted_and_write_nothing_outside(tmp_path: Path) -> None:
    home = tmp_path / "a" / "b"
    home.mkdir(parents=True)
    entries = [("../../x.txt", b"x"), ("/abs/x.txt", b"x"), entry("l.jpg", b"2", "/etc/passwd"), ("l.txt", b"x")]
    path = write_entries(home / "p.tar", entries)
    before = {p for p in tmp_path.rglob("*") if p.parent != home}
    index, _ = built(data_section(path), home / "idx")
    assert index.counts() == {"unsafe_name": 2, "link_member": 1}
    assert {p for p in tmp_path.rglob("*") if p.parent not in (home, home / "idx")} == before


def test_replaced_captions_are_noted_and_stay_good(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "p.tar", [("a.txt", b"caf\xe9"), ("b.txt", "kept \ufffd".encode())])
    index, _ = built(data_section(path))
    assert reasons(index) == {"a": "good", "b": "good"}
    assert index.counts() == {"replaced_utf8": 1}
    rejecting, _ = built(data_section(path, text=TextSection(bad_utf8="reject")))
    assert reasons(rejecting) == {"a": "bad_utf8", "b": "good"}


def test_a_missing_index_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"p\.tar has no index.*millstream-loader index --config"):
        reopened(data_section(tar4(tmp_path / "p.tar")))


def test_an_index_older_than_its_tar_is_refused_and_rebuilt(tmp_path: Path) -> None:
    data = data_section(tar4(tmp_path / "p.tar"))
    built(data)
    write_tar(tmp_path / "p.tar", [(f"{i}.txt", b"x") for i in range(9)])
    with pytest.raises(ShardError, match=r"index of .*p\.tar is older than its tar; run .* again"):
        reopened(data)
    index, report = built(data)
    assert (report.built, len(index)) == (1, 9)


def test_a_second_build_reads_nothing_again(tmp_path: Path) -> None:
    data = data_section(tar4(tmp_path / "a.tar"), tar4(tmp_path / "b.tar"))
    built(data)
    written = index_path(str(tmp_path / "a.tar"), None).stat().st_mtime_ns
    _, report = built(data)
    assert (report.built, report.reused, report.samples) == (0, 2, 8)
    assert index_path(str(tmp_path / "a.tar"), None).stat().st_mtime_ns == written


def test_a_build_that_broke_off_goes_on_where_it_was(tmp_path: Path) -> None:
    data = data_section(*[tar4(tmp_path / f"{name}.tar") for name in "abc"])
    shards, last = expand(data.datasets, "fail"), tmp_path / "c.tar"
    last.rename(tmp_path / "away")
    with pytest.raises(ShardError, match=r"c\.tar cannot be opened"):
        build(shards, data, None)
    (tmp_path / "away").rename(last)
    report = build(shards, data, None)
    assert (report.built, report.reused, report.samples) == (1, 2, 12)


def test_another_tokenizer_changes_only_the_token_column(tmp_path: Path) -> None:
    members = [("a.txt", b"a street with a car"), ("b.jpg", b""), ("b.txt", b"x"), ("c.txt", b"a car by the sea")]
    data = data_section(write_tar(tmp_path / "p.tar", members))
    first, _ = built(data)
    before, problems = [first.row(i) for i in range(3)], first.problems()
    other = changed(data, text=TextSection(tokenizer=trained(tmp_path / "t.json")))
    with pytest.raises(ShardError, match="built for another tokenizer"):
        reopened(other)
    second, report = built(other)
    assert (report.built, report.retokenized) == (0, 1)
    assert second.row(0).tokens < before[0].tokens == 19
    for i, old in enumerate(before):
        new = second.row(i)
        assert msgspec.structs.replace(new, tokens=old.tokens, text_tokens=old.text_tokens) == old
    assert second.problems() == problems


def test_an_index_rebuilt_while_in_use_is_noticed(tmp_path: Path) -> None:
    data = data_section(tar4(tmp_path / "p.tar"))
    index, _ = built(data)
    built(changed(data, audio=AudioSection(max_s=3)))
    with pytest.raises(ShardError, match="changed while in use"):
        index.row(0)


def test_other_limits_make_the_index_stale(tmp_path: Path) -> None:
    data = data_section(tar4(tmp_path / "p.tar"))
    built(data)
    other = changed(data, image=ImageSection(pixel_budget=64 * 64, max_pixels=10))
    with pytest.raises(ShardError, match="built under other data limits"):
        reopened(other)
    index, report = built(other)
    assert report.built == 1
    assert set(reasons(index).values()) == {"image_too_large"}


@pytest.mark.parametrize("damage", ["cut", "junk", "empty", "row"])
def test_a_damaged_index_is_refused_and_rebuilt(tmp_path: Path, damage: str) -> None:
    data = data_section(tar4(tmp_path / "p.tar"))
    built(data)
    path = index_path(str(tmp_path / "p.tar"), None)
    raw = path.read_bytes()
    damaged = {"cut": raw[:-3], "junk": b"junk" * 99, "empty": b"", "row": raw[:16] + bytes(len(raw) - 16)}
    path.write_bytes(damaged[damage])
    with pytest.raises(ShardError, match="run millstream-loader index again"):
        reopened(data)
    index, report = built(data)
    assert (report.built, len(index)) == (1, 4)


def test_two_shards_of_one_name_do_not_share_a_file_in_the_index_folder(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        write_tar(tmp_path / name / "p.tar", [(f"{name}.txt", b"x")])
    index, _ = built(data_section(f"{tmp_path}/*/p.tar"), tmp_path / "idx")
    assert [index.row(i).key for i in range(2)] == ["a", "b"]
    assert len(list((tmp_path / "idx").iterdir())) == 2
    assert not list((tmp_path / "a").glob("*idx"))


def test_an_unwritable_folder_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    data = data_section(tar4(tmp_path / "p.tar"))
    with pytest.raises(ShardError, match=r"cannot be written.*loader\.index_dir"):
        build(expand(data.datasets, "fail"), data, tmp_path / "file" / "idx")


def test_a_remote_shard_needs_an_index_folder() -> None:
    with pytest.raises(ShardError, match=r"set loader\.index_dir"):
        index_path("memory://x/p.tar", None)


def test_threads_build_the_same_index_and_report_progress(tmp_path: Path) -> None:
    write_dataset(tmp_path, 40, 5)
    data = data_section(f"{tmp_path}/*.tar")
    shards = expand(data.datasets, "fail")
    seen: list[tuple[int, int]] = []
    one = build(shards, data, tmp_path / "one", 1)
    four = build(shards, data, tmp_path / "four", 4, lambda done, of: seen.append((done, of)))
    assert one == four
    total = sum(path.stat().st_size for path in tmp_path.glob("*.tar"))
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    for shard in shards:
        files = [index_path(shard.path, tmp_path / n).read_bytes() for n in ("one", "four")]
        assert files[0] == files[1]


def test_a_row_is_read_from_the_mapped_file_not_from_a_copy(tmp_path: Path) -> None:
    data = data_section(tar4(tmp_path / "p.tar"))
    index, _ = built(data)
    index.row(0)
    file = read(index_path(str(tmp_path / "p.tar"), None))
    assert file is not None
    assert not file.rows.flags.owndata
    assert not file.rows.flags.writeable
    assert index._columns is None
    assert len(index.height) == 4
    assert index._columns is not None


def test_looking_up_rows_costs_no_memory_a_sample(tmp_path: Path) -> None:
    """2,000 look-ups spread over an index of 3.6 MB dirty less than 0.5 MB: its pages stay shared."""
    members = [(f"{i:06d}.txt", b"x") for i in range(20_000)]
    data = data_section(*[write_tar(tmp_path / f"{s}.tar", members) for s in range(2)])
    built(data)
    program = (
        "import sys, msgspec\n"
        "from pathlib import Path\n"
        "from dataloader_svc.index import Index\n"
        "from dataloader_svc.shards import expand\n"
        "from shared.sections import DataSection\n"
        "def private():\n"
        "    lines = open('/proc/self/smaps_rollup').read().splitlines()\n"
        "    return sum(int(line.split()[1]) for line in lines if line.startswith('Private_Dirty'))\n"
        "data = msgspec.json.decode(sys.argv[1], type=DataSection)\n"
        "index = Index.open(expand(data.datasets, 'fail'), data, None)\n"
        "index.row(0)\n"
        "before = private()\n"
        "names = [index.row(i).tokens for i in range(0, len(index), 20)]\n"
        "print(private() - before)\n"
    )
    text = msgspec.json.encode(data).decode()
    done = subprocess.run(
        [sys.executable, "-c", program, text], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 512


def test_shards_are_the_same_wherever_they_lie_and_however_they_were_packed(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", 12, 2)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for tar in (tmp_path / "b").glob("*.tar"):
        tar.write_bytes(tar.read_bytes() + bytes(10240))
        os.utime(tar, (1, 1))
    [here, there] = [built(data_section(f"{tmp_path}/{name}/*.tar"))[0] for name in "ab"]
    assert here.content == there.content
    assert here.digest != there.digest


@pytest.mark.parametrize("member", ["b.jpg", "b.txt", "b.wav", "b.cls"])
def test_a_shard_rewritten_to_its_size_is_another_where_training_would_see_it(tmp_path: Path, member: str) -> None:
    """In the middle of the tar, under the same name, of the same size, changed as late as it was before."""
    members: dict[str, bytes] = {
        "a.txt": bytes(5000),
        "b.jpg": photo(30, 20),
        "b.txt": b"good",
        "b.wav": tone(0.1),
        "b.cls": b"1",
    }
    data = data_section(path := write_tar(tmp_path / "p.tar", list({**members, "c.txt": bytes(5000)}.items())))
    before, info = built(data)[0].content, path.stat()
    old = bytearray(members[member])
    old[len(old) // 2] ^= 1
    members[member] = bytes(old)
    write_tar(path, list({**members, "c.txt": bytes(5000)}.items()))
    assert path.stat().st_size == info.st_size
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))
    now, report = built(data)
    assert report.built == 1
    assert (now.content == before) is (member == "b.cls")


def test_a_tokenizer_that_counts_otherwise_makes_other_places_of_the_same_shards(tmp_path: Path) -> None:
    data = data_section(write_tar(tmp_path / "p.tar", [("a.txt", b"a street with a car")]))
    before = built(data)[0].content
    text = TextSection(tokenizer=trained(tmp_path / "t.json"))
    assert built(changed(data, text=text))[0].content != before
    assert built(data)[0].content == before


def test_no_file_stays_open_after_a_build(tmp_path: Path) -> None:
    data = data_section(*[tar4(tmp_path / f"{i}.tar") for i in range(5)])
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    build(expand(data.datasets, "fail"), data, None, 2)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rows_fields_are_those_of_the_file() -> None:
    assert Fields._fields == ROW.names
