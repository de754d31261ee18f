"""Expert parallelism, alone, in a pipeline and with replicas, trains as one process does.

Auxiliary losses are far larger here than anyone would set them, so that a wrong scale shows. Each layout is launched
once on real processes over gloo; three global batches each with every modality set, an empty pack and an empty
caption; clipping is always active, so that an error of the gradient norm reaches the weights.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from shared.config import load
from tests.support import packs
from tests.support.layouts import Run, differences, run_layout, too_far
from tests.support.ranks import run_ranks
from trainer.loss import token_loss
from trainer.models import build
from trainer.models.moe import weigh_losses
from trainer.source import Source

SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
EXPERTS = ["experts=4", "experts_per_token=2", "expert_mlp=64", "balance_loss=0.5", "router_z_loss=0.1"]
MODEL = [f"model.decoder.{each}" for each in EXPERTS]
CASES = {
    "adamw": MODEL,
    "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"],
    "capacity": [*MODEL, *SGD, "model.decoder.capacity_factor=0.5"],
    "on-both-stages": [*MODEL, *SGD, "model.decoder.depth=4", "model.decoder.expert_every=2"],
    "bf16": [*MODEL, "train.precision=bf16"],
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
def alone(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The reference: one process."""
    return run_layout(tmp_path_factory.mktemp("alone"), (1, 1, 1), CASES, steps=2)


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every case in one layout, weights merged; whatever several ranks hold is equal on them to the last bit."""
    return run_layout(tmp_path_factory.mktemp("layout"), LAYOUTS[request.param], CASES, steps=2)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """Two replicas of a pair that shares out the experts: checkpoints after two of three steps, and the whole runs."""
    folder = tmp_path_factory.mktemp("home")
    return folder, run_layout(
        folder, (1, 4, 1, 2), RELAYOUT_CASES, checkpoints=f"{folder}/saved/{{case}}", save_every=2
    )


@slow
def test_every_layout_trains_as_one_process_does(alone: Runs, layout: Runs) -> None:
    assert too_far(layout, alone, TOLERANCE) == {}


@slow
def test_every_layout_reports_what_one_process_does(alone: Runs, layout: Runs) -> None:
    for case, run in layout.items():
        tolerance = 2e-2 if case == "bf16" else 1e-5
        for ours, theirs in zip(run.experts, alone[case].experts, strict=True):
            assert ours and theirs
            ours_load, theirs_load = ours.pop("load"), theirs["load"]
            assert ours == pytest.approx({key: theirs[key] for key in ours}, rel=tolerance), case
            np.testing.assert_allclose(ours_load, theirs_load, rtol=tolerance)
            assert (ours["dropped_share"] > 0.3) is (case == "capacity")


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
    reports = run_ranks("tests.support.exchange_program", 2, tmp_path, EXCHANGES, timeout_s=120)
    assert all(report.keys() == EXCHANGES.keys() and max(report.values()) <= 1e-6 for report in reports)


@slow
def test_a_rank_without_a_single_token_keeps_step_with_the_others(tmp_path: Path) -> None:
    cases = {"adamw": MODEL, "sgd-zero0": [*MODEL, *SGD, "train.zero_stage=0"]}
    alone = run_layout(tmp_path / "alone", (1, 1, 1), cases, steps=2, plans="SILENT")
    shared = run_layout(tmp_path / "shared", (1, 2, 1, 2), cases, steps=2, plans="SILENT")
    for case in cases:
        assert max(differences(shared[case], alone[case])) <= 1e-5, case


@slow
@pytest.mark.parametrize(
    ("mesh", "precision", "zero"),
    [((1, 2, 1, 2), "fp32", 0), ((1, 4, 1, 2), "fp32", 1), ((2, 2, 1, 2), "bf16", 1)],
)
def test_resume_continues_bit_for_bit(tmp_path: Path, mesh: tuple[int, ...], precision: str, zero: int) -> None:
    cases = {"case": [*MODEL, f"train.precision={precision}", f"train.zero_stage={zero}"]}
    saved = {"checkpoints": str(tmp_path / "checkpoints")}
    unbroken = run_layout(tmp_path / "a", mesh, cases, **saved, save_every=2)["case"]
    resumed = run_layout(tmp_path / "b", mesh, cases, **saved, resume=True)["case"]
    assert resumed.first == 2
    assert (resumed.losses, resumed.norms) == (unbroken.losses[2:], unbroken.norms[2:])
    assert resumed.experts == unbroken.experts[2:]
    assert differences(resumed, unbroken).weights == 0


@slow
@pytest.mark.parametrize("layout", RELAYOUTS)
def test_a_checkpoint_goes_on_with_another_expert_degree(home: tuple[Path, Runs], layout: str, tmp_path: Path) -> None:
    """As if it had never stopped; what was loaded is saved again at once, and is the same numbers bit for bit."""
    folder, unbroken = home
    folders = {"checkpoints": f"{folder}/saved/{{case}}", "copies": f"{tmp_path}/copies/{{case}}"}
    for case, run in run_layout(tmp_path, RELAYOUTS[layout], RELAYOUT_CASES, **folders, resume=True).items():
        assert run.first == 2
        assert max(differences(run, unbroken[case])) <= TOLERANCE.get(case, 1e-5), case
        saved, copy = (Source(at / case / "step-00000002") for at in (folder / "saved", tmp_path / "copies"))
        assert saved.keys() == copy.keys()
        assert all(torch.equal(saved.whole(key), copy.whole(key)) for key in saved.keys()), case  # noqa: SIM118
