"""Every layout on several GPUs of one host beside one GPU: `python -m tests.bench.multi_gpu run FOLDER`, then `report`.

Each layout is a run of its own, with a loader daemon of its own, through the `deepspeed` launcher and `trainer bench`,
over the same global batches from the same weights. Its losses and gradient norms are held against one GPU's, its speed
too. `run --only one --gpus 0` and `run --only moe --gpus 1` may go side by side: what was measured lies in FOLDER.
`killed` is no matter of speed: a rank is killed in the middle of a run, the others must name it, and the run that is
resumed must be the unbroken one.
"""

import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from deploy.demo.run import DEEPSPEED, ROOT, around, free_port
from shared.config import load
from tests.bench.main_job import hardware
from tests.bench.report import table, today
from tests.bench.trainer import CONFIG, Decoded, demo_options, each, measure, tail
from tests.support.daemons import serving
from tests.support.trainers import lines, rank_processes
from trainer.bench import Numbers

MOE = ("model.decoder.depth=24", "model.decoder.experts=8", "model.decoder.expert_mlp=2752", "train.compile=false")
KILLED_STEPS, KILLED_AFTER, ENDED_S = 16, 8, 60.0


class Layout(msgspec.Struct, frozen=True):
    """A row of the table: what is changed in the run file, and which layout on one GPU it is held against."""

    name: str
    devices: int
    options: tuple[str, ...] = ()
    alone: str = "one"


PP2 = ("mesh.pipe=2", "mesh.balance=measured")
LAYOUTS = {
    "one": Layout("one GPU", 1),
    "tp2": Layout("tensor 2", 2, ("mesh.tensor=2",)),
    "tp2s": Layout("tensor 2, sequence parallel", 2, ("mesh.tensor=2", "mesh.sequence_parallel=true")),
    "tp2e": Layout("tensor 2, encoders data-parallel", 2, ("mesh.tensor=2", "mesh.encoder_data_parallel=true")),
    "pp2": Layout("pipe 2", 2, PP2),
    "dp2": Layout("data 2, ZeRO-1", 2, ("mesh.data=2",)),
    "dp2z3": Layout("data 2, ZeRO-3", 2, ("mesh.data=2", "train.zero_stage=3")),
    "moe": Layout("experts, one GPU", 1, MOE, "moe"),
    "ep2": Layout("experts, data 2 x expert 2", 2, (*MOE, "mesh.data=2", "mesh.expert=2"), "moe"),
    "tp4": Layout("tensor 4", 4, ("mesh.tensor=4",)),
    "dp4": Layout("data 4, ZeRO-1", 4, ("mesh.data=4",)),
    "tp2dp2": Layout("tensor 2 x data 2", 4, ("mesh.tensor=2", "mesh.data=2")),
    "tp2pp2dp2": Layout("tensor 2 x pipe 2 x data 2", 8, ("mesh.tensor=2", *PP2, "mesh.data=2")),
    "tp4pp2": Layout("tensor 4 x pipe 2", 8, ("mesh.tensor=4", *PP2)),
}


class Result(msgspec.Struct, frozen=True):
    """One layout's, as it lies in the folder."""

    key: str
    numbers: Numbers | None
    decoded: Decoded | None = None
    failure: str = ""


class Killed(msgspec.Struct, frozen=True):
    """What came of killing a rank: seconds until all had ended, what was said, and whether the resumed run is exact."""

    layout: str
    seconds: float
    said: str
    resumed_from: int
    exact: bool


app = typer.Typer(help=__doc__, add_completion=False)
DataOption = Annotated[Path, typer.Option(help="the demo data")]


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="where results are put, a file a layout")],
    config: Annotated[Path, typer.Option(help="run file")] = CONFIG,
    data: DataOption = ROOT / "demo-data",
    copies: Annotated[int, typer.Option(help="how often the data is listed: few samples do not fill large packs")] = 16,
    only: Annotated[list[str] | None, typer.Option(help=f"layouts: {', '.join(LAYOUTS)}; all that fit without")] = None,
    gpus: Annotated[str, typer.Option(help="devices, such as 1 or 0,1; the first ones without")] = "",
    override: Annotated[list[str] | None, typer.Option("--set", help="run-file overrides for every layout")] = None,
    warmup: Annotated[int, typer.Option(help="steps before the timed ones; their losses count")] = 5,
    steps: Annotated[int, typer.Option(help="timed steps")] = 45,
    limit_s: Annotated[float, typer.Option("--limit", help="seconds that a layout may take")] = 540.0,
    profile: Annotated[bool, typer.Option(help="also write a step's kernel times, a folder a layout")] = False,
) -> None:
    """Measure layouts, one after the other."""
    folder.mkdir(parents=True, exist_ok=True)
    for key in only or [key for key, layout in LAYOUTS.items() if layout.devices <= torch.cuda.device_count()]:
        began, told = time.monotonic(), folder / f"profile-{key}" if profile else None
        options = [*demo_options(data, copies, folder / "data"), *LAYOUTS[key].options, *(override or [])]
        found = measure(options, config, folder / "runs" / key, warmup, steps, gpus, told, limit_s)
        result = Result(key, None, failure=found) if isinstance(found, str) else Result(key, *found)
        (folder / f"{key}.json").write_bytes(msgspec.json.encode(result))
        typer.echo(f"{key}, {time.monotonic() - began:.0f} s: {result.failure or in_words(result)}")


