"""One global batch, every layout: the same loss, gradient norm and weights as one process.

Each layout is launched once on real processes over gloo and runs every case. SGD is among them because Adam hides a
constant error in the gradient's scale; clipping is always active, because it spreads an error of the norm to weights.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.ranks import run_ranks
from tests.support.runs import run_file

SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
CASES = {
    "adamw": [],
    "sgd": SGD,
    "sgd-zero0": [*SGD, "train.zero_stage=0"],
    "sgd-zero2": [*SGD, "train.zero_stage=2"],
    "bf16": ["train.precision=bf16"],
}
LAYOUTS = {"pipe2": (2, 1), "data2": (1, 2), "pipe2-data2": (2, 2), "pipe4": (4, 1)}
RUNS = [("MIXED", layout) for layout in LAYOUTS] + [("LOPSIDED", "data2"), ("LOPSIDED", "pipe2-data2")]
STEPS = 3

Runs = dict[str, dict[str, Any]]
pytestmark = pytest.mark.slow


def run_layout(folder: Path, pipe: int, data: int, plans: str) -> Runs:
    """Case -> losses, norms and the weights of all stages."""
    config = run_file(folder, "part-{0..0}.tar", data={"batch": {"micro_batches": 8}}, train={"optim": {"clip": 0.25}})
    cases = {
        name: [*sets, f"mesh.pipe={pipe}", f"mesh.data={data}"] for name, sets in CASES.items() if fits(name, pipe)
    }
    task = {"config": str(config), "cases": cases, "plans": plans, "steps": STEPS}
    reports = run_ranks("tests.support.step_program", pipe * data, folder / "out", task)
    assert all(report == reports[0] for report in reports)
    return {name: {**reports[0][name], "weights": weights(folder / "out", name)} for name in cases}


def fits(case: str, pipe: int) -> bool:
    """ZeRO-2 cannot run in a pipeline."""
    return pipe == 1 or case != "sgd-zero2"


def weights(folder: Path, case: str) -> dict[str, NDArray[np.float32]]:
    """The weights of all stages together; those that several ranks hold must be equal to the last bit."""
    found: dict[str, NDArray[np.float32]] = {}
    for path in sorted(folder.glob(f"{case}-[0-9].npz")):
        with np.load(path) as stage:
            for name in stage.files:
                assert np.array_equal(found.setdefault(name, stage[name]), stage[name]), name
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Runs]:
    """The reference: one process, for each kind of global batch."""
    return {plans: run_layout(tmp_path_factory.mktemp(plans), 1, 1, plans) for plans in ("MIXED", "LOPSIDED")}


@pytest.mark.parametrize(("plans", "layout"), RUNS)
def test_every_layout_trains_as_one_process_does(
    alone: dict[str, Runs], plans: str, layout: str, tmp_path: Path
) -> None:
    for case, run in run_layout(tmp_path, *LAYOUTS[layout], plans).items():
        tolerance = 2e-3 if case == "bf16" else 1e-5
        wanted = alone[plans][case]
        assert run["losses"] == pytest.approx(wanted["losses"], rel=tolerance), case
        assert run["norms"] == pytest.approx(wanted["norms"], rel=tolerance), case
        assert run["weights"].keys() == wanted["weights"].keys()
        for name, array in run["weights"].items():
            np.testing.assert_allclose(array, wanted["weights"][name], atol=tolerance, rtol=0, err_msg=f"{case} {name}")


@pytest.mark.parametrize("other", ["sgd-zero0", "sgd-zero2"])
def test_zero_stages_agree(alone: dict[str, Runs], other: str) -> None:
    one, run = alone["MIXED"]["sgd"], alone["MIXED"][other]
    assert run["norms"] == pytest.approx(one["norms"], rel=1e-5)
    for name, array in run["weights"].items():
        np.testing.assert_allclose(array, one["weights"][name], atol=1e-5, rtol=0, err_msg=name)


def test_bf16_trains_near_fp32(alone: dict[str, Runs]) -> None:
    runs = alone["MIXED"]
    assert runs["bf16"]["losses"] == pytest.approx(runs["adamw"]["losses"], rel=1e-3)
    assert runs["bf16"]["norms"] == pytest.approx(runs["adamw"]["norms"], rel=1e-2)
