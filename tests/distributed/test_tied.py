"""A tied head trains as one process does, whether it shares the embedding's rank, is cut like it, or lies stages away.

`run_layout` holds that the head's copy and the embedding are equal to the last bit, for both go by one name. Clipping
is always active, so that a norm that counts the weight twice reaches every weight; SGD shows what Adam hides.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.support.layouts import SGD, Alone, differences, run_layout, too_far
from tests.support.runs import run_config
from trainer.models import build
from trainer.models.parts import EMBEDDING
from trainer.source import Source

TIED = ["model.decoder.tied=true"]
MOMENTUM = [*TIED, *SGD, "train.optim.momentum=0.9"]
BF16 = [*TIED, "train.precision=bf16"]
ENDS = "train.freeze=[embedding, head]"
ALONE = {"adamw": TIED, "sgd": MOMENTUM, "bf16": BF16, "frozen": [*MOMENTUM, ENDS]}
"""Names of the runs on one process; a case is compared with the one that its name begins with."""

CASES = {
    **ALONE,
    "adamw, zero 0": [*TIED, "train.zero_stage=0"],
    "sgd, zero 0": [*MOMENTUM, "train.zero_stage=0"],
    "sgd, offload": [*MOMENTUM, "train.offload_optimizer=true"],
    "bf16, offload": [*BF16, "train.offload_optimizer=true"],
}
LAYOUTS = {
    "pipe2": (2, 1, 1),
    "pipe4": (4, 1, 1),
    "tensor2": (1, 1, 2),
    "tensor2-pipe2": (2, 1, 2),
    "pipe2-data2": (2, 2, 1),
}
TOLERANCE = {"bf16": 3e-3}
SAVED, STEPS = 2, 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    runs = run_layout(tmp_path, LAYOUTS[layout], CASES)
    assert too_far(runs, alone.runs(ALONE), TOLERANCE, lambda case: case.partition(",")[0]) == {}


def test_experts_and_a_tied_head_far_apart_train_as_one_process_does(alone: Alone, tmp_path: Path) -> None:
    cases = {"case": [*MOMENTUM, "model.decoder.experts=4", "model.decoder.expert_mlp=64"]}
    cut = run_layout(tmp_path, (2, 2, 1, 2), cases)["case"]
    assert max(differences(cut, alone.runs(cases)["case"])) <= 1e-5


def test_a_checkpoint_has_the_weight_once_and_goes_on_in_any_layout(tmp_path: Path) -> None:
    cases = {"adamw": TIED, "sgd": MOMENTUM}
    home: dict[str, Any] = {"checkpoints": f"{tmp_path}/home/{{case}}"}
    unbroken = run_layout(tmp_path / "a", (2, 2, 1), cases, steps=STEPS, save_every=SAVED, **home)
    source = Source(tmp_path / "home" / "adamw" / f"step-{SAVED:08d}")
    config = run_config(tmp_path, "x.tar", model={"decoder": {"tied": True}})
    weights = {key.removeprefix("weight/") for key in source.keys() if key.startswith("weight/")}  # noqa: SIM118
    assert EMBEDDING in weights and weights == build.shapes(config).keys()
    for name, mesh in {"home": (2, 2, 1), "one": (1, 1, 1), "cut": (1, 1, 2), "both": (2, 1, 2)}.items():
        there = run_layout(tmp_path / name, mesh, cases, steps=STEPS, resume=True, **home)
        bound = 0.0 if name == "home" else 1e-5
        assert all(run.first == SAVED for run in there.values())
        assert {case: max(differences(run, unbroken[case])) > bound for case, run in there.items()} == dict.fromkeys(
            cases, False
        )
