"""The daemon's mind: sessions, streams, slots and workers put together. No sockets; the way out is given.

Everything happens in one thread: a message, a worker's report or a tick changes the state, then `advance` fills what is
wanted and sends what is ready. Free slots are the only back-pressure, and each job has its own.
"""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dataloader_svc import metrics
from dataloader_svc.jobs import Job
from dataloader_svc.lending import Lending
from dataloader_svc.patience import Patience
from dataloader_svc.plan import Pack
from dataloader_svc.pool import WorkerPool
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.quota import Pending, Quota
from dataloader_svc.sessions import Session, StreamKey, job_of, refusal
from dataloader_svc.stream import Entry, Reader, Stream
from dataloader_svc.tasks import Done, Task
from shared.batch import Cursor, batch_spec, groups
from shared.logs import RateLimited, logger
from shared.sections import RunConfig
from shared.slots import SlotPool, State
from shared.wire import (
    PROTOCOL,
    Batch,
    Bye,
    Credit,
    Drain,
    Failure,
    Heartbeat,
    Hello,
    Lend,
    Message,
    Release,
    Returned,
    ToDaemon,
    Welcome,
)

log = logger("service")


class Filling:
    """A task under way: whose it is, the plan it carries out, and the places that its batch names."""

    def __init__(self, stream: Stream, slot: int, pack: Pack, after: Cursor, skipped_from: Cursor | None) -> None:
        self.stream, self.slot, self.pack, self.after, self.skipped_from = stream, slot, pack, after, skipped_from


class Outlet(Protocol):
    """The way to the readers; neither method blocks."""

    def send(self, identity: bytes, message: Message) -> bool:
        """Whether the reader could be reached."""

    def send_payload(self, identity: bytes, message: Message, payload: NDArray[np.uint8]) -> Pending | None:
        """What tells when the payload may change again, or None: the reader could not be reached."""


