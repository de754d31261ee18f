"""One global batch, every layout: the same loss, gradient norm and weights as one process.

Each layout is launched once on real processes over gloo and runs every case; clipping is always active, because it
spreads an error of the norm to weights.
"""

from pathlib import Path

import pytest

from tests.support.layouts import SGD, Alone, differences, run_layout, too_far

CASES = {
    "adamw": [],
    "sgd": SGD,
    "sgd-zero0": [*SGD, "train.zero_stage=0"],
    "sgd-zero2": [*SGD, "train.zero_stage=2"],
    "bf16": ["train.precision=bf16"],
}
LAYOUTS = {"pipe2": (2, 1), "data2": (1, 2), "pipe2-data2": (2, 2), "pipe4": (4, 1)}
RUNS = [("MIXED", layout) for layout in LAYOUTS] + [("LOPSIDED", "data2"), ("LOPSIDED", "pipe2-data2")]
TOLERANCE = {"bf16": 2e-3}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("plans", "layout"), RUNS)
def test_every_layout_trains_as_one_process_does(alone: Alone, plans: str, layout: str, tmp_path: Path) -> None:
    mesh = LAYOUTS[layout]
    cases = {name: sets for name, sets in CASES.items() if mesh[0] == 1 or name != "sgd-zero2"}
    runs = run_layout(tmp_path, mesh, cases, plans=plans)
    assert too_far(runs, alone.runs(cases, plans=plans), TOLERANCE) == {}


@pytest.mark.parametrize("other", ["sgd-zero0", "sgd-zero2"])
def test_zero_stages_agree(alone: Alone, other: str) -> None:
    runs = alone.runs(CASES)
    assert max(differences(runs[other], runs["sgd"])) <= 1e-5


def test_bf16_trains_near_fp32(alone: Alone) -> None:
    runs = alone.runs(CASES)
    assert runs["bf16"].losses == pytest.approx(runs["adamw"].losses, rel=1e-3)
    assert runs["bf16"].norms == pytest.approx(runs["adamw"].norms, rel=1e-2)
