"""The daemon's mind: sessions, streams, slots and workers put together. No sockets; `send` is given.

Everything happens in one thread: a message, a worker's report or a tick changes the state, then `advance` fills what is
wanted and sends what is ready. Free slots are the only back-pressure.
"""

from collections.abc import Callable

from dataloader_svc import metrics
from dataloader_svc.plan import Pack, Planner
from dataloader_svc.pool import WorkerPool
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.sessions import Session, StreamKey, refusal
from dataloader_svc.stream import Entry, Reader, Stream
from dataloader_svc.tasks import Done, Task
from shared.batch import batch_spec, groups
from shared.config import digest
from shared.sections import RunConfig
from shared.slots import SlotPool, State
from shared.telemetry import RateLimited, logger
from shared.wire import (
    PROTOCOL,
    Batch,
    Bye,
    Credit,
    Drain,
    Failure,
    Heartbeat,
    Hello,
    Message,
    Release,
    ToDaemon,
    Welcome,
)

HELD_UP_S = 10.0

log = logger("service")


class Filling:
    """A task under way: whose it is, and the plan it carries out."""

    def __init__(self, stream: Stream, data_ranks: int, pack: Pack, slot: int) -> None:
        self.stream, self.data_ranks, self.pack, self.slot = stream, data_ranks, pack, slot


