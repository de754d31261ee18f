"""Ranks that wait for good, as in a collective over NVLink; one of them ends as the task says."""

import json
import os
import signal
import time

from shared.config import load
from shared.errors import DataError
from trainer.cli import exit_code, leave
from trainer.launch import join
from trainer.lifeline import lifeline

LONG_S = 100.0


def main() -> None:
    task = json.loads(os.environ["MILLSTREAM_TASK"])
    ranks = join(load(task["config"], task["sets"]))
    try:
        with lifeline(ranks, exit_code):
            ranks.barrier()
            if ranks.rank == task["rank"]:
                end(task["way"])
            if task["way"] != "orderly":
                time.sleep(LONG_S)
    except DataError as error:
        leave(exit_code(error))
    ranks.leave()


def end(way: str) -> None:
    """Be the rank that is over."""
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "error":
        raise DataError("the loader ended its stream")


if __name__ == "__main__":
    main()
