"""The other commands: index, verify, top; and exit codes."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dataloader_svc import top
from dataloader_svc.cli import exit_code
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.plan import Planner
from dataloader_svc.shards import expand
from shared.batch import Cursor
from shared.errors import ConfigError, DataError, ProtocolError, ShardError, TooManyBadSamples
from tests.support.daemons import ROOT, make_run, make_run_file
from tests.support.media import write_dataset, write_tar


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "dataloader_svc", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_index_shows_shards_problems_groups_and_padding(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", 24, 2)
    write_tar(tmp_path / "data" / "bad.tar", [("a.jpg", b"<html>"), ("a.txt", b"x")])
    path, _ = make_run_file(tmp_path)
    shown = run("index", "--config", str(path))
    assert shown.returncode == 0, shown.stderr
    for word in (
        "shards",
        "with image and audio",
        "junk_image",
        "Padding",
        "text",
        "Slots left empty",
        "before balancing",
    ):
        assert word in shown.stdout


def test_index_shows_what_is_wrong_where_no_sample_is_good(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_tar(tmp_path / "data" / "bad.tar", [("a.jpg", b"<html>"), ("a.txt", b"x")])
    path, _ = make_run_file(tmp_path)
    shown = run("index", "--config", str(path))
    assert shown.returncode == 2
    assert "junk_image" in shown.stdout
    assert "good samples, 0" in shown.stderr


def test_a_ready_file_that_cannot_be_written_is_refused_by_name_and_leaves_nothing(tmp_path: Path) -> None:
    path, config = make_run(tmp_path, 8, 1)
    shown = run("serve", "--config", str(path), "--ready-file", str(path / "ready"))
    assert shown.returncode == 2
    assert f"--ready-file ({path}/ready) cannot be written (Not a directory)" in shown.stderr
    assert list((tmp_path / "shm").iterdir()) == []
    assert not Path(config.loader.endpoint.removeprefix("ipc://")).exists()


def test_keys_that_cannot_be_written_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    shown = run("keys", str(tmp_path / "file" / "keys"))
    assert shown.returncode == 2
    assert "cannot be written (Not a directory)" in shown.stderr


def test_an_unknown_key_is_refused_in_one_line_with_the_nearest_name(tmp_path: Path) -> None:
    path, _ = make_run(tmp_path, 8, 1)
    shown = run("serve", "--config", str(path), "--set", "loader.wrokers=2")
    assert shown.returncode == 2
    assert shown.stderr.count("\n") == 1
    assert "did you mean workers?" in shown.stderr


def test_every_command_teaches_by_example() -> None:
    for command in ("serve", "index", "top", "verify"):
        assert f"millstream-loader {command}" in run(command, "--help").stdout.replace("\n", " ")


def test_top_without_a_daemon_says_so() -> None:
    shown = run("top", "--once", "--url", "http://127.0.0.1:9/metrics")
    assert shown.returncode == 5
    assert "is the daemon running" in shown.stderr


def test_errors_have_their_exit_codes() -> None:
    codes = [exit_code(e) for e in (ConfigError("a", 1, "b", "c"), ShardError("x"), DataError("x"))]
    assert codes == [2, 3, 3]
    assert exit_code(TooManyBadSamples("x")) == 4
    assert exit_code(ProtocolError("x")) == 5


def test_quantiles_are_those_of_promql() -> None:
    cumulative = {0.1: 0.0, 0.5: 50.0, 1.0: 90.0, math.inf: 100.0}
    assert top.quantile(0.5, cumulative) == pytest.approx(0.5)
    assert top.quantile(0.25, cumulative) == pytest.approx(0.3)
    assert top.quantile(0.99, cumulative) == 1.0
    assert math.isnan(top.quantile(0.5, {1.0: 0.0, math.inf: 0.0}))


class Logs:
    """What a trainer of `ranks` ranks would log over the first `steps` steps."""

    def __init__(self, folder: Path, ranks: int, steps: int = 4) -> None:
        self.path, self.config = make_run(folder)
        shards = expand(self.config.data.datasets, "fail")
        build(shards, self.config.data, None)
        planner = Planner(self.config.data, Index.open(shards, self.config.data, None))
        self.folder, self.ranks = folder, ranks
        self.lines: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        for step in range(steps):
            for micro in range(self.config.data.batch.micro_batches // ranks):
                for rank in range(ranks):
                    pack = planner.pack(Cursor(0, step, micro), rank, ranks)
                    place = {"epoch": 0, "step": step, "micro": micro, "data_rank": rank, "data_ranks": ranks}
                    facts = {"batch_id": pack.batch_id, "sample_ids": pack.sample_ids, "substituted": 0}
                    self.lines[rank].append({**place, **facts})

    def verify(self) -> "subprocess.CompletedProcess[str]":
        arguments = ["verify", "--config", str(self.path)]
        for rank, lines in enumerate(self.lines):
            path = self.folder / f"consumed-{rank}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            arguments += ["--consumed", str(path)]
        return run(*arguments)


@pytest.mark.parametrize("ranks", [1, 2])
def test_verify_proves_a_whole_run(tmp_path: Path, ranks: int) -> None:
    shown = Logs(tmp_path, ranks).verify()
    assert shown.returncode == 0, shown.stdout + shown.stderr
    assert "clean: every planned sample once" in shown.stdout


def test_verify_takes_a_second_readers_log_for_the_same_reading(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 1)
    logs.lines.append(list(logs.lines[0]))
    assert logs.verify().returncode == 0


def test_verify_finds_what_was_lost(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 2)
    del logs.lines[1][2]
    shown = logs.verify()
    assert shown.returncode == 1
    assert "NOT clean" in shown.stdout


def test_verify_finds_what_was_repeated(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 1)
    logs.lines[0].append(logs.lines[0][1])
    assert logs.verify().returncode == 1


def test_verify_finds_what_the_plan_does_not_know(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 1)
    logs.lines[0][3]["batch_id"] = "e0-s0-p3-00000000"
    assert logs.verify().returncode == 1


def test_verify_finds_a_sample_in_the_wrong_batch(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 1)
    logs.lines[0][1]["sample_ids"] = logs.lines[0][0]["sample_ids"]
    assert logs.verify().returncode == 1


def test_verify_refuses_a_log_that_is_none(tmp_path: Path) -> None:
    logs = Logs(tmp_path, 1)
    logs.lines[0][2] = {"step": 1}
    shown = logs.verify()
    assert shown.returncode == 3
    assert "line 3" in shown.stderr
