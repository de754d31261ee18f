"""The reader's side of the wire protocol as a state machine, over any link (`link.py`) and lane (`lanes.py`).

States: no link -> linked (HELLO sent) -> session (WELCOME came) -> lost -> no link ... A lost session is opened again
with a HELLO at the position, at the next daemon when this one is gone: every daemon makes every batch. Law: the
position is ours. A batch from before the expected cursor is a duplicate and is dropped, one from beyond it breaks the
protocol, so each batch is handed over exactly once, whoever died meanwhile.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import msgspec

from shared import wire
from shared.batch import BatchSpec, Cursor
from shared.errors import ProtocolError, SlotError, TooManyBadSamples
from shared.logs import RateLimited, logger
from trainer.batches import room_for
from trainer.lanes import Arrival, Lane
from trainer.link import Land, Received
from trainer.peers import Peers

QUIET_S = 2.0
FIRST_HELLO_S = 3.0
MAX_HELLO_S = 30.0
MAX_PAUSE_S = 1.0
CONNECT_S = 3.0
RETURN_S = 3.0
POLL_S = 0.05
BUSY = ("draining", "no_slots")
BROKEN = "daemon_error"

_log = logger("client")


class Link(Protocol):
    """What a session needs of a socket; nothing here blocks beyond the seconds it is given."""

    @property
    def up(self) -> bool:
        """Whether a daemon is at the other end right now."""

    def wait_up(self, seconds: float) -> bool:
        """Wait so long for a daemon."""

    def refusal(self) -> str:
        """Why the daemon cannot be talked to, in words, or ""."""

    def send(self, message: wire.Message) -> bool:
        """Send now (True) or not at all."""

    def receive(self, seconds: float, land: Land) -> Received | None:
        """The next message, its second frame where `land` says, or None after so many seconds."""

    def close(self) -> None:
        """Say BYE if anybody listens, and close."""


class Granted(msgspec.Struct, eq=False):
    """What one WELCOME granted. `draining` is the daemon's reason once it sends no more batches."""

    welcome: wire.Welcome
    lane: Lane
    specs: dict[int, BatchSpec]
    draining: str = ""


