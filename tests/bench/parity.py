"""Every layout against one process, in numbers: `python -m tests.bench.parity [OUT.md]` (`make parity`).

Three steps on the same mixed global batches (every modality set, an empty pack, an empty caption) of the small test
model, with clipping always active; the same with a tied head, and with four experts in each block, two for a token,
and auxiliary losses far larger than anyone would set; then all but the tied head with what a tensor group may share
out: places of a pack (`mesh.sequence_parallel`) and encoding (`mesh.encoder_data_parallel`). Differences are the
largest over the steps, and for weights over all of them.
"""

import platform
import tempfile
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import typer

from tests.bench.report import dated, today
from tests.support.layouts import Differences, differences, run_layout

SGD = ["train.optim.name=sgd", "train.optim.lr=0.1"]
RECOMPUTE = ["train.recompute={vision: all, audio: all, decoder: all, projectors: true}"]
OFFLOAD = "train.offload_optimizer=true"
CASES = {
    "fp32 AdamW ZeRO-1": [],
    "fp32 SGD ZeRO-1": SGD,
    "fp32 SGD ZeRO-0": [*SGD, "train.zero_stage=0"],
    "bf16 AdamW ZeRO-1": ["train.precision=bf16"],
    "fp32 AdamW ZeRO-1, all recomputed": RECOMPUTE,
    "fp32 SGD ZeRO-1, offloaded": [*SGD, OFFLOAD],
    "bf16 AdamW ZeRO-1, offloaded, all recomputed": ["train.precision=bf16", *RECOMPUTE, OFFLOAD],
}
SHARDED = {
    f"fp32 {name} ZeRO-{stage}{words}": [*sets, f"train.zero_stage={stage}", *more]
    for stage in (2, 3)
    for name, sets in (("AdamW", []), ("SGD", SGD))
    for words, more in (("", []), (", offloaded", [OFFLOAD]), (", all recomputed", RECOMPUTE))
}
"""ZeRO-2 and 3, for layouts that are data parallel alone."""

LAYOUTS = [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 1)]
"""pipe, data, tensor, expert."""

EXPERTS = [f"model.decoder.{each}" for each in ("experts=4", "experts_per_token=2", "expert_mlp=64")]
LOSSES = ["model.decoder.balance_loss=0.5", "model.decoder.router_z_loss=0.1"]
EXPERT_CASES = {case: [*sets, *EXPERTS, *LOSSES] for case, sets in CASES.items() if OFFLOAD not in sets}
EXPERT_LAYOUTS = [(2, 1, 1, 1), (1, 2, 1, 1), (1, 2, 1, 2), (2, 2, 1, 2), (1, 4, 1, 2), (1, 4, 1, 4)]
EXPERT_LAYOUTS += [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 1), (1, 2, 2, 2), (2, 2, 2, 2)]

TIED_CASES = {case: [*sets, "model.decoder.tied=true"] for case, sets in CASES.items()}

SHARES = {"places shared": "mesh.sequence_parallel=true", "encoding shared": "mesh.encoder_data_parallel=true"}
SHARE_LAYOUTS = [(1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 1)]

Layout = tuple[int, int, int, int]
Cases = dict[str, list[str]]


class Sweep(NamedTuple):
    """Cases that run in every layout, and the plain ones, among them those that each must equal in one process."""

    layouts: list[Layout]
    cases: Cases
    plain: Cases
    suffix: str = ""


def shares(cases: Cases) -> Cases:
    """Each plain case with places, with encoding and with both shared out."""
    options = {words: [option] for words, option in SHARES.items()} | {", ".join(SHARES): [*SHARES.values()]}
    kept = {case: sets for case, sets in cases.items() if "," not in case}
    return {f"{case}, {words}": [*sets, *more] for case, sets in kept.items() for words, more in options.items()}


SWEEPS = [
    Sweep(LAYOUTS, CASES, CASES),
    Sweep([(1, 2, 1, 1)], SHARDED, CASES),
    Sweep(SHARE_LAYOUTS, shares(CASES), CASES),
    Sweep(LAYOUTS, TIED_CASES, TIED_CASES, ", tied head"),
    Sweep(EXPERT_LAYOUTS, EXPERT_CASES, EXPERT_CASES, ", experts"),
    Sweep(SHARE_LAYOUTS, shares(EXPERT_CASES), EXPERT_CASES, ", experts"),
]


def measure(folder: Path, sweep: Sweep) -> list[tuple[str, str, Differences]]:
    """Layout, case and differences from one process, plain ZeRO-1, with the same precision and optimizer."""
    alone = run_layout(folder / "alone", (1, 1, 1), {plain(case): sweep.plain[plain(case)] for case in sweep.cases})
    found = []
    for mesh in sweep.layouts:
        name = "pipe {} x data {} x tensor {}, expert {}".format(*mesh).removesuffix(", expert 1")
        runs = run_layout(folder / "-".join(map(str, mesh)), mesh, sweep.cases)
        found += [(name, case + sweep.suffix, differences(run, alone[plain(case)])) for case, run in runs.items()]
    return found


def plain(case: str) -> str:
    """The case that it must equal: the same precision and optimizer with ZeRO-1, nothing recomputed or offloaded."""
    precision, optimizer, *_ = case.split()
    return f"{precision} {optimizer} ZeRO-1"


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown to write; parity_cpu_<date>.md without")] = None,
) -> None:
    """Measure, print and write a dated table."""
    with tempfile.TemporaryDirectory() as folder:
        found = [row for i, sweep in enumerate(SWEEPS) for row in measure(Path(folder) / str(i), sweep)]
    lines = ["# Layouts against one process", ""]
    lines += [
        f"{today()}, {platform.machine()} CPU, gloo, torch {torch.__version__}; `python -m tests.bench.parity`",
        "",
    ]
    lines += [str(__doc__).split("\n\n", 1)[1].strip(), ""]
    lines += ["| layout | case | loss (relative) | gradient norm (relative) | weights (absolute) |"]
    lines += ["|---|---|---:|---:|---:|"]
    lines += [f"| {name} | {case} | " + " | ".join(f"{x:.1e}" for x in each) + " |" for name, case, each in found]
    path = out or dated("parity")
    path.write_text("\n".join(lines) + "\n")
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
