"""The loader's lanes with its decoder taken out: the daemon's real loop, and real clients in their own processes.

A worker's place is taken by a copy of made-up bytes into the slot, stamped with the moment just before the slot turns
READY (CLOCK_MONOTONIC, the same in every process).
"""

import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import zmq

from dataloader_svc.daemon import Loop, Signals
from dataloader_svc.jobs import Job
from dataloader_svc.plan import Planner
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.server import Listener
from dataloader_svc.service import Service
from dataloader_svc.tasks import Done, Task, Timings
from shared.batch import BatchSpec, batch_spec, groups
from shared.config import endpoint, load
from shared.sections import RunConfig
from shared.slots import SlotPool
from tests.bench import one_size
from tests.support.columns import pictures
from tests.support.keys import make_keys
from tests.support.ports import free_port
from trainer.client import LoaderClient

SIDE, PATCH, CAPTION_TOKENS = 512, 32, 4
IMAGE_BYTES = SIDE * SIDE * 3
PLACES = 64
WARM, WAIT_S, READER_S, JOIN_S = 4, 60.0, 300.0, 10.0


Way = Literal["slots", "tcp", "tcp, encrypted"]


class Seen(msgspec.Struct, frozen=True):
    """One reader: seconds for its batches after the first WARM, and how late each was after READY."""

    seconds: float
    batches: int
    late_s: list[float]


class Copier:
    """Stands where the pool of decode workers does: `submit` a task, and `collect` finds its slot filled.

    With `pace_s` each fill begins so long after the one before ended: readers then wait for it.
    """

    def __init__(self, pool: SlotPool, spec: BatchSpec, pace_s: float) -> None:
        self._pool, self._pace_s = pool, pace_s
        self._tasks: deque[Task] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._source = np.random.default_rng(0).integers(0, 256, spec.size_bytes, dtype=np.uint8)
        self.batch_bytes, self.written_bytes = spec.size_bytes, 0

    def channels(self) -> list[int]:
        return [self._event]

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        os.eventfd_write(self._event, 1)

    def tick(self) -> None:
        """Nothing can die here."""

    def collect(self) -> list[Done]:
        """Fill one slot, if one is asked for."""
        if not self._tasks:
            return []
        os.eventfd_read(self._event)
        time.sleep(self._pace_s)
        task = self._tasks.popleft()
        payload = self._pool.segment.payload(task.slot)
        np.copyto(payload[: self.batch_bytes], self._source)
        self.written_bytes += self.batch_bytes
        count = len(task.sample_ids)
        payload[:8].view(np.int64)[0] = time.monotonic_ns()
        return [Done(task.id, 0, (count, count, 0, 0, 0), task.sample_ids, 0, (), Timings(0, 0, 0), 0)]

    def close(self) -> None:
        os.close(self._event)


@contextlib.contextmanager
def serving(config: RunConfig, images: int, pace_s: float) -> Iterator[Copier]:
    """The daemon's loop in a thread of this process, over the made-up facts of enough samples."""
    spec = batch_spec(next(group for group in groups(config.data) if group.bucket and not group.clip_samples))
    facts = pictures(*[(SIDE, SIDE)] * (images * PLACES))
    pool = SlotPool.create(config.loader.shm_dir, config.job, config.loader.slots_per_stream, spec.size_bytes)
    copier, listener, signals = (
        Copier(pool, spec, pace_s),
        Listener.reserve([address(config)], config.loader),
        Signals(),
    )
    workers: Any = copier
    quarantine = Quarantine(config.loader.quarantine, str)
    jobs = {config.job: Job(config.job, config.data, Planner(config.data, facts), "")}
    service = Service(config, jobs, quarantine, pool, workers, listener)
    listener.bind()
    thread = threading.Thread(target=Loop(config, listener, service, workers, signals).run, name="lane")
    thread.start()
    try:
        yield copier
    finally:
        signals.count = 2
        thread.join(JOIN_S)
        for part in (listener, copier, pool):
            part.close()


def address(config: RunConfig) -> str:
    """Where the daemon is met: over TCP where the run file says so."""
    return config.loader.listen or endpoint(config)


