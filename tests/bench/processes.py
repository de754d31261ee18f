"""What a tree of processes uses, read from /proc: processor time, and memory with shared pages divided (PSS)."""

import contextlib
import os
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def tree(pid: int) -> list[int]:
    """`pid` and all that descend from it, at this moment."""
    found = [pid]
    for task in _listed(Path(f"/proc/{pid}/task")):
        with contextlib.suppress(OSError):
            for child in (task / "children").read_text().split():
                found += tree(int(child))
    return found


def cpu_s(pids: list[int]) -> float:
    """Processor seconds, user and system, that the living among `pids` have used and their dead children left them."""
    return sum(map(_cpu_s, pids))


def pss_bytes(pids: list[int]) -> int:
    """Proportional set size of the living among `pids`: a page that n processes map counts 1/n for each."""
    return sum(map(_pss_bytes, pids))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) * TICK_S


def _pss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))
