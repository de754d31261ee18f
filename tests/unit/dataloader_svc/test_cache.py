"""The block cache: bounded, checked, shared, and never in the way."""

import os
import threading
from pathlib import Path

import pytest

from dataloader_svc.cache import BLOCK_BYTES, SUM_BYTES, BlockCache
from shared.errors import ConfigError

EACH = BLOCK_BYTES + SUM_BYTES


def name(number: int) -> str:
    return f"{number:02x}name-{number}"


def block(number: int) -> bytes:
    return bytes([number]) * BLOCK_BYTES


def on_disk(cache: BlockCache) -> int:
    return sum(p.stat().st_size for p in cache.folder.rglob("*") if p.is_file() and p.name not in ("lock", "bytes"))


def test_a_block_comes_back_as_it_went_in(tmp_path: Path) -> None:
    cache = BlockCache.open(tmp_path, 10 * EACH)
    assert cache.get(name(1)) is None
    cache.put(name(1), block(1))
    assert BlockCache.open(tmp_path, 10 * EACH).get(name(1)) == block(1)


def test_a_damaged_block_is_never_given(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = BlockCache.open(tmp_path, 10 * EACH)
    for damage in (lambda d: d[:-1], lambda d: d[:-1] + b"x", lambda d: d[:4], lambda d: b""):
        cache.put(name(1), block(1))
        path = tmp_path / "01" / name(1)
        path.write_bytes(damage(path.read_bytes()))
        assert cache.get(name(1)) is None
        assert not path.exists()


def test_the_limit_holds_and_the_block_unused_longest_goes_first(tmp_path: Path) -> None:
    cache = BlockCache.open(tmp_path, 10 * EACH)
    for number in range(10):
        cache.put(name(number), block(number))
        os.utime(tmp_path / f"{number:02x}" / name(number), ns=(number, number))
    assert cache.get(name(0)) == block(0)
    cache.put(name(10), block(10))
    held = {number for number in range(11) if cache.get(name(number))}
    assert on_disk(cache) <= cache.limit_bytes
    assert {0, 10} <= held
    assert held == {0, *range(11 - len(held) + 1, 11)}


def test_threads_never_pass_the_limit(tmp_path: Path) -> None:
    caches = [BlockCache.open(tmp_path, 5 * EACH) for _ in range(4)]
    seen: list[int] = []
    wrong: list[int] = []

    def work(cache: BlockCache, start: int) -> None:
        for number in range(start, start + 12):
            cache.put(name(number), block(number))
            seen.append(cache.used_bytes())
            if (found := cache.get(name(number))) not in (None, block(number)):
                wrong.append(len(found or b""))

    threads = [threading.Thread(target=work, args=(cache, 20 * i)) for i, cache in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert len(seen) == 48
    assert max(seen) <= 5 * EACH


def test_what_a_killed_writer_left_is_reckoned_with(tmp_path: Path) -> None:
    cache = BlockCache.open(tmp_path, 3 * EACH)
    (tmp_path / "writing").write_bytes(b"half")
    (tmp_path / "bytes").write_text("not a number")
    for number in range(5):
        cache.put(name(number), block(number))
    assert cache.get(name(4)) == block(4)
    assert on_disk(cache) <= 3 * EACH


def test_a_folder_over_a_lowered_limit_is_cut_down_at_start(tmp_path: Path) -> None:
    cache = BlockCache.open(tmp_path, 8 * EACH)
    for number in range(8):
        cache.put(name(number), block(number))
    assert BlockCache.open(tmp_path, 3 * EACH).used_bytes() <= 3 * EACH


def test_a_cache_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"loader.cache_bytes \(100\) must hold at least one block, {EACH} bytes"):
        BlockCache.open(tmp_path, 100)
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"loader.cache_dir .*file/cache\) cannot be used"):
        BlockCache.open(tmp_path / "file" / "cache", EACH)


def test_a_folder_that_vanishes_costs_only_its_blocks(tmp_path: Path) -> None:
    cache = BlockCache.open(tmp_path / "cache", 3 * EACH)
    for path in (tmp_path / "cache").iterdir():
        path.unlink()
    (tmp_path / "cache").rmdir()
    cache.put(name(1), block(1))
    assert cache.get(name(1)) is None
