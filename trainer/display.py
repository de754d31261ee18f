"""What a person sees of a run: a progress bar on a terminal, else a log line now and then, and a table at the end."""

import math
import resource
import sys
from contextlib import AbstractContextManager

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shared.logs import logger
from trainer.log import StepLine

MEAN_OVER = 5

_log = logger("train")


class Display(AbstractContextManager["Display"]):
    """Shows steps as they come, on one rank."""

    def __init__(self, first: int, steps: int, every: int) -> None:
        self._steps, self._every = steps, every
        columns = (
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        )
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console) if console.is_terminal else None
        self._task = self._bar.add_task("", total=steps, completed=first) if self._bar else None

    def __enter__(self) -> "Display":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._bar:
            self._bar.stop()

    def step(self, line: StepLine) -> None:
        """One step is done."""
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=line.step + 1, description=in_words(line))
        elif (line.step + 1) % self._every == 0 or line.step + 1 == self._steps:
            _log.info("step %d/%d  %s", line.step + 1, self._steps, in_words(line))


def in_words(line: StepLine) -> str:
    """Loss, gradient norm, speed, MFU where it is known, waits and, where there are experts, their load in one line."""
    loss, norm = ("not finite" if x is None else f"{x:.4f}" for x in (line.loss, line.grad_norm))
    share = "" if line.mfu is None else f"MFU {line.mfu:.1%}  "
    experts = line.experts
    words = f"  busiest expert {experts.load_max:.2f}x  dropped {experts.dropped_share:.1%}" if experts else ""
    return (
        f"loss {loss}  grad norm {norm}  {line.tokens_per_s:,.0f} tokens/s  {share}"
        f"wait p50 {line.wait_p50_ms:.2f} ms p99 {line.wait_p99_ms:.2f} ms{words}"
    )


def show_summary(lines: list[StepLine], device: torch.device) -> None:
    """The closing table, on standard output. The first step's time, which holds the warm-up, is not in the rates."""
    if not lines:
        return
    timed = lines[1:] or lines
    seconds = sum(line.step_s for line in timed)
    table = Table(title="training", show_header=False)
    table.add_row("steps", f"{lines[0].step + 1} to {lines[-1].step + 1}")
    first, last = lines[:MEAN_OVER], lines[-MEAN_OVER:]
    table.add_row("loss, mean of first and last 5", f"{mean_loss(first):.4f} -> {mean_loss(last):.4f}")
    if skipped := sum(line.skipped for line in lines):
        table.add_row("steps skipped, not finite", str(skipped))
    table.add_row("samples/s", f"{sum(line.samples for line in timed) / seconds:,.1f}")
    table.add_row("tokens/s", f"{sum(line.tokens for line in timed) / seconds:,.0f}")
    shares = [line.mfu for line in timed if line.mfu is not None]
    if shares:
        table.add_row("MFU, mean", f"{sum(shares) / len(shares):.1%}")
    table.add_row("data wait p50, p99", f"{lines[-1].wait_p50_ms:.2f} ms, {lines[-1].wait_p99_ms:.2f} ms")
    table.add_row("peak memory", f"{peak_bytes(device) / 2**30:.2f} GiB")
    Console(file=sys.stdout).print(table)


def peak_bytes(device: torch.device) -> int:
    """Most device memory allocated so far; on a CPU the process's largest resident size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def mean_loss(lines: list[StepLine]) -> float:
    """Mean over the lines whose loss is finite."""
    losses = [line.loss for line in lines if line.loss is not None]
    return sum(losses) / len(losses) if losses else math.nan
