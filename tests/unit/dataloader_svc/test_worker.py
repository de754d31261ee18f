"""Laws of filling a slot, and of the worker processes that do it."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataloader_svc.fill import Filler, views
from dataloader_svc.index import Index
from dataloader_svc.pool import WorkerPool
from dataloader_svc.shards import Shard
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Begin, Done, Setup, Task
from dataloader_svc.worker import warm_up
from shared.batch import batch_spec, groups
from shared.errors import ConfigError, DataError
from shared.sections import RunConfig
from shared.slots import SlotPool
from tests.support.crash import deadly_photo, install
from tests.support.daemons import ROOT, alive, make_run, make_run_file, wait_until
from tests.support.filling import POISON, Shop, damaged_run, rotten_png, task_of
from tests.support.media import tone, write_tar

CLIP = {"txt": b"a", "wav": tone(0.1)}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    _, config = make_run(tmp_path_factory.mktemp("fill"))
    shop = Shop(config)
    yield shop
    shop.close()


def test_every_byte_is_written_whatever_the_slot_held_before(shop: Shop) -> None:
    for pack in shop.packs():
        (a, done_a), (b, done_b) = (shop.fill(task_of(pack), poison) for poison in (0x00, POISON))
        assert np.array_equal(a, b)
        assert done_a.checksum == done_b.checksum


def test_the_batch_holds_the_planned_samples_and_their_counts(shop: Shop) -> None:
    for pack in shop.packs():
        payload, done = shop.fill(task_of(pack))
        group = groups(shop.config.data)[pack.group]
        fields = views(shop.specs[pack.group], payload.copy())
        samples = len(pack.sample_ids)
        assert done.sample_ids == pack.sample_ids
        assert not done.verdicts
        assert done.counts[0] == samples
        assert done.counts[1] == (samples if group.bucket else 0)
        heard = sum(1 for i in pack.sample_ids if shop.index.row(i).audio)
        assert done.counts[2] == heard == int((fields["clip_lengths_M"] > 0).sum())
        assert done.counts[3] == int((fields["segments_T"] > 0).sum())
        assert done.counts[4] == int((fields["labels_T"] >= 0).sum()) == pack.label_tokens


def test_unused_places_are_zero(shop: Shop) -> None:
    for pack in shop.packs():
        payload, done = shop.fill(task_of(pack))
        fields = views(shop.specs[pack.group], payload.copy())
        assert not fields["pixels_NHWC"][done.counts[1] :].any()
        assert not fields["clip_lengths_M"][done.counts[0] :].any()
        for wave, length in zip(fields["clips_MS"], fields["clip_lengths_M"], strict=True):
            assert not wave[length:].any()


def test_a_sample_without_a_clip_rides_with_clips_and_keeps_its_own_slot(shop: Shop) -> None:
    heard, silent = (
        next(i for i in range(len(shop.index)) if bool(shop.index.row(i).audio) is has and shop.index.row(i).image)
        for has in (True, False)
    )
    group = next(g for g in groups(shop.config.data) if g.bucket and g.clip_samples == 48_000 and g.samples >= 2)
    payload, done = shop.fill(Task(1, 0, group.id, (silent, heard), ()))
    fields = views(shop.specs[group.id], payload)
    assert done.counts[:3] == (2, 2, 1)
    assert not done.verdicts
    assert fields["clip_lengths_M"][0] == 0
    assert fields["clip_lengths_M"][1] > 0
    rows = fields["features_T"][fields["segments_T"] == 2]
    first_clip_row = group.images * group.image_tokens + group.clip_tokens
    assert (rows >= first_clip_row).sum() == -(-int(fields["clip_lengths_M"][1]) // 1600)
    assert (fields["features_T"][fields["segments_T"] == 1] < group.images * group.image_tokens).all()
    alone, _ = shop.fill(Task(1, 0, group.id, (heard,), ()))
    whole = views(shop.specs[group.id], alone)
    assert np.array_equal(whole["clips_MS"][0], fields["clips_MS"][1])
    assert np.array_equal(whole["pixels_NHWC"][0], fields["pixels_NHWC"][1])


def test_a_sample_that_comes_twice_in_one_batch_is_laid_out_twice(shop: Shop) -> None:
    pack = max(shop.packs(), key=lambda p: len(p.sample_ids))
    group, one = groups(shop.config.data)[pack.group], pack.sample_ids[0]
    for careful in (False, True):
        payload, done = shop.fill(Task(1, 0, pack.group, (one, one), (), careful=careful))
        fields = views(shop.specs[pack.group], payload)
        assert done.sample_ids == (one, one)
        assert (done.counts[0], done.substituted) == (2, 0)
        first, second = (fields["segments_T"] == n for n in (1, 2))
        assert np.array_equal(fields["tokens_T"][first], fields["tokens_T"][second])
        assert group.samples >= 2
        for name in ("pixels_NHWC", "clips_MS"):
            assert len(fields[name]) == 0 or np.array_equal(fields[name][0], fields[name][1])
    _, done = shop.fill(Task(1, 0, pack.group, (one, one), pack.spares, skip=(one,)))
    assert one not in done.sample_ids
    assert len(set(done.sample_ids)) == len(done.sample_ids) == done.substituted


def test_a_careful_task_gives_the_same_bytes_and_announces_each_sample(shop: Shop) -> None:
    announced: list[int] = []
    pack = max(shop.packs(), key=lambda p: len(p.sample_ids))
    plain, _ = shop.fill(task_of(pack))
    careful, _ = shop.fill(task_of(pack, careful=True), announce=announced.append)
    assert np.array_equal(plain, careful)
    assert announced == list(pack.sample_ids)


def test_filling_holds_no_column_of_the_index(shop: Shop) -> None:
    """A worker's memory does not grow with the number of samples: it looks up rows of the mapped files."""
    index = Index.open(shop.shards, shop.config.data, None)
    filler = Filler(shop.config.data, index, Reader(), shop.decoder, 2)
    for pack in shop.packs():
        task = task_of(pack, skip=pack.sample_ids[:1])
        filler.fill(task, np.empty(shop.specs[task.group].size_bytes, np.uint8), print)
    filler.close()
    assert index._columns is None


