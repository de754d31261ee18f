"""Run a small program in N real processes joined over gloo, and collect what each rank reports.

A program is a module with a `__main__` that reads its task from `$MILLSTREAM_TASK` (JSON) and writes
`<out>/rank-<r>.json`. Ranks are forked from a server that has the libraries imported and nothing of ours, which would
cost each of them seconds. Whatever happens, no process outlives the call.
"""

import functools
import gc
import json
import multiprocessing
import os
import runpy
import time
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
LIBRARIES = ["torch", "torch._dynamo", "deepspeed", "deepspeed.moe.layer", "deepspeed.pipe", "safetensors.torch"]
LIBRARIES += [
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "msgspec",
    "prometheus_client",
    "rich.table",
    "xxhash",
    "yaml",
]
"""With what torch and DeepSpeed import at the first optimizer: the compiler, most of a rank's start."""

AROUND = {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}


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
        kill_ranks(processes)
    if any(code != 0 for code in codes):
        raise RanksFailed(codes, [(out / f"rank-{r}.log").read_text() for r in range(world)])
    return [json.loads((out / f"rank-{r}.json").read_text()) for r in range(world)]


def start_ranks(module: str, world: int, out: Path, task: dict[str, Any]) -> list[ForkServerProcess]:
    """The processes, started; each one's output goes to `<out>/rank-<r>.log`."""
    shared = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT)}
    shared |= {"MILLSTREAM_TASK": json.dumps(task), "MILLSTREAM_OUT": str(out), **AROUND}
    context, processes = server(), []
    for rank in range(world):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=run_rank, args=(module, environment, str(out / f"rank-{rank}.log")))
        process.start()
        processes.append(process)
    return processes


@functools.cache
def server() -> ForkServerContext:
    """The server that ranks are forked from, with AROUND in force when it imports; it ends with this process."""
    context, before = multiprocessing.get_context("forkserver"), dict(os.environ)
    context.set_forkserver_preload(LIBRARIES)
    os.environ.update(AROUND)
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def run_rank(module: str, environment: dict[str, str], log: str) -> None:
    """In the forked process: become a rank. DeepSpeed collects garbage for each engine; libraries are none."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with open(log, "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wait_ranks(processes: list[ForkServerProcess], timeout_s: float, *, patient: bool = False) -> list[int | None]:
    """Exit codes once all have ended, or (unless `patient`) one has failed, or the time is up (None: still running)."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        codes = [process.exitcode for process in processes]
        if None not in codes or (any(codes) and not patient):
            return codes
        time.sleep(0.05)
    return [process.exitcode for process in processes]


def kill_ranks(processes: list[ForkServerProcess]) -> None:
    """None of them is left."""
    for process in processes:
        process.kill()
        process.join()
        process.close()
