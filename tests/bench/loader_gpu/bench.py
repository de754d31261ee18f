"""The loader on a GPU: `python -m tests.bench.loader_gpu OUT.md`, some five minutes on one H200.

Three questions. **images**: how many images a second reach the GPU, decoded and resized to 336x336, from raw DALI, from
the daemon with GPU and CPU decode, and from torch's DataLoader, and what processor time that takes. **waits**: how long
a step of 100 ms waits for its images. **steps**: how long a training-like step of 40 ms takes beside a daemon that
decodes on the same GPU, by time slices and through MPS. Data are made first, in seconds. Each measurement is a process
of its own. Without a GPU the same programs run on the CPU, and what needs a GPU is left out with a word.
"""

import contextlib
import os
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import torch
import typer

from dataloader_svc.indexing import build as build_index
from dataloader_svc.shards import expand
from shared.config import load
from tests.bench import report
from tests.bench.loader_gpu import dataset
from tests.bench.loader_gpu.work import (
    ROOT,
    Drain,
    Drained,
    Feed,
    Loader,
    Raw,
    Stepped,
    Steps,
    Torch,
    Waited,
    Waits,
    alone,
    ordered,
    run_file,
)
from tests.support.daemons import serving

PARTS = ("images", "waits", "steps")
PACKAGES = ("torch", "nvidia-dali-cuda130", "webdataset", "pillow", "simplejpeg", "opencv-python-headless")
RAW_RUNS = ((64, 0.65), (64, 1.0), (256, 0.65), (256, 1.0))
"""Pictures a batch, and the share of them for the hardware decoder: DALI's default, and all."""
RAW_THREADS = 4
RATES = (500.0, 2000.0, 8000.0)
WAIT_STEP_S, STEP_S = 0.1, 0.04
BIG, SMALL = "1024x768", "640x480"
Row = dict[str, str]
Lane = Literal["auto", "cuda"]


