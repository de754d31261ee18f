"""Step time, tokens/s, MFU, memory and data wait of a run file on this machine, with real batches of its loader.

The same engine, feed and step as a training run, but nothing is saved. The first steps, in which kernels are compiled
and graphs captured, are not counted.
"""

import sys
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from shared.sections import RunConfig
from trainer.display import MEAN_OVER, Display, mean_loss, peak_bytes
from trainer.engine import build_engine
from trainer.flops import peak_tflops
from trainer.launch import Ranks
from trainer.log import StepLine
from trainer.train import Parts, Start, Stop, build_checkpoints, build_feed, connect, one_step


class Numbers(msgspec.Struct, frozen=True):
    """What was measured. Rates are of real tokens and samples; `mfu` (0 to 1) and its peak are null where unknown.

    Losses are means over the first and the last 5 of the measured steps.
    """

    steps: int
    devices: int
    step_p50_ms: float
    step_p95_ms: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None
    peak_tflops: float | None
    wait_p50_ms: float
    wait_p99_ms: float
    peak_gib: float
    first_loss: float
    last_loss: float


def bench(config: RunConfig, ranks: Ranks, warmup: int, steps: int, out: Path | None) -> None:
    """Run `warmup` + `steps` steps; rank 0 prints a table of the latter, and writes `Numbers` as JSON to `out`.

    Waits and memory are rank 0's.

    Raises:
        MillstreamError: something expected went wrong; its kind and text say what.
    """
    lines: list[StepLine] = []
    waits_s: list[float] = []
    with ExitStack() as stack:
        engine = build_engine(config, ranks)
        client = stack.enter_context(connect(config, ranks, Start())) if ranks.is_reader else None
        feed = build_feed(config, ranks, client) if client else None
        display = stack.enter_context(Display(0, warmup + steps, max(1, steps // 5))) if ranks.is_main else None
        parts = Parts(engine, build_checkpoints(config, ranks), client, feed, None, None, display)
        for step in range(warmup + steps):
            line, taken, *_ = one_step(config, ranks, parts, step, Stop())
            if display:
                display.step(line)
            if step >= warmup:
                lines.append(line)
                waits_s += taken.waits_s if taken else []
    if ranks.is_main:
        numbers = summarise(config, ranks, lines, waits_s)
        Console(file=sys.stdout).print(table(config.job, numbers))
        if out:
            out.write_bytes(msgspec.json.encode(numbers))


def summarise(config: RunConfig, ranks: Ranks, lines: list[StepLine], waits_s: list[float]) -> Numbers:
    """The measured steps in numbers; rates are over their whole time."""
    step_s, waits = np.array([line.step_s for line in lines]), np.array(waits_s)
    shares = [line.mfu for line in lines if line.mfu is not None]
    seconds = float(step_s.sum())
    return Numbers(
        steps=len(lines),
        devices=ranks.mesh.world,
        step_p50_ms=_ms(step_s, 50),
        step_p95_ms=_ms(step_s, 95),
        tokens_per_s=sum(line.tokens for line in lines) / seconds,
        samples_per_s=sum(line.samples for line in lines) / seconds,
        mfu=float(np.average(shares, weights=step_s)) if shares else None,
        peak_tflops=peak_tflops(ranks.device, config.train.peak_tflops),
        wait_p50_ms=_ms(waits, 50),
        wait_p99_ms=_ms(waits, 99),
        peak_gib=peak_bytes(ranks.device) / 2**30,
        first_loss=mean_loss(lines[:MEAN_OVER]),
        last_loss=mean_loss(lines[-MEAN_OVER:]),
    )


def table(title: str, numbers: Numbers) -> Table:
    """The numbers, for people."""
    found = Table(title=title, show_header=False)
    found.add_row("steps x devices", f"{numbers.steps} x {numbers.devices}")
    found.add_row("step time, median and p95", f"{numbers.step_p50_ms:,.1f}, {numbers.step_p95_ms:,.1f} ms")
    found.add_row("tokens/s, without padding", f"{numbers.tokens_per_s:,.0f}")
    found.add_row("samples/s", f"{numbers.samples_per_s:,.1f}")
    if numbers.mfu is not None:
        found.add_row(f"MFU of {numbers.peak_tflops:,.4g} TFLOP/s a device", f"{numbers.mfu:.1%}")
    found.add_row("loss, mean of first and last 5", f"{numbers.first_loss:.4f} -> {numbers.last_loss:.4f}")
    found.add_row("data wait p50 and p99", f"{numbers.wait_p50_ms:.3f}, {numbers.wait_p99_ms:.3f} ms")
    found.add_row("peak memory of rank 0", f"{numbers.peak_gib:.2f} GiB")
    return found


def _ms(seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]", percent: float) -> float:
    return 1e3 * float(np.percentile(seconds, percent))
