"""The reader's side of the wire protocol as a state machine, over any link; `client.py` brings the socket.

States: no link -> linked (HELLO sent) -> session (WELCOME came) -> lost -> no link ... A lost session is opened again
with a HELLO at the position. Law: the position is ours. A batch from before the expected cursor is a duplicate and is
dropped, one from beyond it breaks the protocol, so each batch is handed over exactly once, whoever died meanwhile.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from shared import wire
from shared.batch import BatchSpec, Cursor
from shared.errors import ProtocolError, SlotError, TooManyBadSamples
from shared.slots import Segment
from shared.telemetry import RateLimited, logger
from trainer.batches import Attachment, Register, room_for

QUIET_S = 2.0
FIRST_HELLO_S = 3.0
MAX_HELLO_S = 30.0
MAX_PAUSE_S = 1.0
MAX_ATTACH_FAILURES = 3

_log = logger("client")


class Link(Protocol):
    """What a session needs of a socket; nothing here blocks beyond the seconds it is given."""

    @property
    def up(self) -> bool:
        """Whether a daemon is at the other end right now."""

    def wait_up(self, seconds: float) -> bool:
        """Wait so long for a daemon."""

    def send(self, message: wire.Message) -> bool:
        """Send now (True) or not at all."""

    def receive(self, seconds: float) -> list[bytes] | None:
        """The frames of the next message, or None after so many seconds."""

    def close(self) -> None:
        """Say BYE if anybody listens, and close."""


class Granted(msgspec.Struct, eq=False):
    """What one WELCOME granted. `draining` is the daemon's reason once it sends no more batches."""

    welcome: wire.Welcome
    attachment: Attachment
    specs: dict[int, BatchSpec]
    draining: str = ""


