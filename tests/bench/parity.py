"""Every layout against one process, in numbers: `python -m tests.bench.parity [OUT.md]` (`make parity`).

Three steps on the same mixed global batches (every modality set, an empty pack, an empty caption) of the small test
model, with clipping always active. Differences are the largest over the steps, and for weights over all of them.
"""

import datetime
import platform
import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer

from tests.support.layouts import Differences, differences, run_layout

RESULTS = Path(__file__).parent / "results"
SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
CASES = {
    "fp32 AdamW ZeRO-1": [],
    "fp32 SGD ZeRO-1": SGD,
    "fp32 SGD ZeRO-0": [*SGD, "train.zero_stage=0"],
    "bf16 AdamW ZeRO-1": ["train.precision=bf16"],
}
LAYOUTS = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
"""pipe, data, tensor."""


def measure(folder: Path) -> list[tuple[str, str, Differences]]:
    """Layout, case and differences from one process in the same case."""
    alone = run_layout(folder / "alone", (1, 1, 1), CASES)
    found = []
    for mesh in LAYOUTS:
        name = "pipe {} x data {} x tensor {}".format(*mesh)
        runs = run_layout(folder / name.replace(" ", ""), mesh, CASES)
        found += [(name, case, differences(run, alone[case])) for case, run in runs.items()]
    return found


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown to write; parity_cpu_<date>.md without")] = None,
) -> None:
    """Measure, print and write a dated table."""
    today = datetime.datetime.now(datetime.UTC).date()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder))
    lines = ["# Layouts against one process", ""]
    lines += [f"{today}, {platform.machine()} CPU, gloo, torch {torch.__version__}; `python -m tests.bench.parity`", ""]
    lines += [str(__doc__).split("\n\n", 1)[1].strip(), ""]
    lines += ["| layout | case | loss (relative) | gradient norm (relative) | weights (absolute) |"]
    lines += ["|---|---|---:|---:|---:|"]
    lines += [f"| {name} | {case} | " + " | ".join(f"{x:.1e}" for x in each) + " |" for name, case, each in found]
    path = out or RESULTS / f"parity_cpu_{today}.md"
    path.write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
