"""Laws of slots held for jobs: none takes another's, none is free while it is being sent."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloader_svc.patience import Patience
from dataloader_svc.quota import Quota
from shared.slots import SlotPool, State


class Frame:
    """A frame on its way until the test says it has left."""

    done = False


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[SlotPool]:
    made = SlotPool.create(str(tmp_path), "job", 4, 100)
    yield made
    made.close()


def test_a_job_never_holds_more_than_its_own(pool: SlotPool) -> None:
    quota = Quota(pool, 2)
    assert [quota.claim("greedy") is None for _ in range(4)] == [False, False, True, True]
    assert [quota.claim("other") is None for _ in range(3)] == [False, False, True]
    assert quota.held() == {"greedy": 2, "other": 2}


def test_a_freed_slot_can_be_claimed_again(pool: SlotPool) -> None:
    quota = Quota(pool, 1)
    slot = quota.claim("a")
    assert slot is not None and quota.claim("a") is None
    quota.free(slot)
    assert quota.claim("a") is not None


def test_a_slot_is_free_only_when_every_frame_has_left(pool: SlotPool) -> None:
    quota, first, second = Quota(pool, 1), Frame(), Frame()
    slot = quota.claim("a")
    assert slot is not None
    pool.commit(slot)
    pool.lease(slot)
    quota.sending(slot, first)
    quota.sending(slot, second)
    quota.free(slot)
    for frame in (first, second):
        assert quota.claim("a") is None
        assert (quota.leaving(), pool.states[slot]) == (1, State.LEASED)
        frame.done = True
    assert quota.claim("a") == slot
    assert quota.leaving() == 0


def test_frames_of_one_lease_do_not_hold_the_next(pool: SlotPool) -> None:
    quota, frame = Quota(pool, 1), Frame()
    slot = quota.claim("a")
    assert slot is not None
    frame.done = True
    quota.sending(slot, frame)
    quota.free(slot)
    frame.done = False
    again = quota.claim("a")
    assert again is not None
    quota.free(again)
    assert quota.held()["a"] == 0


def test_patience_ends_once_and_begins_anew() -> None:
    patience = Patience(10.0)
    assert [patience.ends("a", True, now) for now in (0.0, 5.0, 10.0, 10.1, 10.2, 25.0)] == [False] * 3 + [
        True,
        False,
        True,
    ]
    patience.ends("a", True, 30.0)
    patience.ends("a", False, 35.0)
    assert not patience.ends("a", True, 45.0)
    patience.forget("a")
    assert not patience.ends("a", True, 99.0)
