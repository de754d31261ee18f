"""The daemon's side of its decode workers: start, feed, watch, restart, and find the sample that kills them.

A worker is a process; it may die at any time (a decoder's crash, a kill) without loss: its tasks are given to the next
one, which fills the same slots with the same bytes. A task that has killed two workers is run carefully, one announced
sample at a time; the sample under decode at the next death is convicted and skipped from then on.
"""

import contextlib
import itertools
import os
import select
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from dataloader_svc import metrics, native
from dataloader_svc.tasks import (
    PACKET_BYTES,
    Begin,
    Done,
    Forget,
    Forgotten,
    Progress,
    Ready,
    Refused,
    Report,
    Setup,
    Task,
    hands,
)
from shared.errors import ConfigError, DataError, MillstreamError
from shared.logs import logger

WAITING = 1
DEATHS_BEFORE_CARE = 2
MAX_FRUITLESS_STARTS = 8
STOP_S = 2.0
KILL_S = 10.0
LISTEN_S = 0.05
NOTHING_MORE: Mapping[str, str] = MappingProxyType({})

# glibc gives large blocks back to the kernel at once, and a worker faults them in again, zeroed, for the next picture:
# a tenth of its time. Blocks of up to 32 MiB are kept, at most 64 MiB unused (mallopt(3)).
KEPT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}

log = logger("pool")
_encode = msgspec.msgpack.encode
_report: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)


class Job:
    """A task and its history."""

    def __init__(self, task: Task, now: float) -> None:
        self.task, self.submitted_at = task, now
        self.deaths = 0


class Worker:
    """One live process and what it was given, oldest first, as it is reported; `hands` of them are under way."""

    def __init__(self, process: "subprocess.Popen[bytes]", channel: socket.socket, stderr_fd: int, now: float) -> None:
        self.process, self.channel, self.stderr_fd = process, channel, stderr_fd
        self.ready = False
        self.jobs: deque[Job] = deque()
        self.head_since = now
        self.announced: tuple[int, int] | None = None
        self.device_bytes = 0
        self.forgetting: set[bytes] = set()


