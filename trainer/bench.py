"""Step time, tokens/s, MFU, memory and data wait of a run file on this machine, with real batches of its loader.

The same engine, feed and step as a training run, but nothing is saved. The first steps, in which kernels are compiled
and graphs captured, are not counted.
"""

import hashlib
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from shared.errors import writing
from shared.sections import RunConfig
from trainer.display import MEAN_OVER, Display, mean_loss, peak_bytes
from trainer.engine import build_engine
from trainer.flops import peak_tflops
from trainer.launch import Ranks
from trainer.log import StepLine
from trainer.profiling import profiled
from trainer.train import Parts, Start, Stop, build_checkpoints, build_feed, connect, one_step


class RankNumbers(msgspec.Struct, frozen=True):
    """One rank's: most device memory in use, waits for batches (of readers) in the measured steps.

    `batches` are "batch id:checksum" of all steps, told by the first reader of each stream.
    """

    rank: int
    peak_gib: float
    wait_p50_ms: float
    wait_p99_ms: float
    batches: tuple[str, ...]


class Numbers(msgspec.Struct, frozen=True):
    """What was measured. Rates are of real tokens and samples; `mfu` (0 to 1) and its peak are null where unknown.

    `first_loss` and `last_loss` are means over the first and the last 5 of the measured steps; `losses`, `grad_norms`
    and `steps_ms` are those of all steps, the warm-up's too. `batches_digest` is the same for the same global batches,
    whichever rank read which part of them.
    """

    steps: int
    devices: int
    step_p50_ms: float
    step_p95_ms: float
    tokens_per_s: float
    samples_per_s: float
    mfu: float | None
    peak_tflops: float | None
    first_loss: float
    last_loss: float
    losses: tuple[float | None, ...]
    grad_norms: tuple[float | None, ...]
    steps_ms: tuple[float, ...]
    batches_digest: str
    ranks: tuple[RankNumbers, ...]


def bench(
    config: RunConfig, ranks: Ranks, warmup: int, steps: int, out: Path | None, profile: Path | None = None
) -> None:
    """Run `warmup` + `steps` steps; rank 0 prints a table of the latter, and writes `Numbers` as JSON to `out`.

    With `profile`, a folder, one step more is run, of which rank 0 writes what its kernels took.

    Raises:
        MillstreamError: something expected went wrong; its kind and text say what.
    """
    lines: list[StepLine] = []
    waits_s: list[float] = []
    batches: list[str] = []
    if out and ranks.is_main:
        with writing("--out", out):
            out.parent.mkdir(parents=True, exist_ok=True)
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
            lines.append(line)
            if taken:
                waits_s += taken.waits_s if step >= warmup else []
                batches += [f"{x.batch_id}:{x.checksum:016x}" for x in taken.lines] if ranks.reader == 0 else []
        if profile:
            more = partial(one_step, config, ranks, parts, warmup + steps, Stop())
            profiled(more, ranks.device, profile) if ranks.is_main else more()
    every = gathered(ranks, waits_s, batches)
    if ranks.is_main:
        numbers = summarise(config, ranks, lines, warmup, every)
        Console(file=sys.stdout).print(table(config.job, numbers))
        if out:
            with writing("--out", out):
                out.write_bytes(msgspec.json.encode(numbers))


def gathered(ranks: Ranks, waits_s: list[float], batches: list[str]) -> tuple[RankNumbers, ...]:
    """Every rank's own numbers. A collective."""
    waits = np.array(waits_s or [0.0])
    peak_gib = peak_bytes(ranks.device) / 2**30
    mine = RankNumbers(ranks.rank, peak_gib, _ms(waits, 50), _ms(waits, 99), tuple(batches))
    return tuple(msgspec.json.decode(each, type=RankNumbers) for each in ranks.gather(msgspec.json.encode(mine)))


def summarise(
    config: RunConfig, ranks: Ranks, lines: list[StepLine], warmup: int, every: tuple[RankNumbers, ...]
) -> Numbers:
    """The steps after the warm-up in numbers; rates are over their whole time."""
    measured = lines[warmup:]
    step_s = np.array([line.step_s for line in measured])
    shares = [line.mfu for line in measured if line.mfu is not None]
    seconds = float(step_s.sum())
    told = sorted(batch for rank in every for batch in rank.batches)
    return Numbers(
        steps=len(measured),
        devices=ranks.mesh.world,
        step_p50_ms=_ms(step_s, 50),
        step_p95_ms=_ms(step_s, 95),
        tokens_per_s=sum(line.tokens for line in measured) / seconds,
        samples_per_s=sum(line.samples for line in measured) / seconds,
        mfu=float(np.average(shares, weights=step_s)) if shares else None,
        peak_tflops=peak_tflops(ranks.device, config.train.peak_tflops),
        first_loss=mean_loss(measured[:MEAN_OVER]),
        last_loss=mean_loss(measured[-MEAN_OVER:]),
        losses=tuple(line.loss for line in lines),
        grad_norms=tuple(line.grad_norm for line in lines),
        steps_ms=tuple(round(1e3 * line.step_s, 1) for line in lines),
        batches_digest=hashlib.blake2b("\n".join(told).encode(), digest_size=8).hexdigest(),
        ranks=every,
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
    found.add_row("global batches", numbers.batches_digest)
    for each in numbers.ranks:
        waits = f", data wait p50 and p99 {each.wait_p50_ms:.3f}, {each.wait_p99_ms:.3f} ms"
        found.add_row(f"rank {each.rank}: peak memory", f"{each.peak_gib:.2f} GiB{waits}")
    return found


def _ms(seconds: "np.ndarray[tuple[int], np.dtype[np.float64]]", percent: float) -> float:
    return 1e3 * float(np.percentile(seconds, percent))
