"""The main job with experts: two trainers under `deepspeed` that share them out, and one daemon."""

from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.trainers import Trainer, global_batches

pytestmark = pytest.mark.slow

STEPS = 3
DECODER = {"experts": 4, "experts_per_token": 2, "expert_every": 2, "expert_mlp": 48, "capacity_factor": 1.0}


def test_two_ranks_that_share_experts_train_and_report_as_one_process(tmp_path: Path) -> None:
    config_path, _ = make_run(tmp_path, samples=96, shards=4, model={"decoder": DECODER})
    flags = (f"--set=train.steps={STEPS}",)
    runs = {}
    for name, world, degrees in (("shared", 2, ("--set=mesh.data=2", "--set=mesh.expert=2")), ("alone", 1, ())):
        with serving(config_path):
            runs[name] = Trainer(config_path, tmp_path / name, *flags, *degrees, world=world).finish()
    shared, alone = (runs[name].steps() for name in ("shared", "alone"))
    assert len(shared) == len(alone) == STEPS
    for ours, theirs in zip(shared, alone, strict=True):
        for key in ("loss", "grad_norm"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5)
        for key in ("balance_loss", "router_z_loss", "load_max", "dropped_share"):
            assert ours["experts"][key] == pytest.approx(theirs["experts"][key], rel=1e-5, abs=1e-7), key
        assert [len(block) for block in ours["experts"]["load"]] == [4]
    assert global_batches(runs["shared"].run_dir) == global_batches(runs["alone"].run_dir)
