"""Where results are kept, and what every one of them tells about the machine."""

import datetime
import os
import platform
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def today() -> datetime.date:
    return datetime.datetime.now(datetime.UTC).date()


def dated(theme: str) -> Path:
    """The file for a result of today on a CPU."""
    return RESULTS / f"{theme}_cpu_{today()}.md"


def machine() -> str:
    """The machine in a line."""
    return f"{os.cpu_count()} {platform.machine()} CPU cores, Python {platform.python_version()}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """A Markdown table; all columns but the first are right-aligned."""
    yield "| " + " | ".join(head) + " |"
    yield "|---|" + "---:|" * (len(head) - 1)
    for row in rows:
        yield "| " + " | ".join(map(str, row)) + " |"
