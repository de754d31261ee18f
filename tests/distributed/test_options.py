"""Recomputation, offload, ZeRO-2 and 3, frozen parts and stopped gradients, in every layout, train as one process does.

Recomputation, offload and ZeRO must change nothing at all, so they are held to the plain run on one process; what is
frozen or stopped is held to one process with the same parts frozen or stopped.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.support.layouts import SGD, Alone, hold_resumed, run_layout, too_far

RECOMPUTE = ["train.recompute={vision: all, audio: all, decoder: all, projectors: true}"]
OFFLOAD = ["train.offload_optimizer=true"]
BF16 = ["train.precision=bf16"]
STOPPED = ["model.detach=[audio]", "model.gradient_cuts={1: [vision]}"]
FROZEN = ["train.freeze=[vision, audio, vision_projector, audio_projector, embedding]"]

ALONE = {
    "adamw": [],
    "sgd": SGD,
    "bf16": BF16,
    "stopped": [*SGD, *STOPPED],
    "tied": [*SGD, "model.decoder.tied=true"],
    "frozen-front": [*SGD, *FROZEN],
    "frozen-decoder": ["train.freeze=[decoder]"],
    "frozen-encoders": ["train.freeze=[vision, audio, vision_projector, audio_projector]"],
}
"""Names of the runs on one process; a case is compared with the one that its name begins with."""

EVERYWHERE = {
    "adamw recompute": RECOMPUTE,
    "sgd recompute, zero 0": [*SGD, *RECOMPUTE, "train.zero_stage=0"],
    "adamw offload": OFFLOAD,
    "sgd offload": [*SGD, *OFFLOAD],
    "bf16 offload, recompute": [*BF16, *OFFLOAD, *RECOMPUTE],
    "stopped": ALONE["stopped"],
    "frozen-front": ALONE["frozen-front"],
    "frozen-decoder": ALONE["frozen-decoder"],
}
SHARDED = {
    "adamw zero 3": ["train.zero_stage=3"],
    "sgd zero 3, recompute": [*SGD, *RECOMPUTE, "train.zero_stage=3"],
    "adamw zero 2, recompute": [*RECOMPUTE, "train.zero_stage=2"],
    "adamw zero 2, offload": [*OFFLOAD, "train.zero_stage=2"],
    "sgd zero 3, offload": [*SGD, *OFFLOAD, "train.zero_stage=3"],
    "stopped, zero 3": [*ALONE["stopped"], "train.zero_stage=3"],
    "frozen-front, zero 3": [*ALONE["frozen-front"], "train.zero_stage=3"],
    "bf16 zero 3": [*BF16, "train.zero_stage=3"],
    **{f"tied, zero {stage}": [*ALONE["tied"], f"train.zero_stage={stage}"] for stage in range(4)},
}
STAGES = {
    "frozen-front": ALONE["frozen-front"],
    "frozen-decoder": ALONE["frozen-decoder"],
    "frozen-decoder, zero 0": [*ALONE["frozen-decoder"], "train.zero_stage=0"],
    "frozen-encoders": ALONE["frozen-encoders"],
    "stopped": ALONE["stopped"],
}
"""With four stages of one layer each: stages that train nothing, in front and in the middle, or embeddings alone."""

LAYOUTS = {
    "data2": ((1, 2, 1), EVERYWHERE | SHARDED),
    "pipe2": ((2, 1, 1), EVERYWHERE),
    "tensor2": ((1, 1, 2), EVERYWHERE),
    "pipe4": ((4, 1, 1), STAGES),
}
TOLERANCE = {"bf16": 3e-3}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_trains_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    mesh, cases = LAYOUTS[layout]
    runs = run_layout(tmp_path, mesh, cases)
    assert too_far(runs, alone.runs(ALONE), TOLERANCE, lambda case: case.split(" ")[0].rstrip(",")) == {}


def test_what_is_frozen_or_detached_keeps_its_weights(alone: Alone) -> None:
    runs = alone.runs(ALONE)
    plain, stopped, front = (runs[name].weights for name in ("sgd", "stopped", "frozen-front"))
    start = {name for name in plain if np.array_equal(plain[name], front[name])}
    assert not start & {name for name in plain if name.startswith(("1.", "2.", "3."))}
    audio = [name for name in plain if name.startswith("0.audio.")]
    assert audio and all(np.array_equal(stopped[name], front[name]) for name in audio)
    assert not np.array_equal(stopped["0.audio_projector.up.weight"], front["0.audio_projector.up.weight"])
    assert front["0.embedding.weight"].std() == pytest.approx(0.02, rel=0.1)


def test_a_run_with_frozen_stages_and_offload_resumes_bit_for_bit(tmp_path: Path) -> None:
    cases = {"case": [*ALONE["frozen-decoder"], *OFFLOAD, *BF16]}
    saved = {"checkpoints": str(tmp_path / "checkpoints")}
    unbroken = run_layout(tmp_path / "a", (4, 1, 1), cases, steps=3, save_every=2, **saved)
    resumed = run_layout(tmp_path / "b", (4, 1, 1), cases, steps=3, resume=True, **saved)
    hold_resumed(resumed, unbroken, 2)