class Session:
    """Keeps a session with the daemon open, or opens it again; every call is bounded by the seconds it is given.

    Attributes:
        position: cursor of the next batch to hand over.
        queue: batches received and not yet handed over, in order.
        granted: what the current session granted, None while there is none.
        content: what the shards are that the position is a place in; "" until a daemon told it.
        opened: sessions opened so far. junk: messages that were none, or whose bytes did not come whole.
    """

    def __init__(
        self,
        open_link: Callable[[str, int], Link],
        peers: Peers,
        hello: wire.Hello,
        credits: int,
        holds: Callable[[Cursor], bool],
        content: str = "",
    ) -> None:
        self._open_link, self._peers, self._hello, self._credits = open_link, peers, hello, credits
        self._holds, self.content = holds, content
        self.position = self._expected = hello.cursor
        self.queue: deque[Arrival] = deque()
        self.granted: Granted | None = None
        self.opened = self.junk = 0
        self._link: Link | None = None
        self._opened_at = self._hello_at = self._heard_at = self._turned_at = self._sent_at = self._retry_at = 0.0
        self._attempts = self._due = 0
        self._reason = ""
        self._say = RateLimited(_log.warning)

    def turn(self, seconds: float) -> None:
        """Take one step towards a session, or take in what the daemon sent, within so many seconds."""
        now = time.monotonic()
        if now - self._turned_at > QUIET_S / 2:
            self._heard_at = now
        if self.granted and self.granted.draining and not self.queue:
            self.lose(f"the daemon drains: {self.granted.draining}", elsewhere=True)
        if self._link is None:
            self._open(seconds)
        elif not self._hello_at:
            self._say_hello(self._link, seconds)
        else:
            self._listen(self._link, seconds)
        self._turned_at = time.monotonic()

    def send(self, message: wire.Message) -> None:
        """Send within the session, if there is one; a link that takes nothing is found dead by the next turn."""
        if self.granted and self._link and self._link.send(message):
            self._sent_at = time.monotonic()

    def take(self) -> tuple[Arrival, Granted]:
        """The next batch of the queue, whose lease is the caller's from here on, and the session it belongs to."""
        assert self.granted is not None
        return self.queue.popleft(), self.granted

    def advance(self, header: wire.Batch) -> None:
        """The batch was handed over: the position moves, and its credit is due."""
        self.position = header.after
        self._due += 1

    def return_credits(self) -> None:
        """Tell the daemon of the credits that are due. Not part of a hand-over, which would wait for the socket."""
        if self._due:
            self.send(wire.Credit(self._due))
            self._due = 0

    def release(self, cursor: Cursor, granted: object) -> None:
        """Every read of a batch is over; the daemon is told, unless it knows or is another by now."""
        if granted is self.granted and self.granted and not self.granted.lane.returns_at_once:
            self.send(wire.Release(cursor))

    def lose(self, reason: str, elsewhere: bool = False) -> None:
        """Give the session up; the next turn opens a new one at the position, with the next daemon if `elsewhere`."""
        self._say("lost", f"lost {self.name}: {reason}; position {place(self.position)}")
        self._reason = reason
        self._drop_link()
        if elsewhere:
            self._peers.go_on()
        pause_s = min(MAX_PAUSE_S, 0.05 * 2.0**self._attempts) if self._attempts else 0.0
        self._retry_at = time.monotonic() + pause_s
        self._attempts = min(self._attempts + 1, 10)

    def close(self) -> None:
        """BYE, and unmap once no batch is held. Lent memory is waited for, RETURN_S at most."""
        if self.granted and self._link and self._peers.current.lane.lent:
            self._recall(self._link, self._peers.current.lane)
        self._drop_link()
        self._peers.close()

    def _recall(self, link: Link, lane: Lane) -> None:
        """End the session, and listen until the daemon says that it has let go of our memory, or is gone."""
        self.send(wire.Bye())
        deadline = time.monotonic() + RETURN_S
        while lane.lent and time.monotonic() < deadline:
            received = link.receive(POLL_S, lane.land)
            with contextlib.suppress(ProtocolError):
                message = wire.decode_to_reader(received.frame) if received else None
                if isinstance(message, wire.Returned):
                    lane.returned(message.handle)
            if received is None and not link.up:
                lane.daemon_gone()

    @property
    def name(self) -> str:
        """The daemon and this reader, for messages."""
        hello = self._hello
        reader = f"reader {hello.reader} of {hello.readers}"
        return f"loader {self._peers.current.endpoint} (data rank {hello.data_rank} of {hello.data_ranks}, {reader})"

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
            peer = self._peers.current
            self._link, self._opened_at = self._open_link(peer.endpoint, peer.lane.max_bytes), time.monotonic()

    def _say_hello(self, link: Link, seconds: float) -> None:
        lane = self._peers.current.lane
        hello = msgspec.structs.replace(self._hello, cursor=self.position, lane=lane.name, device=lane.device)
        if link.wait_up(seconds) and link.send(hello):
            self._hello_at = self._heard_at = time.monotonic()
        elif refusal := link.refusal():
            raise ProtocolError(f"refused by {self.name}: {refusal}")
        elif len(self._peers) > 1 and time.monotonic() - self._opened_at > CONNECT_S:
            self.lose(f"not there within {CONNECT_S:g} s", elsewhere=True)

    def _listen(self, link: Link, seconds: float) -> None:
        land = self._peers.current.lane.land
        received = link.receive(seconds, land)
        while received is not None:
            self._take_in(received)
            received = link.receive(0.0, land) if link is self._link else None
        if link is not self._link:
            return
        if not self.queue:
            self._check_alive(link)
        if self.granted and time.monotonic() - self._sent_at >= self.granted.welcome.heartbeat_s:
            self.send(wire.Heartbeat())

    def _check_alive(self, link: Link) -> None:
        if self.granted:
            beat_s = self.granted.welcome.heartbeat_s
            bound_s = max(QUIET_S, 3 * beat_s) + self.granted.lane.slack_s(self._credits)
        else:
            bound_s = min(MAX_HELLO_S, FIRST_HELLO_S * 2.0**self._attempts)
        if not link.up:
            self.lose("the daemon went away", elsewhere=True)
        elif time.monotonic() - self._heard_at > bound_s:
            self.lose(f"no word from the daemon for {bound_s:g} s", elsewhere=True)

    def _take_in(self, received: Received) -> None:
        try:
            message = wire.decode_to_reader(received.frame)
            if received.frames != 1 and not isinstance(message, wire.Batch):
                raise ProtocolError(f"a message of {received.frames} frames")
        except ProtocolError as error:
            self.junk += 1
            self._say("junk", f"ignored from {self.name}: {error}")
            return
        self._heard_at = time.monotonic()
        match message:
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Batch():
                self._on_batch(message, received)
            case wire.Failure():
                self._on_failure(message)
            case wire.Returned():
                self._peers.current.lane.returned(message.handle)
            case wire.Drain() if self.granted:
                self.granted.draining = message.reason or "no reason given"

    def _on_welcome(self, welcome: wire.Welcome) -> None:
        self._check_welcome(welcome)
        peer = self._peers.current
        if not peer.attach(welcome):
            self.lose(f"its slots cannot be mapped; the {peer.lane.name} lane is tried next")
            return
        self.granted = Granted(welcome, peer.lane, {spec.group: spec for spec in welcome.specs})
        self._expected = self.position
        self.opened += 1
        name = peer.lane.name
        _log.info("session %d with %s from %s, lane %s", self.opened, self.name, place(self.position), name)
        if lent := peer.lane.lend():
            self.send(lent)
        self.send(wire.Credit(self._credits + 1))
        self._due = 0

    def _check_welcome(self, welcome: wire.Welcome) -> None:
        if self.granted:
            raise ProtocolError(f"{self.name} sent WELCOME twice")
        if welcome.protocol != wire.PROTOCOL:
            raise ProtocolError(f"{self.name} speaks protocol {welcome.protocol}, this client {wire.PROTOCOL}")
        if self._hello.digest and welcome.digest != self._hello.digest:
            both = f"data digest {welcome.digest}, this client's is {self._hello.digest}"
            raise ProtocolError(f"{self.name} serves {both}; start both from one run file")
        if self.content and welcome.content and welcome.content != self.content:
            both = f"other shards (content {welcome.content}) than those read so far ({self.content})"
            remedy = "restore them, for a cursor is a place in these; or start anew in another train.run_dir"
            raise ProtocolError(f"{self.name} serves {both}: some were added, taken out or rewritten; {remedy}")
        self.content = welcome.content or self.content

    def _on_batch(self, header: wire.Batch, received: Received) -> None:
        if self.granted is None:
            raise ProtocolError(f"{self.name} sent batch {header.batch_id} before WELCOME")
        if header.cursor < self._expected:
            self._drop(header)
            return
        spec = self._check_header(header, self.granted)
        try:
            arrival = self.granted.lane.arrive(header, spec, received.frames, received.payload_bytes)
        except SlotError as error:
            self.junk += 1
            self.lose(str(error))
            return
        self._attempts, self._reason = 0, ""
        self._expected = header.after
        self.queue.append(arrival)
        if self.granted.lane.returns_at_once:
            self.send(wire.Release(header.cursor))

    def _drop(self, header: wire.Batch) -> None:
        self._say("duplicate", f"batch {header.batch_id} came again from {self.name}; dropped")
        self.send(wire.Credit(1))
        held = self._holds(header.cursor) or any(header.cursor == queued.header.cursor for queued in self.queue)
        if self.granted and (self.granted.lane.returns_at_once or not held):
            self.send(wire.Release(header.cursor))

    def _check_header(self, header: wire.Batch, granted: Granted) -> BatchSpec:
        sent = f"{self.name} sent batch {header.batch_id}"
        first = header.skipped_from or header.cursor
        if not first <= self._expected <= header.cursor < header.after:
            where = f"{place(header.cursor)}, followed by {place(header.after)}"
            raise ProtocolError(f"{sent} at {where}, where {place(self._expected)} is next")
        spec = granted.specs.get(header.group)
        if spec is None or not room_for(spec, granted.welcome.slot_bytes):
            raise ProtocolError(f"{sent} of group {header.group}, whose layout is unknown or does not fit a slot")
        if not -1 <= header.device_part < (granted.lane.parts if spec.pixels.size_bytes else 0):
            part, parts = header.device_part, granted.lane.parts
            raise ProtocolError(f"{sent} with pixels in part {part} of device memory, of which {parts} parts are lent")
        return spec

    def _on_failure(self, failure: wire.Failure) -> None:
        survivable = failure.code == BROKEN and len(self._peers) > 1
        if not (failure.retryable or survivable):
            self._refused(failure)
        self.lose(f"{failure.code}: {failure.text}", elsewhere=survivable or failure.code in BUSY)

    def _refused(self, failure: wire.Failure) -> NoReturn:
        if "bad_samples" in failure.code:
            raise TooManyBadSamples(failure.text)
        raise ProtocolError(f"refused by {self.name}: {failure.text} ({failure.code})")

    def _drop_link(self) -> None:
        link, self._link, self.granted, self._hello_at = self._link, None, None, 0.0
        while self.queue:
            self.queue.popleft().attachment.give_back()
        if link:
            link.close()


def place(cursor: Cursor) -> str:
    """A cursor as messages write it."""
    return f"e{cursor.epoch}-s{cursor.step}-m{cursor.micro}"
