"""How decode workers share their GPU with the trainer: under CUDA MPS at the same time, else by time slices.

This is the door to `nvidia-cuda-mps-control`. One control daemon serves all of a user's processes, so one that answers
is used, whoever started it, also a daemon of ours that was killed. What we started, or found as such, we end when we
end, unless a trainer is its client: that would lose its GPU.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from dataloader_svc import metrics
from shared import mps
from shared.errors import ConfigError
from shared.logs import logger
from shared.sections import LoaderSection

COMMAND = "nvidia-cuda-mps-control"
ASK_S, START_S, QUIT_S = 5.0, 10.0, 10
LEAVE_S, POLL_S = 3.0, 0.05
COST = "time slices, which costs the trainer 3 to 16 % of a step (docs/loaders.md, Sharing a GPU)"

log = logger("mps")


class Control:
    """The control daemon at one pipe directory, which may or may not be there."""

    def __init__(self, pipe_dir: Path) -> None:
        self.pipe_dir = pipe_dir

    def answers(self) -> bool:
        """Whether it answers within ASK_S; where its program cannot be run here, whether its pipe is there."""
        if not (self.pipe_dir / "control").exists():
            return False
        return shutil.which(COMMAND) is None or self._ask("get_server_list") is not None

    def clients(self) -> list[int]:
        """Process ids of all clients."""
        servers = _numbers(self._ask("get_server_list"))
        return [pid for server in servers for pid in _numbers(self._ask(f"get_client_list {server}"))]

    def start(self) -> None:
        """Start it, with no GPU hidden from it: it would number them anew for every client.

        Raises:
            ConfigError: its program is missing or fails, or it does not answer within START_S.
        """
        if shutil.which(COMMAND) is None:
            _refuse(f"needs {COMMAND}, which is not on PATH", "install the driver's compute utilities or set auto")
        logs = Path(os.environ.get(mps.LOG_VARIABLE) or mps.own_dir() / "log")
        for folder in (self.pipe_dir, logs):
            _private(folder)
        self._end()
        self._clear()
        around = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        around |= {mps.PIPE_VARIABLE: str(self.pipe_dir), mps.LOG_VARIABLE: str(logs)}
        code, words = _run([COMMAND, "-d"], "", around, START_S)
        deadline = time.monotonic() + START_S
        while not self.answers():
            if code or time.monotonic() > deadline:
                _refuse(f"cannot be done: {COMMAND} -d gave {code} ({words.strip()[:200]})", f"see {logs}, or set auto")
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End it and its servers; after QUIT_S it breaks off what they do."""
        self._ask(f"quit -t {QUIT_S}", QUIT_S)
        deadline = time.monotonic() + ASK_S
        while self._processes() and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._end()
        self._clear()

    def _ask(self, command: str, patience_s: float = 0.0) -> str | None:
        """The answer to one command, within `patience_s` more than ASK_S, or None: there is none."""
        around = {**os.environ, mps.PIPE_VARIABLE: str(self.pipe_dir)}
        code, words = _run([COMMAND], command + "\n", around, ASK_S + patience_s)
        return None if code else words

    def _processes(self) -> list[int]:
        """Control daemons that live, known by their name and their pipe directory."""
        mark, found = f"{mps.PIPE_VARIABLE}={self.pipe_dir}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it is another user's, or has just ended
                name = (folder / "cmdline").read_bytes().partition(b"\0")[0].rpartition(b"/")[2]
                if name == COMMAND.encode() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def _end(self) -> None:
        """SIGKILL for what does not hear."""
        for pid in self._processes():
            log.warning("process %d, an MPS control daemon that does not answer, is ended", pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _clear(self) -> None:
        """Take away what a dead one left: its socket and lock would stand in the way of the next."""
        for path in self.pipe_dir.iterdir():
            if not path.is_dir():
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def sharing(loader: LoaderSection) -> Iterator[dict[str, str]]:
    """What decode workers need in their environment, after `loader.mps` was seen to. Nothing for CPU decode.

    Raises:
        ConfigError: `loader.mps: start` cannot be done.
    """
    if loader.device == "cpu":
        yield {}
        return
    control = Control(mps.pipe_dir(loader))
    started = loader.mps == "start" and _found_or_started(control)
    how = "mps" if loader.mps != "off" and control.answers() else "time_slices"
    metrics.GPU_SHARING.labels(how).set(1)
    _tell(loader, control, how)
    try:
        yield {mps.PIPE_VARIABLE: str(mps.own_dir() / "off" if loader.mps == "off" else control.pipe_dir)}
    finally:
        metrics.GPU_SHARING.clear()
        if started:
            with _alone():
                _leave(control)


def _found_or_started(control: Control) -> bool:
    """Have it run; whether it is ours to end: just started, or in the folder that only we use."""
    with _alone():
        if control.answers():
            return control.pipe_dir.parent == mps.own_dir()
        control.start()
        return True


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """No other daemon of this user starts or stops one meanwhile.

    Raises:
        ConfigError: one has been at it for longer than that can take.
    """
    _private(mps.own_dir())
    with (mps.own_dir() / "lock").open("w") as file:
        deadline = time.monotonic() + 2 * START_S + QUIT_S
        while not _locked(file):
            if time.monotonic() > deadline:
                _refuse(f"waited in vain for another daemon's lock on {file.name}", "end that daemon")
            time.sleep(POLL_S)
        yield


def _locked(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _tell(loader: LoaderSection, control: Control, how: str) -> None:
    if loader.mps == "off":
        log.info("loader.mps is off: GPU %d is shared by %s", loader.gpu_id, COST)
    elif how == "time_slices":
        text = "no MPS control daemon answers at %s: GPU %d is shared by %s; set loader.mps=start, or run %s -d"
        log.warning(text, control.pipe_dir, loader.gpu_id, COST, COMMAND)
    else:
        text = "GPU %d is shared through MPS; a trainer joins with: export %s=%s"
        log.info(text, loader.gpu_id, mps.PIPE_VARIABLE, control.pipe_dir)


def _leave(control: Control) -> None:
    deadline = time.monotonic() + LEAVE_S
    while (clients := control.clients()) and time.monotonic() < deadline:  # our own workers have only just ended
        time.sleep(POLL_S)
    if clients:
        text = "MPS stays, as processes %s are its clients; a later daemon ends it, or: echo quit | %s=%s %s"
        log.warning(text, clients, mps.PIPE_VARIABLE, control.pipe_dir, COMMAND)
        return
    control.stop()
    log.info("MPS control daemon stopped")


def _private(folder: Path) -> None:
    """Make `folder` ours alone: who can write there can pose as MPS."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (folder, folder.parent):
        if path.lstat().st_uid not in (os.getuid(), 0):
            _refuse(f"would use {path}, which belongs to another user", f"set {mps.PIPE_VARIABLE} to a folder of yours")


def _refuse(rule: str, remedy: str) -> NoReturn:
    raise ConfigError("loader.mps", "start", rule, remedy)


def _run(command: list[str], said: str, environment: dict[str, str], bound_s: float) -> tuple[int, str]:
    """(exit code, output) of a program told `said`; -1 as code where it was not done in time.

    Output goes through a file: a pipe would be held open by the daemon that `-d` leaves behind.
    """
    with os.fdopen(os.memfd_create("millstream-mps"), "w+b") as out:
        try:
            done = subprocess.run(
                command, input=said.encode(), stdout=out, stderr=out, env=environment, timeout=bound_s, check=False
            )
        except subprocess.TimeoutExpired:
            return -1, f"no end within {bound_s:g} s"
        out.seek(0)
        return done.returncode, out.read().decode(errors="replace")


def _numbers(text: str | None) -> list[int]:
    return [int(word) for word in (text or "").split() if word.isdecimal()]
