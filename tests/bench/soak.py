"""Long reading under fire: `python -m tests.bench.soak --steps 50000` (`make soak`).

A real daemon serves small samples to two data ranks of two real reader processes each, while decode workers, daemons
and readers are killed (SIGKILL) at seeded steps and started again as a supervisor would. At the end the consumed logs
are held against the plan and an undisturbed daemon, and memory, descriptors, threads and segments against themselves.
Writes a dated result; exit code 1 when a law does not hold. One reader is never killed, and no daemon in the last
quarter, so that there are long lives to measure.
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from shared.sections import RunConfig
from tests.bench import soak_laws as laws
from tests.bench.report import dated
from tests.bench.soak_report import Outcome, report
from tests.support.daemons import make_run_file
from tests.support.media import Member, photo, tone, write_tar
from tests.support.ordering import Broken, planner_of
from tests.support.reading import Place, lines
from tests.support.supervise import Site

RANKS, READERS, WORKERS, SHARDS = 2, 2, 2, 4
DATA = {
    "image": {"pixel_budget": 32 * 32, "patch": 16, "ratios": [[1, 1], [2, 1]]},
    "audio": {"classes_s": [0.2, 0.4], "samples_per_token": 1600},
    "text": {"max_tokens": 24, "expected_tokens": 10},
    "batch": {"tokens": 64, "micro_batches": RANKS, "round": RANKS},
}
LOADER = {"workers": WORKERS, "threads": 1, "slots_per_stream": 8, "max_streams": RANKS, "worker_s": 300}
STEPS_A_KILL, WINDOWS, SAMPLES = 500, 64, 60
QUIET_SHARE = 0.75
SETTLE_S, POLL_S, STALL_S = 1.5, 0.02, 300.0
PLACES = [Place(rank, RANKS, reader, READERS) for rank in range(RANKS) for reader in range(READERS)]

Laws = dict[str, Callable[[], str]]


class Accident(msgspec.Struct, frozen=True, order=True):
    """Who is killed once the slowest reader has come to `step`, and again `again_s` later where that is set."""

    step: int
    target: str
    again_s: float = 0.0


def accidents(rng: random.Random, steps: int, count: int) -> list[Accident]:
    """Deaths at random steps, a third of them twice in a row: the second one hits what is just starting."""
    found = []
    for _ in range(count):
        target = rng.choice(("worker", "worker", "reader", "reader", "daemon", "daemon and reader"))
        end = QUIET_SHARE if "daemon" in target else 1.0
        again_s = rng.uniform(0, 4) if rng.random() < 1 / 3 else 0.0
        found.append(Accident(rng.randrange(steps // 50, max(1 + steps // 50, int(steps * end))), target, again_s))
    return sorted(found)


def small_sample(key: str, number: int) -> list[Member]:
    """A picture, a clip, both or neither, and a caption: a few kilobytes."""
    members: list[Member] = [(f"{key}.txt", f"sample {number}".encode())]
    if number % 4 != 1:
        width, height = ((64, 64), (96, 48), (48, 96))[number // 4 % 3]
        members.append((f"{key}.jpg", photo(width, height, number)))
    if number % 4 in (1, 2):
        members.append((f"{key}.wav", tone(0.1 + number % 30 / 100, hz=200 + number % 400)))
    return members


def prepare(folder: Path, shm: Path, samples: int, seed: int) -> tuple[Path, RunConfig]:
    """Shards and a run file."""
    (folder / "data").mkdir(parents=True)
    for shard in range(SHARDS):
        numbers = range(samples * shard // SHARDS, samples * (shard + 1) // SHARDS)
        members = [member for n in numbers for member in small_sample(f"k{n:06d}", n)]
        write_tar(folder / "data" / f"part-{shard:06d}.tar", members)
    return make_run_file(folder, data={**DATA, "seed": seed}, loader={**LOADER, "shm_dir": str(shm)})


class Soak:
    """The loop of a run: watch progress, deal accidents, take samples."""

    def __init__(self, site: Site, shm: Path, plan: list[Accident], steps: int, rng: random.Random) -> None:
        self._site, self._shm, self._plan, self._steps, self._rng = site, shm, plan, steps, rng
        self._again: list[tuple[float, Accident]] = []
        self._began = self._moved_at = time.monotonic()
        self._step = 0
        self.stall_s = 0.0
        self.samples: list[laws.Sample] = []

    def run(self, show: Callable[[int], None]) -> None:
        """Until every reader has ended well.

        Raises:
            Broken: a process ended by itself, or nothing moved for STALL_S.
        """
        while not self._site.check():
            self._progress(time.monotonic())
            self._strike(time.monotonic())
            if self._step >= self._next_sample and self._site.settled(SETTLE_S, WORKERS):
                self._sample()
            show(self._step)
            time.sleep(POLL_S)
        self._progress(time.monotonic())
        show(self._step)

    @property
    def _next_sample(self) -> int:
        last = self.samples[-1].step if self.samples else 0
        return last + max(1, self._steps // SAMPLES)

    def _progress(self, now: float) -> None:
        step = self._site.advance()
        if step > self._step:
            self._step, self._moved_at = step, now
        self.stall_s = max(self.stall_s, now - self._moved_at)
        if now - self._moved_at > STALL_S:
            raise Broken(f"nothing moved for {STALL_S:g} s at step {self._step}: {self._site.daemon.log[-2000:]}")

    def _strike(self, now: float) -> None:
        while self._plan and self._plan[0].step <= self._step:
            accident = self._plan.pop(0)
            self._kill(accident.target)
            if accident.again_s:
                self._again.append((now + accident.again_s, accident))
        for due in [due for due in self._again if due[0] <= now]:
            self._again.remove(due)
            self._kill(due[1].target)

    def _kill(self, target: str) -> None:
        time.sleep(self._rng.uniform(0, POLL_S))
        if target == "worker":
            self._site.kill_worker(self._rng)
        if "daemon" in target:
            self._site.kill_daemon()
        if "reader" in target:
            self._site.kill_reader(self._rng.randrange(RANKS * READERS - 1))

    def _sample(self) -> None:
        held = {(role, pid): footprint for role, pid, footprint in self._site.footprints()}
        files = len(list(self._shm.iterdir()))
        if len(held) == 1 + WORKERS + RANKS * READERS and all(one.segments for one in held.values()):
            self.samples.append(laws.Sample(self._step, time.monotonic() - self._began, held, files))


def soak(folder: Path, shm: Path, steps: int, kills: int, samples: int, seed: int, progress: Progress) -> Outcome:
    """Prepare, run, and examine."""
    path, config = prepare(folder, shm, samples, seed)
    (logs_folder := folder / "logs").mkdir()
    rng, began = random.Random(seed), time.monotonic()
    task = progress.add_task("reading", total=steps)
    with Site(path, logs_folder, PLACES, steps) as site:
        run = Soak(site, shm, accidents(rng, steps, kills), steps, rng)
        found = list(_run(run, site, lambda step: progress.update(task, completed=step)))
        seconds, outputs = time.monotonic() - began, list(site.outputs())
    progress.add_task("examining", total=None)
    logs = {place: place.log(logs_folder) for place in PLACES}
    alone: Laws = {
        "flat": lambda: laws.flat(run.samples),
        "logs": lambda: laws.no_traceback(outputs),
        "nothing left": lambda: laws.nothing_left(folder, shm),
    }
    found += laws.verdicts({**alone, **_reading_laws(path, config, logs, steps, seed)})
    epochs = max((line.epoch + 1 for log in logs.values() for line in lines(log)[-1:]), default=0)
    mesh = f"{RANKS} data ranks of {READERS} readers each"
    return Outcome(steps, epochs, mesh, seconds, run.stall_s, dict(site.kills), run.samples, found)


def _run(run: Soak, site: Site, show: Callable[[int], None]) -> Iterator[tuple[str, bool, str]]:
    """Run to the end and end the daemon: how that went."""
    try:
        run.run(show)
    except Broken as broken:
        yield "run", False, str(broken)
    else:
        code = site.daemon.terminate()
        yield "end", code == 0, f"the daemon ended with {code} when told to"


def _reading_laws(path: Path, config: RunConfig, logs: dict[Place, Path], steps: int, seed: int) -> Laws:
    planner = planner_of(config)
    ordered: Laws = {
        f"order of {place.name}": partial(laws.in_order, planner, log, place, steps) for place, log in logs.items()
    }
    return {
        **ordered,
        "exactly once": lambda: laws.exactly_once(planner, config, list(logs.values()), steps),
        "same bits": lambda: laws.same_bits(logs),
        "as undisturbed": lambda: laws.as_undisturbed(path, config, logs, WINDOWS, seed),
    }


def main(
    steps: Annotated[int, typer.Option(min=1, help="global steps")] = 50_000,
    kills: Annotated[int | None, typer.Option(min=0, help="accidents; one each 500 steps without")] = None,
    samples: Annotated[int, typer.Option(min=64, help="samples of the data set")] = 8_000,
    seed: Annotated[int, typer.Option(help="of the data's order and of the accidents")] = 0,
    out: Annotated[Path | None, typer.Option(help="Markdown to write; soak_cpu_<date>.md without")] = None,
) -> None:
    """Soak, print and write a dated result."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that no process outlives us
    count = max(1, steps // STEPS_A_KILL) if kills is None else kills
    bars = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        tempfile.TemporaryDirectory(prefix="soak-", dir=shared) as shm,
        Progress(*bars, TimeRemainingColumn()) as progress,
    ):
        outcome = soak(Path(folder) / "run", Path(shm), steps, count, samples, seed, progress)
    command = f"python -m tests.bench.soak --steps {steps} --kills {count} --samples {samples} --seed {seed}"
    text = "\n".join(report(outcome, command))
    (out or dated("soak")).write_text(text + "\n")
    typer.echo(text)
    broken = [f"{law}: {found}" for law, holds, found in outcome.verdicts if not holds]
    typer.echo("\n\n".join(broken), err=True)
    sys.exit(bool(broken))


if __name__ == "__main__":
    typer.run(main)
