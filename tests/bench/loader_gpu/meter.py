"""What the parts of a worker's fill path take, and its threads, as figures of `inside.py`."""

import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dataloader_svc import fill, headers, pipeline, scan
from dataloader_svc.fill import Filler
from tests.bench.processes import TICK_S

PARTS = {
    "read": [(Filler, "_read")],
    "headers": [(headers, "image_facts")],
    "scan": [(scan, "damage")],
    "feed": [(pipeline.PipelineDecoder, "_feed")],
    "run": [(pipeline.PipelineDecoder, "_run")],
    "copy": [(pipeline.PipelineDecoder, "_deliver")],
    "tokens": [(Filler, "_captions"), (Filler, "_lay_out")],
    "sum": [(fill, "_checksum")],
}
SHOWN_THREADS = 6
Row = dict[str, str]


class Meter:
    """Wall and processor seconds of what it wraps, over all threads."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._lock = threading.Lock()

    def timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`call`, timed every time."""

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter(), time.thread_time()
            try:
                return call(*given, **named)
            finally:
                self.add(part, *began)

        return timed

    @contextlib.contextmanager
    def timing(self, part: str) -> Iterator[None]:
        """Time the block."""
        began = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self.add(part, *began)

    def add(self, part: str, wall: float, own: float) -> None:
        """Count the time since then."""
        wall, own = time.perf_counter() - wall, time.thread_time() - own
        with self._lock:
            self.seconds[part][0] += wall
            self.seconds[part][1] += own


@contextlib.contextmanager
def wrapped(meter: Meter) -> Iterator[None]:
    """All PARTS timed, until the end of the block."""
    found = [(part, *where, getattr(*where)) for part, places in PARTS.items() for where in places]
    try:
        for part, owner, name, call in found:
            setattr(owner, name, meter.timed(call, part))
        yield
    finally:
        for _, owner, name, call in found:
            setattr(owner, name, call)


def figures(hands: int, pictures: int, elapsed: float, used: float, meter: Meter, threads: Counter[str]) -> Row:
    """Microseconds a picture, `clock/processor` for parts."""

    def each(seconds: float) -> str:
        return f"{1e6 * seconds / max(1, pictures):.1f}"

    row = {"hands": str(hands), "images/s": f"{pictures / elapsed:.0f}", "cores": f"{used / elapsed:.2f}"}
    row |= {"processor us": each(used)}
    row |= {part: "/".join(map(each, meter.seconds[part])) for part in ("fill", *PARTS, "report")}
    return row | {"threads": ", ".join(f"{name} {each(s)}" for name, s in threads.most_common(SHOWN_THREADS))}


def threads_s() -> Counter[str]:
    """Processor seconds of this process's threads, by name, in ticks of the kernel's clock."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            name, _, fields = (task / "stat").read_text().partition("(")[2].rpartition(")")
            found[name] += sum(map(int, fields.split()[11:13])) * TICK_S  # type: ignore[assignment]
    return found
