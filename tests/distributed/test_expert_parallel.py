"""Expert parallelism, alone, in a pipeline and with replicas, trains as one process does.

Auxiliary losses are far larger here than anyone would set them, so that a wrong scale shows. Each layout is launched
once on real processes over gloo; two global batches each with every modality set, an empty pack and an empty
caption; clipping is always active, so that an error of the gradient norm reaches the weights.
"""

from pathlib import Path

import pytest
import torch
from torch import nn

from shared.config import load
from tests.support import packs
from tests.support.layouts import EXPERTS as MODEL
from tests.support.layouts import SGD, Alone, Run, differences, hold_resumed, run_layout, same_expert_training, too_far
from tests.support.ranks import run_ranks
from trainer.loss import token_loss
from trainer.models import build
from trainer.models.moe import weigh_losses
from trainer.source import Source

CASES = {
    "adamw": MODEL,
    "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"],
    "capacity": [*MODEL, *SGD, "model.decoder.capacity_factor=0.5"],
    "on-both-stages": [*MODEL, *SGD, "model.decoder.depth=4", "model.decoder.expert_every=2"],
    "bf16": [*MODEL, "train.precision=bf16", "mesh.expert_backend=gloo"],
    "recomputed": [*MODEL, "train.recompute.decoder=all"],
    "frozen": [*MODEL, "train.freeze=[decoder]"],
}
"""Cut in two, the model has all its experts on the second stage but for `on-both-stages`."""
LAYOUTS = {
    "pipe2": (2, 1, 1, 1),
    "expert2": (1, 2, 1, 2),
    "pipe2-expert2": (2, 2, 1, 2),
    "data4-expert2": (1, 4, 1, 2),
}
TOLERANCE = {"bf16": 3e-3}
MOMENTUM = [*SGD, "train.optim.momentum=0.9", "train.zero_stage=0"]
RELAYOUT_CASES = {"adamw": MODEL, "sgd-zero0": [*MODEL, *MOMENTUM], "bf16": [*MODEL, "train.precision=bf16"]}
HOME = (1, 4, 1, 2)
SAVED, STEPS = 2, 3
RELAYOUTS = {"one-process": (1, 1, 1, 1), "pipe2-expert2": (2, 2, 1, 2), "expert4": (1, 4, 1, 4)}
EXCHANGES = {
    "mixed": [[0, 1, 1, 2, 3, 3], [0, 2, 2, 3]],
    "all to one rank": [[0, 0, 1], [1, 1, 1]],
    "one rank without rows": [[0, 2, 3], []],
    "nobody has rows": [[], []],
    "one expert": [[3, 3], [3]],
}

Runs = dict[str, Run]
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """Two replicas of a pair that shares out the experts: checkpoints after two of three steps, and the whole runs."""
    folder = tmp_path_factory.mktemp("home")
    return folder, run_layout(
        folder, HOME, RELAYOUT_CASES, steps=STEPS, checkpoints=f"{folder}/saved/{{case}}", save_every=SAVED
    )


@slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_and_reports_as_one_process_does(alone: Alone, layout: str, tmp_path: Path) -> None:
    """And whatever several ranks hold is equal on them to the last bit."""
    runs, wanted = run_layout(tmp_path, LAYOUTS[layout], CASES), alone.runs(CASES)
    assert too_far(runs, wanted, TOLERANCE) == {}
    same_expert_training(runs, wanted)


@slow
def test_the_engines_gradient_is_that_of_the_losses_added_up(tmp_path: Path) -> None:
    """Against plain autograd over loss + auxiliary losses, where nothing knows of accumulation."""
    cases = {"zero0": [*MODEL, *SGD, "train.zero_stage=0", "train.optim.clip=0"], "zero1": [*MODEL, *SGD]}
    runs = run_layout(tmp_path, (1, 1, 1), cases, steps=1)
    config = load(tmp_path / "run.yaml", cases["zero0"])
    model = build.build(config, "sdpa")
    batches = packs.global_batch(config, packs.MIXED, seed=0)
    for inputs, targets in batches:
        (token_loss(model(inputs), *targets) / len(batches)).backward()
    without = norm_of(model)
    model.zero_grad()
    weigh_losses(model, 1 / len(batches))
    for inputs, targets in batches:
        (token_loss(model(inputs), *targets) / len(batches)).backward()
    wanted = norm_of(model)
    assert [run.norms[0] for run in runs.values()] == pytest.approx([wanted, wanted], rel=1e-5)
    assert wanted != pytest.approx(without, rel=1e-2)


def norm_of(model: nn.Module) -> float:
    """2-norm of all gradients."""
    squares = [p.grad.square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def test_rows_find_their_experts_whoever_has_none(tmp_path: Path) -> None:
    reports = run_ranks("tests.support.exchange_program", 2, tmp_path, {"cases": EXCHANGES}, timeout_s=120)
    assert all(report.keys() == EXCHANGES.keys() and max(report.values()) <= 1e-6 for report in reports)


@slow
def test_a_rank_without_a_single_token_keeps_step_with_the_others(alone: Alone, tmp_path: Path) -> None:
    cases = {"adamw": MODEL, "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"]}
    shared = run_layout(tmp_path, (1, 2, 1, 2), cases, plans="SILENT")
    assert too_far(shared, alone.runs(cases, plans="SILENT"), {}) == {}


@slow
def test_resume_continues_bit_for_bit(home: tuple[Path, Runs], tmp_path: Path) -> None:
    folder, unbroken = home
    saved = {"checkpoints": f"{folder}/saved/{{case}}", "resume": True}
    hold_resumed(run_layout(tmp_path, HOME, RELAYOUT_CASES, steps=STEPS, **saved), unbroken, SAVED)


@slow
def test_a_pipeline_with_shared_out_experts_resumes_bit_for_bit(tmp_path: Path) -> None:
    mesh, cases = (2, 2, 1, 2), {"bf16": RELAYOUT_CASES["bf16"]}
    saved = {"checkpoints": f"{tmp_path}/saved/{{case}}", "steps": STEPS}
    unbroken = run_layout(tmp_path / "a", mesh, cases, save_every=SAVED, **saved)
    hold_resumed(run_layout(tmp_path / "b", mesh, cases, resume=True, **saved), unbroken, SAVED)


@slow
@pytest.mark.parametrize("layout", RELAYOUTS)
def test_a_checkpoint_goes_on_with_another_expert_degree(home: tuple[Path, Runs], layout: str, tmp_path: Path) -> None:
    """As if it had never stopped; what was loaded is saved again at once, and is the same numbers bit for bit."""
    folder, unbroken = home
    folders = {"checkpoints": f"{folder}/saved/{{case}}", "copies": f"{tmp_path}/copies/{{case}}"}
    resumed = run_layout(tmp_path, RELAYOUTS[layout], RELAYOUT_CASES, steps=STEPS, resume=True, **folders)
    for case, run in resumed.items():
        assert run.first == SAVED
        assert max(differences(run, unbroken[case])) <= TOLERANCE.get(case, 1e-5), case
        saved, copy = (Source(at / case / f"step-{SAVED:08d}") for at in (folder / "saved", tmp_path / "copies"))
        assert saved.keys() == copy.keys()
        assert all(torch.equal(saved.whole(key), copy.whole(key)) for key in saved.keys()), case  # noqa: SIM118
