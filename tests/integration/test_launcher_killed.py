"""A launcher that is killed leaves no rank behind: they save, end, and the run goes on where it was."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.support.daemons import make_run, serving
from tests.support.trainers import Trainer, rank_processes, verify
from trainer.launchers import is_launcher, launchers

GONE_S = 60.0
STEPS = 40


def test_a_shell_and_a_test_are_no_launchers() -> None:
    assert not is_launcher(os.getpid())
    assert list(launchers(os.getpid())) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_ranks_save_and_end_when_a_launcher_above_them_is_killed(tmp_path: Path, place: int) -> None:
    config, _ = make_run(tmp_path, samples=48, shards=2)
    sets = ("--set=mesh.data=2", f"--set=train.steps={STEPS}")
    with serving(config):
        trainer = Trainer(config, tmp_path / "run", *sets, world=2)
        trainer.wait_step(2)
        group, ranks = trainer.process.pid, rank_processes(trainer.process.pid)
        above = list(launchers(parent(ranks[0])))
        assert above[1] == group
        os.kill(above[place], signal.SIGKILL)
        deadline = time.monotonic() + GONE_S
        while rank_processes(group):
            assert time.monotonic() < deadline, trainer.log
            time.sleep(0.05)
        trainer.process.wait(GONE_S)
        done = len(trainer.steps())
        assert 2 <= done < STEPS, trainer.log
        assert (tmp_path / "run" / "checkpoints" / f"step-{done:08d}").is_dir(), trainer.log
        again = Trainer(config, tmp_path / "run", *sets, f"--set=train.steps={done + 2}", "--resume", world=2).finish()
    assert [line["step"] for line in again.steps()] == list(range(done + 2))
    shown = verify(config, tmp_path / "run")
    assert shown.returncode == 0, shown.stdout


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
