"""Index and plan at millions of samples: `python -m tests.bench.plan [OUT.md] --samples 1000000 --samples 10000000`.

The index files are real ones, of shards of 10,000 samples with made-up facts (images of six shapes, clips to 4 s, both,
or text alone); the tars are empty stand-ins, since planning never reads them. Each size is measured in a new process,
from opening the index to the first planned step (one in the epoch's middle, as on a resume), as a daemon does at its
start: once where the plan must be made, once where it was kept. Then the following steps are planned one by one.
Resident is anonymous memory beyond what the imports hold: index files and kept plans are mapped and can be dropped.
"""

import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from dataloader_svc import index_file, indexing
from dataloader_svc.index import Index
from dataloader_svc.plan import Planner
from dataloader_svc.plan_file import PlanFiles, key_of
from dataloader_svc.shards import Shard, expand
from dataloader_svc.store import Store
from dataloader_svc.text import Tokenizer
from deploy.demo import build_data
from deploy.demo.run import CONFIG, ROOT
from shared.batch import Cursor
from shared.config import load
from shared.sections import DataSection, DatasetSection
from tests.bench import report
from tests.support.columns import columns

PER_SHARD = 10_000
KEY_BYTES = 9
STEPS = 2_000
STAND_IN_BYTES = 10_240
DATA = DataSection(datasets=(DatasetSection("made-up", ("*.tar",)),))
PACKAGES = ("numpy", "msgspec")


class Cost(msgspec.Struct, frozen=True):
    """Seconds to open the index, to have the plan, to have the first step's packs; of each further step; bytes."""

    open_s: float
    plan_s: float
    first_s: float
    steps_s: list[float]
    resident_bytes: int

    @property
    def start_s(self) -> float:
        """From nothing to the first step."""
        return self.open_s + self.plan_s + self.first_s


def write(folder: Path, samples: int) -> list[Shard]:
    """Index files of `samples` samples, beside their stand-in tars."""
    store, tokenizer, rules = Store(), Tokenizer.load(DATA.text.tokenizer).digest, indexing.rules_digest(DATA)
    shards = []
    for number, first in enumerate(range(0, samples, PER_SHARD)):
        count = min(PER_SHARD, samples - first)
        path = folder / f"{number:05d}.tar"
        path.write_bytes(bytes(STAND_IN_BYTES))
        keys = b"".join(b"%09d" % key for key in range(first, first + count))
        problems = msgspec.msgpack.encode([])
        print_of = store.fingerprint(str(path))
        sizes = (count, len(keys), len(problems))
        header = index_file.Header(index_file.VERSION, print_of, rules, tokenizer, f"{number:032x}", *sizes)
        index_file.write(index_file.index_path(str(path), None), header, rows(count, number), keys, problems)
        shards.append(Shard("made-up", str(path)))
    return shards


def rows(count: int, seed: int) -> np.ndarray:
    """Made-up rows of one shard."""
    facts, found = columns(count, seed, bad_share=0.001), np.zeros(count, index_file.ROW)
    found["key_offset"], found["key_size"] = np.arange(count) * KEY_BYTES, KEY_BYTES
    found["height"], found["width"], found["verdict"] = facts.height, facts.width, facts.verdict
    found["frames"], found["rate_hz"] = facts.clip_samples, DATA.audio.rate_hz * (facts.clip_samples > 0)
    found["tokens"] = found["characters"] = facts.text_tokens
    found["text_offset"], found["text_size"] = 512, facts.text_tokens
    return found


def measure(shards: list[Shard], folder: Path) -> Cost:
    """What a daemon's start and its steps cost; plans are kept in `folder`. For a new process: memory is told from what
    it began with.
    """
    before, times = anonymous_bytes(), [time.perf_counter()]
    index = Index.open(shards, DATA, None)
    times.append(time.perf_counter())
    planner = Planner(DATA, index, PlanFiles(folder, "bench", key_of(DATA, index.digest)))
    steps = planner.steps(0)
    times.append(time.perf_counter())
    middle = steps // 2
    step_s(planner, middle)
    times.append(time.perf_counter())
    resident = anonymous_bytes() - before
    planned = [step_s(planner, step) for step in range(middle + 1, min(middle + STEPS, steps))]
    return Cost(*np.diff(times).tolist(), planned, resident)


