"""The run's folder, which one run writes to at a time.

Two runs in one folder would cut each other's logs and clear each other's unfinished checkpoints, so the main rank keeps
the file `lock` in it locked (flock) for as long as it lives; whoever finds the lock free may have the folder.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from shared.config import run_dir
from shared.errors import ConfigError, writing
from shared.logs import logger
from shared.sections import RunConfig
from trainer.launch import Ranks
from trainer.manifest import complete

NAME = "train.run_dir"

_log = logger("train")


@contextmanager
def run_folder(config: RunConfig, ranks: Ranks, resume: bool) -> Iterator[None]:
    """Make the run's folder and hold it. A collective.

    Raises:
        ConfigError: it cannot be written, another run holds it, or it has checkpoints that are not to be continued.
    """
    folder = run_dir(config)
    with ExitStack() as stack:
        failure: ConfigError | None = None
        try:
            if ranks.is_main:
                stack.enter_context(held(folder, resume))
        except ConfigError as error:
            failure = error
        if ranks.any(failure is not None):
            raise failure or ConfigError(NAME, folder, "is refused by rank 0", "see what it says")
        with writing(NAME, folder):
            folder.mkdir(parents=True, exist_ok=True)
        yield


@contextmanager
def held(folder: Path, resume: bool) -> Iterator[None]:
    """The folder, ours alone while this is open.

    Raises:
        ConfigError: see `run_folder`.
    """
    with writing(NAME, folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("ab+", buffering=0)
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().decode(errors="replace").strip() or "another process"
            raise ConfigError(NAME, folder, f"is written to by {holder}", "stop it, or name another folder") from None
        except OSError as error:
            _log.warning("%s keeps no locks (%s): no other run may write to it", folder, error.strerror)
        with writing(NAME, folder):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        if not resume and any(complete(folder / "checkpoints")):
            rule = "already holds checkpoints of a run"
            raise ConfigError(NAME, folder, rule, "continue it with --resume, or name another folder")
        yield
