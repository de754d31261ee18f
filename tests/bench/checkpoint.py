"""What a checkpoint costs the training loop: `python -m tests.bench.checkpoint [OUT.md]`.

One process trains on made-up batches of the small test model, widened, and saves every few steps, in turn in the
background and not, in one run. A save takes as long as training stands still for it.
"""

import platform
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer

from shared.batch import Cursor
from shared.config import load
from shared.sections import CheckpointSection, RunConfig
from tests.bench.report import RESULTS, today
from tests.support import packs
from tests.support.runs import run_file
from trainer.checkpoint import Checkpoints
from trainer.feed import MicroBatch
from trainer.launch import Ranks, join
from trainer.manifest import layout_of, signature_of, step_name

WAYS = {"asynchronous": True, "synchronous": False}


def make_config(folder: Path, dim: int, depth: int) -> RunConfig:
    """The test model with a larger decoder, on the best device there is."""
    decoder = {"dim": dim, "depth": depth, "heads": 8, "kv_heads": 8, "mlp": 4 * dim}
    changes = {"model": {"decoder": decoder}, "train": {"device": "auto", "run_dir": str(folder / "run")}}
    return load(run_file(folder, "part-{0..0}.tar", **changes))


class Bench:
    """A run that is timed; `found` has seconds by what they were spent on."""

    def __init__(self, config: RunConfig, ranks: Ranks) -> None:
        from trainer.engine import build_engine

        self._config, self._ranks, self._engine = config, ranks, build_engine(config, ranks)
        self._batch = move(packs.global_batch(config, packs.MIXED[:4], seed=0), ranks.device)
        self.found: dict[str, list[float]] = defaultdict(list)

    def step(self, what: str) -> None:
        """One training step."""
        self._timed(what, lambda: self._engine.train_batch(iter(self._batch), 1e-3))

    def save(self, what: str, store: Checkpoints, step: int) -> None:
        """One checkpoint, with the steps that are taken until it is committed."""
        self._timed(what, lambda: store.save(self._engine, step, Cursor()))
        while not (store.folder / step_name(step)).exists():
            self.step("step, file being written")
            store.poll()

    def open_store(self, way: str) -> Checkpoints:
        """Checkpoints in a folder of their own; one is kept."""
        how, folder = CheckpointSection(asynchronous=WAYS[way]), Path(self._config.train.run_dir) / way
        return Checkpoints(folder, self._ranks, layout_of(self._config), signature_of(self._config), 1, how)

    def _timed(self, what: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        self.found[what].append(time.perf_counter() - began)


def move(batch: list[MicroBatch], device: torch.device) -> list[MicroBatch]:
    """A global batch on the training device."""
    return [(tuple(x.to(device) for x in inputs), tuple(x.to(device) for x in targets)) for inputs, targets in batch]


def measure(bench: Bench, saves: int, every: int) -> dict[str, list[float]]:
    """Seconds by what they were spent on; the first round, which allocates, is left out."""
    stores = {way: bench.open_store(way) for way in WAYS}
    for number in range(saves + 1):
        for way, store in stores.items():
            for _ in range(every):
                bench.step("step, nothing written")
            bench.save(f"save, {way}", store, number + 1)
        if not number:
            bench.found.clear()
    return dict(bench.found)


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown to write; checkpoint_DEVICE_<date>.md without")] = None,
    saves: int = 6,
    every: int = 4,
    dim: int = 384,
    depth: int = 8,
) -> None:
    """Measure, print and write a dated table."""
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        config = make_config(Path(folder), dim, depth)
        ranks = join(config)
        found = measure(Bench(config, ranks), saves, every)
        size = sum(path.stat().st_size for path in Path(folder).rglob("*.safetensors")) // len(WAYS)
        ranks.leave()
    lines = ["# What a checkpoint costs the training loop", ""]
    command = f"python -m tests.bench.checkpoint --saves {saves} --every {every} --dim {dim} --depth {depth}"
    name = torch.cuda.get_device_name() if ranks.device.type == "cuda" else f"{platform.machine()} CPU"
    lines += [f"{today()}, {name}, torch {torch.__version__}; `{command}`; one checkpoint is {size / 1e6:.0f} MB", ""]
    lines += [str(__doc__).split("\n\n", 1)[1].strip(), "", "| what | median ms | largest ms | count |"]
    lines += ["|---|---:|---:|---:|"]
    lines += [
        f"| {what} | {1e3 * statistics.median(times):.1f} | {1e3 * max(times):.1f} | {len(times)} |"
        for what, times in sorted(found.items())
    ]
    path = out or RESULTS / f"checkpoint_{ranks.device.type}_{today()}.md"
    path.write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