class Service:
    """Serves the data to every job. The first of `jobs` is the one of readers that name none."""

    def __init__(
        self,
        config: RunConfig,
        jobs: Mapping[str, Job],
        quarantine: Quarantine,
        slots: SlotPool,
        workers: WorkerPool,
        outlet: Outlet,
    ) -> None:
        self._config, self._jobs, self._quarantine = config, jobs, quarantine
        self._slots, self._workers, self._outlet = slots, workers, outlet
        self._quota = Quota(slots, slots.segment.slots // len(jobs))
        self._groups = groups(config.data)
        self._specs = tuple(batch_spec(group) for group in self._groups)
        self._lending = Lending(workers, self._specs, config.loader.slots_per_stream)
        self._sessions: dict[bytes, Session] = {}
        self._streams: dict[StreamKey, Stream] = {}
        self._tasks: dict[int, Filling] = {}
        self._uncounted: deque[tuple[Done, str]] = deque()
        self._held_up, self._absent = Patience(config.loader.held_up_s), Patience(config.loader.absent_s)
        self._warn = RateLimited(log.warning)
        self._last_task = 0
        self._next_beat = 0.0
        self._draining = False

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
        """A worker filled a slot. It is counted by the next `advance`, once it was sent."""
        filling = self._tasks.pop(done.task)
        self._uncounted.append((done, self._groups[filling.pack.group].name))
        stream, cursor = filling.stream, filling.pack.cursor
        entry = stream.entries.get(cursor)
        if stream not in self._streams.values() or entry is None or entry.slot != filling.slot:
            self._free([filling.slot])
            return
        self._slots.commit(filling.slot)
        self._free(stream.filled(self._batch(filling, done), now))

    def tick(self, now: float) -> None:
        """Find readers that died, fell silent or cannot go on, beat to the others, and set the gauges."""
        self._bury_dead()
        for identity, session in list(self._sessions.items()):
            if now - session.heard_at > self._config.loader.lease_s:
                log.warning("reader %s said nothing for %g s", session.name, self._config.loader.lease_s)
                self._outlet.send(identity, Failure("lease_expired", "nothing was heard within loader.lease_s", True))
                self._leave(identity)
        for key, stream in list(self._streams.items()):
            self._end_hold_up(key, stream, now)
            self._give_up_absent(key, stream, now)
        self._quota.reap()
        if now >= self._next_beat:
            self._next_beat = now + self._config.loader.heartbeat_s
            self.broadcast(Heartbeat())
            self._set_gauges()

    def advance(self, now: float) -> None:
        """Send what is ready, then count it and start filling what streams want and slots allow: no reader waits for
        a plan.

        Raises:
            TooManyBadSamples: over the limits of loader.quarantine.
        """
        if not self._draining:
            self._send_ready(now)
        self._count()
        for identity, handle in self._lending.returned():
            self._outlet.send(identity, Returned(handle))
        hungry = [] if self._draining else list(self._streams)
        while hungry:
            hungry = [key for key in hungry if self._fill_next(key)]

    def drain(self, reason: str) -> None:
        """No more plans and no more batches; every reader is told."""
        self._draining = True
        self.broadcast(Drain(reason))

    def broadcast(self, message: Message) -> None:
        """Send to every reader; one that cannot be reached has left."""
        for identity in list(self._sessions):
            if not self._outlet.send(identity, message):
                self._leave(identity)

    def sending(self) -> bool:
        """Whether a slot waits for nothing but the end of its frames' sending."""
        return self._quota.leaving() > 0

    def leases(self) -> int:
        """Batches in readers' hands."""
        return sum(stream.leases() for stream in self._streams.values())

    def _bury_dead(self) -> None:
        for identity, session in list(self._sessions.items()):
            if session.dead():
                log.info("reader %s died (process %d)", session.name, session.hello.process.pid)
                self._leave(identity)

    def _greet(self, identity: bytes, hello: Hello, now: float) -> None:
        self._bury_dead()
        if identity in self._sessions:
            self._leave(identity)
        failure = refusal(hello, self._jobs, self._config.data.batch.round) or self._no_place(hello)
        if failure:
            self._warn(failure.code, f"reader of data rank {hello.data_rank} refused: {failure.text}")
            self._reject(identity, failure)
            return
        session = self._session(hello, now)
        self._sessions[identity] = session
        metrics.CLIENTS.set(len(self._sessions))
        stream = self._streams.setdefault(session.key, self._new_stream(session))
        self._free(stream.join(identity, hello.reader, session.job.planner.skips.landing(hello.cursor)))
        self._settle(stream)
        log.info("reader %s joins at %s (process %d)", session.name, hello.cursor, hello.process.pid)
        if not self._outlet.send(identity, self._welcome(session)):
            self._leave(identity)

    def _session(self, hello: Hello, now: float) -> Session:
        job = job_of(hello, self._jobs)
        assert job
        return Session(hello, job, now)

    def _no_place(self, hello: Hello) -> Failure | None:
        if self._draining:
            return Failure("draining", "this daemon is stopping; try its successor", True)
        key = self._session(hello, 0.0).key
        stream = self._streams.get(key)
        limit = self._config.loader.max_streams
        if stream is None and sum(1 for job, *_ in self._streams if job == key[0]) >= limit:
            text = f"loader.max_streams ({limit}) streams of job {key[0]} are open; raise it or wait"
            return Failure("no_slots", text, True)
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

    def _new_stream(self, session: Session) -> Stream:
        ranks, planner = session.hello.data_ranks, session.job.planner
        limit = self._config.loader.slots_per_stream
        return Stream(session.hello.readers, limit, lambda cursor: planner.skips.landing(planner.after(cursor, ranks)))

    def _welcome(self, session: Session) -> Welcome:
        segment, beat = self._slots.segment, self._config.loader.heartbeat_s
        path = "" if session.hello.lane == "tcp" else segment.path
        shape = (segment.slot_bytes, segment.slots, beat, self._config.data.batch.micro_batches)
        offer = self._lending.offer(session.hello)
        return Welcome(PROTOCOL, session.job.digest, path, *shape, self._specs, *offer, content=session.job.content)

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
        elif isinstance(message, Lend):
            if wrong := self._lending.lend(identity, self._sessions[identity].hello, message):
                self._reject(identity, Failure("lend", f"{wrong}; start both from one version", False))
        elif isinstance(message, Bye):
            log.info("reader %s leaves", self._sessions[identity].name)
            self._leave(identity)

    def _reject(self, identity: bytes, failure: Failure) -> None:
        metrics.REJECTED.labels(failure.code).inc()
        self._outlet.send(identity, failure)

    def _leave(self, identity: bytes) -> None:
        session = self._sessions.pop(identity)
        stream = self._streams[session.key]
        stream.leave(identity)
        self._lending.leave(identity)
        metrics.CLIENTS.set(len(self._sessions))
        metrics.READER_LAG.clear()
        self._settle(stream)
        if not stream.readers:
            del self._streams[session.key]
            self._held_up.forget(session.key)
            self._absent.forget(session.key)
            self._free([entry.slot for entry in stream.entries.values() if entry.batch])

    def _send_ready(self, now: float) -> None:
        for stream in list(self._streams.values()):
            for reader, entry in stream.sendable():
                self._hand_over(stream, reader, entry, now)

    def _count(self) -> None:
        while self._uncounted:
            done, group = self._uncounted.popleft()
            metrics.filled(done, group)
            self._quarantine.record(len(done.sample_ids), done.verdicts)

    def _fill_next(self, key: StreamKey) -> bool:
        stream = self._streams[key]
        cursor = stream.wanted()
        if cursor is None:
            return False
        if (freed := stream.make_room(cursor)) is not None:
            self._free([freed])
        job, *place = key
        slot = self._quota.claim(job)
        if slot is None:
            return False
        stream.begin(cursor, slot)
        planner = self._jobs[job].planner
        pack = planner.pack(cursor, *place)
        metrics.IMBALANCE.labels("packed").set(pack.imbalance.packed)
        metrics.IMBALANCE.labels("balanced").set(pack.imbalance.balanced)
        places = planner.after(cursor, key[2]), planner.skips.before(cursor)
        self._submit(Filling(stream, slot, pack, *places))
        return True

    def _submit(self, filling: Filling) -> None:
        self._last_task += 1
        self._tasks[self._last_task] = filling
        pack, slot = filling.pack, filling.slot
        target = self._lending.claim(next(iter(filling.stream.readers)), slot, pack.group)
        self._workers.submit(Task(self._last_task, slot, pack.group, pack.sample_ids, pack.spares, target=target))

    def _batch(self, filling: Filling, done: Done) -> Batch:
        pack = filling.pack
        return Batch(
            cursor=pack.cursor,
            after=filling.after,
            batch_id=pack.batch_id,
            group=pack.group,
            slot=filling.slot,
            generation=self._slots.segment.generation(filling.slot),
            checksum=done.checksum,
            counts=done.counts,
            step_labels=pack.step_labels,
            sample_ids=done.sample_ids,
            substituted=done.substituted,
            skipped_from=filling.skipped_from,
            imbalance=pack.imbalance.balanced,
            device_part=self._lending.part(filling.slot) if done.on_device else -1,
        )

    def _hand_over(self, stream: Stream, reader: Reader, entry: Entry, now: float) -> None:
        if not self._send_batch(reader.session, entry):
            self._leave(reader.session)
            return
        self._slots.lease(entry.slot)
        stream.lease(reader, entry, now)
        metrics.BATCHES_SENT.inc()
        metrics.STAGE_SECONDS.labels("handover").observe(now - entry.ready_at)

    def _send_batch(self, identity: bytes, entry: Entry) -> bool:
        """Send the header and, in the tcp lane, the slot's bytes; whether the reader could be reached."""
        assert entry.batch
        if self._sessions[identity].hello.lane != "tcp":
            return self._outlet.send(identity, entry.batch)
        payload = self._slots.segment.payload(entry.slot)[: self._specs[entry.batch.group].size_bytes]
        frame = self._outlet.send_payload(identity, entry.batch, payload)
        if frame is None:
            return False
        self._quota.sending(entry.slot, frame)
        metrics.PAYLOAD_BYTES.inc(payload.nbytes)
        return True

    def _settle(self, stream: Stream) -> None:
        """What was leased and is held no more, but wanted by a reader that is still to come, is ready again."""
        for slot in stream.idle():
            if self._slots.states[slot] is State.LEASED:
                self._slots.give_back(slot)

    def _end_hold_up(self, key: StreamKey, stream: Stream, now: float) -> None:
        """Tell a reader that waits in vain why, after loader.held_up_s; it may greet again with its cursor."""
        found = stream.held_up()
        if self._held_up.ends(key, found is not None, now) and found:
            reader, holders = found
            held = f"readers {holders} hold all {len(stream.entries)} slots of data rank {key[1]} with later batches"
            text = f"{held}, so that {reader.next} cannot be filled; release them, or start all readers at one cursor"
            log.warning("reader %d of data rank %d cannot go on: %s", reader.number, key[1], text)
            self._reject(reader.session, Failure("slots_held", text, True))
            self._leave(reader.session)

    def _give_up_absent(self, key: StreamKey, stream: Stream, now: float) -> None:
        """Stop keeping batches for readers that did not come, once others waited loader.absent_s for that."""
        if self._absent.ends(key, stream.stalled(), now):
            text = "data rank %d of %d of job %s goes on without readers %s, which may read elsewhere"
            log.warning(text, key[1], key[2], key[0], stream.absent())
            self._free(stream.give_up())

    def _free(self, slots: list[int]) -> None:
        for slot in slots:
            self._lending.free(slot)
            self._quota.free(slot)

    def _set_gauges(self) -> None:
        for state in State:
            metrics.SLOTS.labels(state.value).set(self._slots.count(state))
        held = self._quota.held()
        for job in self._jobs:
            metrics.JOB_SLOTS.labels(job).set(held[job])
        for session in self._sessions.values():
            stream = self._streams[session.key]
            reader = next(r for r in stream.readers.values() if r.number == session.hello.reader)
            metrics.READER_LAG.labels(*session.labels).set(stream.waiting(reader))