def in_words(result: Result) -> str:
    """The numbers in a line."""
    numbers = result.numbers
    assert numbers
    share = math.nan if numbers.mfu is None else numbers.mfu
    speed = f"step {numbers.step_p50_ms:.0f} ms, {numbers.tokens_per_s:,.0f} tokens/s, MFU {share:.1%}"
    return f"{speed}, loss {numbers.first_loss:.4f} -> {numbers.last_loss:.4f}, batches {numbers.batches_digest}"


@app.command()
def killed(
    folder: Annotated[Path, typer.Argument(help="where the result is put")],
    config: Annotated[Path, typer.Option(help="run file of a small model")] = ROOT / "deploy/configs/demo.yaml",
    data: DataOption = ROOT / "demo-data",
    layout: Annotated[str, typer.Option(help="the mesh of two ranks")] = "mesh.pipe=2",
) -> None:
    """Kill rank 1 of 2 in the middle of a run, and resume it."""
    folder.mkdir(parents=True, exist_ok=True)
    axis = layout.partition(".")[2]
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        mesh = [*(f"mesh.{name}=1" for name in ("pipe", "data", "tensor")), layout]
        options = [*demo_options(data, 1, place), *mesh, "train.deterministic=true", "train.metrics_port=0"]
        options += [f"train.steps={KILLED_STEPS}", "train.save_every=2", "train.log_every=1", "loader.metrics_port=0"]
        whole = losses(options, config, place / "whole", kill=False)[0]
        _, seconds, said = losses(options, config, place / "broken", kill=True)
        kept = sorted(path.name for path in (place / "broken/run/checkpoints").glob("step-????????"))
        again = losses(options, config, place / "broken", kill=False)[0]
    result = Killed(axis, seconds, said, int(kept[-1][5:]), again == whole and len(whole) == KILLED_STEPS)
    (folder / f"killed-{axis}.json").write_bytes(msgspec.json.encode(result))
    typer.echo(str(result))


def losses(options: list[str], config: Path, folder: Path, kill: bool) -> tuple[list[object], float, str]:
    """Train on, and perhaps kill rank 1: losses and gradient norms, seconds from the kill to the end, what was said."""
    folder.mkdir(exist_ok=True)
    run = load(config, [*options, f"train.run_dir={folder}/run", f"loader.endpoint=ipc://{folder}/l.sock"])
    path, log = folder / "run.yaml", folder / f"{time.monotonic_ns()}.log"
    path.write_bytes(msgspec.yaml.encode(run))
    command = [*DEEPSPEED, "--num_gpus", "2", "--master_port", str(free_port()), "--module", "trainer", "train"]
    with serving(path) as daemon, log.open("wb") as file:
        with subprocess.Popen(
            [*command, "--config", str(path), "--resume"],
            cwd=ROOT,
            env=around(),
            stdout=file,
            stderr=file,
        ) as child:
            began = kill_rank_one(child, folder / "run" / "metrics.jsonl") if kill else time.monotonic()
            try:
                code = child.wait(ENDED_S if kill else 10 * ENDED_S)
            finally:
                child.kill()
        seconds = time.monotonic() - began
        daemon.terminate()
    if kill != bool(code):
        raise SystemExit(f"exit code {code}: {tail(log)}")
    said = [line for line in log.read_text(errors="replace").splitlines() if "rank 1 is gone" in line]
    steps = [(line["loss"], line["grad_norm"]) for line in lines(folder / "run" / "metrics.jsonl")]
    return list(steps), seconds, said[0] if said else ""


def kill_rank_one(launcher: "subprocess.Popen[bytes]", log: Path) -> float:
    """SIGKILL to rank 1 once KILLED_AFTER steps are logged; when."""
    deadline = time.monotonic() + 10 * ENDED_S
    while len(lines(log)) < KILLED_AFTER:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.02)
    os.kill(rank_processes(os.getpgid(launcher.pid))[1], signal.SIGKILL)
    return time.monotonic()


