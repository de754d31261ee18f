"""The daemon's door to the network, and the only user of ZeroMQ in this package: one ROUTER socket on every address.

An address is `ipc://path`, or `tcp://` with CURVE: keys are required off the loopback, where anybody could connect,
unless `loader.allow_plain_tcp` waives them. A payload frame lies in its slot, and ZeroMQ reads it from there: what
`send_payload` returns tells when it has done so.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from dataloader_svc import metrics, zap
from dataloader_svc.guard import PathGuard, guard_path
from dataloader_svc.quota import Pending
from shared.addresses import is_loopback
from shared.errors import ConfigError
from shared.keys import DaemonKeys, daemon_keys
from shared.logs import RateLimited, logger
from shared.sections import LoaderSection
from shared.wire import MAX_MESSAGE_BYTES, Message, encode

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
ZAP_ADDRESS = "inproc://zeromq.zap.01"
FAILED_HANDSHAKE = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL

log = logger("server")


class Listener:
    """Addresses, ours from `reserve` on and open to readers from `bind` on.

    Sending never blocks; `wait` is bounded by its timeout, `close` by FAREWELL_S.
    """

    def __init__(
        self, endpoints: tuple[str, ...], guards: list[PathGuard], keys: DaemonKeys | None, loader: LoaderSection
    ) -> None:
        self.endpoints, self._guards, self._keys, self._loader = endpoints, guards, keys, loader
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket, self._zap = self._context.socket(zmq.ROUTER), self._context.socket(zmq.REP)
        self._monitor = self._socket.get_monitor_socket(FAILED_HANDSHAKE)
        self._warn = RateLimited(log.warning)

    @classmethod
    def reserve(cls, endpoints: Sequence[str], loader: LoaderSection) -> "Listener":
        """Make sure of every address before anything costly starts; nobody can connect yet.

        Raises:
            ConfigError: one is malformed, open to the network without keys, or served by another daemon.
        """
        keys = daemon_keys(Path(loader.keys_dir)) if loader.keys_dir else None
        for endpoint in endpoints:
            _check(endpoint, bool(keys) or loader.allow_plain_tcp)
        guards: list[PathGuard] = []
        try:
            guards.extend(guard_path(endpoint, path) for endpoint in endpoints if (path := _path(endpoint)))
        except ConfigError:
            for guard in guards:
                guard.release()
            raise
        return cls(tuple(endpoints), guards, keys, loader)

    def bind(self) -> None:
        """Open every address to readers; a path is for this user only.

        Raises:
            ConfigError: one cannot be bound.
        """
        self._zap.bind(ZAP_ADDRESS)
        for option, value in OPTIONS:
            self._socket.setsockopt(option, value)
        mask = os.umask(0o077)
        try:
            for endpoint in sorted(self.endpoints, key=_is_tcp):
                self._bind(endpoint)
        finally:
            os.umask(mask)

    def wait(self, channels: Sequence[int], timeout_s: float) -> None:
        """Return when a message has come, a channel is readable, or after `timeout_s`."""
        poller = zmq.Poller()
        for source in (self._socket, self._zap, self._monitor, *channels):
            poller.register(source, zmq.POLLIN)
        poller.poll(max(0, round(timeout_s * 1000)))

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(identity, frames) of the messages that have come, at most MAX_BURST of them."""
        self._let_in()
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
            return _unreachable(error)
        return True

    def send_payload(self, identity: bytes, message: Message, payload: NDArray[np.uint8]) -> Pending | None:
        """Queue a message and its payload frame, uncopied; None when the peer is gone or takes nothing any more.

        The payload must not change until the returned `Pending` is done.
        """
        frames: list[bytes | memoryview] = [identity, encode(message), payload.data]
        try:
            return self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False, track=True)
        except zmq.ZMQError as error:
            _unreachable(error)
            return None

    def close(self) -> None:
        """Unbind; what cannot be sent within FAREWELL_S is dropped. Safe to call twice."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._zap.close(linger=0)
        self._socket.close(linger=round(1000 * FAREWELL_S))
        self._context.term()
        for guard in self._guards:
            guard.release()

    def _bind(self, endpoint: str) -> None:
        """Options count for the addresses bound after them, so what only TCP needs comes with the first of those.

        A peer that answers no more, or takes no more, is cut off after a lease, which gives back what it was sent.
        """
        if _is_tcp(endpoint):
            lease_ms = round(1000 * self._loader.lease_s)
            self._socket.setsockopt(zmq.HEARTBEAT_IVL, round(1000 * self._loader.heartbeat_s))
            self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, lease_ms)
            self._socket.setsockopt(zmq.TCP_MAXRT, lease_ms)
            if self._keys:
                self._socket.setsockopt(zmq.ZAP_DOMAIN, zap.DOMAIN)
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _refused(endpoint, error) from None

    def _let_in(self) -> None:
        """Answer who asks to be let in, and count whom the handshake kept out."""
        while self._zap.poll(0):
            allowed = {z85.decode(key) for key in self._keys.allowed} if self._keys else set()
            reply, why = zap.answer(self._zap.recv_multipart(), allowed)
            self._zap.send_multipart(reply)
            self._count("key", why)
        while self._monitor.poll(0):
            where = recv_monitor_message(self._monitor)["endpoint"].decode(errors="replace")
            self._count("handshake", f"a peer at {where} failed the handshake: other keys than ours, or none")

    def _count(self, reason: str, why: str) -> None:
        if why:
            metrics.REJECTED.labels(reason).inc()
            self._warn(reason, f"refused: {why}")


def make_keys() -> tuple[bytes, bytes]:
    """A new (public, secret) pair, in Z85."""
    return zmq.curve_keypair()


def _unreachable(error: zmq.ZMQError) -> bool:
    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        raise error
    return False


def _refused(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    if error.errno == zmq.EADDRINUSE:
        return ConfigError("loader.endpoint", endpoint, "is in use by another process", "stop it or name another")
    return ConfigError("loader.endpoint", endpoint, f"cannot be bound ({error.strerror})", "name another")


def _check(endpoint: str, guarded: bool) -> None:
    scheme, _, place = endpoint.partition("://")
    if scheme not in ("ipc", "tcp") or not place.strip("@"):
        raise ConfigError("loader.endpoint", endpoint, "must be ipc://PATH or tcp://HOST:PORT", "use the default")
    if scheme == "tcp" and not (guarded or is_loopback(place.rpartition(":")[0].strip("[]"))):
        rule = "is open to the network, which needs keys"
        remedy = "make them (millstream-loader keys) and set loader.keys_dir, or set loader.allow_plain_tcp"
        raise ConfigError("loader.endpoint", endpoint, rule, remedy)


def _is_tcp(endpoint: str) -> bool:
    return endpoint.startswith("tcp://")


def _path(endpoint: str) -> str:
    """The file of an ipc address; "" for an abstract one and for TCP."""
    path = endpoint.removeprefix("ipc://")
    return "" if _is_tcp(endpoint) or path.startswith("@") else path