def network(folder: Path, way: Way) -> dict[str, str]:
    """What a run file's loader section needs for that way."""
    if way == "slots":
        return {}
    keys_dir = str(make_keys(folder)) if way == "tcp, encrypted" else ""
    return {"listen": f"tcp://127.0.0.1:{free_port()}", "keys_dir": keys_dir}


def run(
    images: int, readers: int, batches: int, copy: bool, pace_s: float = 0.0, way: Way = "slots"
) -> tuple[list[Seen], float]:
    """What each of `readers` processes saw of `batches` batches, and how many writes the daemon spent on a batch."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        path = one_size.run_file(place, "none.tar", images, SIDE, PATCH, CAPTION_TOKENS, network(place, way))
        config = load(path)
        children = [Child(config, n, readers, batches, copy) for n in range(readers)]  # forked while no thread runs
        try:
            with serving(config, images, pace_s) as copier:
                seen = [child.result() for child in children]
        finally:
            for child in children:
                child.end()
    return seen, copier.written_bytes / copier.batch_bytes / (batches + WARM + 1)


def bare_late_s(messages: int, pace_s: float) -> list[float]:
    """How late a bare message is that one process sends another through ZeroMQ, `pace_s` after the last one.

    No hand-over through a ROUTER and a DEALER over ipc can be quicker on this machine.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/bare.sock"
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_hear, args=(theirs, address, messages))
        process.start()
        theirs.close()
        try:
            with zmq.Context() as sockets, sockets.socket(zmq.ROUTER) as router:
                router.bind(address)
                router.setsockopt(zmq.RCVTIMEO, round(1000 * WAIT_S))
                who, _ = router.recv_multipart()
                for _ in range(messages):
                    time.sleep(pace_s)
                    router.send_multipart([who, str(time.monotonic_ns()).encode()])
                    router.recv_multipart()
                return list(msgspec.json.decode(ours.recv_bytes(), type=list[float]))
        finally:
            process.join(JOIN_S)
            process.kill()
            ours.close()


def _hear(pipe: Connection, address: str, messages: int) -> None:
    late_s = []
    with zmq.Context() as sockets, sockets.socket(zmq.DEALER) as dealer:
        dealer.connect(address)
        dealer.setsockopt(zmq.RCVTIMEO, round(1000 * WAIT_S))
        dealer.send(b"here")
        for _ in range(messages):
            stamp = int(dealer.recv())
            late_s.append((time.monotonic_ns() - stamp) / 1e9)
            dealer.send(b"heard")
    pipe.send_bytes(msgspec.json.encode(late_s))


class Child:
    """One reader in a forked process, which has all imports done."""

    def __init__(self, config: RunConfig, reader: int, readers: int, batches: int, copy: bool) -> None:
        context = multiprocessing.get_context("fork")
        self._ours, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_read, args=(theirs, config, reader, readers, batches, copy))
        self._process.start()
        theirs.close()

    def result(self) -> Seen:
        """Its report.

        Raises:
            TimeoutError: none came within READER_S.
            EOFError: it died; standard error tells why.
        """
        if not self._ours.poll(READER_S):
            raise TimeoutError(f"a reader said nothing for {READER_S:g} s")
        return msgspec.json.decode(self._ours.recv_bytes(), type=Seen)

    def end(self) -> None:
        """Gone, whatever it was doing."""
        self._process.join(JOIN_S)
        self._process.kill()
        self._process.join(JOIN_S)
        self._ours.close()


def _read(pipe: Connection, config: RunConfig, reader: int, readers: int, batches: int, copy: bool) -> None:
    lane: Any = "tcp" if config.loader.listen else "slots"
    place = {"job": "bench", "reader": reader, "readers": readers, "lane": lane, "keys_dir": config.loader.keys_dir}
    with LoaderClient(address(config), wait_s=WAIT_S, **place) as client:
        out, late_s, began = np.empty(next(client).spec.size_bytes, np.uint8), [], 0.0
        for number in range(WARM + batches):
            if number == WARM:
                began = time.perf_counter()
            payload = next(client).payload.numpy()
            late_s.append((time.monotonic_ns() - int(payload[:8].view(np.int64)[0])) / 1e9)
            if copy:
                np.copyto(out, payload)
        seconds = time.perf_counter() - began
    pipe.send_bytes(msgspec.json.encode(Seen(seconds, batches, late_s[WARM:])))
