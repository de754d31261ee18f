"""The client of loader daemons, usable from any torch program: iterate it, get `Batch`es.

It needs torch, numpy, msgspec, pyzmq and xxhash, nothing of the trainer. No threads: everything, heartbeats included,
happens inside the calls, and each wait ends by `wait_s`. The protocol itself is in `session.py`, the ways for batches
(shared memory, TCP, device memory) in `lanes.py`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal

import torch

from shared import wire
from shared.batch import Cursor
from shared.config import digest
from shared.errors import LoaderTimeout, ProtocolError, SlotError
from shared.keys import reader_keys
from shared.logs import logger
from shared.sections import DataSection
from trainer.batches import Batch, Leases, Register
from trainer.cuda_lane import CudaLane
from trainer.lanes import Arrival, Lane, SlotsLane
from trainer.lending import Allocator, find_allocator
from trainer.link import Links
from trainer.peers import Peers
from trainer.pinning import pin
from trainer.session import Granted, Session
from trainer.waits import WaitHistogram, WaitStats

SLICE_S = 0.05
SAY_AFTER_S = 10.0
CLOSE_S = 5.0
START = Cursor()

_log = logger("client")


class LoaderClient:
    """One reader of one data-parallel rank's stream. Iterate it; use it as a context manager.

    Args:
        endpoint: the daemon's address, such as ipc:///tmp/millstream-1000-demo.sock, or those of several daemons
            with the same data: data rank r begins with number r of them, and goes to the next when one is lost.
        job: the job's name; the daemon compares it unless it is empty.
        data: the data section, compared with the daemon's; None takes what is served.
        data_rank, data_ranks: this stream among the data-parallel ranks.
        reader, readers: this process among those that read the same stream from this daemon.
        cursor: where to start: the `after` of the last batch that was consumed.
        credits: batches the daemon may send ahead of the one handed over.
        wait_s: bound of every wait for a batch.
        steps: end the iteration after so many global steps; None never ends it.
        verify: recompute each batch's checksum when it is handed over.
        lane: slots (shared memory), tcp (frames, from any host), auto (the first where it can be mapped), or cuda:
            slots, with pixels in device memory where the daemon decodes on our GPU and we read the stream alone.
        device: the GPU of the cuda lane; None is torch's current one.
        content: what `content` was when the cursor was taken; a daemon of other shards is refused. "" takes any.
        keys_dir: the folder of daemon.public and reader.secret, for daemons that ask for keys over TCP.
        register: page-locks memory that batches lie in and returns what undoes that; None does so where CUDA is.
        allocator: makes the device memory of the cuda lane; None does so on `device`.

    Raises:
        ConfigError: the keys cannot be used.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        job: str = "",
        data: DataSection | None = None,
        data_rank: int = 0,
        data_ranks: int = 1,
        reader: int = 0,
        readers: int = 1,
        cursor: Cursor = START,
        credits: int = 2,
        wait_s: float = 120.0,
        steps: int | None = None,
        verify: bool = False,
        lane: Literal["auto", "slots", "tcp", "cuda"] = "auto",
        device: torch.device | str | None = None,
        content: str = "",
        keys_dir: str = "",
        register: Register | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        place = (data_rank, data_ranks, reader, readers, cursor)
        hello = wire.Hello(wire.PROTOCOL, job, digest(data) if data else "", *place, wire.this_process())
        endpoints = (endpoint,) if isinstance(endpoint, str) else tuple(endpoint)
        if lane == "cuda":
            allocator = allocator or find_allocator(device)
        make = partial(_cuda_lane, register or pin, allocator, verify)
        peers = Peers.build(endpoints, data_rank, lane, register or pin, make)
        self._wait_s, self._steps_left, self._verify = wait_s, steps, verify
        self._links = Links(reader_keys(Path(keys_dir)) if keys_dir else None)
        self._leases = Leases(self._give_back)
        self._session = Session(self._links.open, peers, hello, credits, self._leases.holds, content)
        self._previous: Batch | None = None
        self._closed = False
        self._run, self._recent, self._first_s = WaitHistogram(), WaitHistogram(), -1.0

    def __enter__(self) -> "LoaderClient":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; releases the previous one unless it was kept.

        Raises:
            LoaderTimeout: none came within `wait_s`.
            ProtocolError: the daemon refuses this reader, or breaks the protocol.
            SlotError: a slot was reused while leased, or (with `verify`) its bytes are wrong.
            TooManyBadSamples: the daemon gave up on the data.
        """
        previous, self._previous = self._previous, None
        if previous and not previous.kept:
            previous.release()
        self._session.return_credits()
        if self._ended:
            raise StopIteration
        self._previous = batch = self._take()
        if self._steps_left is not None and batch.ends_step:
            self._steps_left -= 1
        return batch

    @property
    def position(self) -> Cursor:
        """Cursor of the next batch to be handed over."""
        return self._session.position

    @property
    def content(self) -> str:
        """What tells the shards that are read from others, to be saved with a cursor; "" before the first session."""
        return self._session.content

    @property
    def reconnects(self) -> int:
        """Sessions opened after the first one."""
        return max(0, self._session.opened - 1)

    @property
    def junk(self) -> int:
        """What came from daemons and was dropped: no message, too large, with a wrong number of frames or bytes."""
        return self._session.junk

    def connect(self) -> wire.Welcome:
        """Open the session now rather than at the first batch; return what the daemon granted."""
        self._wait(lambda: self._session.granted is not None, time.monotonic())
        assert self._session.granted is not None
        return self._session.granted.welcome

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Whether the next batch is there, after waiting for it up to `timeout_s`. Also keeps the session alive."""
        if self._ended:
            return False
        deadline = time.monotonic() + timeout_s
        self._turn(0.0)
        while not self._session.queue and (left_s := deadline - time.monotonic()) > 0:
            self._turn(min(SLICE_S, left_s))
        return bool(self._session.queue)

    def wait_stats(self) -> WaitStats:
        """Waits for batches, over the run and since the last call; percentiles are right to 5 %."""
        recent, self._recent = self._recent, WaitHistogram()
        return WaitStats(self._run.summary(), recent.summary(), max(0.0, self._first_s))

    def close(self) -> None:
        """End the session and give back what nobody keeps. Safe to call twice; takes seconds at most."""
        if self._closed:
            return
        self._closed = True
        self._release_previous_quietly()
        self._leases.finish(CLOSE_S)
        self._session.close()
        self._links.close()

    def _release_previous_quietly(self) -> None:
        try:
            if self._previous and not self._previous.kept:
                self._previous.release()
        except SlotError as error:
            _log.error("%s", error)

    @property
    def _ended(self) -> bool:
        return self._steps_left is not None and self._steps_left <= 0

    def _take(self) -> Batch:
        started = time.monotonic()
        while True:
            self._turn(0.0)
            if not self._session.queue:
                self._wait(lambda: bool(self._session.queue), started)
            arrival, granted = self._session.take()
            batch = _batch(arrival, granted, time.monotonic() - started)
            if not batch.lost():
                return self._hand_over(batch, granted)
            batch.attachment.give_back()
            self._session.lose(f"the lease of batch {batch.batch_id} ended before it was read")

    def _hand_over(self, batch: Batch, granted: Granted) -> Batch:
        if self._verify:
            batch.check_payload()
        self._leases.hold(batch, granted)
        self._session.advance(batch.header)
        if self._first_s < 0:
            self._first_s = batch.wait_s
        else:
            self._run.add(batch.wait_s)
            self._recent.add(batch.wait_s)
        return batch

    def _give_back(self, batch: Batch, granted: object) -> None:
        self._session.release(batch.cursor, granted)

    def _wait(self, done: Callable[[], bool], started: float) -> None:
        say_at = started + SAY_AFTER_S
        while not done():
            waited_s = time.monotonic() - started
            if waited_s >= self._wait_s:
                raise LoaderTimeout(
                    f"nothing within {self._wait_s:g} s from {self._session.name}; {self._state(started)}"
                )
            if started + waited_s >= say_at:
                say_at = float("inf")
                _log.warning("waiting for %s: %s", self._session.name, self._state(started))
            self._turn(min(SLICE_S, self._wait_s - waited_s))

    def _state(self, started: float) -> str:
        held = f"; {len(self._leases)} batches are not released" if len(self._leases) else ""
        return self._session.state(time.monotonic() - started) + held

    def _turn(self, seconds: float) -> None:
        if self._closed:
            raise ProtocolError(f"the client of {self._session.name} is closed")
        self._leases.flush()
        self._session.turn(seconds)


def _cuda_lane(register: Register, allocator: Allocator | None, verify: bool) -> Lane:
    """The slots lane where there is no device memory to lend."""
    return CudaLane(register, allocator, verify) if allocator else SlotsLane(register)


def _batch(arrival: Arrival, granted: Granted, waited_s: float) -> Batch:
    return Batch(arrival.header, granted.specs[arrival.header.group], arrival.attachment, waited_s)
