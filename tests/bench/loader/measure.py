"""One contender in this process: `python -m tests.bench.loader.measure NAME DECODER FOLDER OUT.json --seconds 4`.

Drained first: as many batches as come, nothing done with them. Then a step for each batch, which holds the interpreter
lock (Python code) for one half and waits (as for a GPU) for the other. Torch is imported before the clock starts: a
trainer has it anyway.
"""

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from tests.bench.loader.contenders import OURS
from tests.bench.loader.peers import PEERS
from tests.bench.loader.work import BATCH, SIDE, Prepared, one_thread
from tests.bench.processes import cpu_s, pss_bytes, tree

CONTENDERS = OURS | PEERS
WARM_BATCHES = 8


class Window(msgspec.Struct, frozen=True):
    """A stretch of `seconds`: samples that came, each wait for a batch, processor seconds used."""

    seconds: float
    samples: int
    waits_s: list[float]
    consumer_cpu_s: float
    all_cpu_s: float


class Figures(msgspec.Struct, frozen=True):
    """What one run of one contender came to, or why it came to nothing."""

    first_s: float = 0.0
    pss_bytes: int = 0
    drained: Window | None = None
    stepped: Window | None = None
    error: str = ""


def installed(package: str) -> bool:
    """Whether `package` can be found."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def run(name: str, decoder: str, folder: Path, seconds: float, step_s: float) -> Figures:
    """Both windows of one contender."""
    began = time.perf_counter()
    with CONTENDERS[name].batches(folder, decoder) as batches:
        checked(next(batches))
        first_s = time.perf_counter() - began
        for _ in range(min(WARM_BATCHES, round(2 * seconds))):
            checked(next(batches))
        drained = window(batches, seconds, lambda: None)
        stepped = window(batches, seconds, lambda: step(step_s))
        pss = pss_bytes(tree(os.getpid()))
    return Figures(first_s, pss, drained, stepped)


def window(batches: Iterator[Prepared], seconds: float, use: Callable[[], None]) -> Window:
    """Take batches for `seconds` and `use` each."""
    pids = tree(os.getpid())
    all_before, own_before, began = cpu_s(pids), time.process_time(), time.perf_counter()
    waits: list[float] = []
    while time.perf_counter() - began < seconds:
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        checked(batch)
        use()
    elapsed = time.perf_counter() - began
    return Window(elapsed, BATCH * len(waits), waits, time.process_time() - own_before, cpu_s(pids) - all_before)


def checked(batch: Prepared) -> None:
    """Refuse a batch that is not what was ordered."""
    pixels, tokens = batch
    if pixels.shape != (BATCH, SIDE, SIDE, 3) or pixels.dtype != torch.uint8 or not int(tokens.view(-1)[0]):
        raise ValueError(f"{tuple(pixels.shape)} {pixels.dtype} came, and first token {tokens.view(-1)[:1].tolist()}")


def step(seconds: float) -> None:
    """Python code for half of the time, a wait without the interpreter lock for the other."""
    end = time.perf_counter() + seconds / 2
    while time.perf_counter() < end:
        pass
    time.sleep(seconds / 2)


def main(
    name: Annotated[str, typer.Argument(help=", ".join(CONTENDERS))],
    decoder: Annotated[str, typer.Argument(help="pillow or reduced")],
    folder: Annotated[Path, typer.Argument(help="the tars")],
    out: Annotated[Path, typer.Argument(help="JSON file to write")],
    seconds: Annotated[float, typer.Option(help="length of each window; 0 only prepares")] = 4.0,
    step_ms: Annotated[float, typer.Option(help="a step of the second window")] = 60.0,
) -> None:
    """Measure one contender and write its figures."""
    one_thread()
    contender = CONTENDERS[name]
    if not installed(contender.package):
        figures = Figures(error="not installed")
    elif seconds:
        figures = run(name, decoder, folder, seconds, step_ms / 1000)
    else:
        contender.prepare(folder)
        figures = Figures()
    out.write_text(json.dumps(msgspec.to_builtins(figures)))


if __name__ == "__main__":
    typer.run(main)
