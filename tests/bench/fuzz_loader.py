"""Damage of every kind against real daemons: `python -m tests.bench.fuzz_loader --minutes 30 --seed 1` (`make fuzz`).

Rounds of four kinds take turns until the time is over: damaged media, damaged tars, lies on the socket, and `kill -9`
of workers, daemons and readers. A verifying client reads meanwhile. What must hold, whatever was thrown: the daemon
neither crashes nor hangs, and every good sample comes in its planned place, once. Writes what was tried, by kind of
damage, and what came back to a dated result; exit code 1 when anything did not hold. What a round throws follows from
the seed and its number.
"""

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq

from dataloader_svc.plan import Pack
from shared.batch import Cursor
from shared.config import endpoint
from shared.sections import RunConfig
from shared.wire import Hello, Process, start_ticks, this_process
from tests.bench.report import dated, machine, table, today
from tests.support.daemons import Daemon, kill_process, make_run, make_run_file, serving, wait_until
from tests.support.media import photo, sample, write_tar
from tests.support.mutate import FILE, TAR, frames, media, mutated
from tests.support.ordering import hold, index_of, planner_of, walk
from tests.support.reader import RawReader
from tests.support.reading import Place, lines
from tests.support.supervise import ReaderProcess
from trainer.client import LoaderClient

WAIT_S = 240.0
CONTROLS, DAMAGED, TARS, FRAMES = 12, 100, 4, 300
PATIENT = {"quarantine": {"max_consecutive": 100_000, "max_share": 1.0}}

Tally = Counter[str]


def reader(config: RunConfig, cursor: Cursor = Cursor()) -> LoaderClient:  # noqa: B008  frozen
    """A client that checks every byte and waits WAIT_S at most."""
    return LoaderClient(endpoint(config), job=config.job, data=config.data, cursor=cursor, wait_s=WAIT_S, verify=True)


def controls(rng: random.Random, folder: Path) -> set[str]:
    """A tar of good samples; their keys."""
    keys = [f"good{i:02d}" for i in range(CONTROLS)]
    write_tar(folder / "good.tar", [m for i, key in enumerate(keys) for m in sample(key, i + rng.randrange(4))])
    return set(keys)


def read_epoch(path: Path, config: RunConfig, good: set[str]) -> Tally:
    """Serve and read epoch 0: every good sample comes once, but for stand-ins; the daemon ends as told."""
    with serving(path) as daemon, reader(config) as client:
        index = index_of(config)
        seen: Tally = Counter()
        stand_ins = 0
        for batch in client:
            if batch.cursor.epoch:
                break
            seen.update(index.row(i).key for i in batch.sample_ids)
            stand_ins += batch.substituted
        restarts = daemon.log.count("another takes over")
        hold(daemon.terminate() == 0, f"the daemon ends as told\n{daemon.log[-2000:]}")
        hold("Traceback" not in daemon.log, f"no traceback\n{daemon.log[-2000:]}")
    hold(good <= set(seen), f"good samples come: {sorted(good - set(seen))} did not")
    repeats = sum(seen.values()) - len(seen)
    hold(repeats <= stand_ins, f"{repeats} repeats, and {stand_ins} stand-ins")
    return Counter(samples=len(index), served=len(seen), stand_ins=stand_ins, worker_crashes=restarts)


def fuzz_media(rng: random.Random, folder: Path) -> Tally:
    """Damaged pictures, clips and captions among good ones, some under a wrong name."""
    (folder / "data").mkdir()
    good = controls(rng, folder / "data")
    members, tried = [], Counter[str]()
    for i in range(DAMAGED):
        field, data = media(rng)
        name = rng.choice(("jpg", "png", "wav", "mp3")) if rng.random() < 0.1 else field
        tried[f"{field} as {name}" if name != field else field] += 1
        members.append((f"bad{i:03d}.{name}", mutated(data, rng, FILE, tried)))
        members.append((f"bad{i:03d}.txt", mutated(b"a caption of a few words", rng, FILE, tried)))
    write_tar(folder / "data" / "bad.tar", members)
    path, config = make_run_file(folder, loader=PATIENT)
    return read_epoch(path, config, good) + tried


def fuzz_tars(rng: random.Random, folder: Path) -> Tally:
    """Damaged tars beside a good one."""
    (folder / "data").mkdir()
    good, tried = controls(rng, folder / "data"), Counter[str]()
    for number in range(TARS):
        path = folder / "data" / f"bad{number}.tar"
        keys = [f"t{number}k{i}" for i in range(6)]
        write_tar(
            path, [m for i, key in enumerate(keys) for m in ((f"{key}.jpg", photo(64, 64, i)), (f"{key}.txt", b"x"))]
        )
        path.write_bytes(mutated(path.read_bytes(), rng, TAR, tried))
    path, config = make_run_file(folder, data={"missing_shards": "skip"}, loader=PATIENT)
    return read_epoch(path, config, good) + tried


