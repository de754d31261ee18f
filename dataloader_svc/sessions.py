"""Readers' sessions: who may open one, and whether the process behind it is still alive. No sockets here."""

from collections.abc import Iterator, Mapping

from dataloader_svc.jobs import Job
from shared.errors import MillstreamError
from shared.wire import PROTOCOL, Failure, Hello, start_ticks, this_process

MAX_READERS = 1024

StreamKey = tuple[str, int, int]


class Session:
    """An accepted HELLO of a job's reader, and when that was last heard."""

    def __init__(self, hello: Hello, job: Job, heard_at: float) -> None:
        self.hello, self.job, self.heard_at = hello, job, heard_at

    @property
    def key(self) -> StreamKey:
        """The stream it reads: (job, data_rank, data_ranks)."""
        return self.job.name, self.hello.data_rank, self.hello.data_ranks

    @property
    def labels(self) -> tuple[str, str, str]:
        """Job, data rank and reader, for metrics."""
        return self.job.name, f"{self.hello.data_rank}/{self.hello.data_ranks}", str(self.hello.reader)

    @property
    def name(self) -> str:
        """The reader, for logs."""
        job, rank, reader = self.labels
        return f"{reader} of data rank {rank} of job {job}"

    def visible(self) -> bool:
        """Whether we can see the reader's process: it shares our process-id namespace."""
        return self.hello.process.namespace == this_process().namespace

    def dead(self) -> bool:
        """Whether its process is known to be gone."""
        process = self.hello.process
        return self.visible() and start_ticks(process.pid) != process.started


def job_of(hello: Hello, jobs: Mapping[str, Job]) -> Job | None:
    """The job that `hello` asks for, which is the first one when it names none; None when it is not served."""
    return jobs.get(hello.job or next(iter(jobs)))


def refusal(hello: Hello, jobs: Mapping[str, Job], round_size: int) -> Failure | None:
    """Why `hello` cannot be served, or None. The first rule broken is named."""
    return next(_refusals(hello, jobs, round_size), None)


def _refusals(hello: Hello, jobs: Mapping[str, Job], round_size: int) -> Iterator[Failure]:
    if hello.protocol != PROTOCOL:
        text = f"protocol version {hello.protocol} of the reader is not {PROTOCOL} of the daemon"
        yield Failure("protocol", f"{text}; install one version of millstream on both sides", False)
    job = job_of(hello, jobs)
    if job is None:
        text = f"job {hello.job!r} of the reader is not {' or '.join(map(repr, jobs))} served here"
        yield Failure("job", f"{text}; check the endpoint, or name it in loader.jobs", False)
        return
    if hello.digest and hello.digest != job.digest:
        text = f"the data section differs: its digest is {hello.digest} at the reader and {job.digest} at the daemon"
        yield Failure("digest", f"{text}; start both with one run file", False)
    yield from _bad_place(hello, round_size)
    try:
        job.planner.check(hello.cursor, hello.data_ranks)
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
