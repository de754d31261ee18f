"""Tensor parallelism, alone and with pipeline and data parallelism, trains as one process does.

Each layout is launched once on real processes over gloo and runs every case: AdamW and SGD (Adam hides a constant
error in a gradient's scale), ZeRO-0 and 1, bf16; two global batches each with every modality set, an empty pack and
an empty caption. Clipping is always active, so that an error of the gradient norm reaches the weights.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import SGD, Alone, differences, hold_resumed, run_layout, too_far
from tests.support.ranks import RanksFailed, run_ranks
from tests.support.runs import run_file

CASES = {
    "adamw": [],
    "adamw-zero0": ["train.zero_stage=0"],
    "sgd": SGD,
    "sgd-zero0": [*SGD, "train.zero_stage=0"],
    "bf16": ["train.precision=bf16"],
    "qkv-bias": [*SGD, "model.decoder.qkv_bias=true"],
}
LAYOUTS = {
    "tensor2": (1, 1, 2),
    "tensor2-pipe2": (2, 1, 2),
    "tensor2-data2": (1, 2, 2),
    "tensor2-pipe2-data2": (2, 2, 2),
}
TOLERANCE = {"bf16": 3e-3}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    """And whatever several ranks hold is equal on them to the last bit."""
    runs = run_layout(tmp_path, LAYOUTS[layout], CASES)
    assert too_far(runs, alone.runs(CASES), TOLERANCE) == {}


@pytest.mark.parametrize("tensor", [2, 4])
def test_the_gradient_norm_counts_every_parameter_once(tmp_path: Path, alone: Alone, tensor: int) -> None:
    """Whole parameters counted on every rank would give up to sqrt(tensor) times the norm."""
    four = [*SGD, "model.decoder.kv_heads=4"]
    cases = {"zero0": [*four, "train.zero_stage=0"], "zero1": four, "bf16": [*four, "train.precision=bf16"]}
    whole = alone.runs(cases, steps=1)
    cut = run_layout(tmp_path, (1, 1, tensor), cases, steps=1)
    for case, tolerance in {"zero0": 1e-5, "zero1": 1e-5, "bf16": 1e-2}.items():
        assert cut[case].norms == pytest.approx(whole[case].norms, rel=tolerance), case


@pytest.mark.parametrize(
    ("pipe", "data", "precision", "zero"), [(1, 1, "fp32", 1), (2, 1, "bf16", 1), (1, 2, "fp32", 0)]
)
def test_resume_continues_bit_for_bit(tmp_path: Path, pipe: int, data: int, precision: str, zero: int) -> None:
    cases = {"case": [f"train.precision={precision}", f"train.zero_stage={zero}"]}
    saved = {"checkpoints": str(tmp_path / "checkpoints")}
    mesh = (pipe, data, 2)
    unbroken = run_layout(tmp_path / "a", mesh, cases, steps=3, save_every=2, **saved)
    resumed = run_layout(tmp_path / "b", mesh, cases, steps=3, resume=True, **saved)
    hold_resumed(resumed, unbroken, 2)


def test_init_from_gives_every_rank_its_slice(tmp_path: Path) -> None:
    cases = {"case": ["train.init_from=start.safetensors"]}
    whole = run_layout(tmp_path / "whole", (1, 1, 1), cases, start_seed=99)["case"]
    for mesh in ((1, 1, 2), (2, 1, 2)):
        cut = run_layout(tmp_path / f"cut{mesh[0]}", mesh, cases, start_seed=99)["case"]
        assert max(differences(cut, whole)) <= 1e-5


@pytest.mark.parametrize("axis", ["tensor", "pipe"])
def test_tensor_ranks_or_stages_that_were_given_different_data_stop_the_run(tmp_path: Path, axis: str) -> None:
    config = run_file(tmp_path, "part-{0..0}.tar")
    task: dict[str, Any] = {"config": str(config), "sets": [f"mesh.{axis}=2"]}
    with pytest.raises(RanksFailed) as failure:
        run_ranks("tests.support.unlike_program", 2, tmp_path / "unlike", {**task, "unlike": True})
    assert "ProtocolError" in str(failure.value) and "read different data" in str(failure.value)
    assert run_ranks("tests.support.unlike_program", 2, tmp_path / "like", {**task, "unlike": False}) == [4, 4]


def test_one_process_trains_without_the_parallel_package(tmp_path: Path, alone: Alone) -> None:
    """Law: the model is written for one device, and what cuts it up can be deleted."""
    run = run_layout(tmp_path, (1, 1, 1), {"sgd": SGD}, program="tests.support.bare_program")["sgd"]
    assert max(differences(run, alone.runs({"sgd": SGD})["sgd"])) == 0
