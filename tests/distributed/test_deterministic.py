"""With `train.deterministic` a run can be repeated to the last bit: other processes, same losses, norms and weights."""

from pathlib import Path

import pytest

from tests.support.layouts import differences, run_layout

CASES = {
    "adamw": [],
    "bf16, recompute": ["train.precision=bf16", "train.recompute.decoder=all"],
    "sgd, zero 0": ["train.optim.name=sgd", "train.zero_stage=0"],
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 1, 1)], ids=["data2", "pipe2"])
def test_two_runs_are_equal_to_the_last_bit(mesh: tuple[int, int, int], tmp_path: Path) -> None:
    cases = {name: [*sets, "train.deterministic=true"] for name, sets in CASES.items()}
    one, other = (run_layout(tmp_path / name, mesh, cases) for name in ("one", "other"))
    for case in cases:
        assert (one[case].losses, one[case].norms) == (other[case].losses, other[case].norms), case
        assert differences(one[case], other[case]).weights == 0, case
