"""Exactly once, proven from logs: with steps passed over, after a change of ranks, with repeats in one batch."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataloader_svc import verify
from dataloader_svc.plan import Planner
from shared.batch import Cursor
from shared.consumed import Consumed
from shared.errors import DataError
from shared.sections import BatchSection, DataSection, DatasetSection
from tests.support.columns import columns
from tests.support.consuming import logs
from tests.support.tars import data_section

DATA = data_section(batch=BatchSection(256, 4, 4))
FACTS = columns(90)
SKIPS = ((3, 6), (8, 9))
Logs = list[list[Consumed]]


def planner(*ranges: tuple[int, int]) -> Planner:
    return Planner(msgspec.structs.replace(DATA, skip_steps=ranges), FACTS)


def verdict(found: Logs, *ranges: tuple[int, int]) -> verify.Verdict:
    return verify.check(planner(*ranges), DATA, found)


def steps_of(found: Logs) -> set[int]:
    return {line.step for log in found for line in log}


def joined(*runs: Logs) -> Logs:
    """Logs of runs that followed one another in one folder: rank r appends to file r."""
    most = max(len(run) for run in runs)
    return [[line for run in runs if rank < len(run) for line in run[rank]] for rank in range(most)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_steps_passed_over_on_request_are_not_lost_and_nothing_else_is(ranks: int) -> None:
    found = logs(planner(*SKIPS), Cursor(), 6, ranks)
    assert steps_of(found) == {0, 1, 2, 6, 7, 9}
    told = verdict(found, *SKIPS)
    assert told.clean
    assert (told.steps, told.skipped_steps, told.unasked_steps) == (6, 4, 0)
    left = [planner().pack(Cursor(0, step, micro), 0, 1) for step in (3, 4, 5, 8) for micro in range(4)]
    assert told.skipped == sum(len(pack.sample_ids) for pack in left)


def test_what_the_run_file_does_not_ask_for_is_lost() -> None:
    found = logs(planner(*SKIPS), Cursor(), 6, 2)
    told = verdict(found, (3, 6))
    assert not told.clean
    assert (told.skipped_steps, told.unasked_steps, told.lost_batches) == (3, 1, 4)


def test_a_hole_that_no_line_tells_of_is_lost_even_where_skipping_was_asked() -> None:
    whole = logs(planner(), Cursor(), 10, 1)
    found = [[line for line in whole[0] if line.step not in (3, 4, 5)]]
    told = verdict(found, (3, 6))
    assert not told.clean
    assert told.lost_batches == 12


def test_steps_that_one_rank_trained_on_while_another_passed_over_them_are_lost() -> None:
    skipping, whole = logs(planner(*SKIPS), Cursor(), 6, 2), logs(planner(), Cursor(), 10, 2)
    told = verdict([skipping[0], whole[1]], *SKIPS)
    assert not told.clean
    assert told.lost_batches == 8


def test_steps_skipped_at_the_very_start_are_told() -> None:
    told = verdict(logs(planner((0, 4)), Cursor(), 3, 1), (0, 4))
    assert told.clean
    assert (told.steps, told.skipped_steps) == (3, 4)


def test_a_skip_asked_for_after_the_steps_were_trained_on_changes_nothing() -> None:
    told = verdict(logs(planner(), Cursor(), 10, 2), *SKIPS)
    assert told.clean
    assert (told.steps, told.skipped_steps) == (10, 0)


@pytest.mark.parametrize("chain", [(1, 2, 4), (4, 2, 1), (2, 4, 1), (4, 1, 4)])
@pytest.mark.parametrize("ranges", [(), SKIPS])
def test_a_change_of_ranks_between_steps_loses_and_repeats_nothing(chain: tuple[int, ...], ranges) -> None:
    runs, start = [], Cursor()
    for ranks in chain:
        runs.append(logs(planner(*ranges), start, 2, ranks))
        start = planner().after(max(line.cursor for line in runs[-1][0]), ranks)
    told = verdict(joined(*runs), *ranges)
    assert told.clean
    assert told.steps == 6
    alone = logs(planner(*ranges), Cursor(), 6, 1)
    assert {line.batch_id for run in runs for log in run for line in log} == {line.batch_id for line in alone[0]}


def test_steps_done_again_after_a_change_of_ranks_are_repeated() -> None:
    found = joined(logs(planner(), Cursor(), 4, 2), logs(planner(), Cursor(0, 3), 3, 4))
    told = verdict(found)
    assert not told.clean
    assert told.repeated_batches == 4


def test_a_step_left_out_after_a_change_of_ranks_is_lost() -> None:
    told = verdict(joined(logs(planner(), Cursor(), 4, 4), logs(planner(), Cursor(0, 5), 3, 1)))
    assert not told.clean
    assert told.lost_batches == 4


def tiny_mixture() -> tuple[DataSection, Planner]:
    """A dataset of three samples that makes half of an epoch: each comes many times in one global batch."""
    sets = (DatasetSection("many", ("x",), 0.5), DatasetSection("few", ("y",), 0.5))
    data = msgspec.structs.replace(DATA, datasets=sets)
    facts = columns(63)
    text_alone = {
        name: np.where(np.arange(63) < 60, getattr(facts, name), 0) for name in ("height", "width", "clip_samples")
    }
    return data, Planner(data, msgspec.structs.replace(facts, **text_alone, dataset_starts=(0, 60, 63)))


def test_a_dataset_repeated_within_one_batch_is_clean_and_counted_sample_by_sample() -> None:
    data, mixed = tiny_mixture()
    found = logs(mixed, Cursor(), mixed.steps(0), 2)
    twice = [line for log in found for line in log if len(set(line.sample_ids)) < len(line.sample_ids)]
    assert twice
    assert verify.check(mixed, data, found).clean
    for line in twice[:3]:
        short = msgspec.structs.replace(line, sample_ids=tuple(dict.fromkeys(line.sample_ids)))
        told = verify.check(mixed, data, [[short if other == line else other for other in log] for log in found])
        assert told.left_out == len(line.sample_ids) - len(short.sample_ids)
        more = msgspec.structs.replace(line, sample_ids=(*line.sample_ids, line.sample_ids[0]))
        assert not verify.check(
            mixed, data, [[more if other == line else other for other in log] for log in found]
        ).clean


def test_a_folder_stands_for_the_logs_of_all_its_data_ranks_and_has_some(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no consumed-\*\.jsonl"):
        verify.read_logs([tmp_path])
    for rank, log in enumerate(logs(planner(), Cursor(), 4, 2)):
        (tmp_path / f"consumed-{rank}.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in log))
    found = verify.read_logs([tmp_path])
    assert [{line.data_rank for line in log} for log in found] == [{0}, {1}]
    assert verdict(found).clean
