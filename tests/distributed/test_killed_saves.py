"""`kill -9` at any moment loses nothing that was committed, and leaves nothing that could be taken for committed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ranks import ROOT
from tests.support.runs import run_file
from trainer.manifest import complete, verify

pytestmark = pytest.mark.slow

TORN, MOST_KILLS, VALUES, SEEN_S = 3, 12, 500_000, 10.0


def save_until_killed(config: Path, folder: Path, pause_s: float) -> int:
    """The last step that was told as committed, after a kill `pause_s` after a later save was seen under way."""
    task = json.dumps({"config": str(config), "values": VALUES})
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "MILLSTREAM_TASK": task, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    command = [sys.executable, "-m", "tests.support.save_program"]
    with subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline()]
        deadline = time.monotonic() + SEEN_S
        while not torn(folder) and time.monotonic() < deadline:
            pass
        time.sleep(pause_s)
        process.kill()
        told += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL
    return int([line for line in told if line.endswith("\n")][-1])


def test_a_save_killed_at_a_random_moment_costs_itself_alone(tmp_path: Path) -> None:
    config, draw, met = run_file(tmp_path, "part-{0..0}.tar", train={"keep": 2}), random.Random(0), 0
    folder = tmp_path / "run" / "checkpoints"
    for _ in range(MOST_KILLS):
        committed = save_until_killed(config, folder, draw.uniform(0.0, 0.02))
        met += torn(folder)
        assert verify(max(complete(folder))).step >= committed
        assert all(verify(path).step for path in complete(folder))
        if met == TORN:
            return
    raise AssertionError(f"only {met} of {MOST_KILLS} kills met a save")


def torn(folder: Path) -> bool:
    """Whether something lies there that is being written or deleted."""
    return any(folder.glob("step-*.*"))