class Service:
    """Serves one job's data. `send(identity, message)` tells whether the reader could be reached."""

    def __init__(
        self,
        config: RunConfig,
        planner: Planner,
        quarantine: Quarantine,
        slots: SlotPool,
        workers: WorkerPool,
        send: Callable[[bytes, Message], bool],
    ) -> None:
        self._config, self._planner, self._quarantine = config, planner, quarantine
        self._slots, self._workers, self._send = slots, workers, send
        self._groups = groups(config.data)
        self._sessions: dict[bytes, Session] = {}
        self._streams: dict[StreamKey, Stream] = {}
        self._tasks: dict[int, Filling] = {}
        self._held_up_since: dict[StreamKey, float] = {}
        self._last_task = 0
        self._next_beat = 0.0
        self._draining = False
        self._warn = RateLimited(log.warning)

    def handle(self, identity: bytes, message: ToDaemon, now: float) -> None:
        """Act on one message of a reader."""
        if isinstance(message, Hello):
            self._greet(identity, message, now)
        elif session := self._sessions.get(identity):
            session.heard_at = now
            self._obey(identity, self._streams[session.key], message, now)
        elif not isinstance(message, Bye):
            self._reject(
                identity, Failure("unknown_session", "no such session here; send HELLO with your cursor", True)
            )

    def finished(self, done: Done, now: float) -> None:
        """A worker filled a slot.

        Raises:
            TooManyBadSamples: over the limits of loader.quarantine.
        """
        filling = self._tasks.pop(done.task)
        group = self._groups[filling.pack.group].name
        _count(done, group)
        self._quarantine.record(len(done.sample_ids), done.verdicts)
        stream, cursor = filling.stream, filling.pack.cursor
        entry = stream.entries.get(cursor)
        if stream not in self._streams.values() or entry is None or entry.slot != filling.slot:
            self._slots.free(filling.slot)
            return
        self._slots.commit(filling.slot)
        self._free(stream.filled(self._batch(filling, done), now))

    def tick(self, now: float) -> None:
        """Find readers that died, fell silent or cannot go on, beat to the others, and set the gauges."""
        self._bury_dead()
        for identity, session in list(self._sessions.items()):
            if now - session.heard_at > self._config.loader.lease_s:
                log.warning("reader %s said nothing for %g s", _name(session), self._config.loader.lease_s)
                self._send(identity, Failure("lease_expired", "nothing was heard within loader.lease_s", True))
                self._leave(identity)
        for key, stream in list(self._streams.items()):
            self._end_hold_up(key, stream, now)
        if now >= self._next_beat:
            self._next_beat = now + self._config.loader.heartbeat_s
            self.broadcast(Heartbeat())
            self._set_gauges()

    def advance(self, now: float) -> None:
        """Start filling what the streams want and slots allow, and send what is ready."""
        hungry = [] if self._draining else list(self._streams)
        while hungry:
            hungry = [key for key in hungry if self._fill_next(key)]
        for stream in list(self._streams.values()):
            for reader, entry in stream.sendable():
                if not self._draining:
                    self._hand_over(stream, reader, entry, now)

    def drain(self, reason: str) -> None:
        """No more plans and no more batches; every reader is told."""
        self._draining = True
        self.broadcast(Drain(reason))

    def broadcast(self, message: Message) -> None:
        """Send to every reader; one that cannot be reached has left."""
        for identity in list(self._sessions):
            if not self._send(identity, message):
                self._leave(identity)

    def leases(self) -> int:
        """Batches in readers' hands."""
        return sum(stream.leases() for stream in self._streams.values())

    def _bury_dead(self) -> None:
        for identity, session in list(self._sessions.items()):
            if session.dead():
                log.info("reader %s died (process %d)", _name(session), session.hello.process.pid)
                self._leave(identity)

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        self._bury_dead()
        if identity in self._sessions:
            self._leave(identity)
        failure = refusal(hello, self._config, self._planner.check) or self._no_place(hello)
        if failure:
            log.warning("reader of data rank %d refused: %s", hello.data_rank, failure.text)
            self._reject(identity, failure)
            return
        session = Session(hello, now)
        self._sessions[identity] = session
        metrics.CLIENTS.set(len(self._sessions))
        stream = self._streams.setdefault(session.key, self._new_stream(hello))
        self._free(stream.join(identity, hello.reader, self._planner.skips.landing(hello.cursor)))
        self._settle(stream)
        log.info("reader %s joins at %s (process %d)", _name(session), hello.cursor, hello.process.pid)
        if not self._send(identity, self._welcome()):
            self._leave(identity)

    def _no_place(self, hello: Hello) -> Failure | None:
        if self._draining:
            return Failure("draining", "this daemon is stopping; try its successor", True)
        key = (hello.data_rank, hello.data_ranks)
        stream = self._streams.get(key)
        limit = self._config.loader.max_streams
        if stream is None and len(self._streams) >= limit:
            return Failure("no_slots", f"loader.max_streams ({limit}) streams are open; raise it or wait", True)
        if stream and stream.expected != hello.readers:
            text = f"readers ({hello.readers}) must equal the {stream.expected} the stream was opened with"
            return Failure("readers", f"{text}; start all ranks with one mesh", False)
        return self._taken(key, hello)

    def _taken(self, key: StreamKey, hello: Hello) -> Failure | None:
        for identity, session in list(self._sessions.items()):
            if session.key == key and session.hello.reader == hello.reader:
                other = session.hello.process
                if session.visible() and not session.dead() and other != hello.process:
                    text = f"reader {hello.reader} of data rank {hello.data_rank} is process {other.pid}, which lives"
                    return Failure("reader_taken", f"{text}; end it or use another job name", True)
                self._leave(identity)
        return None

    def _new_stream(self, hello: Hello) -> Stream:
        ranks, planner = hello.data_ranks, self._planner
        limit = self._config.loader.slots_per_stream
        return Stream(hello.readers, limit, lambda cursor: planner.skips.landing(planner.after(cursor, ranks)))

    def _welcome(self) -> Welcome:
        data, segment = self._config.data, self._slots.segment
        specs = tuple(batch_spec(group) for group in self._groups)
        beat = self._config.loader.heartbeat_s
        place = (segment.path, segment.slot_bytes, segment.slots)
        return Welcome(PROTOCOL, digest(data), *place, beat, data.batch.micro_batches, specs)

    def _obey(self, identity: bytes, stream: Stream, message: ToDaemon, now: float) -> None:
        if isinstance(message, Credit) and message.count > 0:
            stream.credit(identity, message.count)
        elif isinstance(message, Release):
            since, slots = stream.release(identity, message.cursor)
            if since is None:
                metrics.REJECTED.labels("release").inc()
                return
            metrics.HOLD_SECONDS.observe(now - since)
            self._free(slots)
            self._settle(stream)
        elif isinstance(message, Bye):
            log.info("reader %s leaves", _name(self._sessions[identity]))
            self._leave(identity)

    def _reject(self, identity: bytes, failure: Failure) -> None:
        metrics.REJECTED.labels(failure.code).inc()
        self._send(identity, failure)

    def _leave(self, identity: bytes) -> None:
        session = self._sessions.pop(identity)
        stream = self._streams[session.key]
        stream.leave(identity)
        metrics.CLIENTS.set(len(self._sessions))
        metrics.READER_LAG.clear()
        self._settle(stream)
        if not stream.readers:
            del self._streams[session.key]
            self._free([entry.slot for entry in stream.entries.values() if entry.batch])

    def _fill_next(self, key: StreamKey) -> bool:
        stream = self._streams[key]
        cursor = stream.wanted()
        if cursor is None:
            return False
        if (freed := stream.make_room(cursor)) is not None:
            self._slots.free(freed)
        slot = self._slots.claim()
        if slot is None:
            return False
        stream.begin(cursor, slot)
        pack = self._planner.pack(cursor, *key)
        metrics.IMBALANCE.labels("packed").set(pack.imbalance.packed)
        metrics.IMBALANCE.labels("balanced").set(pack.imbalance.balanced)
        self._submit(Filling(stream, key[1], pack, slot))
        return True

    def _submit(self, filling: Filling) -> None:
        self._last_task += 1
        self._tasks[self._last_task] = filling
        pack, slot = filling.pack, filling.slot
        self._workers.submit(Task(self._last_task, slot, pack.group, pack.sample_ids, pack.spares))

    def _batch(self, filling: Filling, done: Done) -> Batch:
        pack = filling.pack
        return Batch(
            cursor=pack.cursor,
            after=self._planner.after(pack.cursor, filling.data_ranks),
            batch_id=pack.batch_id,
            group=pack.group,
            slot=filling.slot,
            generation=self._slots.segment.generation(filling.slot),
            checksum=done.checksum,
            counts=done.counts,
            step_labels=pack.step_labels,
            sample_ids=done.sample_ids,
            substituted=done.substituted,
            skipped_from=self._planner.skips.before(pack.cursor),
            imbalance=pack.imbalance.balanced,
        )

    def _hand_over(self, stream: Stream, reader: Reader, entry: Entry, now: float) -> None:
        assert entry.batch
        if not self._send(reader.session, entry.batch):
            self._leave(reader.session)
            return
        self._slots.lease(entry.slot)
        stream.lease(reader, entry, now)
        metrics.BATCHES_SENT.inc()
        metrics.STAGE_SECONDS.labels("handover").observe(now - entry.ready_at)

    def _settle(self, stream: Stream) -> None:
        """What was leased and is held no more, but wanted by a reader that is still to come, is ready again."""
        for slot in stream.idle():
            if self._slots.states[slot] is State.LEASED:
                self._slots.give_back(slot)

    def _end_hold_up(self, key: StreamKey, stream: Stream, now: float) -> None:
        """Tell a reader that waits in vain why, once HELD_UP_S have passed; it may greet again with its cursor."""
        found = stream.held_up()
        if found is None:
            self._held_up_since.pop(key, None)
        elif now - self._held_up_since.setdefault(key, now) > HELD_UP_S:
            del self._held_up_since[key]
            reader, holders = found
            held = f"readers {holders} hold all {len(stream.entries)} slots of data rank {key[0]} with later batches"
            text = f"{held}, so that {reader.next} cannot be filled; release them, or start all readers at one cursor"
            log.warning("reader %d of data rank %d cannot go on: %s", reader.number, key[0], text)
            self._reject(reader.session, Failure("slots_held", text, True))
            self._leave(reader.session)

    def _free(self, slots: list[int]) -> None:
        for slot in slots:
            self._slots.free(slot)

    def _set_gauges(self) -> None:
        for state in State:
            metrics.SLOTS.labels(state.value).set(self._slots.count(state))
        for session in self._sessions.values():
            stream = self._streams[session.key]
            reader = next(r for r in stream.readers.values() if r.number == session.hello.reader)
            metrics.READER_LAG.labels(*_labels(session)).set(stream.waiting(reader))
        for key, stream in self._streams.items():
            if (absent := stream.absent()) and stream.wanted() is None:
                text = f"data rank {key[0]} of {key[1]}: nothing moves until readers {absent} join"
                self._warn(f"absent {key}", text)


def _labels(session: Session) -> tuple[str, str]:
    hello = session.hello
    return f"{hello.data_rank}/{hello.data_ranks}", str(hello.reader)


def _name(session: Session) -> str:
    rank, reader = _labels(session)
    return f"{reader} of data rank {rank}"


def _count(done: Done, group: str) -> None:
    samples, images, clips = done.counts[:3]
    for modality, count in (("sample", samples), ("image", images), ("audio", clips)):
        metrics.SAMPLES.labels(modality).inc(count)
    for stage, seconds in (
        ("read", done.timings.read),
        ("decode", done.timings.decode),
        ("assemble", done.timings.assemble),
    ):
        metrics.STAGE_SECONDS.labels(stage).observe(seconds)
    metrics.BATCHES_FILLED.labels(group).inc()
    metrics.READ_BYTES.inc(done.read_bytes)
    metrics.FETCHED_BYTES.inc(done.fetched_bytes)
    metrics.READ_RETRIES.inc(done.retries)
    metrics.SUBSTITUTED.inc(done.substituted)
