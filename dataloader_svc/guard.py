"""Who serves an ipc path: ZeroMQ lets a second daemon take one over, so a locked `path.lock` names the holder."""

import fcntl
import os
from pathlib import Path

from shared.errors import ConfigError

MAX_PATH_BYTES = 107


def guard_path(endpoint: str, path: str) -> "PathGuard":
    """The lock on `path`, held by us from here on.

    Raises:
        ConfigError: the path cannot be a socket's, or another process serves it.
    """
    if (size := len(os.fsencode(path))) > MAX_PATH_BYTES:
        rule = f"has a path of {size} bytes, and a Unix socket takes at most {MAX_PATH_BYTES}"
        raise ConfigError("loader.endpoint", endpoint, rule, "use a shorter folder, such as /tmp")
    if not (folder := Path(path).parent).is_dir():
        raise ConfigError("loader.endpoint", endpoint, f"lies in {folder}, which is no folder", "create it")
    guard = PathGuard(Path(path))
    if holder := guard.acquire():
        rule = f"is in use by process {holder}"
        raise ConfigError("loader.endpoint", endpoint, rule, "stop that daemon or name another endpoint")
    return guard


class PathGuard:
    """A locked `path.lock` that says who serves the socket `path`; a dead holder's lock is free at once.

    Both files are unlinked on release (ZeroMQ leaves its socket file behind).
    """

    def __init__(self, path: Path) -> None:
        self._socket_path, self._path, self._fd = path, path.with_name(path.name + ".lock"), -1

    def acquire(self) -> str:
        """Take the lock; return an empty string, or the process id of whoever has it."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.read(fd, 32).decode(errors="replace").strip()
                os.close(fd)
                return holder or "unknown"
            if self._is_current(fd):
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
                self._fd = fd
                return ""
            os.close(fd)

    def release(self) -> None:
        """Unlink and unlock. Safe to call twice."""
        if self._fd >= 0:
            self._socket_path.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _is_current(self, fd: int) -> bool:
        """Whether the locked file is still the one at the path: its last holder may have unlinked it meanwhile."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino)
