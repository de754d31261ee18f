"""A trainer that is told to pass over steps: its step numbers stay those of the global batches, also when resumed."""

import re
from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.trainers import Trainer, consumed, verify

pytestmark = pytest.mark.slow

FIRST, BOTH = "data.skip_steps=[[2, 4]]", "data.skip_steps=[[2, 4], [6, 9]]"


def test_skipped_steps_leave_gaps_in_the_logs_and_nothing_else(tmp_path: Path) -> None:
    path, _ = make_run(tmp_path, samples=96, shards=4)
    run = tmp_path / "run"
    with serving(path, "--set", FIRST) as daemon:
        Trainer(path, run, "--set", FIRST, "--set=train.steps=6").finish()
    with serving(path, "--set", BOTH):
        trainer = Trainer(path, run, "--set", BOTH, "--set=train.steps=11", "--resume").finish()
    assert [line["step"] for line in trainer.steps()] == [0, 1, 4, 5, 9, 10]
    first_epoch = int(re.findall(r"(\d+) steps an epoch", daemon.log)[0])
    places = {(epoch, step) for epoch, step, _, _ in consumed(run)}
    assert sorted(epoch * first_epoch + step for epoch, step in places) == [0, 1, 4, 5, 9, 10]
    assert sorted(p.name for p in (run / "checkpoints").glob("step-*")) == ["step-00000006", "step-00000011"]
    assert "passing over 3 of the steps from 6 on" in trainer.log
    proof = verify(path, run, "--set", BOTH)
    assert proof.returncode == 0, proof.stdout + proof.stderr
    assert "passed over on request: 5 steps" in proof.stdout
