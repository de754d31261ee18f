"""Cross-attention with open gates trains in every layout as in one process, whatever a rank's packs hold.

AdamW and SGD, ZeRO-0 and 1, bf16; in the first, the second or both blocks, so that features pass stages that have no
use for them; alone trained or frozen. The batches are those of `test_parity`: packs without images, clips or anything.
"""

from pathlib import Path

import pytest

from tests.support.crossing import CROSS, open_start
from tests.support.layouts import Run, run_layout, too_far

SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
OTHERS = "[vision, audio, vision_projector, audio_projector, embedding, decoder, head]"
CASES = {
    "adamw": [CROSS],
    "sgd": [CROSS, *SGD],
    "sgd-zero0": [CROSS, *SGD, "train.zero_stage=0"],
    "second": ["model.decoder.cross_every=2", *SGD],
    "alone": [CROSS, *SGD, f"train.freeze={OTHERS}"],
    "second-alone": ["model.decoder.cross_every=2", f"train.freeze={OTHERS}"],
    "recomputed": [CROSS, *SGD, "train.recompute={cross_attention: true}", "model.detach=[audio]"],
    "experts": [CROSS, *SGD, "model.decoder.experts=4", "model.decoder.expert_mlp=64"],
    "bf16": [CROSS, "train.precision=bf16"],
}
SHARDED = {"zero3": [CROSS, "train.zero_stage=3"]}
SHARED = {"media": [CROSS, *SGD, "mesh.encoder_data_parallel=true"]}
SAME = {"zero3": "adamw", "media": "sgd"}
LAYOUTS = {
    "data2": ((1, 2, 1), "MIXED"),
    "data2-lopsided": ((1, 2, 1), "LOPSIDED"),
    "pipe2": ((2, 1, 1), "MIXED"),
    "pipe4": ((4, 1, 1), "MIXED"),
    "tensor2": ((1, 1, 2), "MIXED"),
    "pipe2-data2": ((2, 2, 1), "LOPSIDED"),
}
TOLERANCE = {"bf16": 3e-3}

pytestmark = pytest.mark.slow


def run(folder: Path, mesh: tuple[int, ...], plans: str) -> dict[str, Run]:
    """Every case, from a file of weights in which the gates stand open."""
    pipe, _, tensor = mesh
    cases = CASES | (SHARED if tensor > 1 else {} if pipe > 1 else SHARDED)
    started = {name: [*sets, f"train.init_from={open_start(folder, sets)}"] for name, sets in cases.items()}
    return run_layout(folder / "run", mesh, started, plans=plans)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Run]]:
    """The references: one process."""
    return {plans: run(tmp_path_factory.mktemp(plans), (1, 1, 1), plans) for plans in ("MIXED", "LOPSIDED")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(alone: dict[str, dict[str, Run]], layout: str, tmp_path: Path) -> None:
    mesh, plans = LAYOUTS[layout]
    runs = run(tmp_path, mesh, plans)
    assert too_far(runs, alone[plans], TOLERANCE, lambda case: SAME.get(case, case)) == {}
