"""The commands that print with rich: index, top, verify. `cli.py` loads this for them alone: `serve` starts sooner."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from dataloader_svc import tables, top, verify
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.jobs import plan_of
from dataloader_svc.plan import Planner
from dataloader_svc.shards import expand
from dataloader_svc.store import Store
from shared.config import index_dir
from shared.sections import RunConfig


def index_shards(run: RunConfig, jobs: int) -> None:
    """Index `jobs` shards at a time (0: loader.threads), and show what is in them and what the buckets make of them.

    Raises:
        ConfigError, DataError: the data cannot be used as configured.
    """
    store, folder = Store.of(run.loader), index_dir(run)
    shards = expand(run.data.datasets, run.data.missing_shards, store)
    columns = (TextColumn("indexing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task("indexing", total=None)
        show = partial(_show, progress, bar)
        report = build(shards, run.data, folder, jobs or run.loader.threads, show, store)
    found = Index.open(shards, run.data, folder, store)
    tables.show_index(Console(), found, report)
    tables.show_plan(Console(), plan_of(run, found, run.job, run.data).summary(0))


def watch(url: str, once: bool, every_s: float) -> None:
    """Show a daemon's metrics page every so many seconds, or once.

    Raises:
        MillstreamError: it cannot be read.
    """
    top.watch(Console(), url, once, every_s)


def verify_logs(run: RunConfig, consumed: Sequence[Path]) -> bool:
    """Hold trainers' logs to the plan and show the verdict: whether every planned sample was consumed exactly once.

    Raises:
        ConfigError, DataError: the data or the logs cannot be used.
    """
    store = Store.of(run.loader)
    shards = expand(run.data.datasets, run.data.missing_shards, store)
    planner = Planner(run.data, Index.open(shards, run.data, index_dir(run), store))
    report = verify.check(planner, run.data, verify.read_logs(consumed))
    tables.show_verdict(Console(), report)
    return report.clean


def _show(progress: Progress, bar: TaskID, done: int, of: int) -> None:
    progress.update(bar, completed=done, total=of)
