"""The wire protocol's messages and how they become frames. No sockets here; the specification is README.md.

Every message is one msgpack frame of a tagged struct, so junk is refused by type before anything looks at it. In the
tcp lane a BATCH is followed by a second frame, its payload.
"""

import os
import platform
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar, Union

import msgspec

from shared.batch import BatchSpec, Cursor
from shared.errors import ProtocolError

T = TypeVar("T")

PROTOCOL = 3
MAX_MESSAGE_BYTES = 1 << 20
MAX_TO_DAEMON_BYTES = 1 << 16
MAX_PAYLOAD_BYTES = 1 << 30

Lane = Literal["slots", "tcp", "cuda"]
"""How a batch's bytes reach a reader: in shared memory that it maps, as a frame over the socket, or in shared memory
and, for pixels, in device memory that it lends."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the tag is the struct's name."""


class Process(msgspec.Struct, frozen=True, array_like=True):
    """Who a peer is, so that a daemon on the same host sees its death at once. `namespace` names host and pid space."""

    pid: int
    started: int
    namespace: str


class Hello(Message, frozen=True):
    """Reader -> daemon: open a session. `readers` is how many readers of this stream use this daemon.

    `digest` is empty for a client that holds no data section and takes what is served, `job` for one that reads the
    daemon's own job. `lane` has a default so that a greeting of protocol 1 is refused in words, not as junk.
    `device` is the UUID of the reader's GPU in the cuda lane.
    """

    protocol: int
    job: str
    digest: str
    data_rank: int
    data_ranks: int
    reader: int
    readers: int
    cursor: Cursor
    process: Process
    lane: Lane = "slots"
    device: str = ""


class Welcome(Message, frozen=True):
    """Daemon -> reader: where the slots lie (`segment` is empty in the tcp lane) and how every group is laid out.

    In the cuda lane `device_parts` is how many batches' pixels the reader may lend room for, and 0 means that all go to
    slots, because of `device_refusal`. `content` tells the shards that a cursor is a place in from others.
    """

    protocol: int
    digest: str
    segment: str
    slot_bytes: int
    slots: int
    heartbeat_s: float
    micro_batches: int
    specs: tuple[BatchSpec, ...]
    device_parts: int = 0
    device_refusal: str = ""
    content: str = ""


class Lend(Message, frozen=True):
    """Reader -> daemon: device memory for the pixels of later batches, `parts` of `part_bytes` each, until BYE.

    `handle` is its CUDA IPC handle. `hashed`: checksums are to cover pixels there too.
    """

    handle: bytes
    parts: int
    part_bytes: int
    hashed: bool = False


class Returned(Message, frozen=True):
    """Daemon -> reader, after BYE: no process of ours has that memory open any more."""

    handle: bytes


class Credit(Message, frozen=True):
    """Reader -> daemon: `count` more batches may be sent."""

    count: int


class Batch(Message, frozen=True):
    """Daemon -> reader: a filled slot, leased until released. In the tcp lane the slot's bytes follow in a frame.

    `counts` are samples, images, clips, tokens and label tokens in this micro-batch; `step_labels` the label tokens
    the plan holds for the whole global batch, the same on every rank, known before the forward starts. `skipped_from`
    is where the steps begin that are passed over on request just before this batch, `imbalance` the estimated cost of
    the step's most loaded data rank over the mean. `device_part` is the part of lent memory that holds the pixels, or
    -1: they lie in the slot. Where they lie apart, `checksum` is of the bytes before and after them, unless the memory
    was lent `hashed`.
    """

    cursor: Cursor
    after: Cursor
    batch_id: str
    group: int
    slot: int
    generation: int
    checksum: int
    counts: tuple[int, int, int, int, int]
    step_labels: int
    sample_ids: tuple[int, ...]
    substituted: int = 0
    skipped_from: Cursor | None = None
    imbalance: float = 1.0
    device_part: int = -1


class Release(Message, frozen=True):
    """Reader -> daemon: every read of this batch is over."""

    cursor: Cursor


class Heartbeat(Message, frozen=True):
    """Both ways: the sender's loop is alive."""


class Failure(Message, frozen=True):
    """Daemon -> reader: something is refused. `retryable` tells whether a new HELLO may succeed."""

    code: str
    text: str
    retryable: bool


class Drain(Message, frozen=True):
    """Daemon -> reader: no more batches from this process; reconnect with your cursor to its successor."""

    reason: str


class Bye(Message, frozen=True):
    """Reader -> daemon: the session is over; its leases are returned."""


ToDaemon = Union[Hello, Lend, Credit, Release, Heartbeat, Bye]
ToReader = Union[Welcome, Batch, Returned, Heartbeat, Failure, Drain]

_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_reader: msgspec.msgpack.Decoder[ToReader] = msgspec.msgpack.Decoder(ToReader)


def encode(message: Message) -> bytes:
    """One frame."""
    return _encoder.encode(message)


def decode_to_daemon(frame: bytes) -> ToDaemon:
    """A reader's frame as a message.

    Raises:
        ProtocolError: the frame is none.
    """
    return _decode(_to_daemon, frame, MAX_TO_DAEMON_BYTES)


def decode_to_reader(frame: bytes) -> ToReader:
    """A daemon's frame as a message.

    Raises:
        ProtocolError: the frame is none.
    """
    return _decode(_to_reader, frame, MAX_MESSAGE_BYTES)


def _decode(decoder: "msgspec.msgpack.Decoder[T]", frame: bytes, limit: int) -> T:
    if len(frame) > limit:
        raise ProtocolError(f"a frame of {len(frame)} bytes is over the limit of {limit}")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"a frame of {len(frame)} bytes is not a message ({error})") from None


def this_process() -> Process:
    """The calling process."""
    return Process(os.getpid(), start_ticks(os.getpid()), f"{_boot()}/{os.readlink('/proc/self/ns/pid')}")


@cache
def _boot() -> str:
    """What tells this host's running kernel from every other: the first pid namespace has one number everywhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def start_ticks(pid: int) -> int:
    """Clock ticks after boot at which `pid` started, or -1 when there is no such live process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *rest = file.read().rpartition(b")")[2].split()
    except OSError:
        return -1
    return -1 if state in (b"Z", b"X") else int(rest[18])