def test_a_convicted_sample_is_not_touched(shop: Shop) -> None:
    announced: list[int] = []
    pack = max(shop.packs(), key=lambda p: len(p.sample_ids))
    bad = pack.sample_ids[0]
    _, done = shop.fill(task_of(pack, careful=True, skip=(bad,)), announce=announced.append)
    assert bad not in announced
    assert bad not in done.sample_ids
    assert [(v.sample_id, v.reason) for v in done.verdicts] == [(bad, "decoder_crash")]


def test_a_bad_sample_is_replaced_by_the_first_spare(tmp_path: Path) -> None:
    shop = Shop(damaged_run(tmp_path, rotten_png()))
    pack = next(p for p in shop.packs() if 4 in p.sample_ids)
    _, done = shop.fill(task_of(pack))
    stand_in = pack.spares[0]
    assert done.sample_ids == tuple(stand_in if i == 4 else i for i in pack.sample_ids)
    assert done.substituted == 1
    assert [(v.sample_id, v.reason) for v in done.verdicts] == [(4, "image_decode")]
    assert shop.fill(task_of(pack))[1].checksum == done.checksum
    shop.close()


def test_without_a_spare_the_batch_is_a_sample_shorter(tmp_path: Path) -> None:
    shop = Shop(damaged_run(tmp_path, rotten_png()))
    pack = next(p for p in shop.packs() if 4 in p.sample_ids)
    payload, done = shop.fill(task_of(pack, spares=()))
    assert done.sample_ids == tuple(i for i in pack.sample_ids if i != 4)
    assert done.counts[0] == len(pack.sample_ids) - 1
    assert payload.max() != POISON or not views(shop.specs[pack.group], payload)["pixels_NHWC"][-1].any()
    shop.close()


