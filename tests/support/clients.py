"""What tests of the client do again and again."""

import time
from collections.abc import Callable

from shared.batch import Cursor
from trainer.client import LoaderClient


def take(client: LoaderClient, count: int) -> list[Cursor]:
    """Cursors of the next batches."""
    return [next(client).cursor for _ in range(count)]


def eventually(what: Callable[[], object]) -> None:
    """Wait, bounded, until a callable is true: for what the daemon's thread is about to do."""
    deadline = time.monotonic() + 60
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.005)
