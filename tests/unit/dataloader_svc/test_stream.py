"""Laws of one stream: what is filled, sent, freed, and what a reader that comes back gets."""

import random

import pytest

from dataloader_svc.stream import Stream
from shared.batch import Cursor
from shared.wire import Batch

LIMIT = 3


def after(cursor: Cursor) -> Cursor:
    return Cursor(0, cursor.step + 1, 0)


def at(step: int) -> Cursor:
    return Cursor(0, step, 0)


def batch(cursor: Cursor) -> Batch:
    return Batch(cursor, after(cursor), f"b{cursor.step}", 0, 0, 1, 0, (1, 0, 0, 1, 1), 1, (cursor.step,))


class House:
    """A stream with slots and an eager filler around it; keeps who got what."""

    def __init__(self, readers: int = 1) -> None:
        self.stream = Stream(readers, LIMIT, after)
        self.free = list(range(LIMIT))
        self.got: dict[bytes, list[int]] = {}
        self.fills: list[int] = []

    def join(self, name: bytes, number: int = 0, step: int = 0, credits: int = 100) -> None:
        self.free += self.stream.join(name, number, at(step))
        self.stream.credit(name, credits)
        self.got.setdefault(name, [])

    def fill(self, most: int = 100) -> None:
        for _ in range(most):
            cursor = self.stream.wanted()
            if cursor is None:
                return
            if (slot := self.stream.make_room(cursor)) is not None:
                self.free.append(slot)
            self.stream.begin(cursor, self.free.pop())
            self.fills.append(cursor.step)
            self.free += self.stream.filled(batch(cursor), 0.0)

    def send(self) -> None:
        for reader, entry in self.stream.sendable():
            self.stream.lease(reader, entry, 0.0)
            self.got[reader.session].append(entry.cursor.step)

    def release(self, name: bytes, step: int) -> bool:
        since, slots = self.stream.release(name, at(step))
        self.free += slots
        return since is not None

    def run(self) -> None:
        self.fill()
        self.send()


def test_nothing_is_filled_before_a_reader_comes() -> None:
    house = House()
    house.run()
    assert house.fills == []


def test_batches_come_in_order_and_never_more_than_the_slots() -> None:
    house = House()
    house.join(b"a")
    house.run()
    assert house.got[b"a"] == [0, 1, 2]
    house.run()
    assert house.got[b"a"] == [0, 1, 2]
    assert house.release(b"a", 0)
    house.run()
    assert house.got[b"a"] == [0, 1, 2, 3]


def test_nothing_is_sent_without_credit() -> None:
    house = House()
    house.join(b"a", credits=0)
    house.run()
    assert house.got[b"a"] == []
    house.stream.credit(b"a", 2)
    house.run()
    assert house.got[b"a"] == [0, 1]


def test_nothing_is_sent_before_it_is_filled() -> None:
    house = House()
    house.join(b"a")
    cursor = house.stream.wanted()
    assert cursor == at(0)
    house.stream.begin(cursor, house.free.pop())
    house.send()
    assert house.got[b"a"] == []


def test_two_readers_share_one_fill_and_one_slot() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.join(b"b", 1)
    house.run()
    assert house.got[b"a"] == house.got[b"b"] == [0, 1, 2]
    assert house.fills == [0, 1, 2]


def test_a_slot_is_free_only_when_the_last_reader_released_it() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.join(b"b", 1)
    house.run()
    house.release(b"a", 0)
    assert house.free == []
    house.release(b"b", 0)
    assert len(house.free) == 1


def test_slots_wait_for_a_reader_that_has_not_come_yet() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.run()
    for step in range(LIMIT):
        house.release(b"a", step)
    house.run()
    assert house.got[b"a"] == [0, 1, 2]
    assert house.stream.absent() == [1]
    house.join(b"b", 1)
    house.run()
    assert house.got[b"b"] == [0, 1, 2]
    assert house.fills == [0, 1, 2]


def test_a_lease_released_twice_or_never_held_frees_nothing() -> None:
    house = House()
    house.join(b"a")
    house.run()
    assert house.release(b"a", 1)
    assert not house.release(b"a", 1)
    assert not house.release(b"a", 99)
    assert len(house.free) == 1


def test_release_may_come_out_of_order() -> None:
    house = House()
    house.join(b"a")
    house.run()
    house.release(b"a", 2)
    house.run()
    assert house.got[b"a"] == [0, 1, 2, 3]


def test_a_reader_that_comes_back_gets_its_batches_again() -> None:
    house = House()
    house.join(b"a")
    house.run()
    house.stream.leave(b"a")
    house.join(b"a2", step=1)
    house.run()
    assert house.got[b"a2"] == [1, 2, 3]
    assert house.fills == [0, 1, 2, 3]


def test_an_older_cursor_is_filled_again() -> None:
    house = House()
    house.join(b"a", step=7)
    house.run()
    house.stream.leave(b"a")
    house.join(b"a2", step=2)
    for step in range(2, 9):
        house.run()
        assert house.release(b"a2", step)
    assert house.got[b"a2"][:7] == [2, 3, 4, 5, 6, 7, 8]


def test_an_older_cursor_finds_room_among_what_nobody_holds() -> None:
    house = House(readers=2)
    house.join(b"a", 0, step=7, credits=0)
    house.fill()
    house.join(b"b", 1, step=2)
    house.run()
    assert house.got[b"b"] == [2, 3, 4]
    assert sorted(entry.cursor.step for entry in house.stream.entries.values()) == [2, 3, 4]