def test_a_spare_too_long_for_the_room_is_passed_over(tmp_path: Path) -> None:
    shop = Shop(damaged_run(tmp_path, rotten_png()))
    pack = next(p for p in shop.packs() if 4 in p.sample_ids)
    long, fitting = [i for i in range(12) if i not in pack.sample_ids][:2]
    shop.pretend(long, text_tokens=40)
    _, done = shop.fill(task_of(pack, spares=(long, fitting)))
    assert long not in done.sample_ids
    assert fitting in done.sample_ids
    shop.close()


def test_a_clip_longer_than_its_header_says_keeps_to_its_planned_tokens(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    members = [(f"k{i}.{ext}", data) for i in range(4) for ext, data in (("txt", b"a"), ("wav", tone(0.35)))]
    write_tar(tmp_path / "data" / "a.tar", members)
    shop = Shop(make_run_file(tmp_path)[1])
    for sample_id in range(4):
        shop.pretend(sample_id, clip_samples=1600)
    pack = next(p for p in shop.packs() if p.sample_ids)
    payload, done = shop.fill(task_of(pack))
    lengths = views(shop.specs[pack.group], payload)["clip_lengths_M"]
    assert lengths[: done.counts[2]].tolist() == [1600] * len(pack.sample_ids)
    shop.close()


def test_a_clip_shorter_than_its_header_says_is_told_with_its_own_length(tmp_path: Path) -> None:
    """As an mp3 whose header counts the encoder's padding, here by 10 ms; what follows it in its place is silence."""
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "a.tar", [(f"k{i}.{e}", d) for i in range(4) for e, d in CLIP.items()])
    shop = Shop(make_run_file(tmp_path)[1])
    for sample_id in range(4):
        shop.pretend(sample_id, clip_samples=1760)
    pack = next(p for p in shop.packs() if p.sample_ids)
    payload, done = shop.fill(task_of(pack))
    fields = views(shop.specs[pack.group], payload)
    assert not done.verdicts
    assert fields["clip_lengths_M"][: done.counts[2]].tolist() == [1600] * len(pack.sample_ids)
    assert not fields["clips_MS"][:, 1600:].any()
    shop.close()


class House:
    """Worker processes over a segment in `folder`."""

    def __init__(self, config: RunConfig, shards: tuple[Shard, ...]) -> None:
        largest = max(batch_spec(group).size_bytes for group in groups(config.data))
        self.slots = SlotPool.create(config.loader.shm_dir, config.job, 4, largest)
        self.pool = WorkerPool(Setup(config.data, config.loader, shards, None))

    def start(self) -> None:
        segment = self.slots.segment
        self.pool.start()
        self.pool.begin(Begin(segment.path, segment.slots, segment.slot_bytes), stop=lambda: False)

    def run(self, tasks: list[Task]) -> dict[int, Done]:
        for task in tasks:
            self.pool.submit(task)
        return self.collect({task.id for task in tasks})

    def collect(self, wanted: set[int], bound_s: float = 60.0) -> dict[int, Done]:
        done: dict[int, Done] = {}
        deadline = time.monotonic() + bound_s
        while set(done) < wanted:
            assert time.monotonic() < deadline
            done.update({report.task: report for report in self.pool.collect()})
            self.pool.tick()
            time.sleep(0.01)
        return done

    def close(self) -> None:
        self.pool.close()
        self.slots.close()


@pytest.fixture
def house(shop: Shop) -> Iterator[House]:
    house = House(shop.config, shop.shards)
    house.start()
    yield house
    house.close()


def tasks_of(shop: Shop, count: int = 4) -> list[Task]:
    packs = [pack for pack in shop.packs() if pack.sample_ids][:count]
    return [task_of(pack, id=i, slot=i) for i, pack in enumerate(packs)]


def test_a_worker_process_fills_the_same_bytes_as_this_one(shop: Shop, house: House) -> None:
    tasks = tasks_of(shop)
    done = house.run(tasks)
    for task in tasks:
        payload, here = shop.fill(task)
        assert done[task.id].checksum == here.checksum
        assert np.array_equal(house.slots.segment.payload(task.slot)[: len(payload)], payload)


