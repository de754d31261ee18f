"""The command line: launchers' arguments, exit codes, and errors in one line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import CheckpointError, ConfigError, LoaderTimeout, ProtocolError, ShardError
from tests.support.runs import run_file
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


def run(*arguments: str, **more: str) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | more
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


REFUSED = [
    (["mesh.pipe=2", "train.zero_stage=2"], r"train.zero_stage (2) cannot run with pipeline parallelism"),
    (["mesh.pipe=2", "train.zero_stage=3"], r"train.zero_stage (3) cannot run with pipeline parallelism"),
    (["mesh.pipe=2"], "must equal the number of processes, 1; launch 2 processes"),
    (["train.precision=bf16", "train.zero_stage=0"], "train.zero_stage (0) cannot run with train.precision bf16"),
]


@pytest.mark.parametrize(("overrides", "text"), REFUSED)
def test_layouts_that_go_wrong_deep_inside_are_refused_at_the_start(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    config = run_file(tmp_path, "part-{0..0}.tar")
    done = run("train", "--config", str(config), *(part for key in overrides for part in ("--set", key)))
    assert done.returncode == 2, done.stderr
    assert text in done.stderr


def test_another_runs_checkpoints_are_not_overwritten(tmp_path: Path) -> None:
    config = run_file(tmp_path, "part-{0..0}.tar")
    (tmp_path / "run" / "checkpoints" / "step-00000004").mkdir(parents=True)
    done = run("train", "--config", str(config))
    assert done.returncode == 2, done.stderr
    assert "already holds checkpoints of a run; continue it with --resume" in done.stderr


def test_a_run_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    config = run_file(tmp_path, "part-{0..0}.tar")
    done = run("train", "--config", str(config), f"--set=train.run_dir={config}/run")
    assert done.returncode == 2, done.stderr
    assert done.stderr == (
        f"millstream-trainer: train.run_dir ({config}/run) cannot be written (Not a directory); "
        "make room and rights for it there, or name another place\n"
    )


def test_a_port_that_another_run_has_is_refused_by_number(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        config = run_file(tmp_path, "part-{0..0}.tar")
        done = run("train", "--config", str(config), "--set=mesh.data=2", **ranks)
    assert done.returncode == 2, done.stderr
    assert f"MASTER_ADDR:MASTER_PORT (127.0.0.1:{port}) is no place for the ranks to meet" in done.stderr
    assert "EADDRINUSE" in done.stderr and done.stderr.endswith("give the launcher another --master_port\n")
    assert "Traceback" not in done.stderr