class Bench:
    """One run: where the tars are, how long each figure is measured, and how much of the machine is used."""

    def __init__(self, scratch: Path, tars: dict[str, Path], seconds: float, batch: int) -> None:
        self.scratch, self.tars, self.seconds, self.batch = scratch, tars, seconds, batch
        self.cuda, self.cores = torch.cuda.is_available(), len(os.sched_getaffinity(0))
        self._count = 0

    @contextlib.contextmanager
    def daemon(self, size: str, device: str, workers: int, mps: str = "off") -> Iterator[Loader]:
        """A daemon over the tars of one size; with `mps: start` its reader joins by the same run file."""
        self._count += 1
        loader = {"device": device, "workers": workers, "threads": 2 if device == "gpu" else 1, "mps": mps}
        slots = {"slots_per_stream": 2 * workers + 4, "index_dir": str(self.scratch / "index")}
        place = self.scratch / f"{self._count:02d}"
        path = run_file(place, self.tars[size], self.batch, {**loader, **slots})
        with serving(path, **self.around(mps)) as daemon:
            try:
                yield Loader(str(path), daemon.process.pid)
            finally:
                daemon.terminate()

    def around(self, mps: str) -> dict[str, str]:
        """The environment of a daemon and of its reader."""
        return {"CUDA_MPS_PIPE_DIRECTORY": ""} if mps == "start" else alone()

    def index(self) -> None:
        """Index the tars, so that no daemon has to."""
        for path in self.tars.values():
            data = load(run_file(self.scratch / "indexing", path, self.batch, {})).data
            build_index(expand(data.datasets, "fail"), data, self.scratch / "index", self.cores)

    def images(self) -> Iterator[Row]:
        """Images a second, and the processor time they take."""
        for size in self.tars:
            yield from (raws := self._raw(size))
            best = max(float(row["images/s"]) for row in raws) if "CPU cores used" in raws[0] else 0.0
            for way in self._daemons(size):
                yield self._drained(size, *way, best)
            feed = Torch(str(self.tars[size]), self._torch_workers(), self.batch)
            found = ordered(Drain(feed, self.seconds), Drained, **alone())
            yield rate_row(size, f"DataLoader + webdataset + Pillow, {feed.workers} workers", found, best)

    def _raw(self, size: str) -> list[Row]:
        runs = RAW_RUNS if self.cuda else RAW_RUNS[:1]
        threads = min(RAW_THREADS, self.cores) if self.cuda else self.cores
        found = ordered(Raw(str(self.tars[size]), runs, threads, self.seconds), list[Drained], **alone())
        each = [found] * len(runs) if isinstance(found, str) else found
        names = [f"raw DALI, {batch} a batch" + f", {share:.0%} in hardware" * self.cuda for batch, share in runs]
        return [rate_row(size, name, one) for name, one in zip(names, each, strict=True)]

    def _drained(self, size: str, device: str, workers: int, mps: str, lane: Lane, best: float) -> Row:
        with self.daemon(size, device, workers, mps) as feed:
            order = Drain(msgspec.structs.replace(feed, lane=lane), self.seconds)
            found = ordered(order, Drained, **self.around(mps))
        extras = [", MPS"] * (mps == "start") + [", cuda lane"] * (lane == "cuda")
        return rate_row(size, f"daemon, {device.upper()} decode, {workers} workers{''.join(extras)}", found, best)

    def _daemons(self, size: str) -> list[tuple[str, int, str, Lane]]:
        if not self.cuda:
            return [("cpu", min(2, self.cores), "off", "auto")]
        few: list[tuple[str, int, str, Lane]] = [("gpu", 1, "off", "auto"), ("gpu", 2, "off", "auto")]
        most: list[tuple[str, int, str, Lane]] = [("gpu", 4, "off", "auto"), ("gpu", 4, "start", "auto")]
        last: list[tuple[str, int, str, Lane]] = [("gpu", 4, "start", "cuda"), ("cpu", self.cores, "off", "auto")]
        return [*(few if size == SMALL else []), *most, *last]

    def _torch_workers(self) -> int:
        return min(16, self.cores)

    def waits(self) -> Iterator[Row]:
        """A step of 100 ms and its images: 3 batches a step on a GPU."""
        size, images = next(iter(self.tars)), (3 if self.cuda else 1) * self.batch
        for device, workers, mps in self._waiting():
            with self.daemon(size, device, workers, mps) as feed:
                name = f"daemon, {device.upper()} decode, {workers} workers{', MPS' if mps == 'start' else ''}"
                yield self._wait_row(name, feed, images, self.around(mps))
        feed = Torch(str(self.tars[size]), self._torch_workers(), self.batch)
        yield self._wait_row(f"DataLoader, {feed.workers} workers", feed, images, alone())

    def _waiting(self) -> list[tuple[str, int, str]]:
        return [("gpu", 2, "off"), ("gpu", 2, "start")] if self.cuda else [("cpu", min(2, self.cores), "off")]

    def _wait_row(self, name: str, feed: Feed, images: int, around: dict[str, str]) -> Row:
        found = ordered(Waits(feed, 2 * self.seconds, WAIT_STEP_S, images), Waited, **around)
        row = {"loader": name, "images a step": str(images)}
        if isinstance(found, str):
            return row | {"images/s": found}
        marks = [f"{1e3 * report.percentile(found.waits_s, share):.2f}" for share in (0.5, 0.99)]
        row |= {"images/s": f"{images * len(found.waits_s) / found.seconds:.0f}"}
        row |= {"wait p50 ms": marks[0], "wait p99 ms": marks[1]}
        return row | {"GPU idle" if self.cuda else "not in a step": f"{1 - found.busy_s / found.seconds:.1%}"}

    def steps(self) -> Iterator[Row]:
        """A step of 40 ms alone, and beside a daemon, by time slices and through MPS."""
        if not self.cuda:
            return
        first = self._stepped(Steps(None, self.seconds, STEP_S, 0, (0.0,)), alone())[0]
        yield self._step_row("alone", first, first)
        repeats = first.repeats if isinstance(first, Stepped) else 0
        for mps, name in (("off", "time slices"), ("start", "MPS")):
            with self.daemon(SMALL, "gpu", 2, mps) as feed:
                found = self._stepped(Steps(feed, self.seconds, STEP_S, repeats, RATES), self.around(mps))
                for each, rate in zip(found, RATES, strict=True):
                    yield self._step_row(name, each, first, rate)

    def _stepped(self, order: Steps, around: dict[str, str]) -> list[Stepped] | list[str]:
        found = ordered(order, list[Stepped], **around)
        return [found] * len(order.rates) if isinstance(found, str) else found

    def _step_row(self, name: str, found: Stepped | str, alone: Stepped | str, rate: float = 0.0) -> Row:
        row = {"beside": name, "images/s asked": f"{rate:.0f}"}
        if isinstance(found, str) or isinstance(alone, str):
            return row | {"step ms, median": str(found)}
        middle, before = statistics.median(found.steps_s), statistics.median(alone.steps_s)
        row |= {"images/s": f"{found.images / found.seconds:.0f}", "step ms, median": f"{1e3 * middle:.2f}"}
        return row | {
            "p99": f"{1e3 * report.percentile(found.steps_s, 0.99):.2f}",
            "cost": f"{middle / before - 1:+.1%}",
        }


