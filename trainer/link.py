"""The trainer's door to ZeroMQ: a DEALER socket to one daemon. Nothing here blocks beyond the seconds it is given.

A frame that follows a message is received straight into memory that the caller offers, so a payload lands where the
tensors will lie. Over TCP the link is encrypted when there are keys; a handshake that fails is told in words.
"""

from collections.abc import Callable

import msgspec
import numpy as np
import zmq
from numpy.typing import NDArray
from zmq.utils.monitor import recv_monitor_message

from shared import wire
from shared.errors import ConfigError
from shared.keys import ReaderKeys

BYE_MS = 200
MAX_FRUITLESS_HANDSHAKES = 3
SOCKET_OPTIONS: dict[int, int] = {
    zmq.LINGER: 0,
    zmq.IMMEDIATE: 1,
    zmq.SNDHWM: 1000,
    zmq.RCVHWM: 1000,
    zmq.RECONNECT_IVL: 20,
    zmq.RECONNECT_IVL_MAX: 500,
}
UNKNOWN_KEY = "it does not know this reader's key; copy our reader.public into its loader.keys_dir"
OTHER_KEY = "it has another key than our daemon.public, or none; copy daemon.public from its host's loader.keys_dir"
NO_KEY_HERE = "it asks for keys, and loader.keys_dir is not set here"

Land = Callable[[], NDArray[np.uint8] | None]


class Received(msgspec.Struct):
    """A message, how many frames it had, and how many bytes the second one had (they are where `land` said)."""

    frame: bytes
    frames: int = 1
    payload_bytes: int = 0


class Links:
    """Opens links; all share one context. `keys` are used over TCP."""

    def __init__(self, keys: ReaderKeys | None) -> None:
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def open(self, endpoint: str, max_bytes: int) -> "DealerLink":
        """A link to `endpoint` on which no frame has more than `max_bytes`.

        Raises:
            ConfigError: it is no address.
        """
        socket = self._context.socket(zmq.DEALER)
        for option, value in {**SOCKET_OPTIONS, zmq.MAXMSGSIZE: max_bytes, zmq.IPV6: int("[" in endpoint)}.items():
            socket.setsockopt(option, value)
        keys = self._keys if endpoint.startswith("tcp://") else None
        if keys:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.daemon)
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, zmq.curve_public(keys.secret))
        try:
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close()
            remedy = "give ipc:///path or tcp://host:port"
            raise ConfigError("loader.endpoint", endpoint, f"cannot be connected to ({error})", remedy) from None
        return DealerLink(socket, bool(keys))

    def close(self) -> None:
        """After the last link was closed."""
        self._context.term()


class DealerLink:
    """One DEALER socket to a daemon (a `session.Link`). Queues are bounded and never fill for an absent daemon."""

    def __init__(self, socket: "zmq.Socket[bytes]", keyed: bool) -> None:
        self._socket, self._keyed = socket, keyed
        self._monitor = socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
        )
        self._fruitless = 0

    @property
    def up(self) -> bool:
        """Whether a daemon is at the other end right now."""
        return self.wait_up(0.0)

    def wait_up(self, seconds: float) -> bool:
        """Wait so long for a daemon."""
        return bool(self._socket.poll(round(seconds * 1000), zmq.POLLOUT))

    def refusal(self) -> str:
        """Why the daemon cannot be talked to, in words, or ""; it may only be told after some handshakes failed."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                return UNKNOWN_KEY
            if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                return OTHER_KEY if self._keyed else NO_KEY_HERE
            self._fruitless = 0 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else self._fruitless + 1
        return OTHER_KEY if self._keyed and self._fruitless >= MAX_FRUITLESS_HANDSHAKES else ""

    def send(self, message: wire.Message) -> bool:
        """Send now (True) or not at all."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, seconds: float, land: Land) -> Received | None:
        """The next message, or None after so many seconds. Its second frame goes where `land` says, others nowhere."""
        here = int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
        if not (here or (seconds and self._socket.poll(round(seconds * 1000), zmq.POLLIN))):
            return None
        received = Received(self._socket.recv(zmq.NOBLOCK))
        while self._socket.getsockopt(zmq.RCVMORE):
            received.frames += 1
            room = land() if received.frames == 2 else None
            size = self._socket.recv_into(bytearray() if room is None else room.data)
            received.payload_bytes = size if received.frames == 2 else received.payload_bytes
        return received

    def close(self) -> None:
        """Say BYE if anybody listens, and close."""
        said = self.up and self.send(wire.Bye())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=BYE_MS if said else 0)
