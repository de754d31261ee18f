"""A reader process that may be killed at any moment: `python -m tests.support.reading CONFIG LOG`, and its log.

It reads the stream of one data rank with a real `LoaderClient` that checks every byte, and logs a batch as consumed
before it asks for the next one. Started again, it goes on where its log ends, as a trainer does at its checkpoint.
A pace holds readers together as a trainer's collectives do: none logs more batches than it allows.
"""

import mmap
import os
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shared.batch import Cursor
from shared.config import endpoint, load
from shared.consumed import Consumed
from tests.support.ranks import ROOT
from trainer.batches import Batch
from trainer.client import LoaderClient
from trainer.log import Lines, cut_after

WAIT_S = 600.0
PAUSE_S = 0.005


class Line(Consumed, frozen=True, kw_only=True):
    """A line of the consumed log, with the cursor to go on from."""

    after: Cursor = Cursor()


def line_of(batch: Batch, rank: int, ranks: int) -> Line:
    """What data rank `rank` of `ranks` logs of a batch."""
    where = (*msgspec.structs.astuple(batch.cursor), rank, ranks)
    what = (batch.batch_id, batch.sample_ids, batch.substituted, batch.group, batch.checksum, batch.skipped_from)
    return Line(*where, *what, after=batch.after)


class Place(msgspec.Struct, frozen=True):
    """Which reader of which data rank."""

    rank: int = 0
    ranks: int = 1
    reader: int = 0
    readers: int = 1

    @property
    def name(self) -> str:
        return f"reader {self.rank}.{self.reader}"

    def log(self, folder: Path) -> Path:
        """Where it logs what it consumed."""
        return folder / f"consumed-{self.rank}.{self.reader}.jsonl"


class Pace:
    """How many batches each reader may have logged: eight bytes of a mapped file, which the supervisor raises."""

    FORM = "<q"

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(struct.calcsize(self.FORM)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), struct.calcsize(self.FORM))

    def allow(self, batches: int) -> None:
        struct.pack_into(self.FORM, self._map, 0, batches)

    def allowed(self) -> int:
        return int(struct.unpack_from(self.FORM, self._map)[0])


def lines(path: Path) -> list[Line]:
    """The whole lines of a reader's log."""
    if not path.exists():
        return []
    return [msgspec.json.decode(line, type=Line) for line in path.read_bytes().split(b"\n")[:-1]]


def start(config: Path, log: Path, output: Path, place: Place, *flags: str) -> "subprocess.Popen[bytes]":
    """Start a reader process; what it says goes to the end of `output`."""
    places = [f"--{key}={value}" for key, value in msgspec.structs.asdict(place).items()]
    command = [sys.executable, "-m", "tests.support.reading", str(config), str(log), *places, *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with output.open("ab") as out:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)


def read(
    config_path: Path,
    log: Path,
    rank: int = 0,
    ranks: int = 1,
    reader: int = 0,
    readers: int = 1,
    steps: Annotated[int, typer.Option(help="end after so many global steps of the log; 0 never ends")] = 0,
    cursor: Annotated[str, typer.Option(help="EPOCH,STEP,MICRO where an empty log begins")] = "0,0,0",
    pace: Annotated[Path | None, typer.Option(help="the file of a Pace; none: as fast as can be")] = None,
) -> None:
    """Read and log until the end."""
    cut_after(log, lambda line: True)
    done = lines(log)
    at = done[-1].after if done else Cursor(*map(int, cursor.split(",")))
    left = steps - sum(ends_step(line) for line in done) if steps else None
    config, allowed = load(config_path), Pace(pace).allowed if pace else lambda: sys.maxsize
    client = LoaderClient(
        endpoint(config),
        job=config.job,
        data=config.data,
        data_rank=rank,
        data_ranks=ranks,
        reader=reader,
        readers=readers,
        cursor=at,
        wait_s=WAIT_S,
        steps=left,
        verify=True,
    )
    with Lines(log) as out, client:
        for number, batch in enumerate(client, len(done) + 1):
            while number > allowed():
                client.poll()
                time.sleep(PAUSE_S)
            out.write([line_of(batch, rank, ranks)])


def ends_step(line: Line) -> bool:
    """Whether the micro-batch was the last of its step on its rank."""
    return (line.after.epoch, line.after.step) != (line.epoch, line.step)


if __name__ == "__main__":
    typer.run(read)
