"""One stream of micro-batches and its readers: what to fill next, what may be sent, what a release frees. No I/O.

A stream is the batches of one data coordinate of one job. Each of its `readers` reads every batch; a batch is filled
once and its slot is free again when all of them released it. A reader's place is its cursor and nothing else: one that
comes back with an older cursor gets the same batches again, filled anew where they are gone.
"""

from collections.abc import Callable, Iterator

from shared.batch import Cursor
from shared.wire import Batch

MAX_CREDITS = 1 << 16


class Entry:
    """A batch in a slot: being filled while `batch` is None. `holders` are reader numbers -> when they got it."""

    def __init__(self, cursor: Cursor, slot: int) -> None:
        self.cursor, self.slot = cursor, slot
        self.batch: Batch | None = None
        self.ready_at = 0.0
        self.holders: dict[int, float] = {}
        self.released: set[int] = set()


class Reader:
    """One reader with an open session: the next batch it is to be sent, and how many more it takes."""

    def __init__(self, session: bytes, number: int, cursor: Cursor) -> None:
        self.session, self.number, self.next = session, number, cursor
        self.credits = 0


class Stream:
    """At most `limit` entries at a time, so `limit` slots. `after` gives the cursor that follows one."""

    def __init__(self, readers: int, limit: int, after: Callable[[Cursor], Cursor]) -> None:
        self.expected, self._limit, self.after = readers, limit, after
        self.readers: dict[bytes, Reader] = {}
        self.entries: dict[Cursor, Entry] = {}
        self._given_up: set[int] = set()

    def join(self, session: bytes, number: int, cursor: Cursor) -> list[int]:
        """A reader takes its place at `cursor`: all before it counts as released, nothing from it on does.

        Returns the slots this frees. The place must not be taken: `leave` the old session first.
        """
        self.readers[session] = Reader(session, number, cursor)
        self._given_up.discard(number)
        for entry in self.entries.values():
            entry.holders.pop(number, None)
            if entry.cursor < cursor:
                entry.released.add(number)
            else:
                entry.released.discard(number)
        return self._collect()

    def leave(self, session: bytes) -> None:
        """A reader is gone: its leases end. What it did not release stays for when it comes back."""
        reader = self.readers.pop(session)
        for entry in self.entries.values():
            entry.holders.pop(reader.number, None)

    def absent(self) -> list[int]:
        """Numbers of the readers that are not here."""
        here = {reader.number for reader in self.readers.values()}
        return [number for number in range(self.expected) if number not in here]

    def stalled(self) -> bool:
        """Whether a reader waits in vain, because all batches are kept for readers that are not here."""
        absent = set(self.absent()) - self._given_up
        hungry = any(r.credits and r.next not in self.entries for r in self.readers.values())
        return bool(absent) and hungry and self.wanted() is None

    def give_up(self) -> list[int]:
        """Keep nothing for the readers that are not here: they may read elsewhere. Returns the slots this frees."""
        self._given_up.update(self.absent())
        return self._collect()

    def credit(self, session: bytes, count: int) -> None:
        """The reader takes `count` more batches."""
        reader = self.readers[session]
        reader.credits = min(MAX_CREDITS, reader.credits + count)

    def wanted(self) -> Cursor | None:
        """The next cursor to fill: the first missing from the slowest reader's place on, if there is room for it."""
        if not self.readers:
            return None
        cursor = min(reader.next for reader in self.readers.values())
        for _ in range(self._limit):
            if cursor not in self.entries:
                return cursor if len(self.entries) < self._limit or self._evictable(cursor) else None
            cursor = self.after(cursor)
        return None

    def begin(self, cursor: Cursor, slot: int) -> None:
        """`slot` is being filled with the batch of `cursor`."""
        self.entries[cursor] = Entry(cursor, slot)

    def make_room(self, cursor: Cursor) -> int | None:
        """Give up the last batch after `cursor` that nobody holds, when all places are taken; return its slot."""
        if len(self.entries) < self._limit or not (last := self._evictable(cursor)):
            return None
        return self.entries.pop(last.cursor).slot

    def filled(self, batch: Batch, now: float) -> list[int]:
        """The batch is in its slot. Returns the slots to free (its own, when nobody wants it any more)."""
        entry = self.entries[batch.cursor]
        entry.batch, entry.ready_at = batch, now
        for reader in self.readers.values():
            if entry.cursor < reader.next:
                entry.released.add(reader.number)
        return self._collect()

    def sendable(self) -> Iterator[tuple[Reader, Entry]]:
        """Every (reader, entry) that may be sent now; the caller answers each with `lease` (or `leave`)."""
        for reader in list(self.readers.values()):
            while reader.credits and (entry := self.entries.get(reader.next)) and entry.batch:
                before = reader.next
                yield reader, entry
                if reader.next == before:
                    break

    def lease(self, reader: Reader, entry: Entry, now: float) -> None:
        """`entry` was sent to `reader`."""
        reader.credits -= 1
        reader.next = self.after(entry.cursor)
        entry.holders[reader.number] = now

    def release(self, session: bytes, cursor: Cursor) -> tuple[float | None, list[int]]:
        """The reader is done with the batch: (when it got it, slots this frees). (None, []) when it held no lease."""
        number = self.readers[session].number
        entry = self.entries.get(cursor)
        if entry is None or number not in entry.holders:
            return None, []
        since = entry.holders.pop(number)
        entry.released.add(number)
        return since, self._collect()

    def idle(self) -> list[int]:
        """Slots of filled batches that no reader holds at the moment."""
        return [entry.slot for entry in self.entries.values() if entry.batch and not entry.holders]

    def held_up(self) -> tuple[Reader, list[int]] | None:
        """The slowest reader and the readers that hold every slot, where its batch cannot be filled for that reason.

        A reader that holds some itself is no such case: it moves on by releasing them.
        """
        slowest = min(self.readers.values(), key=lambda r: r.next, default=None)
        if slowest is None or slowest.next in self.entries or len(self.entries) < self._limit:
            return None
        holders = [set(entry.holders) for entry in self.entries.values()]
        if not all(holders) or any(slowest.number in numbers for numbers in holders):
            return None
        return slowest, sorted(set().union(*holders))

    def waiting(self, reader: Reader) -> int:
        """How many filled batches wait for this reader."""
        return sum(1 for e in self.entries.values() if e.batch and e.cursor >= reader.next)

    def leases(self) -> int:
        """How many (reader, batch) leases are open."""
        return sum(len(entry.holders) for entry in self.entries.values())

    def _evictable(self, cursor: Cursor) -> Entry | None:
        idle = [e for e in self.entries.values() if e.batch and not e.holders and e.cursor > cursor]
        return max(idle, key=lambda e: e.cursor, default=None)

    def _collect(self) -> list[int]:
        over = [
            e
            for e in self.entries.values()
            if e.batch and not e.holders and len(e.released | self._given_up) == self.expected
        ]
        return [self.entries.pop(entry.cursor).slot for entry in over]