def step_s(planner: Planner, step: int) -> float:
    """Seconds to plan all micro-batches of one step for the only data rank."""
    began, cursor = time.perf_counter(), Cursor(0, step)
    while (cursor.epoch, cursor.step) == (0, step):
        planner.pack(cursor, 0, 1)
        cursor = planner.after(cursor, 1)
    return time.perf_counter() - began


def anonymous_bytes() -> int:
    """This process's resident memory that no file backs."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def row(samples: int) -> dict[str, str]:
    """One size: the plan made, then taken up again, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shards, kept = write(Path(folder), samples), Path(folder) / "plans"
        made, again = alone(shards, kept), alone(shards, kept)
    parts = [" / ".join(f"{part:.2f}" for part in (c.open_s, c.plan_s, c.first_s)) for c in (made, again)]
    return {
        "samples": f"{samples:,}",
        "made: open / plan / first step s": parts[0],
        "start-up s": f"{made.start_s:.2f}",
        "taken up: open / plan / first step s": parts[1],
        "resumed s": f"{again.start_s:.2f}",
        "resident MB, made / taken up": f"{made.resident_bytes / 1e6:.0f} / {again.resident_bytes / 1e6:.0f}",
        "µs a planned step, mean / p50 / p99": " / ".join(f"{1e6 * value:.0f}" for value in spread(made.steps_s)),
    }


def alone(shards: list[Shard], folder: Path) -> Cost:
    """`measure` in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, shards, folder).result()


def spread(values: list[float]) -> tuple[float, float, float]:
    """Mean (balancing a block of steps falls on one of them), median, 99th percentile."""
    return statistics.mean(values), statistics.median(values), report.percentile(values, 0.99)


def padding(folder: Path, samples: int) -> dict[str, str]:
    """The share of model tokens that is padding, on the demo's photographs and speech under the demo's run file."""
    build_data.build(folder, samples)
    pairs = {
        "data.datasets": f'[{{name: demo, shards: ["{folder}/demo-*.tar"]}}]',
        "data.text.tokenizer": f"{folder}/tokenizer.json",
    }
    data = load(CONFIG, [f"{key}={value}" for key, value in pairs.items()]).data
    shards = expand(data.datasets, "fail")
    indexing.build(shards, data, None)
    found = Planner(data, Index.open(shards, data, None)).summary(0)
    shares = {"in buckets": f"{found.padding_bucketed:.1%}", "padded to the largest": f"{found.padding_naive:.1%}"}
    return {"samples": f"{found.samples:,}", "micro-batches": f"{found.packs:,}", **shares}


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown file; plan_<date>.md without")] = None,
    samples: Annotated[list[int] | None, typer.Option(help="a size; may be repeated. 1 and 10 million without")] = None,
    demo: Annotated[Path, typer.Option(help="the demo data, built where it is missing")] = ROOT / "demo-data",
    demo_samples: Annotated[int, typer.Option(help="samples of the demo data")] = 640,
    quick: Annotated[bool, typer.Option("--quick", help="one small size: only shows that all works")] = False,
) -> None:
    """Measure and write a dated table."""
    before = report.busy()
    sizes = [50_000] if quick else samples or [1_000_000, 10_000_000]
    command = "python -m tests.bench.plan " + " ".join(f"--samples {size}" for size in sizes)
    lines = [
        "# Index and plan at size",
        "",
        f"{report.today()}, {report.machine()}; {before}",
        report.versions(PACKAGES),
    ]
    lines += ["", f"`{command}`", "", " ".join(str(__doc__).split("\n\n", 1)[1].split()), ""]
    lines += [f"A step is {DATA.batch.micro_batches} micro-batches of {DATA.batch.tokens} tokens.", ""]
    lines += [*report.table([row(size) for size in sizes]), "", "## Padding, demo data", ""]
    lines += [*report.table([padding(demo, demo_samples)]), ""]
    path = out or report.RESULTS / f"plan_{report.today()}.md"
    path.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
