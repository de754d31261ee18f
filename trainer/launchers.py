"""The launchers above this rank: when one is killed, the rank ends as on SIGTERM, so it saves and frees its device.

`deepspeed` is two processes, one above the other, and neither takes the ranks along when it dies without a word;
training would go on unseen, in the way of the next run. A shell that a rank was started from is no launcher.
"""

import os
import selectors
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

from shared.logs import logger

PROGRAMS = {"deepspeed", "deepspeed.launcher.runner", "deepspeed.launcher.launch", "torchrun", "torch.distributed.run"}
WORDS = 4
"""How far into a command line its program may stand: python -u -m NAME."""

_log = logger("launchers")


def watch_launchers() -> None:
    """From now on, end this process (SIGTERM) when a launcher above it is gone."""
    fds: dict[int, int] = {}
    try:
        for pid in launchers(os.getppid()):
            fds[pid] = os.pidfd_open(pid)
    except OSError as error:
        _log.warning("the launcher cannot be watched (%s): should it be killed, end the ranks yourself", error.strerror)
    if fds:
        threading.Thread(target=_watch, args=(fds,), name="launchers", daemon=True).start()


def launchers(pid: int) -> Iterator[int]:
    """`pid` and what is above it, as long as these are launchers."""
    while is_launcher(pid):
        yield pid
        pid = _parent(pid)


def is_launcher(pid: int) -> bool:
    """Whether the process runs one of PROGRAMS."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return bool(PROGRAMS & {word.rsplit("/", 1)[-1] for word in words[:WORDS]})


def _parent(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("PPid:"))


def _watch(fds: dict[int, int]) -> None:
    with selectors.DefaultSelector() as selector:
        for pid, fd in fds.items():
            selector.register(fd, selectors.EVENT_READ, pid)
        key, _ = selector.select()[0]
    _log.warning("the launcher (process %d) is gone; this rank ends as on SIGTERM", key.data)
    os.kill(os.getpid(), signal.SIGTERM)
