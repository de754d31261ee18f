"""Cross-attention with open gates trains in every layout as in one process, whatever a rank's packs hold.

AdamW and SGD, ZeRO-0 and 1, bf16; in the first, the second or both blocks, so that features pass stages that have no
use for them; alone trained or frozen. The batches are those of `test_parity`: packs without images, clips or anything.
"""

from pathlib import Path

import pytest

from tests.support.crossing import CROSS, open_start
from tests.support.layouts import SGD, Alone, hold_resumed, run_layout, too_far

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


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Every case, from a file of weights in which the gates stand open."""
    folder, cases = tmp_path_factory.mktemp("starts"), CASES | SHARDED | SHARED
    return {name: [*sets, f"train.init_from={open_start(folder, sets)}"] for name, sets in cases.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_as_one_process_does(
    alone: Alone, started: dict[str, list[str]], layout: str, tmp_path: Path
) -> None:
    mesh, plans = LAYOUTS[layout]
    pipe, _, tensor = mesh
    cases = CASES | (SHARED if tensor > 1 else {} if pipe > 1 else SHARDED)
    runs = run_layout(tmp_path, mesh, {name: started[name] for name in cases}, plans=plans)
    wanted = alone.runs({name: started[name] for name in CASES}, plans=plans)
    assert too_far(runs, wanted, TOLERANCE, lambda case: SAME.get(case, case)) == {}


@pytest.mark.parametrize("layout", ["pipe2-data2", "tensor2"])
def test_a_checkpoint_goes_on_bit_for_bit_and_in_one_process(
    started: dict[str, list[str]], layout: str, tmp_path: Path
) -> None:
    mesh, _ = LAYOUTS[layout]
    cases = {name: started[name] for name in ("adamw", "second-alone", "bf16")}
    saved = {"checkpoints": f"{tmp_path}/saved/{{case}}", "steps": 3}
    unbroken = run_layout(tmp_path / "a", mesh, cases, save_every=2, **saved)
    again = run_layout(tmp_path / "b", mesh, cases, resume=True, **saved)
    hold_resumed(again, unbroken, 2)
    other = run_layout(tmp_path / "c", (1, 1, 1), cases, resume=True, **saved)
    assert {run.first for run in other.values()} == {2}
    assert too_far(other, unbroken, TOLERANCE) == {}
