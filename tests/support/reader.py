"""A bare reader of the daemon: a DEALER that speaks shared.wire, takes slots apart, and knows nothing of the client."""

import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import msgspec
import numpy as np
import xxhash
import zmq
from numpy.typing import NDArray

from shared.batch import Cursor
from shared.config import digest, endpoint
from shared.sections import RunConfig
from shared.slots import Segment
from shared.wire import (
    PROTOCOL,
    Batch,
    Bye,
    Credit,
    Heartbeat,
    Hello,
    Lane,
    Message,
    Release,
    ToReader,
    Welcome,
    decode_to_reader,
    encode,
    this_process,
)

T = TypeVar("T", bound=Message)

WAIT_S = 60.0
START = Cursor()


class RawReader:
    """One reader. Every wait is bounded by WAIT_S. `slow` takes in little that it is not asked for."""

    def __init__(
        self,
        config: RunConfig,
        data_rank: int = 0,
        data_ranks: int = 1,
        address: str = "",
        lane: Lane = "slots",
        slow: bool = False,
    ) -> None:
        self.config, self.data_rank, self.data_ranks, self.lane = config, data_rank, data_ranks, lane
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        if slow:
            self.socket.setsockopt(zmq.RCVBUF, 4096)
            self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.connect(address or endpoint(config))
        self.welcome: Welcome | None = None
        self.segment: Segment | None = None
        self.payload: list[bytes] = []
        self._early: deque[ToReader] = deque()

    def __enter__(self) -> "RawReader":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self.segment:
            self.segment.close()
        self.socket.close(0)
        self._context.term()

    def send(self, message: Message) -> None:
        self.socket.send(encode(message))

    def hello(self, cursor: Cursor = START, reader: int = 0, readers: int = 1, **changes: Any) -> Hello:
        hello = Hello(
            protocol=PROTOCOL,
            job=self.config.job,
            digest=digest(self.config.data),
            data_rank=self.data_rank,
            data_ranks=self.data_ranks,
            reader=reader,
            readers=readers,
            cursor=cursor,
            process=this_process(),
            lane=self.lane,
        )
        return msgspec.structs.replace(hello, **changes)

    def join(
        self, cursor: Cursor = START, reader: int = 0, readers: int = 1, credits: int = 2, **changes: Any
    ) -> Welcome:
        """Say HELLO, map the slots where there are any, give credits."""
        self.send(self.hello(cursor, reader, readers, **changes))
        self.welcome = self.expect(Welcome)
        if self.lane == "slots":
            self.segment = Segment.attach(self.welcome.segment, self.welcome.slots, self.welcome.slot_bytes)
        self.send(Credit(credits))
        return self.welcome

    def next(self, wait_s: float = WAIT_S) -> ToReader | None:
        """The next message but heartbeats, or None after `wait_s`."""
        if self._early:
            return self._early.popleft()
        deadline = time.monotonic() + wait_s
        while (left := deadline - time.monotonic()) > 0:
            if not self.socket.poll(max(1, round(left * 1000))):
                return None
            frame, *self.payload = self.socket.recv_multipart()
            message = decode_to_reader(frame)
            if not isinstance(message, Heartbeat):
                return message
            self.send(Heartbeat())
        return None

    def hear_beats(self, count: int) -> None:
        """Wait for so many heartbeats, before each of which the daemon looks for the dead.

        What else comes is kept for `next`, without its payload frames.
        """
        deadline = time.monotonic() + WAIT_S
        while count:
            assert self.socket.poll(max(1, round(1000 * (deadline - time.monotonic())))), "no heartbeat"
            message = decode_to_reader(self.socket.recv_multipart()[0])
            if isinstance(message, Heartbeat):
                count -= 1
                self.send(Heartbeat())
            else:
                self._early.append(message)

    def expect(self, kind: type[T], wait_s: float = WAIT_S) -> T:
        message = self.next(wait_s)
        assert isinstance(message, kind), message
        return message

    def batch(self) -> Batch:
        return self.expect(Batch)

    def arrays(self, batch: Batch) -> dict[str, Any]:
        """Copies of the batch's arrays; its checksum and generation are held."""
        assert self.welcome
        spec, payload = self.welcome.specs[batch.group], self._payload(batch)
        assert xxhash.xxh3_64_intdigest(payload[: spec.size_bytes].tobytes()) & ((1 << 63) - 1) == batch.checksum
        return {
            f.name: np.array(payload[f.offset : f.offset + f.size_bytes].view(f.dtype).reshape(f.shape))
            for f in spec.fields
        }

    def _payload(self, batch: Batch) -> NDArray[np.uint8]:
        if self.segment is None:
            return np.frombuffer(self.payload[0], dtype=np.uint8)
        assert self.segment.generation(batch.slot) == batch.generation
        return self.segment.payload(batch.slot)

    def release(self, batch: Batch, credits: int = 1) -> None:
        self.send(Release(batch.cursor))
        if credits:
            self.send(Credit(credits))

    def read(self, count: int) -> list[Batch]:
        """`count` batches, each checked and released."""
        batches = []
        for _ in range(count):
            batch = self.batch()
            self.arrays(batch)
            self.release(batch)
            batches.append(batch)
        return batches

    def bye(self) -> None:
        self.send(Bye())


def left_behind(folder: Path) -> list[str]:
    """Sockets, locks and segments in `folder`."""
    return sorted(p.name for p in folder.iterdir() if p.is_socket() or ".lock" in p.name or "millstream-" in p.name)
