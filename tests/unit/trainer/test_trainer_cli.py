"""The command line: launchers' arguments, exit codes, and errors in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import CheckpointError, ConfigError, LoaderTimeout, ProtocolError, ShardError
from trainer.cli import exit_code, without_local_rank


def test_a_launchers_local_rank_is_dropped_wherever_it_stands() -> None:
    assert without_local_rank(["--local_rank=3", "train", "--config", "x"]) == ["train", "--config", "x"]
    assert without_local_rank(["train", "--local-rank=0", "--resume"]) == ["train", "--resume"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", 1, "b", "c"), 2),
        (ShardError("x"), 3),
        (ProtocolError("x"), 3),
        (LoaderTimeout("x"), 3),
        (CheckpointError("x"), 4),
    ],
)
def test_an_exit_code_tells_the_kind(error: Exception, code: int) -> None:
    assert exit_code(error) == code


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-m", "trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_a_missing_run_file_is_one_line_and_code_2(tmp_path: Path) -> None:
    done = run("train", "--config", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert done.stderr.startswith("millstream-trainer: config (")
    assert done.stderr.count("\n") == 1


def test_a_folder_that_is_no_checkpoint_is_code_4(tmp_path: Path) -> None:
    done = run("--local_rank=0", "verify-checkpoint", str(tmp_path))
    assert done.returncode == 4
    assert "manifest.json cannot be read" in done.stderr
