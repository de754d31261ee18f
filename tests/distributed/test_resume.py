"""A run that was saved, killed and resumed in the same layout is the unbroken run, to the last bit."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import degrees, hold_resumed, make_run, run_layout
from tests.support.ranks import kill_ranks, start_ranks

BF16, OFFLOAD = "train.precision=bf16", "train.offload_optimizer=true"
LAYOUTS = {
    "one process": ((1, 1, 1), {"fp32": []}),
    "data2": (
        (1, 2, 1),
        {
            "bf16": [BF16],
            "zero 2": ["train.zero_stage=2"],
            "zero 3": ["train.zero_stage=3"],
            "bf16, offload": [BF16, OFFLOAD],
            "zero 2, offload": ["train.zero_stage=2", OFFLOAD],
        },
    ),
    "pipe2": ((2, 1, 1), {"zero 0": ["train.zero_stage=0"]}),
    "pipe2-data2": ((2, 2, 1), {"bf16": [BF16]}),
}
SAVED, STEPS = 2, 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_resume_continues_bit_for_bit(tmp_path: Path, layout: str) -> None:
    mesh, cases = LAYOUTS[layout]
    saved = {"checkpoints": f"{tmp_path}/checkpoints/{{case}}"}
    unbroken = run_layout(tmp_path / "a", mesh, cases, steps=STEPS, save_every=SAVED, **saved)
    hold_resumed(run_layout(tmp_path / "b", mesh, cases, steps=STEPS, resume=True, **saved), unbroken, SAVED)


def test_ranks_killed_while_saving_resume_from_the_last_complete_checkpoint(tmp_path: Path) -> None:
    mesh, steps = (2, 1, 1), 6
    saved: dict[str, Any] = {"checkpoints": str(tmp_path / "checkpoints")}
    unbroken = run_layout(tmp_path / "a", mesh, {"case": []}, steps=steps)
    task = {"config": str(make_run(tmp_path / "b")), "cases": {"case": degrees(mesh)}, "plans": "MIXED", **saved}
    killed = start_ranks("tests.support.step_program", 2, tmp_path / "b", {**task, "steps": steps, "save_every": 1})
    try:
        wait_for_partial(tmp_path / "checkpoints", after=2)
    finally:
        kill_ranks(killed)
    resumed = run_layout(tmp_path / "c", mesh, {"case": []}, steps=steps, resume=True, **saved)
    assert resumed["case"].first >= 2
    hold_resumed(resumed, unbroken, resumed["case"].first)


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
