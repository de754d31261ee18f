"""Start real trainers as a user does, through the `deepspeed` launcher or torchrun, and read what they leave."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

from tests.support.ports import free_port
from tests.support.ranks import ROOT

TRAIN_S = 240.0

Launcher = Literal["deepspeed", "torchrun"]
LAUNCHERS: dict[Launcher, tuple[str, ...]] = {
    "deepspeed": ("deepspeed.launcher.runner", "--num_gpus={world}", "--master_port={port}", "--module"),
    "torchrun": ("torch.distributed.run", "--nproc_per_node={world}", "--master_port={port}", "-m"),
}


class Trainer:
    """One launched run over `world` processes; its output is in `log`."""

    def __init__(
        self,
        config_path: Path,
        run_dir: Path,
        *flags: str,
        world: int = 1,
        launcher: Launcher = "deepspeed",
        command: str = "train",
    ) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = run_dir / f"trainer-{time.monotonic_ns()}.log"
        port = free_port()
        launch = [sys.executable, "-m", *(word.format(world=world, port=port) for word in LAUNCHERS[launcher])]
        launch += ["trainer", command, "--config", str(config_path)]
        environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        words = [*launch, "--set", f"train.run_dir={run_dir}", *flags]
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def steps(self) -> list[dict[str, Any]]:
        """The metrics log, a dict a step."""
        return lines(self.run_dir / "metrics.jsonl")

    def wait_step(self, count: int) -> None:
        """Until `count` steps are logged."""
        deadline = time.monotonic() + TRAIN_S
        while len(self.steps()) < count:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def wait_checkpoint(self, step: int) -> None:
        """Until the checkpoint after `step` steps is committed."""
        deadline = time.monotonic() + TRAIN_S
        while not (self.run_dir / "checkpoints" / f"step-{step:08d}").exists():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.01)

    def finish(self) -> "Trainer":
        """Wait for the end, which must be a good one."""
        assert self.process.wait(TRAIN_S) == 0, self.log
        return self

    def stop(self) -> "Trainer":
        """SIGTERM to the ranks (the launcher itself would answer it by killing them), and a good end."""
        for pid in rank_processes(self.process.pid).values():
            os.kill(pid, signal.SIGTERM)
        return self.finish()

    def kill_rank(self, rank: int) -> None:
        """SIGKILL to one rank."""
        os.kill(rank_processes(self.process.pid)[rank], signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to every process of the run."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(TRAIN_S)


def rank_processes(group: int) -> dict[int, int]:
    """Process ids by rank: processes of the group that run the trainer and were told a rank."""
    found: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            pid, told = int(folder.name), (folder / "environ").read_bytes().split(b"\0")
            ranks = [int(word[5:]) for word in told if word.startswith(b"RANK=")]
            if ranks and os.getpgid(pid) == group and b"\0trainer\0" in (folder / "cmdline").read_bytes():
                found[ranks[0]] = pid
    return found


def verify(config: Path, run_dir: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    """`millstream-loader verify` over the run's consumed logs."""
    command = [sys.executable, "-m", "dataloader_svc", "verify", "--config", str(config)]
    command += ["--consumed", str(run_dir), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a JSON-lines file; [] where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def consumed(run_dir: Path) -> dict[tuple[int, int, int, int], tuple[Any, ...]]:
    """What the run's weights have seen: (epoch, step, micro, data rank) -> (batch id, sample ids, checksum)."""
    return {
        (x["epoch"], x["step"], x["micro"], x["data_rank"]): (x["batch_id"], tuple(x["sample_ids"]), x["checksum"])
        for path in sorted(run_dir.glob("consumed-*.jsonl"))
        for x in lines(path)
    }


def global_batches(run_dir: Path) -> dict[tuple[int, int], list[Any]]:
    """What each global batch held, whichever rank read it: (epoch, step) -> sorted (batch id, sample ids, checksum)."""
    found: dict[tuple[int, int], list[Any]] = {}
    for (epoch, step, _, _), seen in sorted(consumed(run_dir).items()):
        found.setdefault((epoch, step), []).append(seen)
    return {place: sorted(batches) for place, batches in found.items()}
