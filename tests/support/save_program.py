"""A program to kill: one process that resumes and then saves as fast as it can, and says what is committed.

Task in `$MILLSTREAM_TASK`: `config`, a run file, and `values`, how many numbers are saved. Each line of standard output
is a step whose checkpoint was committed when the line was written. The numbers saved after step n are all n.
"""

import json
import os

import torch

from shared.batch import Cursor
from shared.config import load
from trainer.launch import join
from trainer.shard import Box, Entry, Piece
from trainer.source import Source
from trainer.train import build_checkpoints


class Numbers:
    """Equal numbers in one tensor."""

    def __init__(self, count: int) -> None:
        self.values = torch.zeros(count)

    def entries(self) -> dict[str, Entry]:
        count = self.values.numel()
        return {"weight/w": Entry(self.values, Piece(Box((count,), (0,), (count,)), 0, count))}

    def fill(self, source: Source) -> None:
        self.values.copy_(source.whole("weight/w"))


def main() -> None:
    """Save until killed."""
    task = json.loads(os.environ["MILLSTREAM_TASK"])
    config, numbers = load(task["config"]), Numbers(task["values"])
    store = build_checkpoints(config, join(config))
    manifest = store.load_newest(numbers)
    step = manifest.step if manifest else 0
    assert numbers.values.eq(step).all()
    while True:
        step += 1
        numbers.values.fill_(step)
        store.save(numbers, step, Cursor(0, step, 0))
        numbers.values.fill_(-1)
        store.finish()
        os.write(1, b"%d\n" % step)


if __name__ == "__main__":
    main()
