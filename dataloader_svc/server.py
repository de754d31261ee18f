"""The daemon's door to the network, and the only user of ZeroMQ in this package: one ROUTER socket.

An endpoint is `ipc://path` or `tcp://` on the loopback: batches lie in this host's shared memory, so nobody further off
could read them. An ipc path is guarded by a locked `path.lock` file that names its holder, because ZeroMQ itself lets
a second daemon take a path over.
"""

import fcntl
import ipaddress
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import zmq

from shared.errors import ConfigError
from shared.wire import MAX_MESSAGE_BYTES, Message, encode

MAX_PATH_BYTES = 107
MAX_QUEUED = 1024
MAX_BURST = 256
FAREWELL_S = 0.5
OPTIONS = (
    (zmq.LINGER, 0),
    (zmq.ROUTER_MANDATORY, 1),
    (zmq.ROUTER_HANDOVER, 1),
    (zmq.SNDHWM, MAX_QUEUED),
    (zmq.RCVHWM, MAX_QUEUED),
    (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
)


class Listener:
    """An endpoint, ours from `reserve` on and open to readers from `bind` on.

    `send` never blocks; `wait` is bounded by its timeout, `close` by FAREWELL_S.
    """

    def __init__(self, endpoint: str, context: "zmq.Context[zmq.Socket[bytes]]", guard: "PathGuard | None") -> None:
        self.endpoint, self._context, self._guard = endpoint, context, guard
        self._socket = context.socket(zmq.ROUTER)

    @classmethod
    def reserve(cls, endpoint: str) -> "Listener":
        """Make sure of `endpoint` before anything costly starts; nobody can connect yet.

        Raises:
            ConfigError: it is malformed, not local, or served by another daemon.
        """
        guard = _guard(endpoint)
        return cls(endpoint, zmq.Context(), guard)

    def bind(self) -> None:
        """Open the endpoint to readers, for this user only.

        Raises:
            ConfigError: it cannot be bound.
        """
        for option, value in OPTIONS:
            self._socket.setsockopt(option, value)
        mask = os.umask(0o077)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            raise _refused(self.endpoint, error) from None
        finally:
            os.umask(mask)

    def wait(self, channels: Sequence[int], timeout_s: float) -> None:
        """Return when a message has come, a channel is readable, or after `timeout_s`."""
        poller = zmq.Poller()
        for source in (self._socket, *channels):
            poller.register(source, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(identity, frames) of the messages that have come, at most MAX_BURST of them."""
        for _ in range(MAX_BURST):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield identity, frames

    def send(self, identity: bytes, message: Message) -> bool:
        """Queue a message; False when the peer is gone or takes nothing any more."""
        try:
            self._socket.send_multipart([identity, encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def close(self) -> None:
        """Unbind; what cannot be sent within FAREWELL_S is dropped. Safe to call twice."""
        self._socket.close(linger=round(1000 * FAREWELL_S))
        self._context.term()
        if self._guard:
            self._guard.release()


def _refused(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    if error.errno == zmq.EADDRINUSE:
        return ConfigError("loader.endpoint", endpoint, "is in use by another process", "stop it or name another")
    return ConfigError("loader.endpoint", endpoint, f"cannot be bound ({error.strerror})", "name another")


def _guard(endpoint: str) -> "PathGuard | None":
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc" and rest and not rest.startswith("@"):
        return _guard_path(endpoint, rest)
    if scheme == "ipc" and rest:
        return None
    if scheme == "tcp" and _is_loopback(rest.rpartition(":")[0]):
        return None
    rule = "must be ipc://PATH, or tcp://127.0.0.1:PORT: batches are in this host's shared memory"
    raise ConfigError("loader.endpoint", endpoint, rule, "use the default")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _guard_path(endpoint: str, path: str) -> "PathGuard":
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