class WorkerPool:
    """`setup.loader.workers` processes. All methods return at once, but for `begin` and `close`, which are bounded.

    `start` lets them warm up while the index is still being made; `begin` tells them that they can open it.
    `environment` is what they get beside ours.
    """

    def __init__(self, setup: Setup, environment: Mapping[str, str] = NOTHING_MORE) -> None:
        self._setup, self._bound_s = setup, setup.loader.worker_s
        self._environment = environment
        self._workers: list[Worker] = []
        self._queue: deque[Job] = deque()
        self._convicted: set[int] = set()
        self._fruitless = 0
        self._restart_at = 0.0
        self._begin: Begin | None = None
        self._device = ""

    def start(self) -> None:
        """Start all workers."""
        self._spawn_missing()

    def begin(self, begin: Begin, stop: Callable[[], bool]) -> None:
        """Send all workers `begin` and wait until each is ready, or `stop()` tells to.

        Raises:
            ConfigError, DataError: a worker refuses to start, or takes longer than `loader.worker_s`.
        """
        self._begin = begin
        for worker in self._workers:
            self._introduce(worker, begin)
        deadline = time.monotonic() + self._bound_s
        while not (stop() or (self._workers and all(worker.ready for worker in self._workers))):
            if time.monotonic() > deadline:
                raise DataError(f"decode workers did not warm up within loader.worker_s, {self._bound_s:g} s")
            self._listen()
            self.collect()
            self.tick()

    def channels(self) -> list[int]:
        """File descriptors that turn readable when a worker reports or dies."""
        return [worker.channel.fileno() for worker in self._workers]

    def submit(self, task: Task) -> None:
        """Queue a task; the caller bounds their number by its slots."""
        self._queue.append(Job(task, time.monotonic()))
        self._feed()

    def collect(self) -> list[Done]:
        """Reports that have come in; a worker found dead is buried and its tasks are queued again."""
        done = [report for worker in list(self._workers) for report in self._drain(worker)]
        self._feed()
        return done

    def tick(self) -> None:
        """Kill workers that sit on a task too long, and start those that are missing."""
        now = time.monotonic()
        for worker in list(self._workers):
            if (worker.jobs or not worker.ready) and now - worker.head_since > self._bound_s:
                self._bury(worker, "timeout")
        if now >= self._restart_at:
            self._spawn_missing()

    @property
    def device(self) -> str:
        """UUID of the GPU that the workers decode on, or ""."""
        return self._device

    def forget(self, handle: bytes) -> None:
        """Have every worker unmap a reader's device memory."""
        for worker in self._workers:
            worker.forgetting.add(handle)
            with contextlib.suppress(OSError):  # it is dead, and its mappings are gone
                worker.channel.send(_encode(Forget(handle)))

    def forgetting(self, handle: bytes) -> bool:
        """Whether a live worker that was told to has not unmapped it yet."""
        return any(handle in worker.forgetting for worker in self._workers)

    def pids(self) -> list[int]:
        """Process ids of the live workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """End every worker: hang up, wait a little, kill. Safe to call twice."""
        for worker in self._workers:
            worker.channel.close()
        deadline = time.monotonic() + STOP_S
        for worker in self._workers:
            try:
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill(worker.process)
            os.close(worker.stderr_fd)
        self._workers.clear()

    def _listen(self) -> None:
        """Wait until a worker reports or dies, LISTEN_S at most."""
        poller = select.poll()
        for channel in self.channels():
            poller.register(channel, select.POLLIN)
        poller.poll(1000 * LISTEN_S)

    def _spawn_missing(self) -> None:
        while len(self._workers) < self._setup.loader.workers:
            self._workers.append(worker := _spawn(self._setup, self._environment))
            if self._begin:
                self._introduce(worker, self._begin)

    def _introduce(self, worker: Worker, begin: Begin) -> None:
        worker.head_since = time.monotonic()
        with contextlib.suppress(OSError):  # it is dead, which `collect` will find
            worker.channel.send(_encode(begin))

    def _feed(self) -> None:
        for load in range(hands(self._setup.loader) + WAITING):
            for worker in self._workers:
                if self._queue and worker.ready and len(worker.jobs) == load:
                    self._give(worker, self._queue.popleft())

    def _give(self, worker: Worker, job: Job) -> None:
        if not worker.jobs:
            worker.head_since = time.monotonic()
            metrics.STAGE_SECONDS.labels("queue").observe(worker.head_since - job.submitted_at)
        worker.jobs.append(job)
        skip = tuple(i for i in (*job.task.sample_ids, *job.task.spares) if i in self._convicted)
        job.task = msgspec.structs.replace(job.task, skip=skip)
        try:
            worker.channel.send(_encode(job.task))
        except OSError as error:
            log.warning("worker %d cannot be given a task: %s", worker.process.pid, error.strerror)

    def _drain(self, worker: Worker) -> list[Done]:
        done: list[Done] = []
        while (packet := _receive(worker.channel)) is not None:
            if not packet:
                self._bury(worker, "death")
                break
            report = _report.decode(packet)
            if isinstance(report, Done):
                done.append(self._finished(worker, report))
            else:
                self._heard(worker, report)
        return done

    def _heard(self, worker: Worker, report: Ready | Refused | Progress | Forgotten) -> None:
        if isinstance(report, Refused):
            raise ConfigError(*report.setting) if report.setting else DataError(report.text)
        if isinstance(report, Ready):
            worker.ready = True
            worker.device_bytes, self._device = report.device_bytes, report.device
            metrics.DEVICE_BYTES.labels("workers").set(sum(each.device_bytes for each in self._workers))
        elif isinstance(report, Forgotten):
            worker.forgetting.discard(report.handle)
        else:
            worker.announced = (report.task, report.sample_id)
            worker.head_since = time.monotonic()

    def _finished(self, worker: Worker, report: Done) -> Done:
        worker.jobs.popleft()
        worker.announced = None
        worker.head_since = time.monotonic()
        self._fruitless = 0
        if worker.jobs:
            metrics.STAGE_SECONDS.labels("queue").observe(worker.head_since - worker.jobs[0].submitted_at)
        return report

    def _bury(self, worker: Worker, cause: str) -> None:
        self._workers.remove(worker)
        worker.channel.close()
        code = _kill(worker.process)
        words = native.last_words(worker.stderr_fd)
        os.close(worker.stderr_fd)
        text = f" (its last words: {words})" if words else ""
        log.warning("worker %d is gone (%s, exit code %d); another takes over%s", worker.process.pid, cause, code, text)
        metrics.WORKER_RESTARTS.labels(cause).inc()
        for job in under_way(worker.jobs, hands(self._setup.loader)):
            self._blame(job, worker.announced)
        self._queue.extendleft(reversed(worker.jobs))
        self._back_off()

    def _blame(self, job: Job, announced: tuple[int, int] | None) -> None:
        job.deaths += 1
        task = job.task
        if task.careful and announced and announced[0] == task.id:
            self._convicted.add(announced[1])
            log.error("sample id %d kills decode workers; it is skipped from now on", announced[1])
            self._fruitless = 0
        elif job.deaths >= DEATHS_BEFORE_CARE:
            job.task = msgspec.structs.replace(task, careful=True, target=None)

    def _back_off(self) -> None:
        self._fruitless += 1
        if self._fruitless > MAX_FRUITLESS_STARTS:
            raise MillstreamError(f"decode workers died {self._fruitless} times in a row without filling a batch")
        self._restart_at = time.monotonic() + min(2.0, 0.05 * 2**self._fruitless)


def under_way(jobs: Iterable[Job], hands: int) -> list[Job]:
    """Those that a worker with so many hands may have begun: its oldest, and a careful one only when it is alone."""
    begun: list[Job] = []
    for job in itertools.islice(jobs, hands):
        if begun and (job.task.careful or begun[-1].task.careful):
            break
        begun.append(job)
    return begun


def _kill(process: "subprocess.Popen[bytes]") -> int:
    process.kill()
    try:
        return process.wait(KILL_S)
    except subprocess.TimeoutExpired:
        raise MillstreamError(f"worker {process.pid} is still there {KILL_S:g} s after SIGKILL") from None


def _receive(channel: socket.socket) -> bytes | None:
    try:
        return channel.recv(PACKET_BYTES)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # it ended with a packet of ours unread; what it said before comes next
        return _receive(channel)
    except OSError:
        return b""


def _spawn(setup: Setup, environment: Mapping[str, str]) -> Worker:
    """Start a worker with one end of a packet socket pair, a memory file that holds `setup`, and our log."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with theirs, os.fdopen(os.memfd_create("millstream-setup"), "w+b") as file:
        file.write(_encode(setup))
        file.flush()
        log_fd, stderr_fd = os.dup(native.STDERR_FD), native.memory_file()
        fds = (theirs.fileno(), file.fileno(), log_fd)
        command = [sys.executable, "-m", "dataloader_svc.worker", *map(str, fds)]
        try:
            process = subprocess.Popen(
                command, pass_fds=fds, stdin=subprocess.DEVNULL, stderr=stderr_fd, env=_around(environment)
            )
        finally:
            os.close(log_fd)
    return Worker(process, ours, stderr_fd, time.monotonic())


def _around(environment: Mapping[str, str]) -> dict[str, str]:
    """Ours, KEPT_MEMORY, no threads but `loader.threads`, `environment`, and this package's folder first on the module
    path.
    """
    root = str(Path(__file__).resolve().parents[1])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    quiet = {**KEPT_MEMORY, "TOKENIZERS_PARALLELISM": "false"}
    return {**quiet, **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths)}
