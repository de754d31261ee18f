"""A run's folder belongs to one run at a time, and to none once its process is gone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError
from tests.support.ranks import ROOT
from trainer.run_folder import held

HOLDER = """
import sys, time
from pathlib import Path
from trainer.run_folder import held
with held(Path(sys.argv[1]), resume=True):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_in_a_folder_is_refused_by_the_name_of_the_first(tmp_path: Path, resume: bool) -> None:
    rule = rf"train.run_dir .* is written to by process {os.getpid()} on .*; stop it, or name another folder"
    with held(tmp_path / "run", resume=False), pytest.raises(ConfigError, match=rule), held(tmp_path / "run", resume):
        pass


def test_a_folder_is_free_once_its_run_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=f"process {first.pid} on"), held(tmp_path, resume=True):
            pass
        first.kill()
    with held(tmp_path, resume=True):
        assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = r"train.run_dir .* cannot be written \(Not a directory\)"
    with pytest.raises(ConfigError, match=words), held(tmp_path / "file" / "run", resume=False):
        pass
