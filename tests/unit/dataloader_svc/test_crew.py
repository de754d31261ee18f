"""Laws of shared-out work: every item once, results in order, errors told, one thread is the caller's own."""

import threading
import time

import pytest

from dataloader_svc.crew import Crew


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_is_done_once_and_results_stand_in_the_items_order(threads: int) -> None:
    done: list[int] = []

    def work(item: int, other: str) -> str:
        time.sleep(0.001 * (item % 3))
        done.append(item)
        return f"{item}{other}"

    crew = Crew(threads, "test")
    for count in (0, 1, 3, 40):
        done.clear()
        assert crew.map(work, range(count), "x" * count) == [f"{i}x" for i in range(count)]
        assert sorted(done) == list(range(count))
    crew.close()


def test_one_thread_is_the_callers() -> None:
    crew = Crew(1, "test")
    assert set(crew.map(lambda _: threading.get_ident(), range(5))) == {threading.get_ident()}
    crew.close()


def test_all_threads_take_part() -> None:
    crew, meet = Crew(3, "test"), threading.Barrier(3)
    assert len(set(crew.map(lambda _: (meet.wait(10.0), threading.get_ident())[1], range(3)))) == 3
    crew.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_told_after_all_threads_have_ended_and_the_crew_goes_on(threads: int) -> None:
    active = []

    def work(item: int) -> int:
        active.append(item)
        time.sleep(0.002)
        active.remove(item)
        if item == 4:
            raise ValueError("item 4")
        return item

    crew = Crew(threads, "test")
    with pytest.raises(ValueError, match="item 4"):
        crew.map(work, range(12))
    assert not active
    assert crew.map(work, range(3)) == [0, 1, 2]
    crew.close()


def test_columns_of_unequal_length_are_refused() -> None:
    crew = Crew(1, "test")
    with pytest.raises(ValueError, match="shorter"):
        crew.map(max, [1, 2], [3])
    crew.close()