def test_a_worker_whose_daemon_died_while_it_started_ends_without_a_word(shop: Shop, tmp_path: Path) -> None:
    """Its segment is gone too, as after a successor's sweep, so it cannot start and has nobody to tell."""
    gone = Setup(shop.config.data, shop.config.loader, shop.shards, None)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.send(msgspec.msgpack.encode(Begin(str(tmp_path / "gone"), 4, 4096)))
    ours.close()
    (tmp_path / "setup").write_bytes(msgspec.msgpack.encode(gone))
    with theirs, open(tmp_path / "setup", "rb") as setup, open(tmp_path / "log", "wb") as log:
        fds = (theirs.fileno(), setup.fileno(), log.fileno())
        command = [sys.executable, "-m", "dataloader_svc.worker", *map(str, fds)]
        ran = subprocess.run(command, cwd=ROOT, pass_fds=fds, capture_output=True, timeout=120, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr, (tmp_path / "log").read_bytes()) == (0, b"", b"", b"")


def test_a_killed_worker_is_replaced_and_its_batches_are_the_same(shop: Shop, house: House) -> None:
    tasks = tasks_of(shop)
    undisturbed = {i: report.checksum for i, report in house.run(tasks).items()}
    (victim,) = house.pool.pids()
    os.kill(victim, signal.SIGSTOP)
    for task in tasks:
        house.pool.submit(task)
    os.kill(victim, signal.SIGKILL)
    again = house.collect({task.id for task in tasks})
    assert {i: report.checksum for i, report in again.items()} == undisturbed
    assert victim not in house.pool.pids()


def test_a_stopped_worker_is_replaced_after_its_bound(shop: Shop) -> None:
    loader = msgspec.structs.replace(shop.config.loader, worker_s=15.0)
    house = House(msgspec.structs.replace(shop.config, loader=loader), shop.shards)
    house.start()
    house.pool._bound_s = 0.5
    (victim,) = house.pool.pids()
    os.kill(victim, signal.SIGSTOP)
    house.pool.submit(tasks_of(shop, 1)[0])
    wait_until(lambda: house.pool.tick() or not alive(victim), "the stopped worker is killed")
    house.pool._bound_s = 15.0
    assert house.collect({0})
    house.close()


def test_workers_end_when_the_daemon_hangs_up(house: House) -> None:
    (worker,) = house.pool.pids()
    house.pool.close()
    assert not alive(worker)


def test_the_sample_that_kills_workers_is_found_and_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shop = Shop(damaged_run(tmp_path, deadly_photo(128, 128, 4)))
    monkeypatch.setenv("PYTHONPATH", install(tmp_path / "hook"))
    house = House(shop.config, shop.shards)
    house.start()
    packs = [pack for pack in shop.packs() if pack.sample_ids][:4]
    tasks = [task_of(pack, id=i, slot=i) for i, pack in enumerate(packs)]
    done = house.run(tasks)
    verdicts = {(v.sample_id, v.reason) for report in done.values() for v in report.verdicts}
    assert verdicts == {(4, "decoder_crash")}
    assert all(4 not in report.sample_ids for report in done.values())
    before = house.pool.pids()
    house.run(tasks)
    assert house.pool.pids() == before
    house.close()
    shop.close()


def test_an_audio_library_that_lacks_a_format_is_refused_at_start(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up(shop.decoder)
    monkeypatch.setattr("soundfile.available_formats", lambda: {"WAV": "", "FLAC": "", "OGG": ""})
    with pytest.raises(DataError, match="cannot read MP3"):
        warm_up(shop.decoder)


def test_a_worker_that_cannot_start_says_why(shop: Shop, tmp_path: Path) -> None:
    lost = House(shop.config, (Shard("set", str(tmp_path / "gone.tar")),))
    with pytest.raises(DataError, match=r"gone\.tar"):
        lost.start()
    lost.close()


def test_gpu_decode_without_a_gpu_is_refused_at_start(shop: Shop) -> None:
    from shared.cuda import count_gpus

    if count_gpus():
        pytest.skip("there is a GPU")
    loader = msgspec.structs.replace(shop.config.loader, device="gpu")
    house = House(msgspec.structs.replace(shop.config, loader=loader), shop.shards)
    with pytest.raises(ConfigError, match=r"loader\.device"):
        house.start()
    house.close()
