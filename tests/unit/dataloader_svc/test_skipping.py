"""Steps passed over on request: exactly those, wherever a run starts and however many ranks it has."""

import msgspec
import pytest

from dataloader_svc.plan import Planner
from dataloader_svc.skipping import MOST_EPOCHS, Skips
from shared.batch import Cursor
from shared.config import check, load
from shared.errors import ConfigError
from shared.sections import BatchSection
from shared.skips import is_skipped, merged
from tests.support.columns import columns
from tests.support.consuming import read
from tests.support.runs import run_file
from tests.support.tars import data_section
from trainer.manifest import signature_of

LENGTHS = (10, 7, 10)


def skips(*ranges: tuple[int, int]) -> Skips:
    """Over epochs of 10, 7, 10, 10, ... steps."""
    return Skips(ranges, lambda epoch: LENGTHS[epoch] if epoch < len(LENGTHS) else 10)


def test_step_numbers_count_on_over_epochs() -> None:
    found = skips((8, 12), (0, 1), (16, 17), (27, 29)).spans()
    assert found == [
        (Cursor(0, 0), Cursor(0, 1)),
        (Cursor(0, 8), Cursor(1, 2)),
        (Cursor(1, 6), Cursor(2, 0)),
        (Cursor(3, 0), Cursor(3, 2)),
    ]


def test_a_cursor_lands_behind_the_stretch_it_lies_in_and_knows_where_that_began() -> None:
    some = skips((8, 12))
    assert [some.landing(Cursor(0, 7, 3)), some.landing(Cursor(0, 8)), some.landing(Cursor(1, 1, 2))] == [
        Cursor(0, 7, 3),
        Cursor(1, 2),
        Cursor(1, 2),
    ]
    assert some.landing(Cursor(1, 2)) == Cursor(1, 2)
    assert some.before(Cursor(1, 2)) == Cursor(0, 8)
    assert some.before(Cursor(1, 2, 1)) is some.before(Cursor(0, 8)) is some.before(Cursor(0, 0)) is None


def test_ranges_may_overlap_touch_and_come_in_any_order() -> None:
    assert merged([(5, 9), (1, 3), (3, 6), (20, 21)]) == [(1, 9), (20, 21)]
    assert skips((3, 6), (1, 3)).spans() == skips((1, 6)).spans()
    assert [n for n in range(25) if is_skipped([(5, 9), (1, 3), (3, 6), (20, 21)], n)] == [*range(1, 9), 20]


def test_steps_that_no_run_will_reach_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=rf"skip_steps \(99999\) lies beyond the first {MOST_EPOCHS} epochs, which have"
    ):
        skips((3, 99_999)).spans()


def test_nothing_is_counted_when_nothing_is_skipped() -> None:
    def refuse(epoch: int) -> int:
        raise AssertionError(f"epoch {epoch} was counted")

    assert Skips((), refuse).landing(Cursor(40, 3)) == Cursor(40, 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("start", [0, 4, 7, 9])
def test_what_is_left_is_the_unskipped_order_without_those_steps(ranks: int, start: int) -> None:
    data = data_section(batch=BatchSection(256, 4, 4))
    plain, facts = Planner(data, columns(90)), columns(90)
    first_epoch = plain.steps(0)
    ranges = ((0, 2), (5, 9), (first_epoch - 1, first_epoch + 2))
    skipping = Planner(msgspec.structs.replace(data, skip_steps=ranges), facts)
    total = 2 * first_epoch
    kept = [n for n in range(start, total) if not is_skipped(ranges, n)]
    for rank in range(ranks):
        whole = list(read(plain, Cursor(0, start), total - start, rank, ranks))
        numbers = [p.cursor.step + (first_epoch if p.cursor.epoch else 0) for p in whole]
        wanted = [pack for number, pack in zip(numbers, whole, strict=True) if number in kept]
        assert list(read(skipping, Cursor(0, start), len(kept), rank, ranks)) == wanted


def test_a_checkpoint_stays_valid_whatever_is_skipped_later(tmp_path) -> None:
    path = run_file(tmp_path, "x.tar")
    changed = load(path, ["data.skip_steps=[[100, 120], [7, 8]]"])
    assert changed.data.skip_steps == ((100, 120), (7, 8))
    assert signature_of(changed) == signature_of(load(path))
    assert signature_of(load(path, ["data.seed=1"])) != signature_of(changed)


@pytest.mark.parametrize("bad", ["[[5, 5]]", "[[9, 3]]", "[[-1, 3]]"])
def test_a_range_that_is_none_is_refused_with_an_example(tmp_path, bad: str) -> None:
    with pytest.raises(
        ConfigError, match=r"data.skip_steps .* \[first, end\).*\[\[100, 120\]\] skips steps 100 to 119"
    ):
        load(run_file(tmp_path, "x.tar"), [f"data.skip_steps={bad}"])


@pytest.mark.parametrize(("key", "value"), [("patch", "-1"), ("token", "0"), ("token_pair", ".inf"), ("frame", "2000")])
def test_impossible_costs_are_refused(tmp_path, key: str, value: str) -> None:
    config = load(run_file(tmp_path, "x.tar"))
    with pytest.raises(ConfigError, match=rf"data\.batch\.cost\.{key} "):
        load(run_file(tmp_path, "x.tar"), [f"data.batch.cost.{key}={value}"])
    assert check(config) is config
