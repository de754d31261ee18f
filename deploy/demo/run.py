"""The main job, from nothing to a closing table: build data, index, serve, train with `deepspeed`, report.

Every part is the real program, started as a user would start it; logs and results land in `runs/demo`.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "configs" / "demo.yaml"
RUN = ROOT / "runs" / "demo"
LOADER = (sys.executable, "-m", "dataloader_svc")
DEEPSPEED = (sys.executable, "-m", "deepspeed.launcher.runner")
READY_S, TRAIN_S, STOP_S = 120, 1200, 30
console = Console()


def ranks() -> int:
    """Two processes, or one for a single GPU."""
    return min(2, torch.cuda.device_count()) if torch.cuda.is_available() else 2


def say(text: str) -> None:
    console.print(f"[bold cyan]==>[/] {text}")


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def daemon(overrides: list[str]) -> Iterator[str]:
    """The loader daemon, ready, as its metrics page; stopped with SIGTERM at the end, whatever happens."""
    ready, port = RUN / "loader.ready", free_port()
    command = [*LOADER, "serve", "--config", str(CONFIG), "--ready-file", str(ready), *overrides]
    command += ["--set", f"loader.metrics_port={port}"]
    with (RUN / "loader.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT) as child:
        try:
            _await_ready(child, ready)
            yield f"http://127.0.0.1:{port}/metrics"
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()


def _await_ready(child: "subprocess.Popen[bytes]", ready: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not ready.exists():
        if child.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the loader did not become ready within {READY_S} s; see {RUN / 'loader.log'}")
        time.sleep(0.1)


def scrape(page: str) -> dict[str, float]:
    """Every sample of the daemon's metrics page, as `name{label values}` -> value."""
    with urllib.request.urlopen(page, timeout=5) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {f"{s.name}{{{','.join(s.labels.values())}}}": s.value for f in families for s in f.samples}


def around() -> dict[str, str]:
    """The environment of a launched trainer: without a GPU DeepSpeed has to be told, and ranks share the cores."""
    return {**os.environ, **({} if torch.cuda.is_available() else {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"})}


def train(count: int, overrides: list[str]) -> None:
    """Launch the trainer with `deepspeed` and wait for it."""
    launch = [*DEEPSPEED, "--num_gpus", str(count), "--master_port", "29577", "--module", "trainer"]
    command = [*launch, "train", "--config", str(CONFIG), "--set", f"mesh.data={count}", *overrides]
    child = subprocess.run(command, cwd=ROOT, timeout=TRAIN_S, check=False, env=around())
    if child.returncode:
        raise SystemExit(f"the trainer ended with exit code {child.returncode}")


def closing_table(loader: dict[str, float]) -> Table:
    """What the run did, from the trainer's own log and the daemon's own metrics."""
    steps = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    edge = max(1, min(5, len(steps) // 2))
    first, last = (statistics.mean(s["loss"] for s in part) for part in (steps[:edge], steps[-edge:]))
    bad = {k: v for k, v in loader.items() if k.startswith("loader_samples_quarantined_total")}
    seconds = sum(s["step_s"] for s in steps)
    table = Table(title="Millstream demo", show_header=False)
    rows = {
        "steps": f"{len(steps)}",
        f"loss, mean of the first / last {edge}": f"{first:.3f} / {last:.3f}",
        "samples/s": f"{sum(s['samples'] for s in steps) / seconds:.1f}",
        "tokens/s": f"{sum(s['tokens'] for s in steps) / seconds:.0f}",
        "data wait p50 / p99": f"{steps[-1]['wait_p50_ms']:.2f} / {steps[-1]['wait_p99_ms']:.2f} ms",
        "padding share, naive / bucketed": " / ".join(
            f"{100 * loader[f'loader_padding_ratio{{{kind}}}']:.1f} %" for kind in ("naive", "bucketed")
        ),
        "bad samples": f"{sum(bad.values()):.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    if last >= first:
        raise SystemExit(f"the loss did not fall: {first:.3f} -> {last:.3f}")
    return table


def main(
    steps: Annotated[int, typer.Option(help="optimizer steps")] = 100,
    data: Annotated[Path, typer.Option(help="where the demo data is built, or already is")] = ROOT / "demo-data",
    override: Annotated[list[str] | None, typer.Option("--set", help="run-file overrides, key.key=value")] = None,
) -> None:
    """Build the demo data, start the loader daemon, train with deepspeed, print a closing table, stop everything."""
    with alone():
        demo(steps, data.resolve(), override or [])


@contextmanager
def alone() -> Iterator[None]:
    """Hold the demo's folder, which a second demo would clear."""
    RUN.parent.mkdir(exist_ok=True)
    with RUN.with_suffix(".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another demo is running in {RUN}: wait for its end, or stop it") from None
        yield


def demo(steps: int, data: Path, override: list[str]) -> None:
    """The main job."""
    overrides = [f"--set=train.steps={steps}", f'--set=data.datasets=[{{name: demo, shards: ["{data}/demo-*.tar"]}}]']
    overrides += [f"--set=data.text.tokenizer={data}/tokenizer.json", *(f"--set={o}" for o in override)]
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    started = time.monotonic()
    if not (data / "SUMMARY.json").exists():
        say("building real media into WebDataset shards")
        subprocess.run([sys.executable, "-m", "deploy.demo.build_data", str(data)], cwd=ROOT, check=True)
    say("indexing")
    subprocess.run([*LOADER, "index", "--config", str(CONFIG), *overrides], cwd=ROOT, check=True)
    say("starting the loader daemon")
    with daemon(overrides) as page:
        count = ranks()
        say(f"training with deepspeed on {count} process{'es' if count > 1 else ''}")
        train(count, overrides)
        loader = scrape(page)
    console.print(closing_table(loader))
    say(f"done in {time.monotonic() - started:.0f} s; logs are in {RUN}")


if __name__ == "__main__":
    typer.run(main)
