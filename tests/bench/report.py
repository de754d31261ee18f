"""Numbers to text: percentiles, spreads, Markdown tables, and the machine in a line."""

import datetime
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
VERSIONS = """import sys
from importlib import metadata
held = {d.metadata["Name"].lower(): d.version for d in reversed(list(metadata.distributions()))}
for name in sys.argv[1:]:
    if name in held:
        print(name, held[name])
"""


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` (0 to 1) of them do not exceed (nearest rank)."""
    if not values:
        raise ValueError("percentile of nothing")
    rank = max(1, -(-len(values) * round(share * 1000) // 1000))
    return sorted(values)[rank - 1]


def spread(values: Sequence[float], digits: int = 0) -> str:
    """The median, and the least and most where there are several: `812 (790-845)`."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(rows: Sequence[dict[str, str]]) -> Iterator[str]:
    """A Markdown table; its columns are the keys of all rows, in the order they are first met."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    yield "| " + " | ".join(columns) + " |"
    yield "| " + " | ".join("---" for _ in columns) + " |"
    for row in rows:
        yield "| " + " | ".join(row.get(column, "").replace("|", "\\|") for column in columns) + " |"


def machine() -> str:
    """Processor and the cores this process may use, memory, Python."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    name = models[0].partition(":")[2].strip() if models else platform.machine()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} of {os.cpu_count()} CPU cores ({name}), {memory:.0f} GiB; Python {platform.python_version()}"


def busy() -> str:
    """How many other programs wanted the processor when this one started; near 0 on a quiet machine."""
    return f"load average before the run: {os.getloadavg()[0]:.1f}"


def versions(packages: Sequence[str], python: str = sys.executable) -> str:
    """`name version` of each of `packages` that the environment of `python` holds."""
    done = subprocess.run([python, "-c", VERSIONS, *packages], capture_output=True, text=True, check=True, timeout=60)
    return ", ".join(done.stdout.splitlines())


def today() -> str:
    """The date, as files are named by it."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def dated(theme: str) -> Path:
    """The file for a result of today on a CPU."""
    return RESULTS / f"{theme}_cpu_{today()}.md"
