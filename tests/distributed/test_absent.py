"""Whatever is absent on a rank, or on all of them, every rank ends the step, with the numbers of one process.

Absent are pictures and clips on one of two data ranks, on both, and tokens for an expert; each at every ZeRO stage,
where gathering and reducing would wait for ever for a rank that left something out. Where a rank lacks a whole
micro-batch, all of them end.
"""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from shared.config import load
from tests.support.layouts import SGD, Alone, Run, differences, run_layout
from tests.support.ranks import kill_ranks, start_ranks, wait_ranks
from tests.support.runs import run_file
from trainer.models import build

STAGES = {f"zero{stage}": [*SGD, f"train.zero_stage={stage}"] for stage in range(4)} | {"adamw": ["train.zero_stage=3"]}
EXPERTS = ["experts=4", "experts_per_token=1", "expert_mlp=64", "balance_loss=0", "router_z_loss=0"]
UNCHOSEN = 3

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 1)], ids=["data2", "pipe2-data2"])
@pytest.mark.parametrize("plans", ["LOPSIDED", "WORDS"])
def test_a_step_without_pictures_and_clips_is_that_of_one_process(
    alone: Alone, tmp_path: Path, plans: str, mesh: tuple[int, int, int]
) -> None:
    cases = {name: sets for name, sets in STAGES.items() if mesh[0] == 1 or name in ("zero0", "zero1")}
    wanted = alone.runs({"adamw": STAGES["adamw"], "zero0": STAGES["zero0"]}, plans=plans)
    for case, run in run_layout(tmp_path, mesh, cases, plans=plans).items():
        assert max(differences(run, wanted["adamw" if case == "adamw" else "zero0"])) <= 1e-5, case


def start_without(folder: Path) -> list[str]:
    """Sets of a model whose last expert no token chooses: its logit is the mean of the others', never the largest."""
    folder.mkdir()
    sets = [*(f"model.decoder.{each}" for each in EXPERTS), "train.optim.weight_decay=0"]
    state = build.build(load(run_file(folder, "part-{0..0}.tar"), sets), "sdpa").state_dict()
    for name, router in state.items():
        if name.endswith(".router.weight"):
            router[UNCHOSEN] = router[:UNCHOSEN].mean(0)
    save_file(state, folder / "start.safetensors")
    return [*sets, f"train.init_from={folder / 'start.safetensors'}"]


def loads(run: Run) -> list[float]:
    """Shares of tokens that chose the last expert, of every step and block."""
    return [shares[UNCHOSEN] for step in run.experts if step for shares in step["load"]]


@pytest.mark.parametrize("expert", [1, 2])
def test_an_expert_that_no_token_chooses_gets_zeros_and_holds_nobody_up(tmp_path: Path, expert: int) -> None:
    sets = start_without(tmp_path / "start")
    cases = {name: [*sets, *each] for name, each in STAGES.items() if expert == 1 or name in ("zero0", "zero1")}
    alone = run_layout(tmp_path / "alone", (1, 1, 1), {"zero0": cases["zero0"]})["zero0"]
    start = load_file(tmp_path / "start" / "start.safetensors")
    assert loads(alone) == [0.0] * 4
    for case, run in run_layout(tmp_path / "shared", (1, 2, 1, expert), cases).items():
        if case != "adamw":
            assert max(differences(run, alone)) <= 1e-5, case
            assert loads(run) == [0.0] * 4
            for name in (f"{block}.experts.{matrix}" for block in (1, 2) for matrix in ("gate", "up", "down")):
                assert np.array_equal(run.weights[name][UNCHOSEN], start[name][UNCHOSEN].numpy()), (case, name)
                assert not np.array_equal(run.weights[name], start[name].numpy()), (case, name)


@pytest.mark.parametrize("axis", ["data", "pipe"])
def test_a_loader_that_ends_on_one_rank_ends_all_of_them(tmp_path: Path, axis: str) -> None:
    """Long before a collective would time out, at 2 `train.wait_s` and a minute."""
    config = run_file(tmp_path, "part-{0..0}.tar", train={"wait_s": 600})
    task = {"config": str(config), "sets": [f"mesh.{axis}=2"], "unlike": False, "short": True}
    processes = start_ranks("tests.support.unlike_program", 2, tmp_path, task)
    try:
        codes = wait_ranks(processes, 240, patient=True)
    finally:
        kill_ranks(processes)
    assert None not in codes and 0 not in codes
    assert "the loader ended its stream" in (tmp_path / "rank-1.log").read_text()
