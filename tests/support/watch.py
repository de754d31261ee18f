"""What processes hold of the machine, sampled from /proc, and whether it grows.

A share of memory (PSS) counts a page that n processes map as 1/n, so a sum over processes is exact, and one process's
share rises when another one ends. Heap is anonymous memory, which is its owner's alone.
"""

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

BARS = "▁▂▃▄▅▆▇█"
KIB = 1024
FEWEST = 9
"""Samples of which thirds can be compared."""


class Footprint(msgspec.Struct, frozen=True):
    """One process, or several summed up. `segments` are mapped segments of shared memory, unlinked ones too."""

    pss_bytes: int = 0
    heap_bytes: int = 0
    fds: int = 0
    threads: int = 0
    segments: int = 0

    def __add__(self, other: "Footprint") -> "Footprint":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Footprint(*(a + b for a, b in pairs))


def footprint(pid: int, shm_dir: str) -> Footprint:
    """Of a live process, whose segments lie in `shm_dir`.

    Raises:
        FileNotFoundError, ProcessLookupError: it has ended.
    """
    process = Path(f"/proc/{pid}")
    memory = _numbers(process / "smaps_rollup")
    paths = {line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines() if shm_dir in line}
    threads = _numbers(process / "status")["Threads"]
    return Footprint(
        memory["Pss"] * KIB, memory["Anonymous"] * KIB, len(list((process / "fd").iterdir())), threads, len(paths)
    )


def _numbers(path: Path) -> dict[str, int]:
    """The lines `Name: NUMBER` and `Name: NUMBER kB` of a file of /proc."""
    parts = [line.split() for line in path.read_text().splitlines()]
    return {part[0].rstrip(":"): int(part[1]) for part in parts if len(part) > 1 and part[1].isdigit()}


def growth(values: Sequence[float]) -> float:
    """From the median of the middle third to that of the last one; 0 for fewer than FEWEST values."""
    third = len(values) // 3
    if len(values) < FEWEST:
        return 0.0
    return statistics.median(values[-third:]) - statistics.median(values[third:-third])


def sparkline(values: Sequence[float]) -> str:
    """One character a value, from 0 (lowest bar) to the largest (highest)."""
    top = max(values, default=0) or 1
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in values)
