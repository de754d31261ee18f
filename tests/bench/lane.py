"""The shared-memory lane with its decoder taken out: the daemon's real loop, and real clients in their own processes.

A worker's place is taken by a copy of made-up bytes into the slot, stamped with the moment just before the slot turns
READY (CLOCK_MONOTONIC, the same in every process). `python -m tests.bench.lane RUN.yaml ...` is one reader: it prints
what it saw as JSON.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer
import yaml

from dataloader_svc.daemon import Loop, Signals
from dataloader_svc.plan import Planner
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.server import Listener
from dataloader_svc.service import Service
from dataloader_svc.tasks import Done, Task, Timings
from shared.batch import BatchSpec, batch_spec, groups
from shared.config import endpoint, load
from shared.sections import RunConfig
from shared.slots import SlotPool
from tests.support.columns import pictures
from trainer.client import LoaderClient

ROOT = Path(__file__).parents[2]
SIDE, PATCH, CAPTION_TOKENS = 512, 32, 4
IMAGE_BYTES = SIDE * SIDE * 3
PLACES = 64
WARM, WAIT_S, READER_S, JOIN_S = 4, 60.0, 300.0, 10.0


class Seen(msgspec.Struct, frozen=True):
    """One reader: seconds for its batches after the first WARM, and how late each was after READY."""

    seconds: float
    batches: int
    late_s: list[float]


class Copier:
    """Stands where the pool of decode workers does: `submit` a task, and `collect` finds its slot filled.

    With `pace_s` each fill begins so long after the one before ended: readers then wait for it.
    """

    def __init__(self, pool: SlotPool, spec: BatchSpec, pace_s: float) -> None:
        self._pool, self._spec, self._pace_s = pool, spec, pace_s
        self._tasks: deque[Task] = deque()
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_SEMAPHORE)
        self._source = np.random.default_rng(0).integers(0, 256, spec.size_bytes, dtype=np.uint8)
        self.written_bytes = 0

    def channels(self) -> list[int]:
        return [self._event]

    def submit(self, task: Task) -> None:
        self._tasks.append(task)
        os.eventfd_write(self._event, 1)

    def tick(self) -> None:
        """Nothing can die here."""

    def collect(self) -> list[Done]:
        """Fill one slot, if one is asked for."""
        if not self._tasks:
            return []
        os.eventfd_read(self._event)
        time.sleep(self._pace_s)
        task = self._tasks.popleft()
        payload = self._pool.segment.payload(task.slot)
        np.copyto(payload[: self._spec.size_bytes], self._source)
        self.written_bytes += self._spec.size_bytes
        count = len(task.sample_ids)
        payload[:8].view(np.int64)[0] = time.monotonic_ns()
        return [Done(task.id, 0, (count, count, 0, 0, 0), task.sample_ids, 0, (), Timings(0, 0, 0), 0)]

    def close(self) -> None:
        os.close(self._event)


def run_file(folder: Path, images: int) -> Path:
    """A run file whose micro-batches hold `images` pictures of IMAGE_BYTES bytes each."""
    each = (SIDE // PATCH) ** 2 + CAPTION_TOKENS + 2
    data = {
        "datasets": [{"name": "lane", "shards": ["none.tar"]}],
        "image": {"patch": PATCH, "pixel_budget": SIDE * SIDE, "buckets": [[SIDE, SIDE]]},
        "audio": {"classes_s": [0.08]},
        "text": {"max_tokens": CAPTION_TOKENS, "expected_tokens": CAPTION_TOKENS},
        "batch": {"tokens": -(-images * each // 64) * 64, "micro_batches": 1, "round": 1},
    }
    loader = {"endpoint": f"ipc://{folder}/lane.sock", "max_streams": 1, "metrics_port": 0}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"job": "lane", "data": data, "loader": loader}))
    return path


@contextlib.contextmanager
def serving(config: RunConfig, images: int, pace_s: float) -> Iterator[Copier]:
    """The daemon's loop in a thread of this process, over the made-up facts of enough samples."""
    spec = batch_spec(next(group for group in groups(config.data) if group.bucket and not group.clip_samples))
    facts = pictures(*[(SIDE, SIDE)] * (images * PLACES))
    pool = SlotPool.create(config.loader.shm_dir, config.job, config.loader.slots_per_stream, spec.size_bytes)
    copier, listener, signals = Copier(pool, spec, pace_s), Listener.reserve(endpoint(config)), Signals()
    workers: Any = copier
    quarantine = Quarantine(config.loader.quarantine, str)
    service = Service(config, Planner(config.data, facts), quarantine, pool, workers, listener.send)
    listener.bind()
    thread = threading.Thread(target=Loop(config, listener, service, workers, signals).run, name="lane")
    thread.start()
    try:
        yield copier
    finally:
        signals.count = 2
        thread.join(JOIN_S)
        for part in (listener, copier, pool):
            part.close()


def read(path: Path, readers: int, batches: int, copy: bool) -> list[Seen]:
    """What `readers` processes see of one stream, `batches` batches each."""
    command = [sys.executable, "-m", "tests.bench.lane", str(path), "--readers", str(readers)]
    command += ["--batches", str(batches), "--copy" if copy else "--view"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    children = [
        subprocess.Popen([*command, "--reader", str(n)], cwd=ROOT, env=environ, stdout=subprocess.PIPE)
        for n in range(readers)
    ]
    try:
        return [msgspec.json.decode(child.communicate(timeout=READER_S)[0], type=Seen) for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()


def main(
    path: Annotated[Path, typer.Argument(help="the lane's run file")],
    reader: Annotated[int, typer.Option(help="which of the readers")] = 0,
    readers: Annotated[int, typer.Option(help="how many there are")] = 1,
    batches: Annotated[int, typer.Option(help="how many are measured")] = 100,
    copy: Annotated[bool, typer.Option("--copy/--view", help="copy each payload out, or only take the views")] = False,
) -> None:
    """One reader: consume, and print what was seen."""
    config = load(path)
    with LoaderClient(endpoint(config), job="lane", reader=reader, readers=readers, wait_s=WAIT_S) as client:
        out, late_s, began = np.empty(next(client).spec.size_bytes, np.uint8), [], 0.0
        for number in range(WARM + batches):
            if number == WARM:
                began = time.perf_counter()
            payload = next(client).payload.numpy()
            late_s.append((time.monotonic_ns() - int(payload[:8].view(np.int64)[0])) / 1e9)
            if copy:
                np.copyto(out, payload)
        seconds = time.perf_counter() - began
    sys.stdout.buffer.write(msgspec.json.encode(Seen(seconds, batches, late_s[WARM:])))


if __name__ == "__main__":
    typer.run(main)
