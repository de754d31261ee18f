"""Where a GPU worker's time goes: `python -m tests.bench.loader_gpu.inside [OUT.md]`, under a minute on a GPU.

One worker's fill path in this process, without daemon or reader: tasks of a real plan over the tars of `dataset.py`, by
1 to 4 hands, into page-locked slots. **Parts** are microseconds a picture of all hands together, `by the clock/of the
hands' processor time`: what differs is waiting, for the GPU, for storage or for the interpreter lock. **Threads** are
those of the process by name, microseconds of processor time a picture, which tells who spins. Each way to wait is a
process of its own, for a context keeps what it was made with: `spin` (CUDA's default), `sleep` (the context's flag),
`stream` (the flag, and results waited for on a stream of ours). On a CPU the pipeline runs its CPU operators, one way.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dataloader_svc import device, pipeline
from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler
from dataloader_svc.hands import Hands
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.plan import Planner
from dataloader_svc.pool import KEPT_MEMORY
from dataloader_svc.shards import expand
from dataloader_svc.store import Reader, Store
from dataloader_svc.tasks import PACKET_BYTES, Done, Task
from shared.batch import Cursor, batch_spec, groups
from shared.config import load
from shared.cuda import count_gpus
from shared.slots import SlotPool
from tests.bench import report
from tests.bench.loader_gpu import dataset
from tests.bench.loader_gpu.meter import Meter, Row, figures, threads_s, wrapped
from tests.bench.loader_gpu.work import ROOT, run_file

WAYS = ("spin", "sleep", "stream", "cpu")
WARM_TASKS, CHILD_S = 2, 120.0


class Inside:
    """One worker of up to `hands` hands over the tars in `folder`; `way` to wait as the module tells."""

    def __init__(self, scratch: Path, folder: Path, way: str, hands: int, batch: int, threads: int) -> None:
        gpu, indexes = way != "cpu", folder.parent / "index"
        loader = {"device": "gpu" if gpu else "cpu", "threads": threads, "index_dir": str(indexes)}
        config = load(run_file(scratch, folder, batch, loader))
        shards = expand(config.data.datasets, "fail")
        build(shards, config.data, indexes, len(os.sched_getaffinity(0)))
        index = Index.open(shards, config.data, indexes)
        planner = Planner(config.data, index)
        packs = [planner.pack(Cursor(0, step, 0), 0, 1) for step in range(planner.steps(0))]
        size = max(batch_spec(group).size_bytes for group in groups(config.data))
        self._slots = SlotPool.create(config.loader.shm_dir, config.job, hands, size)
        self._tasks = [Task(0, 0, pack.group, pack.sample_ids, pack.spares) for pack in packs]
        decoders = [Decoder(config.data, config.loader) for _ in range(hands)]
        if not gpu:
            for decoder in decoders:
                decoder._batches = pipeline.PipelineDecoder(None, threads, batch)
        reader = Reader(Store.of(config.loader), expected=index.fingerprints)
        self._fillers = [Filler(config.data, index, reader, decoder, threads) for decoder in decoders]
        for slot, filler in enumerate(self._fillers):
            for task in self._tasks[:WARM_TASKS]:
                self._fill(slot, filler, task)
        if gpu:
            device.page_lock(self._slots.segment.array, 0)

    def _fill(self, slot: int, filler: Filler, task: Task) -> Done:
        return filler.fill(task, self._slots.segment.payload(slot), print)

    def measure(self, hands: int, seconds: float) -> Row:
        """A row of figures for so many hands."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        meter, done, tasks, order = Meter(), Counter[str](), cycle(self._tasks), msgspec.msgpack.Decoder(Task)
        deadline = time.perf_counter() + seconds

        def receive() -> Task | None:
            if time.perf_counter() > deadline:
                return None
            with meter.timing("report"):
                theirs.sendall(msgspec.msgpack.encode(next(tasks)))
                return order.decode(ours.recv(PACKET_BYTES))

        def tell(report: Done) -> None:
            with meter.timing("report"):
                ours.sendall(msgspec.msgpack.encode(report))
                theirs.recv(PACKET_BYTES)
            done["pictures"] += report.counts[1]

        fills = [
            meter.timed(partial(self._fill, slot, filler), "fill") for slot, filler in enumerate(self._fillers[:hands])
        ]
        with ours, theirs, wrapped(meter):
            before, used, began = threads_s(), time.process_time(), time.perf_counter()
            Hands(fills, receive, tell, lambda: None).serve()
            elapsed, used, after = time.perf_counter() - began, time.process_time() - used, threads_s()
        return figures(hands, done["pictures"], elapsed, used, meter, after - before)

    def close(self) -> None:
        """Unlink the slots."""
        self._slots.close()


def child(way: str, scratch: Path, folder: Path, hands: int, batch: int, threads: int, seconds: float) -> None:
    """One way to wait: a row as JSON on standard output for each number of hands."""
    pipeline.ON_OUR_STREAM = way == "stream"
    if way in ("sleep", "stream"):
        device.wait_asleep(0)
    inside = Inside(scratch, folder, way, hands, batch, threads)
    try:
        for count in range(1, hands + 1):
            typer.echo(json.dumps({"wait": way} | inside.measure(count, seconds)))
    finally:
        inside.close()


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown file to write")] = None,
    size: Annotated[str, typer.Option(help=f"of {', '.join(dataset.SIZES)}")] = "640x480",
    hands: Annotated[int, typer.Option(help="up to so many")] = 4,
    batch: Annotated[int, typer.Option(help="pictures a micro-batch")] = 64,
    threads: Annotated[int, typer.Option(help="loader.threads")] = 2,
    seconds: Annotated[float, typer.Option(help="how long each figure is measured")] = 1.2,
    quick: Annotated[bool, typer.Option("--quick", help="seconds: only shows that all works")] = False,
    way: Annotated[str, typer.Option(help="this way alone, in this process", hidden=True)] = "",
) -> None:
    """Measure every way to wait, and print a table."""
    samples, distinct, name = 4096, 256, "bench-loader-gpu"
    if quick:
        samples, distinct, name, hands, batch, seconds = 128, 16, f"{name}-quick", min(2, hands), 16, 0.3
    folder = dataset.build(ROOT / "runs" / name, size, distinct, samples, len(os.sched_getaffinity(0)))
    if way:
        with tempfile.TemporaryDirectory(prefix="msgpu-", dir="/tmp") as scratch:
            child(way, Path(scratch), folder, hands, batch, threads, seconds)
        return
    rows: list[Row] = []
    for each in WAYS[:-1] if count_gpus() else WAYS[-1:]:
        command = [sys.executable, "-m", "tests.bench.loader_gpu.inside", *sys.argv[1:], "--way", each]
        done = subprocess.run(
            command, cwd=ROOT, env={**KEPT_MEMORY, **os.environ}, capture_output=True, text=True, timeout=CHILD_S
        )
        rows += map(json.loads, filter(None, done.stdout.splitlines()))
        rows += [{"wait": each, "threads": done.stderr[-300:]}] if done.returncode else []
    head = [f"{report.today()}, {report.machine()}; {report.busy()}", "", dataset.describe(folder), ""]
    typer.echo("\n".join(text := [*head, *report.table(rows)]))
    if out:
        out.write_text("\n".join([*text, ""]))


if __name__ == "__main__":
    typer.run(main)
