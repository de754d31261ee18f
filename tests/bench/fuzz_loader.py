"""Damage of every kind against real daemons: `python -m tests.bench.fuzz_loader --minutes 8 --seed 1`.

Rounds of four kinds take turns until the time is over: damaged media, damaged tars, lies on the socket, and `kill -9`
of workers, daemons and readers. A verifying client reads meanwhile. What must hold, whatever was thrown: the daemon
neither crashes nor hangs, and every good sample comes in its planned place, once. Prints what was tried and what came
back; exit code 1 when anything did not hold. What a round throws follows from the seed and its number.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import zmq
from rich.console import Console
from rich.table import Table

from dataloader_svc.index import Index
from dataloader_svc.plan import Planner
from dataloader_svc.shards import expand
from shared.batch import Cursor
from shared.config import endpoint
from shared.sections import RunConfig
from shared.wire import Hello, Process, start_ticks, this_process
from tests.support.daemons import ROOT, Daemon, kill_process, make_run, make_run_file, serving
from tests.support.media import photo, sample, write_tar
from tests.support.mutate import FILE, TAR, frames, media, mutated
from tests.support.reader import RawReader
from trainer.client import LoaderClient

WAIT_S = 40.0
CONTROLS, DAMAGED, TARS, FRAMES = 12, 100, 4, 300
PATIENT = {"quarantine": {"max_consecutive": 100_000, "max_share": 1.0}}

Tally = Counter[str]


class Broken(Exception):
    """A law that did not hold."""


def hold(ok: bool, law: str) -> None:
    """Raise Broken unless `ok`."""
    if not ok:
        raise Broken(law)


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


def index_of(config: RunConfig) -> Index:
    return Index.open(expand(config.data.datasets, "skip"), config.data, None)


def fuzz_media(rng: random.Random, folder: Path) -> Tally:
    """Damaged pictures, clips and captions among good ones, some under a wrong name."""
    (folder / "data").mkdir()
    good = controls(rng, folder / "data")
    members = []
    for i in range(DAMAGED):
        field, data = media(rng)
        name = rng.choice(("jpg", "png", "wav", "mp3")) if rng.random() < 0.1 else field
        members.append((f"bad{i:03d}.{name}", mutated(data, rng, FILE)))
        members.append((f"bad{i:03d}.txt", mutated(b"a caption of a few words", rng, FILE)))
    write_tar(folder / "data" / "bad.tar", members)
    path, config = make_run_file(folder, loader=PATIENT)
    return read_epoch(path, config, good)


def fuzz_tars(rng: random.Random, folder: Path) -> Tally:
    """Damaged tars beside a good one."""
    (folder / "data").mkdir()
    good = controls(rng, folder / "data")
    for number in range(TARS):
        path = folder / "data" / f"bad{number}.tar"
        keys = [f"t{number}k{i}" for i in range(6)]
        write_tar(
            path, [m for i, key in enumerate(keys) for m in ((f"{key}.jpg", photo(64, 64, i)), (f"{key}.txt", b"x"))]
        )
        path.write_bytes(mutated(path.read_bytes(), rng, TAR))
    path, config = make_run_file(folder, data={"missing_shards": "skip"}, loader=PATIENT)
    return read_epoch(path, config, good)


def fuzz_socket(rng: random.Random, folder: Path) -> Tally:
    """Noise, lies and floods from other sockets, while an honest reader goes on."""
    path, config = make_run(folder, 24, 2)
    with serving(path) as daemon, reader(config) as client, RawReader(config) as liar, zmq.Context() as context:
        process = Process(os.getppid(), start_ticks(os.getppid()), this_process().namespace)
        hello: Hello = msgspec.structs.replace(liar.hello(), process=process)
        places = planned(config, Cursor())
        client.connect()
        for _ in range(FRAMES // 10):
            with context.socket(zmq.DEALER) as socket:
                socket.setsockopt(zmq.LINGER, 200)
                socket.connect(endpoint(config))
                for _ in range(10):
                    socket.send_multipart(frames(rng, hello))
                follow(client, places, 2)
        hold(daemon.process.poll() is None, f"the daemon lives\n{daemon.log[-2000:]}")
        hold(client.reconnects == 0, "an honest reader keeps its session")
        hold(daemon.terminate() == 0 and "Traceback" not in daemon.log, f"it ends as told\n{daemon.log[-2000:]}")
    return Counter(messages=FRAMES, batches=FRAMES // 10 * 2)


def fuzz_kills(rng: random.Random, folder: Path, steps: int = 80) -> Tally:
    """SIGKILL of workers and daemons at any moment, and of a reader that another one succeeds."""
    path, config = make_run(folder, 40, 2, loader={"workers": 2})
    places, tally, micro_batches = planned(config, Cursor()), Counter[str](), config.data.batch.micro_batches
    daemon = Daemon(path).wait_ready()
    try:
        with reader(config) as client:
            for _ in range(steps // 2):
                follow(client, places, micro_batches)
                tally["batches"] += micro_batches
                daemon = harm(rng, daemon, path, tally)
            cursor = client.position
        while tally["batches"] < steps * micro_batches:
            cursor = read_and_die(rng, path, cursor, places, tally)
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


def planned(config: RunConfig, cursor: Cursor) -> Iterator[tuple[Cursor, tuple[int, ...]]]:
    """Places and samples from `cursor` on, by the plan alone."""
    planner = Planner(config.data, index_of(config))
    while True:
        yield cursor, planner.pack(cursor, 0, 1).sample_ids
        cursor = planner.after(cursor, 1)


def follow(client: LoaderClient, places: Iterator[tuple[Cursor, tuple[int, ...]]], count: int) -> None:
    """Read `count` batches: each at the next planned place, with the planned samples."""
    for place, batch in zip(itertools.islice(places, count), client, strict=False):
        hold((batch.cursor, batch.sample_ids) == place, f"{place} is next, {batch.cursor} {batch.sample_ids} came")


def read_and_die(
    rng: random.Random, path: Path, cursor: Cursor, places: Iterator[tuple[Cursor, tuple[int, ...]]], tally: Tally
) -> Cursor:
    """Start a reader process at `cursor`, kill it after some batches, check what it wrote; the cursor it came to."""
    command = [
        sys.executable,
        "-m",
        "tests.bench.fuzz_loader",
        "--reader",
        str(path),
        json.dumps(list(vars_of(cursor))),
    ]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        try:
            lines = [child.stdout.readline() for _ in range(rng.randrange(1, 30))]
        finally:
            child.send_signal(signal.SIGKILL)
        lines += child.stdout.readlines()
    for line in filter(lambda text: text.endswith("\n"), lines):
        came, ids, after = json.loads(line)
        place = next(places)
        hold((Cursor(*came), tuple(ids)) == place, f"{place} is next, {came} {ids} came to a reader that was killed")
        cursor = Cursor(*after)
        tally["batches"] += 1
    tally["killed readers"] += 1
    return cursor


def vars_of(cursor: Cursor) -> tuple[int, int, int]:
    return cursor.epoch, cursor.step, cursor.micro


def read_for_ever(path: str, cursor: str) -> None:
    """The reader that is killed: a line for each batch it has consumed."""
    from shared.config import load

    with reader(load(path), Cursor(*json.loads(cursor))) as client:
        for batch in client:
            line = [vars_of(batch.cursor), batch.sample_ids, vars_of(batch.after)]
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


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


def show(tallies: dict[str, Tally], failures: list[str]) -> None:
    """The table, and what did not hold."""
    table = Table("kind", "what was tried and what came back", title="Loader under damage")
    for kind, tally in tallies.items():
        table.add_row(kind, ", ".join(f"{count} {what}" for what, count in tally.items()))
    console = Console()
    console.print(table)
    for failure in failures:
        console.print(failure, markup=False)


def main(arguments: list[str] | None = None) -> int:
    """The program; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=KINDS, action="append", help="only rounds of this kind; may be repeated")
    parser.add_argument("--reader", nargs=2, metavar=("CONFIG", "CURSOR"), help=argparse.SUPPRESS)
    options: Any = parser.parse_args(arguments)
    if options.reader:
        read_for_ever(*options.reader)
        return 0
    tallies, failures = run(options.minutes, options.seed, tuple(options.only or KINDS))
    show(tallies, failures)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
