"""A loader daemon of one thread: a real ROUTER that speaks `shared.wire` over a real segment, with made-up batches.

What it serves at a cursor is a pure function of the cursor, so a restarted one serves the same bytes. Every message it
receives is kept in `received`. Tests make it misbehave by `say` (send anything), `before_batch` (change a header or
the slot just before a batch goes out), `payload_frames` (what follows a header in the tcp lane), `segment_path` (where
it says its slots are) and the constructor's switches.
"""

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
import xxhash
import zmq
from numpy.typing import NDArray

from shared import wire
from shared.batch import BatchSpec, Cursor, Group, batch_spec, groups
from shared.config import digest
from shared.sections import DataSection
from shared.slots import SlotPool

Change = Callable[[wire.Batch, SlotPool], list[wire.Batch]]
Frames = Callable[[bytes], list[bytes]]


class FakeDaemon:
    """Serves one stream of `micro_batches` micro-batches a step to whoever says HELLO. Use as a context manager."""

    def __init__(self, endpoint: str, folder: Path, data: DataSection, micro_batches: int = 2, slots: int = 4) -> None:
        self.endpoint, self.data, self.micro_batches = endpoint, data, micro_batches
        self.specs = [batch_spec(group) for group in groups(data)]
        self.pool = SlotPool.create(str(folder), "fake", slots, max(spec.size_bytes for spec in self.specs))
        self.received: list[Any] = []
        self.refuse: wire.Failure | None = None
        self.before_batch: Change = lambda header, pool: [header]
        self.payload_frames: Frames = lambda payload: [payload]
        self.segment_path = self.pool.segment.path
        self.mute = False
        self.content = ""
        self.heartbeat_s = 0.2
        self.batches_left = 1_000_000
        self._groups = groups(data)
        self._to_say: deque[bytes | wire.Message] = deque()
        self._sessions: dict[bytes, Any] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fake daemon")

    def __enter__(self) -> "FakeDaemon":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    def kill(self) -> None:
        """Vanish without a word, as kill -9 would, but for the segment, which is unlinked."""
        self._stop.set()
        self._thread.join(60)
        self.pool.close()

    def say(self, message: bytes | wire.Message) -> None:
        """Send this to every session."""
        self._to_say.append(message)

    def got(self, kind: type) -> list[Any]:
        """The messages of one kind received so far."""
        return [message for message in list(self.received) if isinstance(message, kind)]

    def _run(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(self.endpoint)
            while not self._stop.is_set():
                if socket.poll(5):
                    who, *frames = socket.recv_multipart()
                    self._take_in(socket, who, wire.decode_to_daemon(frames[0]))
                while self._to_say and self._sessions:
                    message = self._to_say.popleft()
                    frame = message if isinstance(message, bytes) else wire.encode(message)
                    for who in self._sessions:
                        socket.send_multipart([who, frame])
                self._serve(socket)

    def _take_in(self, socket: "zmq.Socket[bytes]", who: bytes, message: Any) -> None:
        self.received.append(message)
        if self.mute:
            return
        if isinstance(message, wire.Hello):
            socket.send_multipart([who, wire.encode(self.refuse or self._welcome())])
            if not self.refuse:
                self._sessions[who] = {"cursor": message.cursor, "credits": 0, "slots": {}, "lane": message.lane}
        elif who not in self._sessions:
            socket.send_multipart([who, wire.encode(wire.Failure("unknown_session", "say HELLO first", True))])
        else:
            self._in_session(socket, who, message)

    def _in_session(self, socket: "zmq.Socket[bytes]", who: bytes, message: Any) -> None:
        session = self._sessions[who]
        match message:
            case wire.Credit(count):
                session["credits"] += count
            case wire.Release(cursor):
                if (slot := session["slots"].pop(cursor, None)) is not None:
                    self.pool.free(slot)
            case wire.Heartbeat():
                socket.send_multipart([who, wire.encode(wire.Heartbeat())])
            case wire.Bye():
                for slot in self._sessions.pop(who)["slots"].values():
                    self.pool.free(slot)

    def _welcome(self) -> wire.Welcome:
        segment = self.pool.segment
        return wire.Welcome(
            wire.PROTOCOL,
            digest(self.data),
            self.segment_path,
            segment.slot_bytes,
            segment.slots,
            self.heartbeat_s,
            self.micro_batches,
            tuple(self.specs),
            content=self.content,
        )

    def _serve(self, socket: "zmq.Socket[bytes]") -> None:
        for who, session in self._sessions.items():
            while (
                not self.mute and self.batches_left and session["credits"] and (slot := self.pool.claim()) is not None
            ):
                header = self._fill(slot, session["cursor"])
                session["cursor"], session["slots"][header.cursor] = header.after, slot
                session["credits"] -= 1
                self.batches_left -= 1
                for changed in self.before_batch(header, self.pool):
                    payload = self.pool.segment.payload(slot)[: self.specs[header.group].size_bytes].tobytes()
                    frames = self.payload_frames(payload) if session["lane"] == "tcp" else []
                    socket.send_multipart([who, wire.encode(changed), *frames])

    def _fill(self, slot: int, cursor: Cursor) -> wire.Batch:
        group = self._groups[cursor.step % len(self._groups)]
        spec = self.specs[group.id]
        payload = self.pool.segment.payload(slot)[: spec.size_bytes]
        payload[:] = content(group, spec, cursor)
        self.pool.commit(slot)
        self.pool.lease(slot)
        last = cursor.micro + 1 == self.micro_batches
        after = (
            Cursor(cursor.epoch, cursor.step + 1) if last else msgspec.structs.replace(cursor, micro=cursor.micro + 1)
        )
        return wire.Batch(
            cursor=cursor,
            after=after,
            batch_id=f"e{cursor.epoch}-s{cursor.step}-m{cursor.micro}",
            group=group.id,
            slot=slot,
            generation=self.pool.segment.generation(slot),
            checksum=xxhash.xxh3_64_intdigest(payload.data) & (2**63 - 1),
            counts=(group.samples, group.images, group.clips, group.tokens, group.tokens - 1),
            step_labels=self.micro_batches * (group.tokens - 1),
            sample_ids=tuple(range(group.samples)),
        )


def content(group: Group, spec: BatchSpec, cursor: Cursor) -> NDArray[np.uint8]:
    """The payload served at a cursor: one sample fills the tokens; pixels and clips are noise, clips of odd lengths."""
    rng = np.random.default_rng([cursor.epoch, cursor.step, cursor.micro])
    tokens = rng.integers(0, 256, group.tokens)
    lengths = rng.integers(1, max(2, group.clip_samples), group.clips)
    clips = rng.integers(-8000, 8000, (group.clips, group.clip_samples))
    clips[np.arange(group.clip_samples) >= lengths[:, None]] = 0
    values = {
        "tokens_T": tokens,
        "labels_T": np.append(tokens[1:], -100),
        "positions_T": np.arange(group.tokens),
        "segments_T": np.ones(group.tokens),
        "features_T": np.full(group.tokens, -1),
        "cu_seqlens": np.append(0, np.full(group.samples + 1, group.tokens)),
        "pixels_NHWC": rng.integers(0, 256, spec.fields[6].shape),
        "clips_MS": clips,
        "clip_lengths_M": lengths,
    }
    out = np.zeros(spec.size_bytes, dtype=np.uint8)
    for field in spec.fields:
        data = np.ascontiguousarray(values[field.name], dtype=field.dtype)
        out[field.offset : field.offset + field.size_bytes] = data.reshape(-1).view(np.uint8)
    return out
