"""A rank that ends early takes the others along, whatever they wait for, and each of them names it."""

import signal
from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.ranks import kill_ranks, start_ranks, wait_ranks
from tests.support.runs import run_file
from tests.support.trainers import Trainer

PROGRAM = "tests.support.lifeline_program"
WORLD = 3
ENDED_S = 90.0
STEPS = 24
"""So many that a run is far from its end whenever a slow machine comes to kill a rank of it after the fourth."""


def ended(folder: Path, rank: int, way: str) -> tuple[list[int | None], list[str]]:
    """Exit codes and outputs of all ranks."""
    task = {
        "config": str(run_file(folder, "part-{0..0}.tar")),
        "sets": [f"mesh.pipe={WORLD}"],
        "rank": rank,
        "way": way,
    }
    processes = start_ranks(PROGRAM, WORLD, folder, task)
    try:
        codes = wait_ranks(processes, ENDED_S, patient=True)
    finally:
        kill_ranks(processes)
    return codes, [(folder / f"rank-{number}.log").read_text() for number in range(WORLD)]


@pytest.mark.parametrize(("way", "code"), [("killed", 5), ("error", 3)])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_wait_for_good_name_the_one_that_ended(tmp_path: Path, rank: int, way: str, code: int) -> None:
    codes, logs = ended(tmp_path, rank, way)
    others = [number for number in range(WORLD) if number != rank]
    told = [logs[number] for number in others]
    assert codes[rank] == (-signal.SIGKILL if way == "killed" else code), told
    assert [codes[number] for number in others] == [code] * len(others), told
    assert all(f"rank {rank} " in text and "--resume" in text for text in told), told


def test_ranks_that_leave_together_leave_in_peace(tmp_path: Path) -> None:
    codes, logs = ended(tmp_path, 1, "orderly")
    assert codes == [0] * WORLD, logs


@pytest.mark.slow
def test_a_run_whose_rank_was_killed_names_it_and_resumes_exactly(tmp_path: Path) -> None:
    config, _ = make_run(tmp_path, samples=48, shards=2)
    sets = ("--set=mesh.pipe=2", f"--set=train.steps={STEPS}", "--set=train.save_every=2", "--set=train.zero_stage=0")
    with serving(config):
        whole = Trainer(config, tmp_path / "whole", *sets, world=2).finish()
    with serving(config):
        killed = Trainer(config, tmp_path / "broken", *sets, world=2)
        killed.wait_checkpoint(4)
        killed.kill_rank(1)
        assert killed.process.wait(60.0) != 0
        assert "rank 0: rank 1 is gone" in killed.log, killed.log
        again = Trainer(config, tmp_path / "broken", *sets, "--resume", world=2).finish()
    assert [x["loss"] for x in again.steps()] == [x["loss"] for x in whole.steps()]
    assert [x["grad_norm"] for x in again.steps()] == [x["grad_norm"] for x in whole.steps()]
