"""The lanes beside plain memcpy: `python -m tests.bench.transport [OUT.md]`.

Decoding is taken out (`lane.py`): the daemon writes each batch into its slot by one copy, and one or four client
processes take it as views or copy it out. Next to it, in the same run, what one thread's memcpy into such a slot moves.
Over TCP, on the loopback, batches come as frames, so both ends' processors share the work with whatever encrypts.
Hand-over latency: from the moment a slot turns READY to the moment a waiting client holds its tensors.
"""

import statistics
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from shared.slots import SlotPool
from tests.bench import lane, report

IMAGES = {1: 600, 10: 200, 43: 60, 171: 20}
"""Pictures a batch (0.8 to 134 MB), and how many batches of it are measured."""
READERS = (1, 4)
PACE_S = 0.005
PACKAGES = ("numpy", "pyzmq", "msgspec", "torch")


def memcpy_gb_s(size_bytes: int, copies: int) -> float:
    """Gigabytes a second that one thread copies into the slots of a segment, one slot after the other."""
    pool = SlotPool.create("/dev/shm", "memcpy", 4, size_bytes)
    source = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    try:
        began = time.perf_counter()
        for number in range(copies):
            np.copyto(pool.segment.payload(number % 4)[:size_bytes], source)
        return size_bytes * copies / (time.perf_counter() - began) / 1e9
    finally:
        pool.close()


def lane_row(images: int, readers: int, batches: int) -> dict[str, str]:
    """One batch size with one number of readers."""
    size = images * lane.IMAGE_BYTES
    row = {"batch MB": f"{size / 1e6:.1f}", "readers": str(readers)}
    row["memcpy GB/s"] = f"{memcpy_gb_s(size, batches):.1f}"
    for how in ("view", "copy"):
        seen, written = lane.run(images, readers, batches, how == "copy")
        row[f"each reader, {how}, GB/s"] = report.spread([size * s.batches / s.seconds / 1e9 for s in seen], 1)
    return row | {"writes per batch": f"{written:.2f}"}


def network_row(images: int, way: lane.Way, batches: int) -> dict[str, str]:
    """One batch size as frames to one reader."""
    size = images * lane.IMAGE_BYTES
    (seen,), _ = lane.run(images, 1, batches, copy=False, way=way)
    row = {"batch MB": f"{size / 1e6:.1f}", "lane": way, "memcpy GB/s": f"{memcpy_gb_s(size, batches):.1f}"}
    return row | {"reader GB/s": f"{size * seen.batches / seen.seconds / 1e9:.2f}"}


def latency_row(readers: int, batches: int) -> dict[str, str]:
    """Hand-over of batches that readers are waiting for."""
    seen, _ = lane.run(10, readers, batches, copy=False, pace_s=PACE_S)
    return late_row(f"a batch to {readers} reader{'s' * (readers > 1)}", [late for one in seen for late in one.late_s])


def late_row(what: str, late_s: list[float]) -> dict[str, str]:
    """The spread of so many delays."""
    row = {"what": what, "times": str(len(late_s))}
    row |= {f"p{100 * share:.0f} µs": f"{1e6 * report.percentile(late_s, share):.0f}" for share in (0.5, 0.99)}
    return row | {"mean µs": f"{1e6 * statistics.mean(late_s):.0f}"}


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown file; transport_<date>.md without")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="a tenth of the batches: only shows that all works")] = False,
) -> None:
    """Measure and write a dated table."""
    load, shrink = report.busy(), 10 if quick else 1
    rows = [lane_row(images, n, max(4, count // shrink)) for images, count in IMAGES.items() for n in READERS]
    ways: tuple[lane.Way, ...] = ("tcp", "tcp, encrypted")
    far = [network_row(images, way, max(4, count // shrink)) for images, count in IMAGES.items() for way in ways]
    late = [late_row("a bare ZeroMQ message", lane.bare_late_s(1000 // shrink, PACE_S))]
    late += [latency_row(n, 1000 // shrink) for n in READERS]
    lines = ["# The lanes", "", f"{report.today()}, {report.machine()}; {load}", report.versions(PACKAGES)]
    lines += ["", f"`python -m tests.bench.transport{' --quick' if quick else ''}`", ""]
    lines += [" ".join(str(__doc__).split("\n\n", 1)[1].split()), ""]
    lines += [
        "`view`: tensors over the slot, nothing is read. `copy`: the whole payload is copied out, as to a device."
    ]
    lines += ["Writes per batch stand a little over 1 for what was filled ahead when the readers left.", ""]
    lines += [*report.table(rows), "", "## As frames over TCP", "", *report.table(far)]
    lines += ["", "## Hand-over to a client that waits", "", *report.table(late), ""]
    path = out or report.RESULTS / f"transport_{report.today()}.md"
    path.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
