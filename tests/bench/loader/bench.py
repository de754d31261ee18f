"""Rounds of every contender in turn, and the table: see the package's docstring.

In each round every contender runs once, Millstream next to the raw loop; the order of the rest turns from round to
round. Figures are medians over the rounds, ratios medians of the ratios within one round. A contender that fails is
reported with its error and ends nothing.
"""

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from tests.bench import report
from tests.bench.loader import dataset, environment
from tests.bench.loader.contenders import ROOT
from tests.bench.loader.measure import CONTENDERS, Figures, Window

RUN_S = 120.0
FIXED = (("raw", "reduced"), ("millstream", "reduced"))
TURNING = (
    ("raw", "pillow"),
    *((n, d) for n in CONTENDERS if n not in ("raw", "millstream") for d in ("pillow", "reduced")),
)
SHOWN = {"reduced": "Millstream's", "pillow": "Pillow, as shipped"}
PACKAGES = (
    *("torch", "numpy", "pillow", "simplejpeg", "opencv-python-headless", "nvidia-dali-cuda130"),
    *("webdataset", "megatron-energon", "mosaicml-streaming", "litdata", "spdl"),
)

Entry = tuple[str, str]
Rounds = list[Figures]


def say(text: str) -> None:
    """Progress, on standard error."""
    typer.echo(text, err=True)


def measured(python: Path, entry: Entry, folder: Path, seconds: float, step_ms: float) -> Figures:
    """One contender in a process group of its own, which is gone afterwards; `seconds` 0 only prepares it."""
    with tempfile.TemporaryDirectory() as scratch:
        out, log = Path(scratch) / "figures.json", Path(scratch) / "log"
        command = [str(python), "-m", "tests.bench.loader.measure", *entry, str(folder), str(out)]
        command += ["--seconds", str(seconds), "--step-ms", str(step_ms)]
        with log.open("wb") as file:
            ended = finished(command, file.fileno())
        if out.exists():
            return msgspec.convert(json.loads(out.read_text()), Figures)
        return Figures(error=ended or last_words(log.read_text(errors="replace")))


def finished(command: Sequence[str], log_fd: int) -> str:
    """Run to the end or to RUN_S, then end what is left of its process group; what went wrong, if it is known."""
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stdout=log_fd, stderr=log_fd, start_new_session=True
    ) as child:
        try:
            child.wait(RUN_S)
        except subprocess.TimeoutExpired:
            return f"no result within {RUN_S:g} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    return ""


def last_words(log: str) -> str:
    """The line of a log that tells best what went wrong."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    told = [line for line in lines if "Error" in line] or lines or ["no output"]
    return told[-1][:160]


def rounds(python: Path, folder: Path, count: int, seconds: float, step_ms: float) -> dict[Entry, Rounds]:
    """Figures of every contender, one for each round."""
    failed: dict[str, Figures] = {}
    for name in CONTENDERS:
        prepared = measured(python, (name, "pillow"), folder, 0.0, step_ms)
        if prepared.error:
            failed[name] = prepared
    found: dict[Entry, Rounds] = defaultdict(list)
    for number in range(count):
        turned = TURNING[number * 3 % len(TURNING) :] + TURNING[: number * 3 % len(TURNING)]
        for entry in (*FIXED, *turned):
            began = time.monotonic()
            figures = failed.get(entry[0]) or measured(python, entry, folder, seconds, step_ms)
            found[entry].append(figures)
            outcome = figures.error or rate(figures.drained)
            say(f"round {number + 1}: {title(entry)}: {outcome}, {time.monotonic() - began:.0f} s")
    return found


def rate(window: Window | None) -> str:
    """Samples per second of a window, for progress."""
    return f"{window.samples / window.seconds:.0f} samples/s" if window else "nothing"


def title(entry: Entry) -> str:
    """A contender's name and its decoder."""
    return f"{CONTENDERS[entry[0]].title}, {decoder(entry)}"


def decoder(entry: Entry) -> str:
    """The decoder, for tables."""
    if entry == ("spdl", "pillow"):
        return "FFmpeg, as shipped"
    return SHOWN[entry[1]]


def speeds(found: dict[Entry, Rounds]) -> dict[Entry, list[float | None]]:
    """Samples per second, drained, in each round."""
    return {
        entry: [f.drained.samples / f.drained.seconds if f.drained else None for f in each]
        for entry, each in found.items()
    }


def ratio(of: Sequence[float | None], to: Sequence[float | None]) -> str:
    """The median of the ratios within one round."""
    pairs = [a / b for a, b in zip(of, to, strict=True) if a and b]
    return f"{statistics.median(pairs):.2f}" if pairs else ""