def test_what_a_reader_holds_is_never_given_up_for_another() -> None:
    house = House(readers=2)
    house.join(b"a", 0, step=7)
    house.run()
    house.join(b"b", 1, step=2)
    assert house.stream.wanted() is None
    assert house.got[b"a"] == [7, 8, 9]


def test_a_reader_that_others_keep_from_its_batch_is_found_and_no_one_else_is() -> None:
    house = House(readers=2)
    house.join(b"a", 0, step=7)
    house.run()
    assert house.stream.held_up() is None, "it holds them itself"
    house.join(b"b", 1, step=2)
    found = house.stream.held_up()
    assert found and (found[0].session, found[1]) == (b"b", [0])
    house.release(b"a", 7)
    assert house.stream.held_up() is None, "what nobody holds makes room"
    house.run()
    assert house.got[b"b"] == [2]


def test_what_no_reader_holds_is_idle_whoever_has_yet_to_read_it() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.join(b"b", 1, credits=0)
    house.run()
    assert house.stream.idle() == []
    house.release(b"a", 0)
    assert house.stream.idle() == [house.stream.entries[at(0)].slot]
    house.stream.leave(b"a")
    assert len(house.stream.idle()) == LIMIT


def test_a_slot_under_fill_is_never_given_up() -> None:
    house = House()
    house.join(b"a", step=5)
    for _ in range(LIMIT):
        cursor = house.stream.wanted()
        assert cursor
        house.stream.begin(cursor, house.free.pop())
    house.stream.leave(b"a")
    house.join(b"a2", step=0)
    assert house.stream.wanted() is None


def test_a_batch_nobody_wants_any_more_is_freed_when_filled() -> None:
    house = House()
    house.join(b"a", step=0)
    house.stream.begin(at(0), house.free.pop())
    house.stream.leave(b"a")
    house.join(b"a2", step=4)
    house.free += house.stream.filled(batch(at(0)), 0.0)
    assert sorted(house.free) == list(range(LIMIT))


def test_a_reader_that_jumps_ahead_frees_what_lies_behind() -> None:
    house = House()
    house.join(b"a")
    house.run()
    house.stream.leave(b"a")
    house.join(b"a2", step=10)
    assert len(house.free) == LIMIT
    house.run()
    assert house.got[b"a2"] == [10, 11, 12]


def test_leases_of_a_reader_that_leaves_end_and_others_stay() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.join(b"b", 1)
    house.run()
    house.stream.leave(b"a")
    assert house.stream.leases() == LIMIT
    for step in range(LIMIT):
        house.release(b"b", step)
    assert house.stream.leases() == 0
    house.join(b"a2", 0)
    house.run()
    assert house.got[b"a2"] == [0, 1, 2]
    assert house.fills == [0, 1, 2]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_each_life_of_a_reader_sees_an_unbroken_row(seed: int) -> None:
    """Readers come, read, release in any order, die and come back anywhere; slots are neither lost nor shared."""
    rng = random.Random(seed)
    house = House(readers=2)
    held: dict[bytes, list[int]] = {}
    lives = 0
    for _ in range(400):
        names = [r.session for r in house.stream.readers.values()]
        act = rng.choice(["join", "fill", "send", "release", "release", "leave"])
        if act == "join" and (free := house.stream.absent()):
            lives += 1
            name = b"%d" % lives
            house.join(name, rng.choice(free), rng.randrange(6))
            held[name] = []
        elif act == "fill":
            house.fill(rng.randrange(1, 4))
        elif act == "send":
            before = {n: len(house.got[n]) for n in names}
            house.send()
            for name in names:
                held[name] += house.got[name][before[name] :]
        elif act == "release" and names and held[name := rng.choice(names)]:
            step = held[name].pop(rng.randrange(len(held[name])))
            assert house.release(name, step)
        elif act == "leave" and names and rng.random() < 0.2:
            house.stream.leave(gone := rng.choice(names))
            held[gone] = []
        used = [entry.slot for entry in house.stream.entries.values()]
        assert sorted(used + house.free) == list(range(LIMIT))
        assert house.stream.leases() == sum(map(len, held.values()))
    for steps in house.got.values():
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True


def test_batches_are_kept_for_an_absent_reader_until_it_is_given_up() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    for step in range(LIMIT):
        house.fill()
        house.send()
        house.release(b"a", step)
    house.fill()
    assert house.got[b"a"] == [0, 1, 2]
    assert house.stream.stalled()
    house.free += house.stream.give_up()
    house.fill()
    house.send()
    assert house.got[b"a"] == [0, 1, 2, 3, 4, 5]
    assert not house.stream.stalled()


def test_a_reader_that_was_given_up_gets_everything_when_it_comes() -> None:
    house = House(readers=2)
    house.join(b"a", 0)
    house.fill()
    house.send()
    house.release(b"a", 0)
    house.free += house.stream.give_up()
    house.join(b"b", 1, credits=2)
    for _ in range(6):
        house.fill()
        house.send()
        for name in (b"a", b"b"):
            for step in house.got[name]:
                if house.release(name, step):
                    house.stream.credit(name, 1)
    assert house.got[b"b"][:4] == [0, 1, 2, 3]
    assert house.got[b"a"] == sorted(set(house.got[b"a"]))


def test_a_stream_with_all_its_readers_is_never_stalled() -> None:
    house = House(readers=1)
    house.join(b"a", 0)
    house.fill()
    house.send()
    house.fill()
    assert not house.stream.stalled()
