"""Tasks filled in this process from real tars: a run's index, plan, decoder and filler; and runs with a bad sample."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.plan import Pack, Planner
from dataloader_svc.shards import Shard, expand
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Done, Task
from shared.batch import Cursor, batch_spec, groups
from shared.sections import RunConfig
from tests.support.daemons import make_run_file
from tests.support.media import photo, write_tar

POISON = 0xFF


class Shop:
    """A run's index, plan and filler in this process."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.shards: tuple[Shard, ...] = expand(config.data.datasets, "fail")
        build(self.shards, config.data, None)
        self.index = Index.open(self.shards, config.data, None)
        self.planner = Planner(config.data, self.index)
        self.decoder = Decoder(config.data, config.loader)
        self.filler = Filler(config.data, self.index, Reader(), self.decoder, 2)
        self.specs = [batch_spec(group) for group in groups(config.data)]

    def packs(self) -> list[Pack]:
        steps, each = self.planner.steps(0), self.config.data.batch.micro_batches
        return [self.planner.pack(Cursor(0, s, m), 0, 1) for s in range(steps) for m in range(each)]

    def fill(self, task: Task, poison: int = POISON, announce: Callable[[int], None] = print) -> tuple[Any, Done]:
        payload = np.full(self.specs[task.group].size_bytes, poison, np.uint8)
        return payload, self.filler.fill(task, payload, announce)

    def pretend(self, sample_id: int, **facts: int) -> None:
        """Change what the index tells of a sample."""
        row = self.index.row
        self.index.row = lambda i: msgspec.structs.replace(row(i), **facts) if i == sample_id else row(i)  # type: ignore[method-assign]

    def close(self) -> None:
        self.filler.close()
        self.decoder.close()


def task_of(pack: Pack, **changes: Any) -> Task:
    return msgspec.structs.replace(Task(1, 0, pack.group, pack.sample_ids, pack.spares), **changes)


def damaged_run(folder: Path, bad: bytes) -> RunConfig:
    """Twelve pictures of one bucket with the same caption; the fifth is `bad`."""
    (folder / "data").mkdir(parents=True)
    members = []
    for i in range(12):
        members += [(f"k{i:02d}.jpg", bad if i == 4 else photo(128, 128, i)), (f"k{i:02d}.txt", b"same words")]
    write_tar(folder / "data" / "a.tar", members)
    return make_run_file(folder)[1]


def rotten_png() -> bytes:
    """A PNG with a good header and a damaged body: only decoding finds out."""
    blob = bytearray(photo(128, 128, 1, "PNG"))
    blob[len(blob) // 2 : len(blob) // 2 + 40] = bytes(40)
    return bytes(blob)
