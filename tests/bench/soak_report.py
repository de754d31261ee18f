"""A soak's result as Markdown: what was done to it, which law holds, and what the processes held meanwhile."""

from collections.abc import Callable, Iterator

import msgspec

from tests.bench.report import machine, table, today
from tests.bench.soak_laws import Sample
from tests.support.watch import sparkline

MIB = 1 << 20
ROWS = 20

COLUMNS: dict[str, Callable[[Sample], int]] = {
    "PSS MiB": lambda s: s.of().pss_bytes // MIB,
    "daemon MiB": lambda s: s.of("daemon").pss_bytes // MIB,
    "workers MiB": lambda s: s.of("worker").pss_bytes // MIB,
    "readers MiB": lambda s: s.of("readers").pss_bytes // MIB,
    "descriptors": lambda s: s.of().fds,
    "threads": lambda s: s.of().threads,
    "mapped segments": lambda s: s.of().segments,
    "segment files": lambda s: s.files,
}
"""Over all processes, which are as many in every sample."""


class Outcome(msgspec.Struct):
    """What a run was and what came of it. `mesh` says how many readers there were."""

    steps: int
    epochs: int
    mesh: str
    seconds: float
    stall_s: float
    kills: dict[str, int]
    samples: list[Sample]
    verdicts: list[tuple[str, bool, str]]


def report(outcome: Outcome, command: str) -> list[str]:
    """The result as Markdown."""
    killed = ", ".join(f"{count} of a {who}" for who, count in sorted(outcome.kills.items()))
    lines = ["# Soak", "", f"{today()}, {machine()}; `{command}`", ""]
    lines += [f"{outcome.steps} steps over {outcome.epochs} epochs, {outcome.mesh}, in "]
    lines[-1] += f"{outcome.seconds:.0f} s ({outcome.steps / outcome.seconds:.0f} steps/s, restarts included)."
    lines += [f"SIGKILLs: {killed or 'none'}. Longest standstill of the slowest reader: {outcome.stall_s:.1f} s.", ""]
    lines += table(
        [
            {"law": law, "holds": "yes" if holds else "**no**", "found": found.split("\n")[0]}
            for law, holds, found in outcome.verdicts
        ]
    )
    lines += ["", "## What the processes held", "", *_plots(outcome.samples), ""]
    lines += table(list(_rows(outcome.samples)))
    return lines


def _plots(samples: list[Sample]) -> Iterator[str]:
    width = max(map(len, COLUMNS))
    yield "```text"
    for column, value in COLUMNS.items():
        values = [value(sample) for sample in samples]
        yield f"{column:<{width}} {sparkline(values)} {min(values, default=0)} to {max(values, default=0)}"
    yield "```"


def _rows(samples: list[Sample]) -> Iterator[dict[str, str]]:
    for sample in samples[:: max(1, len(samples) // ROWS)]:
        values = {name: str(value(sample)) for name, value in COLUMNS.items()}
        yield {"step": str(sample.step), "s": f"{sample.seconds:.0f}", **values}