class Session:
    """Keeps a session with the daemon open, or opens it again; every call is bounded by the seconds it is given.

    Attributes:
        position: cursor of the next batch to hand over.
        queue: headers received and not yet handed over, in order.
        granted: what the current session granted, None while there is none.
        opened: sessions opened so far. junk: frames that were no message.
    """

    def __init__(
        self,
        open_link: Callable[[], Link],
        endpoint: str,
        hello: wire.Hello,
        credits: int,
        holds: Callable[[Cursor], bool],
    ) -> None:
        self._open_link, self._endpoint, self._hello, self._credits = open_link, endpoint, hello, credits
        self._holds = holds
        self.position = self._expected = hello.cursor
        self.queue: deque[wire.Batch] = deque()
        self.granted: Granted | None = None
        self.opened = self.junk = 0
        self._link: Link | None = None
        self._attachment: Attachment | None = None
        self._hello_at = self._heard_at = self._turned_at = self._sent_at = self._retry_at = 0.0
        self._attempts = self._attach_failures = 0
        self._reason = ""
        self._say = RateLimited(_log.warning)

    def turn(self, seconds: float, register: Register) -> None:
        """Take one step towards a session, or take in what the daemon sent, within so many seconds."""
        now = time.monotonic()
        if now - self._turned_at > QUIET_S / 2:
            self._heard_at = now
        if self.granted and self.granted.draining and not self.queue:
            self.lose(f"the daemon drains: {self.granted.draining}")
        if self._link is None:
            self._open(seconds)
        elif not self._hello_at:
            self._say_hello(self._link, seconds)
        else:
            self._listen(self._link, seconds, register)
        self._turned_at = time.monotonic()

    def send(self, message: wire.Message) -> None:
        """Send within the session, if there is one; a link that takes nothing is found dead by the next turn."""
        if self.granted and self._link and self._link.send(message):
            self._sent_at = time.monotonic()

    def take(self) -> tuple[wire.Batch, Granted]:
        """The next header of the queue, and the session it belongs to."""
        assert self.granted is not None
        return self.queue.popleft(), self.granted

    def advance(self, header: wire.Batch) -> None:
        """The batch was handed over: the position moves, and its credit returns."""
        self.position = header.after
        self.send(wire.Credit(1))

    def lose(self, reason: str) -> None:
        """Give the session up; the next turn opens a new one at the position."""
        _log.warning("lost %s: %s; position %s", self.name, reason, place(self.position))
        self._reason = reason
        self._drop_link()
        pause_s = min(MAX_PAUSE_S, 0.05 * 2.0**self._attempts) if self._attempts else 0.0
        self._retry_at = time.monotonic() + pause_s
        self._attempts = min(self._attempts + 1, 10)

    def close(self) -> None:
        """BYE, and unmap once no batch is held."""
        self._drop_link()
        if self._attachment:
            self._attachment.retire()

    @property
    def name(self) -> str:
        """The daemon and this reader, for messages."""
        hello = self._hello
        reader = f"reader {hello.reader} of {hello.readers}"
        return f"loader {self._endpoint} (data rank {hello.data_rank} of {hello.data_ranks}, {reader})"

    def state(self, waited_s: float) -> str:
        """In words, what a wait of so many seconds waits for."""
        if self.granted:
            state = f"connected, waiting for batch {place(self.position)} since {waited_s:.1f} s"
        elif self._hello_at:
            state = f"connected, HELLO unanswered for {time.monotonic() - self._hello_at:.1f} s"
        else:
            state = "not connected" if self._reason else "never connected"
        return state + (f"; before that: {self._reason}" if self._reason else "")

    def _open(self, seconds: float) -> None:
        pause_s = self._retry_at - time.monotonic()
        if pause_s > 0:
            time.sleep(min(pause_s, seconds))
        else:
            self._link = self._open_link()

    def _say_hello(self, link: Link, seconds: float) -> None:
        if link.wait_up(seconds) and link.send(msgspec.structs.replace(self._hello, cursor=self.position)):
            self._hello_at = self._heard_at = time.monotonic()

    def _listen(self, link: Link, seconds: float, register: Register) -> None:
        frames = link.receive(seconds)
        while frames is not None:
            self._take_in(frames, register)
            frames = link.receive(0.0) if link is self._link else None
        if link is not self._link:
            return
        if not self.queue:
            self._check_alive(link)
        if self.granted and time.monotonic() - self._sent_at >= self.granted.welcome.heartbeat_s:
            self.send(wire.Heartbeat())

    def _check_alive(self, link: Link) -> None:
        if self.granted:
            bound_s = max(QUIET_S, 3 * self.granted.welcome.heartbeat_s)
        else:
            bound_s = min(MAX_HELLO_S, FIRST_HELLO_S * 2.0**self._attempts)
        if not link.up:
            self.lose("the daemon went away")
        elif time.monotonic() - self._heard_at > bound_s:
            self.lose(f"no word from the daemon for {bound_s:g} s")

    def _take_in(self, frames: list[bytes], register: Register) -> None:
        try:
            if len(frames) != 1:
                raise ProtocolError(f"a message of {len(frames)} frames")
            message = wire.decode_to_reader(frames[0])
        except ProtocolError as error:
            self.junk += 1
            self._say("junk", f"ignored from {self.name}: {error}")
            return
        self._heard_at = time.monotonic()
        match message:
            case wire.Welcome():
                self._on_welcome(message, register)
            case wire.Batch():
                self._on_batch(message)
            case wire.Failure():
                self._on_failure(message)
            case wire.Drain() if self.granted:
                self.granted.draining = message.reason or "no reason given"

    def _on_welcome(self, welcome: wire.Welcome, register: Register) -> None:
        self._check_welcome(welcome)
        try:
            attachment = self._attach(welcome, register)
        except SlotError as error:
            self._attach_failures += 1
            if self._attach_failures >= MAX_ATTACH_FAILURES:
                raise
            self.lose(str(error))
            return
        self._attach_failures = 0
        self.granted = Granted(welcome, attachment, {spec.group: spec for spec in welcome.specs})
        self._expected = self.position
        self.opened += 1
        _log.info("session %d with %s from %s", self.opened, self.name, place(self.position))
        self.send(wire.Credit(self._credits))

    def _check_welcome(self, welcome: wire.Welcome) -> None:
        if self.granted:
            raise ProtocolError(f"{self.name} sent WELCOME twice")
        if welcome.protocol != wire.PROTOCOL:
            raise ProtocolError(f"{self.name} speaks protocol {welcome.protocol}, this client {wire.PROTOCOL}")
        if self._hello.digest and welcome.digest != self._hello.digest:
            both = f"data digest {welcome.digest}, this client's is {self._hello.digest}"
            raise ProtocolError(f"{self.name} serves {both}; start both from one run file")

    def _attach(self, welcome: wire.Welcome, register: Register) -> Attachment:
        old = self._attachment
        if old and old.segment.path == welcome.segment:
            return old
        segment = Segment.attach(welcome.segment, welcome.slots, welcome.slot_bytes)
        if old:
            old.retire()
        self._attachment = Attachment(segment, register(segment.array))
        return self._attachment

    def _on_batch(self, header: wire.Batch) -> None:
        if self.granted is None:
            raise ProtocolError(f"{self.name} sent batch {header.batch_id} before WELCOME")
        if header.cursor < self._expected:
            self._drop(header)
            return
        self._check_header(header, self.granted)
        self._attempts, self._reason = 0, ""
        self._expected = header.after
        self.queue.append(header)

    def _drop(self, header: wire.Batch) -> None:
        self._say("duplicate", f"batch {header.batch_id} came again from {self.name}; dropped")
        self.send(wire.Credit(1))
        if not self._holds(header.cursor) and all(header.cursor != queued.cursor for queued in self.queue):
            self.send(wire.Release(header.cursor))

    def _check_header(self, header: wire.Batch, granted: Granted) -> None:
        sent = f"{self.name} sent batch {header.batch_id}"
        first = header.skipped_from or header.cursor
        if not first <= self._expected <= header.cursor < header.after:
            where = f"{place(header.cursor)}, followed by {place(header.after)}"
            raise ProtocolError(f"{sent} at {where}, where {place(self._expected)} is next")
        spec = granted.specs.get(header.group)
        if spec is None or not room_for(spec, granted.welcome.slot_bytes):
            raise ProtocolError(f"{sent} of group {header.group}, whose layout is unknown or does not fit a slot")
        if not 0 <= header.slot < granted.welcome.slots:
            raise ProtocolError(f"{sent} in slot {header.slot} of {granted.welcome.slots}")

    def _on_failure(self, failure: wire.Failure) -> None:
        if not failure.retryable:
            self._refused(failure)
        self.lose(f"{failure.code}: {failure.text}")

    def _refused(self, failure: wire.Failure) -> NoReturn:
        if "bad_samples" in failure.code:
            raise TooManyBadSamples(failure.text)
        raise ProtocolError(f"refused by {self.name}: {failure.text} ({failure.code})")

    def _drop_link(self) -> None:
        link, self._link, self.granted, self._hello_at = self._link, None, None, 0.0
        self.queue.clear()
        if link:
            link.close()


def place(cursor: Cursor) -> str:
    """A cursor as messages write it."""
    return f"e{cursor.epoch}-s{cursor.step}-m{cursor.micro}"
