"""Readers' sessions: who may open one, and whether the process behind it is still alive. No sockets here."""

from collections.abc import Callable, Iterator

from shared.batch import Cursor
from shared.config import digest
from shared.errors import MillstreamError
from shared.sections import RunConfig
from shared.wire import PROTOCOL, Failure, Hello, start_ticks, this_process

MAX_READERS = 1024

StreamKey = tuple[int, int]


class Session:
    """An accepted HELLO and when its reader was last heard."""

    def __init__(self, hello: Hello, heard_at: float) -> None:
        self.hello, self.heard_at = hello, heard_at

    @property
    def key(self) -> StreamKey:
        """The stream it reads: (data_rank, data_ranks)."""
        return self.hello.data_rank, self.hello.data_ranks

    def visible(self) -> bool:
        """Whether we can see the reader's process: it shares our process-id namespace."""
        return self.hello.process.namespace == this_process().namespace

    def dead(self) -> bool:
        """Whether its process is known to be gone."""
        process = self.hello.process
        return self.visible() and start_ticks(process.pid) != process.started


def refusal(hello: Hello, config: RunConfig, check_cursor: Callable[[Cursor, int], object]) -> Failure | None:
    """Why `hello` cannot be served by a daemon with `config`, or None. The first rule broken is named."""
    return next(_refusals(hello, config, check_cursor), None)


def _refusals(hello: Hello, config: RunConfig, check_cursor: Callable[[Cursor, int], object]) -> Iterator[Failure]:
    if hello.protocol != PROTOCOL:
        text = f"protocol version {hello.protocol} of the reader is not {PROTOCOL} of the daemon"
        yield Failure("protocol", f"{text}; install one version of millstream on both sides", False)
    if hello.job and hello.job != config.job:
        yield Failure(
            "job", f"job {hello.job!r} of the reader is not {config.job!r} served here; check the endpoint", False
        )
    if hello.digest and hello.digest != (ours := digest(config.data)):
        text = f"the data section differs: its digest is {hello.digest} at the reader and {ours} at the daemon"
        yield Failure("digest", f"{text}; start both with one run file", False)
    yield from _bad_place(hello, config.data.batch.round)
    try:
        check_cursor(hello.cursor, hello.data_ranks)
    except MillstreamError as error:
        yield Failure("cursor", str(error), False)


def _bad_place(hello: Hello, round_size: int) -> Iterator[Failure]:
    ranks = hello.data_ranks
    if ranks < 1 or round_size % ranks:
        text = f"data_ranks ({ranks}) must divide data.batch.round, {round_size}"
        yield Failure("data_ranks", f"{text}, so that all ranks share one shape; change mesh.data or round", False)
    elif not 0 <= hello.data_rank < ranks:
        yield Failure("data_rank", f"data_rank ({hello.data_rank}) must be 0 to {ranks - 1}; check the mesh", False)
    if not 0 <= hello.reader < hello.readers <= MAX_READERS:
        text = f"reader ({hello.reader}) must be below readers ({hello.readers}), which must be at most {MAX_READERS}"
        yield Failure("reader", f"{text}; check the mesh", False)
