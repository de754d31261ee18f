"""The examples, run as a user runs them, against a real daemon; those with checkpoints resume to the last digit."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.config import endpoint
from shared.sections import RunConfig
from tests.support.daemons import ROOT, make_run, serving

pytestmark = pytest.mark.slow

STEPS = 8


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunConfig]:
    """A run with a daemon up."""
    path, config = make_run(tmp_path_factory.mktemp("run"))
    with serving(path):
        yield config


def run_example(name: str, folder: Path, config: RunConfig, *arguments: str) -> list[str]:
    """What it prints, line by line."""
    command = [sys.executable, str(ROOT / "examples" / name), endpoint(config), str(STEPS), config.job, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def test_lightning_goes_on_from_its_checkpoint_at_the_very_next_batch(config: RunConfig, tmp_path: Path) -> None:
    unbroken = run_example("lightning_module.py", tmp_path, config)
    assert len(unbroken) == STEPS * config.data.batch.micro_batches
    resumed = run_example("lightning_module.py", tmp_path, config, "lightning/step=4.ckpt")
    assert resumed == unbroken[-len(resumed) :]
    assert len(resumed) == (STEPS - 4) * config.data.batch.micro_batches


def test_the_transformers_trainer_goes_on_from_its_checkpoint_at_the_very_next_batch(
    config: RunConfig, tmp_path: Path
) -> None:
    run_example("hf_trainer.py", tmp_path, config)
    unbroken = history(tmp_path / "hf" / f"checkpoint-{STEPS}")
    assert len(unbroken) == STEPS and unbroken[-1][0] < unbroken[0][0]
    shutil.rmtree(tmp_path / "hf" / f"checkpoint-{STEPS}")
    run_example("hf_trainer.py", tmp_path, config, "hf/checkpoint-4")
    assert history(tmp_path / "hf" / f"checkpoint-{STEPS}") == unbroken


def history(checkpoint: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step."""
    log = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    return [(line["loss"], line["grad_norm"]) for line in log]
