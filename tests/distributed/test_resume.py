"""A run that was saved, killed and resumed in the same layout is the unbroken run, to the last bit."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import kill_ranks, run_ranks, start_ranks
from tests.support.runs import run_file

PROGRAM = "tests.support.step_program"
STEPS = 6
LAYOUTS = [
    (1, 1, "fp32", 1),
    (1, 2, "bf16", 1),
    (1, 2, "fp32", 2),
    (1, 2, "fp32", 3),
    (2, 2, "bf16", 1),
    (2, 1, "fp32", 0),
    (1, 2, "bf16", 1, "train.offload_optimizer=true"),
    (1, 2, "fp32", 2, "train.offload_optimizer=true"),
]

pytestmark = pytest.mark.slow


def make_task(
    folder: Path, pipe: int, data: int, precision: str, zero: int, *extra: str, **more: Any
) -> dict[str, Any]:
    """A task of `step_program` with one case."""
    config = run_file(folder, "part-{0..0}.tar", data={"batch": {"micro_batches": 8}})
    sets = [f"mesh.pipe={pipe}", f"mesh.data={data}", f"train.precision={precision}", f"train.zero_stage={zero}"]
    sets += extra
    task = {"config": str(config), "cases": {"case": sets}, "plans": "MIXED", "steps": STEPS}
    return {**task, "checkpoints": str(folder / "checkpoints"), **more}


def same_weights(one: Path, other: Path, world: int) -> bool:
    """Whether every rank's weights are equal to the last bit."""
    for rank in range(world):
        with np.load(one / f"case-{rank}.npz") as a, np.load(other / f"case-{rank}.npz") as b:
            if a.files != b.files or not all(np.array_equal(a[name], b[name]) for name in a.files):
                return False
    return True


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout)))
def test_resume_continues_bit_for_bit(tmp_path: Path, layout: tuple[Any, ...]) -> None:
    world = layout[0] * layout[1]
    unbroken = run_ranks(PROGRAM, world, tmp_path / "a", make_task(tmp_path, *layout, save_every=4))[0]["case"]
    resumed = run_ranks(PROGRAM, world, tmp_path / "b", make_task(tmp_path, *layout, resume=True))[0]["case"]
    assert resumed["first"] == 4
    assert resumed["losses"] == unbroken["losses"][4:]
    assert resumed["norms"] == unbroken["norms"][4:]
    assert same_weights(tmp_path / "a", tmp_path / "b", world)


def test_ranks_killed_while_saving_resume_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    layout = (2, 1, "fp32", 1)
    unbroken = run_ranks(PROGRAM, 2, tmp_path / "a", make_task(tmp_path, *layout))[0]["case"]
    killed = start_ranks(PROGRAM, 2, folder(tmp_path / "b"), make_task(tmp_path, *layout, save_every=1))
    try:
        wait_for_partial(tmp_path / "checkpoints", after=2)
    finally:
        kill_ranks(killed)
    resumed = run_ranks(PROGRAM, 2, tmp_path / "c", make_task(tmp_path, *layout, resume=True))[0]["case"]
    assert resumed["first"] >= 2
    assert resumed["losses"] == unbroken["losses"][resumed["first"] :]
    assert same_weights(tmp_path / "a", tmp_path / "c", 2)


def folder(path: Path) -> Path:
    """Made."""
    path.mkdir()
    return path


def wait_for_partial(checkpoints: Path, after: int) -> None:
    """Until a checkpoint is being written and `after` are complete."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        names = [path.name for path in checkpoints.glob("step-*")]
        partial = [name for name in names if name.endswith(".tmp")]
        if partial and len(names) - len(partial) >= after:
            return
        time.sleep(0.001)
    raise AssertionError(f"no checkpoint was caught being written: {names}")
