"""Start, watch and stop real loader daemons."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.config import load
from shared.sections import RunConfig
from tests.support.media import write_dataset
from tests.support.runs import run_file

ROOT = Path(__file__).parents[2]
START_S = 240.0
STOP_S = 90.0


class Daemon:
    """One `millstream-loader serve`; its log is in `log`."""

    def __init__(self, config_path: Path, *extra: str, cwd: Path = ROOT, **environment: str) -> None:
        self.folder = config_path.parent
        self.ready_file = self.folder / f"ready-{time.monotonic_ns()}"
        self.log_path = self.folder / f"{self.ready_file.name}.log"
        command = [sys.executable, "-m", "dataloader_svc", "serve", "--config", str(config_path)]
        command += ["--ready-file", str(self.ready_file), *extra]
        with self.log_path.open("wb") as log:
            around = {**os.environ, **environment}
            around["PYTHONPATH"] = os.pathsep.join(filter(None, [around.get("PYTHONPATH"), str(ROOT)]))
            self.process = subprocess.Popen(command, cwd=cwd, env=around, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def wait_ready(self) -> "Daemon":
        deadline = time.monotonic() + START_S
        while not self.ready_file.exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return self

    def workers(self) -> list[int]:
        """Process ids of its children."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in path.read_text().split()]

    def terminate(self) -> int:
        """SIGTERM, and the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_S)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(STOP_S)


def make_run(folder: Path, samples: int = 48, shards: int = 3, **changes: dict[str, Any]) -> tuple[Path, RunConfig]:
    """A dataset and a run file in `folder`, with shared memory in `folder/shm`."""
    write_dataset(folder / "data", samples, shards)
    return make_run_file(folder, **changes)


def make_run_file(folder: Path, **changes: dict[str, Any]) -> tuple[Path, RunConfig]:
    """A run file over what lies in `folder/data`."""
    (folder / "shm").mkdir(exist_ok=True)
    loader = {"shm_dir": str(folder / "shm"), **changes.pop("loader", {})}
    path = run_file(folder, str(folder / "data" / "*.tar"), loader=loader, **changes)
    return path, load(path)


@contextlib.contextmanager
def serving(config_path: Path, *extra: str, cwd: Path = ROOT, **environment: str) -> Iterator[Daemon]:
    """A daemon that is ready; ended at the end, whatever happens."""
    daemon = Daemon(config_path, *extra, cwd=cwd, **environment)
    try:
        yield daemon.wait_ready()
    finally:
        if daemon.process.poll() is None:
            daemon.kill()


def alive(pid: int) -> bool:
    """Whether `pid` is a process that is no zombie."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    return False


def wait_until(condition: Any, what: str, bound_s: float = 90.0) -> None:
    """Poll `condition` until it holds."""
    deadline = time.monotonic() + bound_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {bound_s} s: {what}"
        time.sleep(0.02)


def kill_process(pid: int) -> None:
    """SIGKILL one process of ours."""
    os.kill(pid, signal.SIGKILL)
