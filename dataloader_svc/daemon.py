"""The daemon's life: the order in which parts start and stop, and the loop between.

Start: config, endpoint reserved, shards, MPS where a GPU decodes; workers start to warm up; index, plan; stale segments
swept, slots; workers begin, endpoint bound, ready. What only tables and metrics tell of the plan is reckoned
meanwhile. The first signal drains: readers are told, no new batch is sent, and leases may return for `loader.drain_s`.
A second signal ends the wait. Whatever happened, sockets are closed, workers ended and the segment unlinked.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import numpy as np

from dataloader_svc import metrics, mps
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.jobs import build_jobs, plan_of
from dataloader_svc.plan import Planner
from dataloader_svc.pool import WorkerPool
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.server import Listener
from dataloader_svc.service import Service
from dataloader_svc.shards import Shard, expand
from dataloader_svc.store import Store
from dataloader_svc.tasks import Begin, Setup
from shared import slots
from shared.batch import batch_spec
from shared.config import index_dir, served
from shared.errors import MillstreamError, ProtocolError, TooManyBadSamples, writing
from shared.logs import RateLimited, logger
from shared.sections import RunConfig
from shared.skips import merged
from shared.telemetry import MetricsPage
from shared.wire import MAX_TO_DAEMON_BYTES, Failure, decode_to_daemon

TICK_S = 0.2
SENDING_S = 0.005

log = logger("daemon")


class Signals:
    """Counts SIGTERM and SIGINT, and makes `channel` readable at each."""

    def __init__(self) -> None:
        self.count = 0
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    @property
    def channel(self) -> int:
        return self._read.fileno()

    @contextlib.contextmanager
    def installed(self) -> Iterator["Signals"]:
        """Handle both signals while the context lasts."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        old = {number: signal.signal(number, self._note) for number in numbers}
        old_fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        try:
            yield self
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)
            self._read.close()
            self._write.close()

    def clear(self) -> None:
        """Take the wake-up bytes away."""
        with contextlib.suppress(BlockingIOError):
            while self._read.recv(64):
                pass

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


def serve(config: RunConfig, ready_file: Path | None = None) -> None:
    """Serve until a signal; `ready_file` exists while readers are welcome and holds the endpoint.

    Raises:
        ConfigError, DataError: it cannot start, or must stop (TooManyBadSamples).
    """
    ready = _Flag()
    with contextlib.ExitStack() as stack:
        data, loader = config.data, config.loader
        listener = Listener.reserve(served(config), loader)
        stack.callback(listener.close)
        page = MetricsPage(loader.metrics_port, ready.is_set, loader.metrics_host, "loader.metrics_port")
        stack.enter_context(page)
        store = Store.of(loader)
        shards = expand(data.datasets, data.missing_shards, store)
        around = stack.enter_context(mps.sharing(loader))
        workers = WorkerPool(Setup(data, loader, shards, loader.index_dir or None), around)
        stack.callback(workers.close)
        workers.start()
        index, quarantine, planner = load_data(config, shards, store)
        jobs = build_jobs(config, index, planner)
        signals = stack.enter_context(Signals().installed())
        describing = threading.Thread(target=describe, args=(planner,), name="describe")
        describing.start()
        stack.callback(describing.join)
        pool = _make_slots(config, planner)
        stack.callback(pool.close)
        segment = pool.segment
        begin = Begin(segment.path, segment.slots, segment.slot_bytes)
        workers.begin(begin, stop=lambda: signals.count > 0)
        if signals.count:
            return
        listener.bind()
        service = Service(config, jobs, quarantine, pool, workers, listener)
        addresses = ", ".join(listener.endpoints)
        log.info("ready: %s, %d samples, %d steps an epoch", addresses, len(index), planner.steps(0))
        stack.enter_context(ready.announced(ready_file, listener.endpoints[0]))
        Loop(config, listener, service, workers, signals).run()


def load_data(config: RunConfig, shards: tuple[Shard, ...], store: Store) -> tuple[Index, Quarantine, Planner]:
    """The shards' index (built where it must be), the tally of what it left out, and the plan.

    Raises:
        ConfigError, DataError: the data cannot be used as configured.
    """
    started = time.monotonic()
    data, folder = config.data, index_dir(config)
    report = build(shards, data, folder, config.loader.threads, store=store)
    index = Index.open(shards, data, folder, store)
    metrics.SHARDS.set(len(shards))
    metrics.INDEX_SECONDS.set(time.monotonic() - started)
    problems = sum(report.counts.values())
    log.info(
        "%d shards (%d indexed anew): %d samples, %d problems", len(shards), report.built, report.samples, problems
    )
    quarantine = Quarantine(config.loader.quarantine, index.name)
    found = ((p.reason, f"{p.shard} {p.key} {p.detail}") for p in index.problems())
    quarantine.record_index(found, int(np.count_nonzero(index.verdict)), len(index))
    planner = plan_of(config, index, config.job, data)
    planner.steps(0)
    for (first, end), (start, stop) in zip(merged(data.skip_steps), planner.skips.spans(), strict=True):
        log.info("passing over steps %d to %d as data.skip_steps asks: from %s to %s", first, end - 1, start, stop)
    return index, quarantine, planner


