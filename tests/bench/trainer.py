"""The trainer in numbers on the demo's real media: `python -m tests.bench.trainer OUT.md`.

Variants of one run file, one after the other on one machine, each with a loader daemon of its own, through the
`deepspeed` launcher and `trainer bench`. The last one is long, with small global batches, and shows the loss.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.demo.run import DEEPSPEED, ROOT, around, free_port, scrape
from shared.config import load
from tests.bench.main_job import hardware
from tests.bench.report import table, today
from tests.support.daemons import serving
from trainer.bench import Numbers

CONFIG = ROOT / "deploy" / "configs" / "clip-l-whisper-small-3b.yaml"
SMALL_BATCH = ("data.batch.micro_batches=1", "data.batch.round=1")
LIMIT_S = 540


class Variant(msgspec.Struct, frozen=True):
    """A row of the table: what is changed in the run file, and how many steps are measured (0: as asked)."""

    name: str
    options: tuple[str, ...] = ()
    long: bool = False


WIDE = "{vocab: 128256, dim: 3072, depth: 28, heads: 24, kv_heads: 8, mlp: 8192, rope_theta: 500000.0, tied: true}"
VARIANTS = {
    "base": Variant("as the run file says"),
    "wide": Variant("decoder of Llama-3.2-3B's dimensions", (f"model.decoder={WIDE}",)),
    "eager": Variant("blocks not compiled", ("train.compile=false",)),
    "sdpa": Variant("attention by torch (cuDNN first)", ("train.attention=sdpa",)),
    "loss": Variant("global batches of one pack", SMALL_BATCH, long=True),
}


class Decoded(msgspec.Struct, frozen=True):
    """What the daemon had filled when the trainer was done: micro-batches, and pictures in them."""

    batches: int
    images: int


def measure(
    options: Sequence[str],
    config: Path,
    folder: Path,
    warmup: int,
    steps: int,
    gpus: str = "",
    profile: Path | None = None,
    limit_s: float = LIMIT_S,
) -> tuple[Numbers, Decoded] | str:
    """Numbers of a run file with `options`, or what went wrong: the last lines that the trainer said.

    `gpus` are the devices, such as "0,1"; the first ones where it is empty. `folder` is made anew; the trainer's log
    lies there.
    """
    folder = folder.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    page = free_port()
    run = load(config, [*options, f"loader.metrics_port={page}", f"loader.endpoint=ipc://{folder}/l.sock"])
    path, out = folder / "run.yaml", folder / "numbers.json"
    path.write_bytes(msgspec.yaml.encode(run))
    world = run.mesh.pipe * run.mesh.data * run.mesh.tensor
    where = ["--include", f"localhost:{gpus}"] if gpus else ["--num_gpus", str(world)]
    command = [*DEEPSPEED, *where, "--master_port", str(free_port()), "--module", "trainer", "bench"]
    command += ["--config", str(path), "--warmup", str(warmup), "--steps", str(steps), "--out", str(out)]
    command += ["--profile", str(profile)] if profile else []
    log = folder / "trainer.log"
    with serving(path) as daemon, log.open("wb") as file:
        try:
            subprocess.run(command, cwd=ROOT, env=around(), stdout=file, stderr=file, timeout=limit_s)
            counted = scrape(f"http://127.0.0.1:{page}/metrics")
        except subprocess.TimeoutExpired:
            return f"not done after {limit_s:g} s: " + tail(log)
        finally:
            daemon.terminate()
    if not out.exists():
        return tail(log)
    filled = sum(count for name, count in counted.items() if name.startswith("loader_batches_filled_total"))
    decoded = Decoded(int(filled), int(counted["loader_samples_total{image}"]))
    return msgspec.json.decode(out.read_bytes(), type=Numbers), decoded


def demo_options(data: Path, copies: int, folder: Path) -> list[str]:
    """Overrides that name the demo data, listed `copies` times."""
    shards = [f"{each}/demo-*.tar" for each in copied(data.resolve(), copies, folder.resolve())]
    named = f"data.datasets=[{{name: demo, shards: {json.dumps(shards)}}}]"
    return [named, f"data.text.tokenizer={data.resolve()}/tokenizer.json"]


def copied(data: Path, copies: int, folder: Path) -> list[Path]:
    """Folders that hold the same shards; links, but for the first."""
    folders = [folder / f"copy-{number}" for number in range(1, copies)]
    for each in folders:
        if not each.exists():
            each.mkdir(parents=True)
            for shard in data.glob("*.tar"):
                (each / shard.name).symlink_to(shard)
    return [data, *folders]


def tail(log: Path) -> str:
    """Its last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


