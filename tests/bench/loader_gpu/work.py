"""What is measured, as orders to a process of its own, and what comes back. Seconds and images are plain numbers."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from shared import mps
from tests.bench import one_size

ROOT = Path(__file__).parents[3]
SIDE, PATCH, CAPTION_TOKENS = 336, 14, 32
CHILD_S = 180.0


class Loader(msgspec.Struct, frozen=True, tag=True):
    """Batches of a daemon that serves the run file `run`; its processor time counts."""

    run: str
    daemon_pid: int
    lane: Literal["auto", "cuda"] = "auto"


class Torch(msgspec.Struct, frozen=True, tag=True):
    """Batches of torch's DataLoader over webdataset and Pillow."""

    folder: str
    workers: int
    batch: int


Feed = Loader | Torch


class Raw(msgspec.Struct, frozen=True, tag=True):
    """DALI alone: its own tar reader, decode and resize, results where they are made. Each of `runs` in turn: pictures
    a batch, and the share of them that the hardware decoder gets.
    """

    folder: str
    runs: tuple[tuple[int, float], ...]
    threads: int
    seconds: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """As many images as can be had where the trainer wants them."""

    feed: Feed
    seconds: float


class Waits(msgspec.Struct, frozen=True, tag=True):
    """A step of `step_s` for every `images` images."""

    feed: Feed
    seconds: float
    step_s: float
    images: int


class Steps(msgspec.Struct, frozen=True, tag=True):
    """A training-like step of `repeats` rounds of kernels (0: as many as take `step_s`), beside images at each of
    `rates` a second in turn.
    """

    feed: Loader | None
    seconds: float
    step_s: float
    repeats: int
    rates: tuple[float, ...]


class Drained(msgspec.Struct, frozen=True):
    images: int
    seconds: float
    cpu_s: float


class Waited(msgspec.Struct, frozen=True):
    """`waits_s` for each step's images; the device worked for `busy_s` of `seconds`."""

    waits_s: list[float]
    busy_s: float
    seconds: float


class Stepped(msgspec.Struct, frozen=True):
    """`steps_s` as the device took them, while `images` came in `seconds`."""

    steps_s: list[float]
    images: int
    seconds: float
    repeats: int


Order = Raw | Drain | Waits | Steps
Result = TypeVar("Result")


def ordered(order: Order, kind: type[Result], **environment: str) -> Result | str:
    """What a fresh process measures, or the words of one that failed that tell why."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "out.json"
        command = [
            sys.executable,
            "-m",
            "tests.bench.loader_gpu.measure",
            msgspec.json.encode(order).decode(),
            str(out),
        ]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, timeout=CHILD_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"nothing within {CHILD_S:g} s"
        if out.exists():
            return msgspec.json.decode(out.read_bytes(), type=kind)
        words = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        return next((line for line in reversed(words) if "Error" in line), words[-1])[:200]


def alone() -> dict[str, str]:
    """An environment in which no control daemon is found: time slices."""
    return {mps.PIPE_VARIABLE: str(mps.own_dir() / "off")}


def run_file(place: Path, tars: Path, batch: int, loader: dict[str, object]) -> Path:
    """A run file whose micro-batches are `batch` pictures of 336x336."""
    return one_size.run_file(place, f"{tars}/*.tar", batch, SIDE, PATCH, CAPTION_TOKENS, loader)