def fuzz_socket(rng: random.Random, folder: Path) -> Tally:
    """Noise, lies and floods from other sockets, while an honest reader goes on."""
    path, config = make_run(folder, 24, 2)
    tried: Tally = Counter()
    with serving(path) as daemon, reader(config) as client, RawReader(config) as liar, zmq.Context() as context:
        process = Process(os.getppid(), start_ticks(os.getppid()), this_process().namespace)
        hello: Hello = msgspec.structs.replace(liar.hello(), process=process)
        places = walk(planner_of(config))
        client.connect()
        for _ in range(FRAMES // 10):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 200)
                socket.connect(endpoint(config))
                for _ in range(10):
                    socket.send_multipart(frames(rng, hello, tried))
                follow(client, places, 2)
        hold(daemon.process.poll() is None, f"the daemon lives\n{daemon.log[-2000:]}")
        hold(client.reconnects == 0, "an honest reader keeps its session")
        hold(daemon.terminate() == 0 and "Traceback" not in daemon.log, f"it ends as told\n{daemon.log[-2000:]}")
    return Counter(messages=FRAMES, batches=FRAMES // 10 * 2) + tried


def fuzz_kills(rng: random.Random, folder: Path, steps: int = 80) -> Tally:
    """SIGKILL of workers and daemons at any moment, and of a reader that another one succeeds."""
    path, config = make_run(folder, 40, 2, loader={"workers": 2, "worker_s": WAIT_S})
    tally, micro_batches = Counter[str](), config.data.batch.micro_batches
    daemon = Daemon(path).wait_ready()
    try:
        places = walk(planner_of(config))
        with reader(config) as client:
            for _ in range(steps // 2):
                follow(client, places, micro_batches)
                tally["batches"] += micro_batches
                daemon = harm(rng, daemon, path, tally)
            cursor = client.position
        tally += killed_readers(rng, path, config, cursor, steps // 2 * micro_batches)
        hold("Traceback" not in daemon.log, f"no traceback\n{daemon.log[-2000:]}")
    finally:
        daemon.kill()
    return tally


def harm(rng: random.Random, daemon: Daemon, path: Path, tally: Tally) -> Daemon:
    """Now and then kill a worker, or the daemon, which a new one succeeds."""
    if rng.random() < 0.2 and (workers := daemon.workers()):
        kill_process(rng.choice(workers))
        tally["killed workers"] += 1
    if rng.random() < 0.05:
        hold("Traceback" not in daemon.log, f"no traceback\n{daemon.log[-2000:]}")
        daemon.kill()
        tally["killed daemons"] += 1
        return Daemon(path)
    return daemon


def follow(client: LoaderClient, places: Iterator[tuple[Pack, Cursor]], count: int) -> None:
    """Read `count` batches: each at the next planned place, with the planned samples."""
    for (pack, _), batch in zip(itertools.islice(places, count), client, strict=False):
        place, came = (pack.cursor, pack.sample_ids), (batch.cursor, batch.sample_ids)
        hold(came == place, f"{place} is next, {came} came")


def killed_readers(rng: random.Random, path: Path, config: RunConfig, cursor: Cursor, count: int) -> Tally:
    """Reader processes, each killed after some batches and succeeded by one that goes on where the log ends."""
    at = f"--cursor={cursor.epoch},{cursor.step},{cursor.micro}"
    process, kills = ReaderProcess(path, path.parent, Place(), at), 0
    try:
        while (done := process.count()) < count:
            until = done + rng.randrange(1, 30)
            wait_until(lambda until=until: process.finished() or process.count() >= until, "some batches", WAIT_S)
            process.kill()
            kills += 1
    finally:
        process.end()
    logged = lines(process.log)
    for line, (pack, after) in zip(logged, walk(planner_of(config), cursor), strict=False):
        place, came = (pack.cursor, pack.sample_ids, after), (line.cursor, line.sample_ids, line.after)
        hold(came == place, f"{place} is next, {came} came to a reader that was killed")
    return Counter({"batches": len(logged), "killed readers": kills})


KINDS: dict[str, Callable[[random.Random, Path], Tally]] = {
    "media": fuzz_media,
    "tars": fuzz_tars,
    "socket": fuzz_socket,
    "kills": fuzz_kills,
}


def run(minutes: float, seed: int, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[dict[str, Tally], list[str]]:
    """Rounds of `kinds` in turn until the time is over, one of each at least; tallies, and what did not hold."""
    deadline = time.monotonic() + 60 * minutes
    tallies: dict[str, Tally] = {kind: Counter() for kind in kinds}
    failures = []
    for number, kind in enumerate(itertools.cycle(kinds)):
        if number >= len(kinds) and time.monotonic() > deadline:
            return tallies, failures
        tallies[kind]["rounds"] += 1
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            try:
                tallies[kind] += KINDS[kind](random.Random(f"{seed} {number} {kind}"), Path(folder))
            except Exception as error:  # whatever it is, the round failed, and the others go on
                failures.append(f"{kind}, round {number} of seed {seed}: {type(error).__name__}: {error}")
    raise AssertionError("rounds never end")


def report(tallies: dict[str, Tally], failures: list[str], command: str) -> list[str]:
    """The result as Markdown."""
    lines = ["# Loader under damage", "", f"{today()}, {machine()}; `{command}`", ""]
    names = ("kind", "what was tried and what came back", "count")
    counts = [(kind, what, str(count)) for kind, tally in tallies.items() for what, count in tally.items()]
    lines += table([dict(zip(names, row, strict=True)) for row in counts])
    lines += ["", f"{len(failures)} rounds in which a law did not hold.", ""]
    return lines + [f"    {line}" for failure in failures for line in failure.splitlines()]


def main(arguments: list[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append", help="only rounds of this kind; may be repeated")
    parser.add_argument("--out", type=Path, default=dated("fuzz"), help="Markdown to write; fuzz_cpu_<date>.md without")
    options: Any = parser.parse_args(arguments)
    kinds = tuple(options.only or KINDS)
    tallies, failures = run(options.minutes, options.seed, kinds)
    only = "".join(f" --only {kind}" for kind in options.only or ())
    command = f"python -m tests.bench.fuzz_loader --minutes {options.minutes:g} --seed {options.seed}{only}"
    text = "\n".join(report(tallies, failures, command))
    options.out.write_text(text + "\n")
    sys.stdout.write(text + "\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
