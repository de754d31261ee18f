"""A supervisor for a loader daemon and its readers: starts them, kills them on demand, and starts again what died.

Only deaths that it dealt itself are in order; a process that ends in any other way is reported.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from shared.config import load
from tests.support.daemons import Daemon, alive, kill_process
from tests.support.ordering import hold
from tests.support.reading import Pace, Place, start
from tests.support.watch import Footprint, footprint

END_S = 60.0
LEAD = 64


class ReaderProcess:
    """A reader that is started again until it ends well; `log` is its consumed log, `done` counts its lines."""

    def __init__(self, config: Path, folder: Path, place: Place, *flags: str) -> None:
        self.config, self.place, self.log = config, place, place.log(folder)
        self.output = self.log.with_suffix(".out")
        self._flags = flags
        self.done = self._read_bytes = 0
        self.start()

    def start(self) -> None:
        self.process = start(self.config, self.log, self.output, self.place, *self._flags)
        self.since = time.monotonic()

    def count(self) -> int:
        """How many micro-batches it has logged."""
        if self.log.exists():
            with self.log.open("rb") as file:
                file.seek(self._read_bytes)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self.done += whole.count(b"\n")
        return self.done

    def kill(self) -> None:
        """SIGKILL, and start again where its log ends."""
        self.end()
        self.start()

    def end(self) -> None:
        """SIGKILL, unless it has ended."""
        self.process.kill()
        self.process.wait(END_S)

    def finished(self) -> bool:
        """Whether it ended well.

        Raises:
            Broken: it ended badly, and nobody had killed it.
        """
        code = self.process.poll()
        hold(not code, f"{self.place.name} ended with {code}: {self.output.read_text()[-2000:]}")
        return code == 0


class Site:
    """A daemon and the readers of every place, each of which reads `steps` global steps and none of which runs ahead
    of another by more than LEAD batches. A context manager that leaves no process behind.
    """

    def __init__(self, config: Path, folder: Path, places: list[Place], steps: int) -> None:
        self.config, self._shm_dir = config, load(config).loader.shm_dir
        self._pace = Pace(folder / "pace")
        self.kills: Counter[str] = Counter()
        self._old_logs: list[Path] = []
        self.daemon = Daemon(config)
        self.since = time.monotonic()
        flags = (f"--steps={steps}", f"--pace={folder / 'pace'}")
        self.readers = [ReaderProcess(config, folder, place, *flags) for place in places]

    def __enter__(self) -> "Site":
        return self

    def __exit__(self, *failure: object) -> None:
        for reader in self.readers:
            reader.end()
        self.daemon.kill()

    def advance(self) -> int:
        """How many batches the slowest reader has logged; the others are allowed a little more."""
        slowest = min(reader.count() for reader in self.readers)
        self._pace.allow(slowest + LEAD)
        return slowest

    def kill_worker(self, rng: random.Random) -> None:
        """SIGKILL to one decode worker, if there is one just now."""
        if workers := self.workers():
            kill_process(rng.choice(workers))
            self.kills["worker"] += 1

    def kill_daemon(self) -> None:
        """SIGKILL to the daemon, and start another one."""
        self.daemon.kill()
        self._old_logs.append(self.daemon.log_path)
        self.kills["daemon"] += 1
        self.daemon = Daemon(self.config)
        self.since = time.monotonic()

    def kill_reader(self, number: int) -> None:
        """SIGKILL to a reader, and start it again, unless it has ended."""
        if self.readers[number].process.poll() is None:
            self.readers[number].kill()
            self.kills["reader"] += 1

    def workers(self) -> list[int]:
        """Process ids of the decode workers."""
        return [pid for pid in self.daemon.workers() if alive(pid)]

    def check(self) -> bool:
        """Whether all readers have ended well.

        Raises:
            Broken: a process ended by itself.
        """
        code = self.daemon.process.poll()
        hold(code is None, f"the daemon ended with {code}: {self.daemon.log[-2000:]}")
        finished = [reader.finished() for reader in self.readers]
        return all(finished)

    def settled(self, seconds: float, workers: int) -> bool:
        """Whether every process is there and has been for so long."""
        young = time.monotonic() - seconds
        there = all(reader.process.poll() is None and reader.since < young for reader in self.readers)
        return there and self.since < young and len(self.workers()) == workers and self.daemon.ready_file.exists()

    def footprints(self) -> Iterator[tuple[str, int, Footprint]]:
        """(role, process id, what it holds) of every process; one that has just ended is left out."""
        pids = [("daemon", self.daemon.process.pid), *(("worker", pid) for pid in self.workers())]
        for role, pid in (*pids, *(("readers", reader.process.pid) for reader in self.readers)):
            try:
                yield role, pid, footprint(pid, self._shm_dir)
            except (FileNotFoundError, ProcessLookupError):
                continue

    def outputs(self) -> Iterator[str]:
        """What every process that ever ran here has said."""
        yield from (path.read_text() for path in (*self._old_logs, self.daemon.log_path))
        yield from (reader.output.read_text() for reader in self.readers)
