"""After a resume the logs show what the weights have seen, and nothing else."""

import json
from pathlib import Path

import pytest

from shared.batch import Cursor
from shared.consumed import Consumed
from shared.errors import CheckpointError
from trainer.log import Lines, StepLine, consumed_lines, cut_unopened, step_lines


def consumed(epoch: int, step: int, micro: int) -> Consumed:
    return Consumed(epoch, step, micro, 0, 2, f"b{epoch}{step}{micro}", (1, 2), 0, 3, 99)


def step_line(step: int) -> StepLine:
    return StepLine(step, 1 / 3, 0.1, 1e-3, 10, 2, 0.5, 20.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("cursor", "kept"), [(Cursor(), 0), (Cursor(0, 1, 0), 2), (Cursor(1, 0, 0), 4), (Cursor(9), 5)]
)
def test_lines_at_or_beyond_the_cursor_are_cut_off(tmp_path: Path, cursor: Cursor, kept: int) -> None:
    places = [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0)]
    with consumed_lines(tmp_path, 0, Cursor()) as lines:
        lines.write([consumed(*place) for place in places])
    with consumed_lines(tmp_path, 0, cursor) as lines:
        lines.write([consumed(7, 7, 7)])
    found = [json.loads(line)["batch_id"] for line in (tmp_path / "consumed-0.jsonl").read_text().splitlines()]
    assert found == [f"b{e}{s}{m}" for e, s, m in places[:kept]] + ["b777"]


def test_a_half_written_line_is_cut_off(tmp_path: Path) -> None:
    with step_lines(tmp_path, 0) as lines:
        lines.write([step_line(0), step_line(1)])
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-4])
    with step_lines(tmp_path, 9) as lines:
        lines.write([step_line(1)])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]


def test_losses_are_written_in_full(tmp_path: Path) -> None:
    with step_lines(tmp_path, 0) as lines:
        lines.write([step_line(0)])
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1 / 3


def test_logs_of_data_ranks_that_are_no_more_are_cut_too(tmp_path: Path) -> None:
    for rank in (0, 1, 2):
        with consumed_lines(tmp_path, rank, Cursor()) as lines:
            lines.write([consumed(0, step, 0) for step in range(3)])
    cut_unopened(tmp_path, 1, Cursor(0, 2, 0))
    assert [len((tmp_path / f"consumed-{rank}.jsonl").read_text().splitlines()) for rank in (0, 1, 2)] == [3, 2, 2]


def test_a_log_that_the_disk_refuses_ends_the_run_with_its_name() -> None:
    words = r"/dev/full cannot be written \(No space left on device\); make room"
    with pytest.raises(CheckpointError, match=words), Lines(Path("/dev/full")) as lines:
        lines.write([step_line(0)])