def each(values: Sequence[float], digits: int) -> str:
    """A value for every rank."""
    return ", ".join(f"{value:.{digits}f}" for value in values)


def row(name: str, numbers: Numbers) -> dict[str, str]:
    """A line of the table."""
    return {
        "variant": name,
        "steps": str(numbers.steps),
        "step ms p50 / p95": f"{numbers.step_p50_ms:,.0f} / {numbers.step_p95_ms:,.0f}",
        "tokens/s": f"{numbers.tokens_per_s:,.0f}",
        "samples/s": f"{numbers.samples_per_s:,.1f}",
        "MFU": "" if numbers.mfu is None else f"{numbers.mfu:.1%}",
        "peak GiB": each([rank.peak_gib for rank in numbers.ranks], 1),
        "wait ms p50": each([rank.wait_p50_ms for rank in numbers.ranks], 3),
        "wait ms p99": each([rank.wait_p99_ms for rank in numbers.ranks], 3),
        "loss first / last 5": f"{numbers.first_loss:.3f} / {numbers.last_loss:.3f}",
    }


def said(found: Numbers | str) -> str:
    """A result in a line or, of a failure, the lines that tell."""
    return found if isinstance(found, str) else " | ".join(row("", found).values())


def main(
    out: Annotated[Path, typer.Argument(help="Markdown file to write")],
    config: Annotated[Path, typer.Option(help="run file")] = CONFIG,
    data: Annotated[Path, typer.Option(help="the demo data")] = ROOT / "demo-data",
    only: Annotated[list[str] | None, typer.Option(help=f"variants: {', '.join(VARIANTS)}; all without")] = None,
    copies: Annotated[int, typer.Option(help="how often the data is listed: few samples do not fill large packs")] = 1,
    folder: Annotated[
        Path | None, typer.Option(help="where the copies, their indexes and the runs' logs are kept")
    ] = None,
    override: Annotated[list[str] | None, typer.Option("--set", help="run-file overrides for every variant")] = None,
    warmup: Annotated[int, typer.Option(help="steps before the measured ones")] = 4,
    steps: Annotated[int, typer.Option(help="measured steps")] = 12,
    long_steps: Annotated[int, typer.Option(help="steps of the variant that shows the loss")] = 500,
    gpus: Annotated[str, typer.Option(help="the device, such as 1; the first one without")] = "",
    profile: Annotated[Path | None, typer.Option(help="folder for a step's kernel times, one folder a variant")] = None,
) -> None:
    """Measure and write a dated table."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        place = folder or Path(scratch)
        options = [*demo_options(data, copies, place / "data"), *(override or [])]
        for key in only or VARIANTS:
            variant = VARIANTS[key]
            counts = (0, long_steps) if variant.long else (warmup, steps)
            result = measure(
                [*options, *variant.options], config, place / "runs" / key, *counts, gpus, profile and profile / key
            )
            found[variant.name] = result if isinstance(result, str) else result[0]
            typer.echo(f"{variant.name}: {said(found[variant.name])}")
    rows = [row(name, numbers) for name, numbers in found.items() if isinstance(numbers, Numbers)]
    lines = [f"# The trainer on {config.stem}", "", f"{today()}, {hardware()}"]
    lines += [f"Demo data listed {copies} times; overrides: `{' '.join(override or []) or 'none'}`", ""]
    lines += [*(table(rows) if rows else []), ""]
    lines += [f"{name} failed: {text.splitlines()[-1]}" for name, text in found.items() if isinstance(text, str)]
    out.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
