"""Every layout against one process, in numbers: `python -m tests.bench.parity [OUT.md]` (`make parity`).

Two steps on the same mixed global batches (every modality set, an empty pack, an empty caption) of the small test
model, with clipping always active. A cell holds the largest differences from one process with the same precision and
optimizer, plain ZeRO-1: of losses and of gradient norms (relative), and of all weights after the last step (absolute).
No combination is left out: what the trainer refuses has a letter, which stands for the rule. Auxiliary losses of the
experts (four, two for a token) are far larger than anyone would set them; gates of cross-attention stand open.
"""

import string
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from shared.config import load
from shared.errors import ConfigError
from tests.bench.report import busy, dated, machine, table, today
from tests.support.crossing import CROSS, open_start
from tests.support.layouts import EXPERTS, SGD, Differences, degrees, differences, make_run, run_layout
from tests.support.packs import MIXED

STEPS = 2
LIMITS = {"fp32": 1e-5, "bf16": 3e-3}

Layout = tuple[int, int, int, int]
Cases = dict[str, list[str]]
Cell = Differences | str

OPTIMIZERS: Cases = {
    "fp32 AdamW": [],
    "fp32 SGD": SGD,
    "bf16 AdamW": ["train.precision=bf16"],
}
PLAIN: Cases = {
    f"{name} ZeRO-{stage}": [*sets, f"train.zero_stage={stage}"]
    for name, sets in OPTIMIZERS.items()
    for stage in range(4)
}
MEMORY: Cases = {
    "all recomputed": ["train.recompute={vision: all, audio: all, decoder: all, projectors: true}"],
    "offloaded": ["train.offload_optimizer=true"],
}
PLACES, ENCODING = "mesh.sequence_parallel=true", "mesh.encoder_data_parallel=true"
SHARES: Cases = {"places": [PLACES], "encoding": [ENCODING], "places and encoding": [PLACES, ENCODING]}


def crossed(plain: Cases, options: Cases) -> Cases:
    """Every plain case with every option."""
    return {f"{case}, {words}": [*sets, *more] for case, sets in plain.items() for words, more in options.items()}


FULL = PLAIN | crossed(PLAIN, MEMORY)
SOME = PLAIN | crossed({case: sets for case, sets in PLAIN.items() if case.endswith("1")}, MEMORY)
SHARED = crossed({case: sets for case, sets in PLAIN.items() if case[-1] in "01"}, SHARES)

LAYOUTS: list[Layout] = [
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
    (2, 2, 2, 1),
]
"""pipe, data, tensor, expert."""

SHARE_LAYOUTS: list[Layout] = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 1)]
EXPERT_LAYOUTS: list[Layout] = [(1, 2, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2), (1, 4, 1, 4), (1, 2, 2, 2), (2, 2, 2, 2)]

TIED = ("model.decoder.tied=true",)
APART = [f"data.batch.micro_batches={sum(len(captions) for *_, captions in MIXED)}", "data.batch.round=1"]


class Sweep(NamedTuple):
    """Every case in every layout, of the model made by the overrides `model`; `apart`: each sample padded by itself."""

    title: str
    layouts: list[Layout]
    cases: Cases
    model: tuple[str, ...] = ()
    apart: bool = False


SWEEPS = [
    Sweep("Dense", [(1, 1, 1, 1), *LAYOUTS], FULL),
    Sweep("Experts", [*LAYOUTS[:-1], *EXPERT_LAYOUTS], SOME, tuple(EXPERTS)),
    Sweep("Tied head", LAYOUTS, PLAIN, TIED),
    Sweep("Cross-attention", LAYOUTS, PLAIN, (CROSS,)),
    Sweep("Shared out over tensor ranks", SHARE_LAYOUTS, SHARED),
    Sweep("Shared out over tensor ranks, experts", SHARE_LAYOUTS, SHARED, tuple(EXPERTS)),
    Sweep("Every sample padded in a pack of its own", [(1, 1, 1, 1)], PLAIN, apart=True),
]


def reference(case: str) -> str:
    """The case that it must equal in one process: the same precision and optimizer, ZeRO-1, no option."""
    return " ".join([*case.split()[:2], "ZeRO-1"])


