"""Laws of a worker's hands: every task once, reports in order, careful tasks alone, and a failure ends them all."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler
from dataloader_svc.hands import Hands
from dataloader_svc.pipeline import PipelineDecoder
from dataloader_svc.pool import Job, under_way
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Done, Task, Timings
from shared.batch import groups
from shared.errors import ShardError
from tests.support.daemons import make_run
from tests.support.filling import POISON, Shop, task_of

BOUND_S = 20.0


def task(number: int, careful: bool = False) -> Task:
    return Task(number, number, 0, (number,), (), careful=careful)


def done(task: Task) -> Done:
    return Done(task.id, 0, (0, 0, 0, 0, 0), task.sample_ids, 0, (), Timings(0, 0, 0), 0)


class Bench:
    """Tasks for so many hands, what they report, and which were under way when each began."""

    def __init__(self, tasks: list[Task], hands: int, during: Callable[[Task], object] = lambda task: None) -> None:
        self._tasks, self._during = deque(tasks), during
        self._lock, self._now = threading.Lock(), set[int]()
        self.reported: list[int] = []
        self.beside: dict[int, set[int]] = {}
        self.stopped = 0
        self.hands = Hands([self.fill] * hands, self.receive, lambda done: self.reported.append(done.task), self.stop)

    def receive(self) -> Task | None:
        return self._tasks.popleft() if self._tasks else None

    def stop(self) -> None:
        self.stopped += 1
        self._tasks.clear()

    def fill(self, task: Task) -> Done:
        with self._lock:
            self.beside[task.id] = set(self._now)
            self._now.add(task.id)
        self._during(task)
        with self._lock:
            self._now.remove(task.id)
        return done(task)


@pytest.mark.parametrize("hands", [1, 2, 3])
def test_every_task_is_done_once_and_reported_in_order(hands: int) -> None:
    """Also where later ones are done sooner."""
    bench = Bench([task(n) for n in range(30)], hands, lambda task: time.sleep(0.002 * (task.id % 3 == 0)))
    bench.hands.serve()
    assert bench.reported == list(range(30))


def test_as_many_are_under_way_as_there_are_hands() -> None:
    meeting = threading.Barrier(2)
    bench = Bench([task(n) for n in range(8)], 2, lambda task: meeting.wait(BOUND_S))
    bench.hands.serve()
    assert bench.reported == list(range(8))


def test_one_hand_does_one_after_the_other() -> None:
    bench = Bench([task(n) for n in range(8)], 1)
    bench.hands.serve()
    assert set(itertools.chain(*bench.beside.values())) == set()


def test_a_careful_task_is_alone() -> None:
    tasks = [task(n, careful=n % 4 == 2) for n in range(24)]
    bench = Bench(tasks, 3, lambda task: time.sleep(0.003))
    bench.hands.serve()
    assert bench.reported == list(range(24))
    careful = {task.id for task in tasks if task.careful}
    assert all(not bench.beside[number] for number in careful)
    assert all(not beside & careful for beside in bench.beside.values())


@pytest.mark.parametrize("hands", [1, 2, 3])
def test_a_failure_ends_all_hands_and_is_told(hands: int) -> None:
    """What came before it is reported, nothing after it."""

    def fail(task: Task) -> None:
        if task.id == 5:
            raise ShardError("storage is gone")

    bench = Bench([task(n) for n in range(50)], hands, fail)
    with pytest.raises(ShardError, match="storage is gone"):
        bench.hands.serve()
    assert bench.reported == list(range(len(bench.reported)))
    assert len(bench.reported) <= 5
    assert bench.stopped == 1


def test_a_death_is_laid_to_what_may_have_begun() -> None:
    plain, careful = (lambda n: Job(task(n), 0.0)), (lambda n: Job(task(n, careful=True), 0.0))
    jobs = [plain(0), plain(1), plain(2)]
    assert under_way(jobs, 1) == jobs[:1]
    assert under_way(jobs, 2) == jobs[:2]
    for jobs in ([careful(0), plain(1)], [plain(0), careful(1)]):
        assert under_way(jobs, 2) == jobs[:1]
    assert under_way([], 2) == []


def test_two_hands_that_decode_whole_batches_fill_as_one_does(tmp_path: Path) -> None:
    """As a worker does on a GPU, whose pipeline runs on the CPU's operators here."""
    shop = Shop(make_run(tmp_path)[1])
    packs = [pack for pack in shop.packs() if groups(shop.config.data)[pack.group].images and pack.sample_ids][:6]
    tasks = deque(task_of(pack, id=i) for i, pack in enumerate(packs))
    payloads = {task.id: np.full(shop.specs[task.group].size_bytes, POISON, np.uint8) for task in tasks}
    fillers = []
    for _ in range(3):
        decoder = Decoder(shop.config.data, shop.config.loader)
        decoder._batches = PipelineDecoder(None, 1, 4)
        fillers.append(Filler(shop.config.data, shop.index, Reader(), decoder, 2))
    alone = [fillers[2].fill(task, np.full_like(payloads[task.id], 0), print).checksum for task in tasks]
    done: list[Done] = []
    fills = [lambda task, filler=filler: filler.fill(task, payloads[task.id], print) for filler in fillers[:2]]
    Hands(fills, lambda: tasks.popleft() if tasks else None, done.append, tasks.clear).serve()
    assert [(report.task, report.checksum) for report in done] == list(enumerate(alone))
    for filler in fillers:
        filler.close()
    shop.close()
