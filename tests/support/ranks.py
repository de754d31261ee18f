"""Run a small program in N real processes joined over gloo, and collect what each rank reports.

A program is a module with a `__main__` that reads its task from `$MILLSTREAM_TASK` (JSON) and writes
`<out>/rank-<r>.json`. Whatever happens, no process outlives the call.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class RanksFailed(AssertionError):
    """Some rank ended badly, or the time was up. `texts` are the ranks' outputs, `codes` their exit codes."""

    def __init__(self, codes: list[int | None], texts: list[str]) -> None:
        self.codes, self.texts = codes, texts
        super().__init__(f"exit codes {codes}\n" + "\n".join(f"--- rank {r}\n{t[-4000:]}" for r, t in enumerate(texts)))


def run_ranks(module: str, world: int, out: Path, task: dict[str, Any], timeout_s: float = 240.0) -> list[Any]:
    """Each rank's report, in order of rank.

    Raises:
        RanksFailed: a rank did not exit with 0 within `timeout_s`.
    """
    out.mkdir(parents=True, exist_ok=True)
    processes = start_ranks(module, world, out, task)
    try:
        codes = wait_ranks(processes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(code != 0 for code in codes):
        raise RanksFailed(codes, [(out / f"rank-{r}.log").read_text() for r in range(world)])
    return [json.loads((out / f"rank-{r}.json").read_text()) for r in range(world)]


def start_ranks(module: str, world: int, out: Path, task: dict[str, Any]) -> list["subprocess.Popen[bytes]"]:
    """The processes, started; each one's output goes to `<out>/rank-<r>.log`."""
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    shared |= {"MILLSTREAM_TASK": json.dumps(task), "MILLSTREAM_OUT": str(out)}
    processes = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with open(out / f"rank-{rank}.log", "wb") as log:
            command = [sys.executable, "-m", module]
            environment = {**os.environ, **shared, **own}
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=ROOT))
    return processes


def wait_ranks(processes: list["subprocess.Popen[bytes]"], timeout_s: float) -> list[int | None]:
    """Exit codes once all have ended, or one has failed, or the time is up (None: still running)."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if all(code is not None for code in codes) or any(codes):
            return codes
        time.sleep(0.05)
    return [process.poll() for process in processes]


def free_port() -> int:
    """A TCP port of the loopback that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