def measure(folder: Path, sweep: Sweep) -> dict[Layout, dict[str, Cell]]:
    """Layout -> case -> its differences from one process, or the rule by which it is refused."""
    folder.mkdir()
    model = list(sweep.model)
    if CROSS in model:
        model.append(f"train.init_from={open_start(folder, model)}")
    plain = {case: [*PLAIN[case], *model] for case in map(reference, PLAIN)}
    alone = run_layout(folder / "alone", (1, 1, 1), plain, steps=STEPS)
    found: dict[Layout, dict[str, Cell]] = {}
    for mesh in sweep.layouts:
        at = folder / "-".join(map(str, mesh))
        cases = {case: [*sets, *model, *(APART if sweep.apart else [])] for case, sets in sweep.cases.items()}
        refused = refusals(at, mesh, cases)
        cases = {case: sets for case, sets in cases.items() if case not in refused}
        runs = run_layout(at, mesh, cases, steps=STEPS, apart=sweep.apart)
        found[mesh] = {**refused, **{case: differences(run, alone[reference(case)]) for case, run in runs.items()}}
    return found


def refusals(folder: Path, mesh: Layout, cases: Cases) -> dict[str, str]:
    """Case -> the rule that a run file of it breaks, for those that break one."""
    config, found = make_run(folder), {}
    for case, sets in cases.items():
        try:
            load(config, [*sets, *degrees(mesh)])
        except ConfigError as error:
            found[case] = f"`{error.name}` {error.rule}"
    return found


def show(cell: Cell, letters: dict[str, str]) -> str:
    """Three numbers, or the letter of a rule; a new rule gets the next letter."""
    if isinstance(cell, str):
        return letters.setdefault(cell, string.ascii_lowercase[len(letters)])
    return " / ".join(f"{x:.0e}" for x in cell)


def name_of(mesh: Layout) -> str:
    """`pipe 2 data 2`: what is more than 1."""
    parts = zip(("pipe", "data", "tensor", "expert"), mesh, strict=True)
    return " ".join(f"{axis} {degree}" for axis, degree in parts if degree > 1) or "one process"


def summary(cells: list[tuple[str, Cell]]) -> list[dict[str, str]]:
    """The largest difference of all cells of each precision, beside what is allowed."""
    rows = []
    for precision, limit in LIMITS.items():
        held = [cell for case, cell in cells if case.startswith(precision) and not isinstance(cell, str)]
        columns = dict(zip(("loss", "gradient norm", "weights"), map(max, zip(*held, strict=True)), strict=True))
        rows.append({"precision": precision, "cells": str(len(held)), "allowed": f"{limit:.0e}"})
        rows[-1] |= {name: f"{value:.1e}" for name, value in columns.items()}
    return rows


def too_far(cells: list[tuple[str, Cell]]) -> list[str]:
    """Cases with a difference above what is allowed, or that is not a number."""
    measured = [(case, cell) for case, cell in cells if not isinstance(cell, str)]
    return [case for case, cell in measured if not all(x <= LIMITS[case.split()[0]] for x in cell)]


def report(found: dict[str, dict[Layout, dict[str, Cell]]], load_before: str) -> list[str]:
    """The result as Markdown."""
    cells = [pair for layouts in found.values() for cases in layouts.values() for pair in cases.items()]
    refused, letters = sum(isinstance(cell, str) for _, cell in cells), dict[str, str]()
    lines = ["# Layouts against one process", "", f"{today()}, {machine()}, gloo, torch {torch.__version__};"]
    lines += [f"{load_before}; `python -m tests.bench.parity`", "", str(__doc__).split("\n\n", 1)[1].strip(), ""]
    lines += [
        *table(summary(cells)),
        "",
        f"{refused} more are refused; {len(too_far(cells))} are further than allowed.",
    ]
    if left_out := [sweep.title for sweep in SWEEPS if sweep.title not in found]:
        lines += ["", f"Not measured in this run: {'; '.join(left_out)}."]
    for title, layouts in found.items():
        rows = [
            {"case": case} | {name_of(mesh): show(cases[case], letters) for mesh, cases in layouts.items()}
            for case in next(iter(layouts.values()))
        ]
        lines += ["", f"## {title}", "", *table(sorted(rows, key=lambda row: row["case"]))]
    rules = [f"- {letter}: {rule}" for rule, letter in letters.items()]
    return [*lines, "", "## Refused, by rule", "", *rules]


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown to write; parity_cpu_<date>.md without")] = None,
    only: Annotated[str, typer.Option(help="Measure the sweeps whose titles contain this.")] = "",
) -> None:
    """Measure, print and write a dated table; exit code 1 if any cell is further than allowed."""
    before, sweeps = busy(), [sweep for sweep in SWEEPS if only in sweep.title]
    with tempfile.TemporaryDirectory() as folder:
        found = {sweep.title: measure(Path(folder) / str(i), sweep) for i, sweep in enumerate(sweeps)}
    lines = report(found, before)
    path = out or dated("parity")
    path.write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))
    if too_far([pair for layouts in found.values() for cases in layouts.values() for pair in cases.items()]):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