def rate_row(size: str, name: str, found: Drained | str, best: float = 0.0) -> Row:
    """One way to get images."""
    row = {"pictures": size, "way": name}
    if isinstance(found, str):
        return row | {"images/s": found}
    rate = found.images / found.seconds
    row |= {"images/s": f"{rate:.0f}", "of raw DALI": f"{rate / best:.0%}" if best else ""}
    cores = found.cpu_s / found.seconds
    return row | {"CPU cores used": f"{cores:.1f}", "CPU s per 1,000": f"{1e3 * found.cpu_s / found.images:.2f}"}


def written(tables: dict[str, list[Row]], head: list[str]) -> list[str]:
    """The result file's lines."""
    titles = {
        "images": "Images a second where the trainer wants them",
        "waits": f"Wait for the images of a step of {1e3 * WAIT_STEP_S:g} ms",
        "steps": f"A step of {1e3 * STEP_S:g} ms on the GPU that decodes",
    }
    lines = ["# The loader on a GPU", "", *head]
    for part, rows in tables.items():
        shown: Any = report.table(rows) if rows else ["needs a GPU, and there is none here"]
        lines += ["", f"## {titles[part]}", "", *shown]
    return [*lines, ""]


def main(
    out: Annotated[Path, typer.Argument(help="Markdown file to write")],
    only: Annotated[str, typer.Option(help=f"parts, of {','.join(PARTS)}")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(help="how long each figure is measured")] = 2.5,
    batch: Annotated[int, typer.Option(help="pictures a micro-batch")] = 64,
    samples: Annotated[int, typer.Option(help="samples of each size")] = 4096,
    folder: Annotated[Path, typer.Option(help="where the tars are made")] = ROOT / "runs/bench-loader-gpu",
    quick: Annotated[bool, typer.Option("--quick", help="a minute on a CPU: only shows that all works")] = False,
) -> None:
    """Make the data, measure, and write a dated table, row by row as they are found."""
    distinct = 256
    if quick:
        seconds, batch, samples, distinct, folder = 0.5, 16, 128, 16, folder.with_name(folder.name + "-quick")
    load_line, cores = report.busy(), len(os.sched_getaffinity(0))
    sizes = [SMALL] if quick else [SMALL, BIG]
    tars = {size: dataset.build(folder, size, distinct, samples, cores) for size in sizes}
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    head = [f"{report.today()}, {report.machine()}{gpu}; {load_line}", report.versions(PACKAGES), ""]
    head += [f"`python -m tests.bench.loader_gpu --seconds {seconds:g} --batch {batch} --samples {samples}`", ""]
    head += [*(f"{dataset.describe(path)}." for path in tars.values())]
    tables: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(prefix="msgpu-", dir="/tmp") as scratch:
        bench = Bench(Path(scratch), tars, seconds, batch)
        bench.index()
        for part in filter(None, only.split(",")):
            tables[part] = []
            for row in getattr(bench, part)():
                tables[part].append(row)
                typer.echo(" | ".join(row.values()))
                out.write_text("\n".join(written(tables, head)))
    out.write_text("\n".join(written(tables, head)))
