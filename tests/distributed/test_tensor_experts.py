"""Experts cut over tensor ranks, alone, in a pipeline and with their group's ranks besides, train as in one process.

Auxiliary losses are far larger here than anyone would set them, and clipping is always active, so that a gradient that
counts twice, in the router or in the norm, reaches the weights. Batches are as in the other layouts' tests.
"""

from pathlib import Path

import pytest
import torch

from tests.support.layouts import EXPERTS as MODEL
from tests.support.layouts import SGD, Alone, Run, differences, hold_resumed, run_layout, same_expert_training, too_far
from trainer.source import Source

CASES = {
    "adamw": MODEL,
    "sgd": [*MODEL, *SGD],
    "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"],
    "capacity": [*MODEL, *SGD, "model.decoder.capacity_factor=0.5", "model.decoder.experts_per_token=1"],
    "on-both-stages": [*MODEL, *SGD, "model.decoder.depth=4", "model.decoder.expert_every=2"],
    "bf16": [*MODEL, "train.precision=bf16"],
    "recomputed": [*MODEL, "train.recompute.decoder=all"],
}
LAYOUTS = {"tensor2": (1, 1, 2, 1), "pipe2-tensor2": (2, 1, 2, 1), "tensor2-expert2": (1, 2, 2, 2)}
TOLERANCE = {"bf16": 3e-3}
MOMENTUM = [*SGD, "train.optim.momentum=0.9", "train.zero_stage=0"]
RELAYOUT_CASES = {"adamw": MODEL, "sgd-zero0": [*MODEL, *MOMENTUM], "bf16": [*MODEL, "train.precision=bf16"]}
HOME = (1, 2, 2, 2)
RELAYOUTS = {"one-process": (1, 1, 1, 1), "pipe2-tensor2": (2, 1, 2, 1), "expert4": (1, 4, 1, 4)}
SAVED, STEPS = 2, 3

Runs = dict[str, Run]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """Experts shared out over two ranks, each cut in two: checkpoints on the way and at the end, and the whole runs."""
    folder = tmp_path_factory.mktemp("home")
    folders = {key: f"{folder}/{key}/{{case}}" for key in ("checkpoints", "ends")}
    return folder, run_layout(folder, HOME, RELAYOUT_CASES, steps=STEPS, save_every=SAVED, **folders)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_and_reports_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    """And whatever several ranks hold is equal on them to the last bit."""
    runs, wanted = run_layout(tmp_path, LAYOUTS[layout], CASES), alone.runs(CASES)
    assert too_far(runs, wanted, TOLERANCE) == {}
    same_expert_training(runs, wanted)


@pytest.mark.parametrize("mesh", [(1, 1, 4, 1), (1, 4, 2, 2)], ids=["tensor4", "data4-tensor2-expert2"])
def test_the_gradient_norm_counts_every_parameter_once(alone: Alone, tmp_path: Path, mesh: tuple[int, ...]) -> None:
    cases = {"zero0": [*MODEL, *SGD, "train.zero_stage=0"], "zero1": [*MODEL, *SGD]}
    cases |= {"bf16": [*cases["zero1"], "train.precision=bf16"]}
    cases = {case: [*sets, "model.decoder.kv_heads=4"] for case, sets in cases.items()}
    whole, cut = alone.runs(cases, steps=1), run_layout(tmp_path, mesh, cases, steps=1)
    for case, tolerance in {"zero0": 1e-5, "zero1": 1e-5, "bf16": 1e-2}.items():
        assert cut[case].norms == pytest.approx(whole[case].norms, rel=tolerance), case


def test_ranks_without_a_single_token_keep_step_with_the_others(alone: Alone, tmp_path: Path) -> None:
    cases = {"adamw": MODEL, "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"]}
    assert too_far(run_layout(tmp_path, HOME, cases, plans="SILENT"), alone.runs(cases, plans="SILENT"), {}) == {}


def test_init_from_gives_every_rank_its_part_of_its_experts(tmp_path: Path) -> None:
    cases = {"case": [*MODEL, "train.init_from=start.safetensors"]}
    runs = [run_layout(tmp_path / str(i), mesh, cases, start_seed=99) for i, mesh in enumerate([(1, 1, 1), HOME])]
    assert max(differences(runs[1]["case"], runs[0]["case"])) <= 1e-5


def test_a_checkpoint_holds_whole_weights_as_trained(home: tuple[Path, Runs]) -> None:
    """What `export` reads, put together from the ranks' shares."""
    folder, runs = home
    for case, run in runs.items():
        source = Source(folder / "ends" / case / f"step-{STEPS:08d}")
        for name, array in run.weights.items():
            stored = source.whole(f"weight/{name}")
            kept = stored.bfloat16().float() if case == "bf16" else stored
            assert torch.equal(kept, torch.from_numpy(array)), (case, name)


def test_resume_continues_bit_for_bit(home: tuple[Path, Runs], tmp_path: Path) -> None:
    folder, unbroken = home
    saved = {"checkpoints": f"{folder}/checkpoints/{{case}}", "resume": True}
    hold_resumed(run_layout(tmp_path, HOME, RELAYOUT_CASES, steps=STEPS, **saved), unbroken, SAVED)


@pytest.mark.parametrize("layout", RELAYOUTS)
def test_a_checkpoint_goes_on_in_another_layout(home: tuple[Path, Runs], layout: str, tmp_path: Path) -> None:
    """As if it had never stopped; what was loaded is saved again at once, and is the same numbers bit for bit."""
    folder, unbroken = home
    folders = {"checkpoints": f"{folder}/checkpoints/{{case}}", "copies": f"{tmp_path}/copies/{{case}}"}
    resumed = run_layout(tmp_path, RELAYOUTS[layout], RELAYOUT_CASES, steps=STEPS, resume=True, **folders)
    for case, run in resumed.items():
        assert run.first == SAVED
        assert max(differences(run, unbroken[case])) <= TOLERANCE.get(case, 1e-5), case
        at = (folder / "checkpoints", tmp_path / "copies")
        saved, copy = (Source(each / case / f"step-{SAVED:08d}") for each in at)
        assert saved.keys() == copy.keys()
        assert all(torch.equal(saved.whole(key), copy.whole(key)) for key in saved.keys()), case  # noqa: SIM118
