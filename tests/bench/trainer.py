"""The trainer in numbers on the demo's real media: `python -m tests.bench.trainer OUT.md`.

Variants of one run file, one after the other on one machine, each with a loader daemon of its own, through the
`deepspeed` launcher and `trainer bench`. The last one is long, with small global batches, and shows the loss.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from deploy.demo.run import DEEPSPEED, ROOT, free_port
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


VARIANTS = {
    "base": Variant("as the run file says"),
    "eager": Variant("blocks not compiled", ("train.compile=false",)),
    "sdpa": Variant("attention by torch (cuDNN first)", ("train.attention=sdpa",)),
    "loss": Variant("global batches of one pack", SMALL_BATCH, long=True),
}


def measure(variant: Variant, config: Path, folder: Path, options: list[str], warmup: int, steps: int) -> Numbers | str:
    """One variant's numbers, or what went wrong: the last lines that the trainer said."""
    folder.mkdir()
    run = load(config, [*options, *variant.options, "loader.metrics_port=0", f"loader.endpoint=ipc://{folder}/l.sock"])
    path, out = folder / "run.yaml", folder / "numbers.json"
    path.write_bytes(msgspec.yaml.encode(run))
    counts = ["--warmup", str(warmup), "--steps", str(steps), "--out", str(out)]
    world = run.mesh.pipe * run.mesh.data * run.mesh.tensor
    command = [*DEEPSPEED, "--num_gpus", str(world), "--master_port", str(free_port()), "--module", "trainer", "bench"]
    device = {} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    log = folder / "trainer.log"
    with serving(path) as daemon, log.open("wb") as file:
        command += ["--config", str(path), *counts]
        try:
            subprocess.run(command, cwd=ROOT, env={**os.environ, **device}, stdout=file, stderr=file, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"not done after {LIMIT_S} s: " + tail(log)
        finally:
            daemon.terminate()
    return msgspec.json.decode(out.read_bytes(), type=Numbers) if out.exists() else tail(log)


def copied(data: Path, copies: int, folder: Path) -> list[Path]:
    """Folders that hold the same shards; links, but for the first."""
    folders = [folder / f"copy-{number}" for number in range(1, copies)]
    for each in folders:
        each.mkdir()
        for shard in data.glob("*.tar"):
            (each / shard.name).symlink_to(shard)
    return [data, *folders]


def tail(log: Path) -> str:
    """Its last lines."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-40:])


def row(name: str, numbers: Numbers) -> dict[str, str]:
    """A line of the table."""
    return {
        "variant": name,
        "steps": str(numbers.steps),
        "step ms p50 / p95": f"{numbers.step_p50_ms:,.0f} / {numbers.step_p95_ms:,.0f}",
        "tokens/s": f"{numbers.tokens_per_s:,.0f}",
        "samples/s": f"{numbers.samples_per_s:,.1f}",
        "MFU": "" if numbers.mfu is None else f"{numbers.mfu:.1%}",
        "peak GiB": f"{numbers.peak_gib:.1f}",
        "wait ms p50 / p99": f"{numbers.wait_p50_ms:.3f} / {numbers.wait_p99_ms:.3f}",
        "loss first / last 5": f"{numbers.first_loss:.3f} / {numbers.last_loss:.3f}",
    }


def main(
    out: Annotated[Path, typer.Argument(help="Markdown file to write")],
    config: Annotated[Path, typer.Option(help="run file")] = CONFIG,
    data: Annotated[Path, typer.Option(help="the demo data")] = ROOT / "demo-data",
    only: Annotated[list[str] | None, typer.Option(help=f"variants: {', '.join(VARIANTS)}; all without")] = None,
    copies: Annotated[int, typer.Option(help="how often the data is listed: few samples do not fill large packs")] = 1,
    override: Annotated[list[str] | None, typer.Option("--set", help="run-file overrides for every variant")] = None,
    warmup: Annotated[int, typer.Option(help="steps before the measured ones")] = 4,
    steps: Annotated[int, typer.Option(help="measured steps")] = 12,
    long_steps: Annotated[int, typer.Option(help="steps of the variant that shows the loss")] = 500,
) -> None:
    """Measure and write a dated table."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        shards = [f"{each}/demo-*.tar" for each in copied(data.resolve(), copies, Path(folder))]
        options = [f"data.datasets=[{{name: demo, shards: {json.dumps(shards)}}}]"]
        options += [f"data.text.tokenizer={data.resolve()}/tokenizer.json", *(override or [])]
        for key in only or VARIANTS:
            variant = VARIANTS[key]
            counts = (0, long_steps) if variant.long else (warmup, steps)
            found[variant.name] = measure(variant, config, Path(folder) / key, options, *counts)
            typer.echo(f"{variant.name}: {found[variant.name]}")
    rows = [row(name, numbers) for name, numbers in found.items() if isinstance(numbers, Numbers)]
    lines = [f"# The trainer on {config.stem}", "", f"{today()}, {hardware()}"]
    lines += [f"Demo data listed {copies} times; overrides: `{' '.join(override or []) or 'none'}`", ""]
    lines += [*(table(rows) if rows else []), ""]
    lines += [f"{name} failed: {text.splitlines()[-1]}" for name, text in found.items() if isinstance(text, str)]
    out.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
