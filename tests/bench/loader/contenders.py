"""The raw loop, Millstream, and torch's DataLoader over webdataset: each an endless iterator of batches.

A contender is `prepare(folder)`, done once and not timed (an index, a conversion), and `batches(folder, decoder)`.
"""

import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import yaml

from tests.bench.loader import dataset
from tests.bench.loader.work import BATCH, SIDE, TOKENS, Prepare, Prepared, collate

ROOT = Path(__file__).parents[3]
WORKERS = 2
READY_S, STOP_S = 60.0, 20.0

Batches = AbstractContextManager[Iterator[Prepared]]


class Contender(NamedTuple):
    """One way to get batches; `package` is what must be importable for it."""

    title: str
    package: str
    prepare: Callable[[Path], None]
    batches: Callable[[Path, str], Batches]


def nothing(folder: Path) -> None:
    """No preparation."""


@contextmanager
def raw(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """Two threads decode what is in memory already; no loader, no other process, nothing is handed over."""
    work, held = Prepare(decoder), list(dataset.samples(folder))
    with ThreadPoolExecutor(WORKERS) as pool:
        yield _ahead(pool, work, itertools.cycle(held))
        pool.shutdown(cancel_futures=True)


def _ahead(pool: ThreadPoolExecutor, work: Prepare, samples: Iterator[tuple[bytes, bytes]]) -> Iterator[Prepared]:
    """Batches, with the next one under way while one is used."""
    ahead: deque[list[Future[Prepared]]] = deque()
    while True:
        while len(ahead) < 2:
            ahead.append([pool.submit(work, sample) for sample in itertools.islice(samples, BATCH)])
        yield collate([future.result() for future in ahead.popleft()])


@contextmanager
def webdataset(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """DataLoader with two workers, batches made in them."""
    import webdataset as wds

    work = Prepare(decoder)
    shards = sorted(map(str, folder.glob(dataset.PATTERN)))
    samples = wds.WebDataset(shards, shardshuffle=False, nodesplitter=wds.split_by_node).repeat()
    batches = samples.to_tuple("jpg", "txt").map(work).batched(BATCH, collation_fn=collate, partial=False)
    yield iter(torch.utils.data.DataLoader(batches, batch_size=None, num_workers=WORKERS))


def index(folder: Path) -> None:
    """Millstream's index of the tars."""
    from dataloader_svc.indexing import build
    from dataloader_svc.shards import expand
    from shared.config import load

    with tempfile.TemporaryDirectory() as scratch:
        data = load(run_file(folder, Path(scratch))).data
        build(expand(data.datasets, "fail"), data, None, WORKERS)


@contextmanager
def millstream(folder: Path, decoder: str) -> Iterator[Iterator[Prepared]]:
    """The daemon as a child of this process, and the client in it."""
    from shared.config import endpoint, load
    from trainer.client import LoaderClient

    scratch = Path(tempfile.mkdtemp(prefix="millstream-bench-"))
    path = run_file(folder, scratch)
    try:
        with _daemon(path), LoaderClient(endpoint(load(path)), job="bench") as client:
            yield ((batch.fields["pixels_NHWC"], batch.fields["tokens_T"]) for batch in client)
    finally:
        shutil.rmtree(scratch)


@contextmanager
def _daemon(path: Path) -> Iterator[None]:
    ready = path.with_name("ready")
    command = [sys.executable, "-m", "dataloader_svc", "serve", "--config", str(path), "--ready-file", str(ready)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as daemon:
        try:
            _await(ready, daemon)
            yield
        finally:
            daemon.send_signal(signal.SIGTERM)
            daemon.wait(STOP_S)


def _await(ready: Path, daemon: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + READY_S
    while not ready.exists():
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError("the daemon did not become ready; its log is above")
        time.sleep(0.01)


def run_file(folder: Path, scratch: Path) -> Path:
    """A run file in `scratch` whose only bucket and token budget make batches of BATCH samples."""
    patch = 14
    tokens = (SIDE // patch) ** 2 + TOKENS + 2
    data = {
        "datasets": [{"name": "bench", "shards": [str(folder / dataset.PATTERN)]}],
        "image": {"patch": patch, "pixel_budget": SIDE * SIDE, "buckets": [[SIDE, SIDE]]},
        "text": {"tokenizer": "bytes", "max_tokens": TOKENS, "expected_tokens": TOKENS},
        "batch": {"tokens": BATCH * tokens, "micro_batches": 2, "round": 2},
    }
    loader = {"endpoint": f"ipc://{scratch}/loader.sock", "workers": WORKERS, "threads": 1, "metrics_port": 0}
    path = scratch / "run.yaml"
    path.write_text(yaml.safe_dump({"job": "bench", "data": data, "loader": loader}))
    return path


OURS = {
    "raw": Contender("raw loop, no loader", "torch", nothing, raw),
    "millstream": Contender("Millstream", "dataloader_svc", index, millstream),
    "webdataset": Contender("DataLoader + webdataset", "webdataset", nothing, webdataset),
}