def describe(planner: Planner) -> None:
    """Tell what the first epoch is like, in the log and the metrics: seconds for millions of samples."""
    summary = planner.summary(0)
    for share in summary.shares:
        metrics.DATASET_SHARE.labels(share.dataset, "asked").set(share.asked)
        metrics.DATASET_SHARE.labels(share.dataset, "served").set(share.served)
    metrics.PADDING.labels("naive").set(summary.padding_naive)
    metrics.PADDING.labels("bucketed").set(summary.padding_bucketed)
    metrics.UNUSED_SLOTS.labels("image").set(summary.unused_images)
    metrics.UNUSED_SLOTS.labels("audio").set(summary.unused_clips)
    metrics.DROPPED.set(summary.dropped_samples)
    shares = 100 * summary.padding_bucketed, 100 * summary.padding_naive
    if summary.dropped_samples:
        log.warning("epoch 0 leaves out %d good samples, as data.batch.leftovers asks", summary.dropped_samples)
    log.info("epoch 0: %d steps; padding %.1f %% (%.1f %% if padded to the largest)", summary.steps, *shares)


def _make_slots(config: RunConfig, planner: Planner) -> slots.SlotPool:
    """Slots, after dead daemons' were swept: `slots_per_stream` x `max_streams` for each job.

    They hold the largest group that the data have, which all jobs share; groups without samples make no batch.
    """
    loader = config.loader
    for path in slots.sweep(loader.shm_dir, config.job):
        log.warning("swept %s, left behind by a daemon that is gone", path)
    largest = max(batch_spec(group).size_bytes for group in planner.groups())
    count = loader.max_streams * loader.slots_per_stream * (1 + len(loader.jobs))
    return slots.SlotPool.create(loader.shm_dir, config.job, count, largest)


class _Flag:
    """Whether readers are welcome: for /readyz, the metric and the ready file alike."""

    def __init__(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    @contextlib.contextmanager
    def announced(self, path: Path | None, text: str) -> Iterator[None]:
        self._set = True
        metrics.READY.set(1)
        if path:
            scratch = path.with_name(f"{path.name}.{os.getpid()}")
            with writing("--ready-file", path):
                scratch.write_text(text + "\n")
                scratch.replace(path)
        try:
            yield
        finally:
            self._set = False
            metrics.READY.set(0)
            if path:
                path.unlink(missing_ok=True)


class Loop:
    """One thread, one poll: readers' messages, workers' reports, signals, and a tick every TICK_S.

    That a frame has left its slot wakes no poll, so while a slot waits for that, it is looked at every SENDING_S.
    """

    def __init__(
        self, config: RunConfig, listener: Listener, service: Service, workers: WorkerPool, signals: Signals
    ) -> None:
        self._config, self._listener, self._service = config, listener, service
        self._workers, self._signals = workers, signals
        self._next_tick = 0.0
        self._warn = RateLimited(log.warning)

    def run(self) -> None:
        """Serve until the first signal, then drain.

        Raises:
            TooManyBadSamples: after every reader was told.
        """
        try:
            while not self._signals.count:
                self._turn()
        except TooManyBadSamples as error:
            self._service.broadcast(Failure("too_many_bad", str(error), False))
            raise
        except MillstreamError as error:
            self._service.broadcast(Failure("daemon_error", str(error), False))
            raise
        self._drain()

    def _turn(self) -> None:
        """Wait for something, then act on everything that has come."""
        bound_s = SENDING_S if self._service.sending() else TICK_S
        self._listener.wait([*self._workers.channels(), self._signals.channel], bound_s)
        self._signals.clear()
        now = time.monotonic()
        for identity, frames in self._listener.receive():
            self._take(identity, frames, now)
        for done in self._workers.collect():
            self._service.finished(done, now)
        self._service.advance(now)
        self._workers.tick()
        if now >= self._next_tick:
            self._next_tick = now + TICK_S
            self._service.tick(now)

    def _take(self, identity: bytes, frames: list[bytes], now: float) -> None:
        try:
            message = decode_to_daemon(*frames) if len(frames) == 1 else None
        except ProtocolError as error:
            self._drop("oversize" if len(frames[0]) > MAX_TO_DAEMON_BYTES else "junk", str(error))
            return
        if message is None:
            self._drop("frames", f"{len(frames)} frames where a message has one")
        else:
            self._service.handle(identity, message, now)

    def _drop(self, reason: str, text: str) -> None:
        metrics.REJECTED.labels(reason).inc()
        self._warn(reason, f"dropped: {text}")

    def _drain(self) -> None:
        leases, bound = self._service.leases(), self._config.loader.drain_s
        log.info("draining: %d leases are out, waiting up to %g s", leases, bound)
        self._service.drain("the daemon was told to stop")
        deadline = time.monotonic() + bound
        while self._service.leases() and time.monotonic() < deadline and self._signals.count < 2:
            self._turn()
        if left := self._service.leases():
            log.warning("stopped with %d leases out; their readers keep the bytes and ask the next daemon", left)
        log.info("stopped")