@app.command()
def collectives(folder: Annotated[Path, typer.Argument(help="where the result is put")]) -> None:
    """Time all-reduce and all-to-all over all GPUs by size."""
    folder.mkdir(parents=True, exist_ok=True)
    count = str(max(2, torch.cuda.device_count()))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", count, "--master_port"]
    command += [str(free_port()), "-m", "tests.bench.collectives", str(folder / "collectives.md")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="where results are")],
    out: Annotated[Path, typer.Argument(help="Markdown file to write")],
    override: Annotated[
        list[str] | None, typer.Option("--set", help="what the runs were given, for the record")
    ] = None,
) -> None:
    """Write a dated table of what was measured."""
    results = {key: read(folder / f"{key}.json") for key in LAYOUTS if (folder / f"{key}.json").exists()}
    text = [f"# {CONFIG.stem} on several GPUs", "", f"{today()}, {hardware()}, {torch.cuda.device_count()} of them"]
    text += [f"`python -m tests.bench.multi_gpu run FOLDER {' '.join(f'--set {x}' for x in override or [])}`", ""]
    good = {key: result for key, result in results.items() if result.numbers}
    text += ["## Speed", "", *table([speed_row(result, good) for result in good.values()]), ""]
    text += ["## The same training", "", *table([loss_row(result, good) for result in good.values()]), ""]
    text += [f"{LAYOUTS[key].name} failed: {r.failure.splitlines()[-1]}" for key, r in results.items() if r.failure]
    ends = [msgspec.json.decode(path.read_bytes(), type=Killed) for path in sorted(folder.glob("killed-*.json"))]
    if ends:
        text += ["## A rank killed in the middle of a run", "", *table([killed_row(end) for end in ends]), ""]
    if (folder / "collectives.md").exists():
        text += ["## Collectives", "", (folder / "collectives.md").read_text()]
    out.write_text("\n".join(text))
    typer.echo("\n".join(text))


def read(path: Path) -> Result:
    """A layout's result."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def speed_row(result: Result, results: dict[str, Result]) -> dict[str, str]:
    """A line of the first table. Efficiency is of GPU time: one GPU's for the same step over that of all, median."""
    numbers, layout = result.numbers, LAYOUTS[result.key]
    assert numbers
    base = results.get(layout.alone)
    pairs = zip(base.numbers.steps_ms, numbers.steps_ms, strict=True) if base and base.numbers else ()
    shares = [alone / (numbers.devices * ours) for alone, ours in pairs][-numbers.steps :]
    return {
        "layout": layout.name,
        "step ms p50 / p95": f"{numbers.step_p50_ms:,.0f} / {numbers.step_p95_ms:,.0f}",
        "tokens/s": f"{numbers.tokens_per_s:,.0f}",
        "MFU": "" if numbers.mfu is None else f"{numbers.mfu:.1%}",
        "efficiency": f"{statistics.median(shares):.1%}" if shares else "",
        "peak GiB by rank": each([rank.peak_gib for rank in numbers.ranks], 1),
        "wait ms p50 by rank": each([rank.wait_p50_ms for rank in numbers.ranks], 3),
        "wait ms p99 by rank": each([rank.wait_p99_ms for rank in numbers.ranks], 3),
    }


def loss_row(result: Result, results: dict[str, Result]) -> dict[str, str]:
    """A line of the second table: differences are the largest over all steps, of norms relative to one GPU's."""
    numbers, layout, decoded = result.numbers, LAYOUTS[result.key], result.decoded
    assert numbers and decoded
    shown = {
        "layout": layout.name,
        "loss, first / last 5": f"{numbers.first_loss:.4f} / {numbers.last_loss:.4f}",
        "global batches": numbers.batches_digest,
        "filled / trained micro-batches": f"{decoded.batches} / {sum(len(rank.batches) for rank in numbers.ranks)}",
        "pictures decoded": str(decoded.images),
    }
    base = results.get(layout.alone)
    if base and base.numbers:
        apart = [abs(a - b) for a, b in both(numbers.losses, base.numbers.losses)]
        norms = [abs(a - b) / b for a, b in both(numbers.grad_norms, base.numbers.grad_norms)]
        shown["loss apart, mean / max"] = f"{sum(apart) / len(apart):.4f} / {max(apart):.4f}"
        shown["norm apart, mean / max"] = f"{sum(norms) / len(norms):.2%} / {max(norms):.2%}"
    return shown


def both(ours: tuple[float | None, ...], theirs: tuple[float | None, ...]) -> list[tuple[float, float]]:
    """Pairs step by step; a step that is not finite in either is infinitely far."""
    return [(math.inf if a is None else a, math.inf if b is None else b) for a, b in zip(ours, theirs, strict=True)]


def killed_row(end: Killed) -> dict[str, str]:
    """A line of the third table."""
    return {
        "layout": end.layout,
        "seconds to the end of all": f"{end.seconds:.1f}",
        "said": end.said,
        "resumed from step": str(end.resumed_from),
        "losses and norms as unbroken": "equal" if end.exact else "DIFFERENT",
    }


if __name__ == "__main__":
    app()
