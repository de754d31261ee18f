"""What a run leaves behind, line by line: `metrics.jsonl` (rank 0) and `consumed-<data_rank>.jsonl` (first readers).

Both show what the weights have seen and nothing else: lines beyond the checkpoint that a run resumes from are cut off
when the files are opened again, a half-written last line too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from shared.batch import Cursor
from shared.consumed import Consumed
from trainer.expert_stats import ExpertStats
from trainer.saving import unwritable

METRICS = "metrics.jsonl"


class StepLine(msgspec.Struct, frozen=True):
    """One step: a line of `metrics.jsonl`. Counts are of the whole global batch, waits of rank 0 since it started.

    Loss and gradient norm are null where they are not finite; a skipped step changed nothing but the cursor. `mfu` is
    the model FLOPs utilisation, 0 to 1 (see `trainer.flops`); null where the device's peak is not known. `experts` is
    null for a model without them, and for a skipped step.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    lr: float
    tokens: int
    samples: int
    step_s: float
    tokens_per_s: float
    wait_p50_ms: float
    wait_p99_ms: float
    mfu: float | None = None
    skipped: bool = False
    experts: ExpertStats | None = None


class Lines:
    """A file of JSON lines, each with the system as soon as it is written. Use as a context manager.

    Every call raises CheckpointError where the system refuses to write: a run without its logs proves nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._told():
            self._file = path.open("ab")

    def write(self, lines: Sequence[msgspec.Struct]) -> None:
        """Append lines."""
        with self._told():
            self._file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
            self._file.flush()

    def sync(self) -> None:
        """Bring what was written to the disk, before a checkpoint that counts on it is committed."""
        with self._told():
            os.fsync(self._file.fileno())

    def __enter__(self) -> "Lines":
        return self

    def __exit__(self, *failure: object) -> None:
        with self._told():
            self._file.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unwritable(self._path, error) from None


def consumed_lines(run_dir: Path, data_rank: int, cursor: Cursor) -> Lines:
    """The consumed log of a data-parallel rank, without what lies at or beyond `cursor`."""
    path = run_dir / f"consumed-{data_rank}.jsonl"
    _cut_consumed(path, cursor)
    return Lines(path)


def cut_unopened(run_dir: Path, data_ranks: int, cursor: Cursor) -> None:
    """Cut the consumed logs of data-parallel ranks that a run with fewer of them no longer has."""
    for path in run_dir.glob("consumed-*.jsonl"):
        if int(path.stem.partition("-")[2]) >= data_ranks:
            _cut_consumed(path, cursor)


def step_lines(run_dir: Path, steps: int) -> Lines:
    """The metrics log, without what lies beyond the first `steps` steps."""
    path = run_dir / METRICS
    cut_after(path, lambda line: msgspec.convert(line, StepLine).step < steps)
    return Lines(path)


def _cut_consumed(path: Path, cursor: Cursor) -> None:
    cut_after(path, lambda line: msgspec.convert(line, Consumed).cursor < cursor)


def cut_after(path: Path, keep: Callable[[Any], bool]) -> None:
    """Truncate a file of JSON lines before the first line that is broken or not to be kept."""
    if not path.exists():
        return
    kept = 0
    with path.open("rb+") as file:
        for line in file:
            if not (line.endswith(b"\n") and _passes(line, keep)):
                break
            kept += len(line)
        file.truncate(kept)


def _passes(line: bytes, keep: Callable[[Any], bool]) -> bool:
    try:
        return keep(msgspec.json.decode(line))
    except msgspec.MsgspecError:
        return False
