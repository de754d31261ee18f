"""One measurement in this process: `python -m tests.bench.loader_gpu.measure ORDER OUT.json`; see `work.py`."""

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from shared import mps
from shared.config import load
from tests.bench.loader_gpu.dataset import SIZES
from tests.bench.loader_gpu.feeds import opened
from tests.bench.loader_gpu.work import (
    SIDE,
    Drain,
    Drained,
    Feed,
    Loader,
    Order,
    Raw,
    Stepped,
    Steps,
    Waited,
    Waits,
)
from tests.bench.processes import cpu_s, tree

WARM_S, CALIBRATION_STEPS = 1.0, 5
MATRIX = 8192


def main(
    order: Annotated[str, typer.Argument(help="as JSON")],
    out: Annotated[Path, typer.Argument(help="JSON file to write")],
) -> None:
    """Carry out one order and write its result."""
    wanted = msgspec.json.decode(order, type=Order)
    found = {Raw: raw, Drain: drain, Waits: waits, Steps: steps}[type(wanted)](wanted)  # type: ignore[operator]
    scratch = out.with_suffix(".tmp")
    scratch.write_bytes(msgspec.json.encode(found))
    scratch.rename(out)


def raw(order: Raw) -> list[Drained]:
    """DALI's tar reader, decode ("mixed": hardware JPEG) and resize; runs overlap, results are not looked at."""
    found = []
    for batch, share in order.runs:
        pipeline = _pipeline(Path(order.folder), batch, share, order.threads)
        batches = (len(pipeline.run()[0]) for _ in itertools.count())
        found.append(_drained(batches, order.seconds, [os.getpid()]))
    return found


def _pipeline(folder: Path, batch: int, share: float, threads: int) -> Any:
    from nvidia.dali import Pipeline, fn, types

    from dataloader_svc.decode import region
    from shared.batch import Bucket

    width, height = SIZES[folder.name]
    top, left, bottom, right = region((height, width), Bucket(SIDE, SIDE))
    cuda = torch.cuda.is_available()
    pipeline = Pipeline(batch, threads, 0 if cuda else None, prefetch_queue_depth=3)
    with pipeline:
        (encoded,) = [fn.readers.webdataset(paths=sorted(map(str, folder.glob("*.tar"))), ext=["jpg"])]
        where = {"device": "mixed" if cuda else "cpu", "hw_decoder_load": share}
        images = fn.decoders.image(encoded, output_type=types.RGB, **where)
        part = {"roi_start": [top, left], "roi_end": [bottom, right], "size": [SIDE, SIDE]}
        pipeline.set_outputs(fn.resize(images, interp_type=types.INTERP_LINEAR, antialias=True, **part))
    pipeline.build()
    return pipeline


def drain(order: Drain) -> Drained:
    """All that comes."""
    with opened(order.feed) as batches:
        return _drained(batches, order.seconds, _roots(order.feed))


def _drained(batches: Iterator[int], seconds: float, roots: list[int]) -> Drained:
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_S:
        next(batches)
    _settle()
    pids = [pid for root in roots for pid in tree(root)]
    before, images, began = cpu_s(pids), 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        images += next(batches)
    _settle()
    elapsed = time.perf_counter() - began
    return Drained(images, elapsed, cpu_s(pids) - before)


def waits(order: Waits) -> Waited:
    """As a plain training loop does it: take what the step needs, step, and so on."""
    with opened(order.feed) as batches:
        step = Step(order.step_s)
        for _ in range(3):
            next(batches)
        waited, busy_s, began = [], 0.0, time.perf_counter()
        while time.perf_counter() - began < order.seconds:
            asked, images = time.perf_counter(), 0
            while images < order.images:
                images += next(batches)
            waited.append(time.perf_counter() - asked)
            step.begin()
            busy_s += step.finish()
        return Waited(waited, busy_s, time.perf_counter() - began)


def steps(order: Steps) -> list[Stepped]:
    """Steps whose kernels are queued first; while they run, the images that are due are taken and copied."""
    if order.feed is None:
        return [_stepped(Step(order.step_s), order, itertools.repeat(0), 0.0)]
    mps.join(load(Path(order.feed.run)).loader)
    with opened(order.feed) as batches:
        next(batches)
        step = Step(order.step_s, order.repeats)
        return [_stepped(step, order, batches, rate) for rate in order.rates]


def _stepped(step: "Step", order: Steps, batches: Iterator[int], rate: float) -> Stepped:
    copies = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    times: list[float] = []
    images, began = 0, time.perf_counter()
    while time.perf_counter() - began < order.seconds:
        step.begin()
        with torch.cuda.stream(copies):
            while images < rate * order.step_s * (len(times) + 1):
                images += next(batches)
        times.append(step.finish())
    return Stepped(times, images, time.perf_counter() - began, step.repeats)


class Step:
    """Kernels like a training's: matrix products in bf16 with element-wise work between. On a CPU it sleeps."""

    def __init__(self, step_s: float, repeats: int = 0) -> None:
        self._step_s, self.repeats = step_s, repeats
        if not torch.cuda.is_available():
            return
        made = {"device": "cuda", "dtype": torch.bfloat16}
        self._a, self._b, self._c = (torch.randn(MATRIX, MATRIX, **made) for _ in range(3))  # type: ignore[call-overload]
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        self.repeats = repeats or self._calibrated()

    def begin(self) -> None:
        """Queue the kernels."""
        if torch.cuda.is_available():
            self._began.record()
            for _ in range(self.repeats):
                torch.mm(self._a, self._b, out=self._c)
                torch.nn.functional.gelu(self._c).add_(self._a)
            self._ended.record()

    def finish(self) -> float:
        """Wait for them; the seconds they took on the device."""
        if not torch.cuda.is_available():
            time.sleep(self._step_s)
            return self._step_s
        self._ended.synchronize()
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def _calibrated(self) -> int:
        self.repeats = 1
        for _ in range(CALIBRATION_STEPS):
            self.begin()
            one_s = self.finish()
        return max(1, round(self._step_s / one_s))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _roots(feed: Feed) -> list[int]:
    """The processes whose trees do the feed's work."""
    return [os.getpid(), *([feed.daemon_pid] if isinstance(feed, Loader) else [])]


if __name__ == "__main__":
    typer.run(main)