def drained_row(entry: Entry, each: Rounds, by_entry: dict[Entry, list[float | None]]) -> dict[str, str]:
    """A contender as fast as it can."""
    row = {"loader": CONTENDERS[entry[0]].title, "decoder": decoder(entry)}
    good = [(f, f.drained) for f in each if f.drained]
    if not good:
        return row | {"samples/s": each[0].error}
    windows = [window for _, window in good]
    waits = [wait for window in windows for wait in window.waits_s]
    cpu = [
        1000 * statistics.median(getattr(w, f"{who}_cpu_s") / w.samples for w in windows) for who in ("consumer", "all")
    ]
    return row | {
        "samples/s": report.spread([w.samples / w.seconds for w in windows]) + ("" if len(good) == len(each) else " *"),
        "of the raw loop": ratio(by_entry[entry], by_entry["raw", "reduced"]),
        "Millstream is": ratio(by_entry["millstream", "reduced"], by_entry[entry]) + " x",
        "CPU s per 1,000: consumer / all": f"{cpu[0]:.3f} / {cpu[1]:.2f}",
        "wait p50 / p99 ms": waits_ms(waits),
        "first batch s": report.spread([f.first_s for f, _ in good], 1),
        "PSS MB": f"{statistics.median(f.pss_bytes for f, _ in good) / 1e6:.0f}",
    }


def stepped_row(entry: Entry, each: Rounds) -> dict[str, str]:
    """A contender under a consumer that holds the interpreter lock half of the time."""
    row = {"loader": CONTENDERS[entry[0]].title, "decoder": decoder(entry)}
    windows = [f.stepped for f in each if f.stepped]
    if not windows:
        return row | {"samples/s": each[0].error}
    waits = [wait for window in windows for wait in window.waits_s]
    return row | {
        "samples/s": report.spread([w.samples / w.seconds for w in windows]),
        "wait p50 / p99 ms": waits_ms(waits),
        "share of time waited": f"{sum(waits) / sum(w.seconds for w in windows):.0%}",
    }


def waits_ms(waits: list[float]) -> str:
    """Both percentiles."""
    return " / ".join(f"{1e3 * report.percentile(waits, share):.1f}" for share in (0.5, 0.99))


def written(found: dict[Entry, Rounds], head: list[str], step_ms: float) -> list[str]:
    """The result file's lines."""
    fast = {entry: statistics.median([s for s in each if s] or [0.0]) for entry, each in speeds(found).items()}
    ordered = sorted(found, key=lambda entry: -fast[entry])
    by_entry = speeds(found)
    lines = ["# The loader beside its peers", "", *head, "", "## As many batches as can be had", ""]
    lines += report.table([drained_row(entry, found[entry], by_entry) for entry in ordered])
    lines += ["", f"## A step of {step_ms:g} ms for each batch that holds the interpreter lock for one half", ""]
    return [*lines, *report.table([stepped_row(entry, found[entry]) for entry in ordered]), ""]


def main(
    out: Annotated[Path | None, typer.Argument(help="Markdown file; loader_<cores>_<date>.md without")] = None,
    folder: Annotated[Path, typer.Option(help="where the tars are built and converted")] = ROOT / "runs/bench-loader",
    peers: Annotated[Path, typer.Option(help="the peers' environment")] = ROOT / ".venv-peers",
    count: Annotated[int, typer.Option("--rounds", min=1, help="runs of each contender")] = 3,
    seconds: Annotated[float, typer.Option(help="each of the two windows of a run")] = 4.0,
    samples: Annotated[int, typer.Option(help="samples in the tars")] = 1024,
    step_ms: Annotated[float, typer.Option(help="a step of the second window")] = 60.0,
    cores: Annotated[int, typer.Option(help="cores that every contender gets")] = 2,
    quick: Annotated[
        bool, typer.Option("--quick", help="one short round on few samples: only shows that all work")
    ] = False,
) -> None:
    """Measure every contender in turn and write a dated table."""
    load = report.busy()
    if quick:
        count, seconds, samples, folder = 1, 1.0, 128, folder.with_name(folder.name + "-quick")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    python = environment.ensure(peers, say)
    dataset.build(folder, samples)
    head = [f"{report.today()}, {report.machine()}; {load}", report.versions(PACKAGES, str(python)), ""]
    command = f"python -m tests.bench.loader --rounds {count} --seconds {seconds:g} --samples {samples} --cores {cores}"
    head += [
        f"`{command}`",
        "",
        f"{dataset.describe(folder)}. {' '.join(str(__doc__).split()).partition('docstring. ')[2]}",
    ]
    lines = written(rounds(python, folder, count, seconds, step_ms), head, step_ms)
    path = out or report.RESULTS / f"loader_{cores}cores_{report.today()}.md"
    path.write_text("\n".join(lines))
    typer.echo("\n".join(lines))


if __name__ == "__main__":
    typer.run(main)
