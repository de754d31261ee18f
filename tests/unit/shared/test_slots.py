"""Slots: states move one way, bytes are seen only after commit, the dead are swept and the living are not."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared.errors import ConfigError, SlotError
from shared.slots import Segment, SlotPool, State, sweep

OWNER = """
import sys, time
from shared.slots import SlotPool
pool = SlotPool.create(sys.argv[1], "job", 2, 100)
print(pool.segment.path, flush=True)
time.sleep(60)
"""


@contextlib.contextmanager
def owner(folder: Path) -> Iterator[str]:
    """A process that owns a segment, and its path; killed with SIGKILL at the end."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(folder)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            yield child.stdout.readline().strip()
        finally:
            child.kill()


def test_a_slot_goes_round_free_filling_ready_leased(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 1, 100)
    slot = pool.claim()
    assert slot == 0 and pool.states == [State.FILLING] and pool.claim() is None
    pool.commit(slot)
    pool.lease(slot)
    pool.lease(slot)
    assert pool.count(State.LEASED) == 1
    pool.free(slot)
    assert pool.claim() == 0
    pool.close()


def test_a_lease_given_back_leaves_the_slot_ready_for_another(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 1, 100)
    slot = pool.claim()
    assert slot is not None
    pool.commit(slot)
    with pytest.raises(SlotError, match="is ready, leased expected"):
        pool.give_back(slot)
    pool.lease(slot)
    pool.give_back(slot)
    assert pool.states == [State.READY]
    pool.close()


def test_a_slot_cannot_be_leased_before_commit(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 1, 100)
    slot = pool.claim()
    assert slot is not None
    with pytest.raises(SlotError, match="is filling, ready expected"):
        pool.lease(slot)
    pool.close()


def test_what_the_owner_writes_a_reader_sees_without_a_copy(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 3, 5000)
    reader = Segment.attach(pool.segment.path, 3, pool.segment.slot_bytes)
    pool.segment.payload(2)[:] = 7
    assert np.all(reader.payload(2) == 7) and np.all(reader.payload(1) == 0)
    reader.close()
    pool.close()


def test_claiming_ends_older_leases(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 1, 100)
    slot = pool.claim()
    assert slot is not None
    before = pool.segment.generation(slot)
    pool.free(slot)
    pool.claim()
    assert pool.segment.generation(slot) == before + 1
    pool.close()


def test_readers_keep_their_bytes_after_the_owner_left(tmp_path: Path) -> None:
    pool = SlotPool.create(str(tmp_path), "job", 1, 100)
    reader = Segment.attach(pool.segment.path, 1, pool.segment.slot_bytes)
    pool.segment.payload(0)[:] = 9
    pool.close()
    pool.close()
    assert list(tmp_path.iterdir()) == [] and np.all(reader.payload(0) == 9)
    reader.close()


def test_sweep_takes_the_dead_and_leaves_the_living(tmp_path: Path) -> None:
    with owner(tmp_path) as dead_path:
        pass
    with owner(tmp_path) as living_path:
        assert sweep(str(tmp_path), "job") == [dead_path]
        assert Path(living_path).exists() and not Path(dead_path).exists()
        assert sweep(str(tmp_path), "other") == []
    assert sweep(str(tmp_path), "job") == [living_path]


def test_a_file_of_another_name_is_never_swept(tmp_path: Path) -> None:
    stranger = tmp_path / f"millstream-{os.getuid()}-job-of-another-0000"
    stranger.write_bytes(b"x")
    sweep(str(tmp_path), "job")
    assert stranger.exists()


def test_slots_larger_than_the_file_system_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must fit the \d+ bytes free in .*; lower loader.slots_per_stream"):
        SlotPool.create(str(tmp_path), "job", 4, 1 << 50)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_or_segment_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loader\.shm_dir"):
        SlotPool.create(str(tmp_path / "none"), "job", 1, 10)
    with pytest.raises(SlotError, match="is the daemon on this host"):
        Segment.attach(str(tmp_path / "gone"), 1, 4096)
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(SlotError, match="has 3 bytes, 4096 expected"):
        Segment.attach(str(tmp_path / "short"), 1, 4096)
