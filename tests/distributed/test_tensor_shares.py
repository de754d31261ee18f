"""What tensor ranks may share out besides layers, places of a pack and encoding, trains as one process does.

Cases are named by option: `places` is mesh.sequence_parallel, `media` mesh.encoder_data_parallel. SGD shows a gradient
that was summed once too often or too seldom, which Adam hides; clipping is always active. Batches have every modality
set; with four ranks, five images and eight clips leave some of them without any.
"""

from pathlib import Path

import pytest

from tests.support.layouts import SGD, Alone, differences, hold_resumed, run_layout, too_far, whole
from tests.support.ranks import run_ranks

PLACES, MEDIA = "mesh.sequence_parallel=true", "mesh.encoder_data_parallel=true"
ZERO0 = [*SGD, "train.zero_stage=0"]
RECOMPUTE = "train.recompute={vision: all, audio: all, decoder: all}"
EXPERTS = [f"model.decoder.{each}" for each in ("experts=4", "expert_mlp=64", "expert_every=2", "balance_loss=0.5")]
CASES = {
    "places": [PLACES],
    "places-sgd": [PLACES, *ZERO0],
    "places-experts": [PLACES, *SGD, *EXPERTS],
    "places-cut": [PLACES, *SGD, "model.gradient_cuts={1: [vision]}"],
    "media": [MEDIA],
    "media-sgd": [MEDIA, *ZERO0],
    "media-frozen": [MEDIA, *SGD, "train.freeze=[vision]", "model.audio.key_bias=false"],
    "both": [PLACES, MEDIA, *SGD, RECOMPUTE],
    "both-tied": [PLACES, MEDIA, *SGD, "model.decoder.tied=true"],
    "both-bf16": [PLACES, MEDIA, "train.precision=bf16"],
}
LAYOUTS = {"tensor2": (1, 1, 2), "pipe2-tensor2": (2, 1, 2), "data2-tensor2": (1, 2, 2)}
TOLERANCE = {"both-bf16": 3e-3}

slow = pytest.mark.slow


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_option_trains_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    """And whatever several ranks hold, norms and encoders above all, is equal on them to the last bit."""
    runs = run_layout(tmp_path, LAYOUTS[layout], CASES)
    assert too_far(runs, alone.runs(CASES), TOLERANCE) == {}


@slow
def test_a_share_may_have_no_images_and_no_clips(alone: Alone, tmp_path: Path) -> None:
    cases = {"media": [MEDIA], "both-sgd": [PLACES, MEDIA, *ZERO0]}
    cases = {case: [*sets, "model.decoder.kv_heads=4"] for case, sets in cases.items()}
    wanted, found = alone.runs(cases), run_layout(tmp_path, (1, 1, 4), cases)
    assert max(max(differences(found[case], wanted[case])) for case in cases) <= 1e-5


@slow
def test_a_checkpoint_goes_on_with_other_options(tmp_path: Path) -> None:
    cases = {"case": [PLACES, MEDIA]}
    saved = {"checkpoints": f"{tmp_path}/saved/{{case}}"}
    unbroken = run_layout(tmp_path / "a", (1, 1, 2), cases, steps=3, save_every=2, **saved)
    again = run_layout(tmp_path / "b", (1, 1, 2), cases, steps=3, resume=True, **saved)
    hold_resumed(again, unbroken, 2)
    plain = {"case": whole(cases["case"])}
    for i, mesh in enumerate([(1, 1, 2), (1, 2, 1)]):
        other = run_layout(tmp_path / f"c{i}", mesh, plain, steps=3, resume=True, **saved)["case"]
        assert other.first == 2 and max(differences(other, unbroken["case"])) <= 1e-5


@pytest.mark.parametrize("size", [2, 3])
def test_mappings_and_their_gradients_are_what_they_say(tmp_path: Path, size: int) -> None:
    reports = run_ranks("tests.support.mapping_program", size, tmp_path, {}, timeout_s=120)
    wrong = [{name: far for name, far in report.items() if far > 1e-6} for report in reports]
    assert wrong == [{}] * size and len(reports[0]) == 9
