"""The planned order, walked by the plan alone, and the laws that hold what came against it."""

from collections.abc import Iterator

import msgspec

from dataloader_svc.index import Index
from dataloader_svc.plan import Pack, Planner
from dataloader_svc.shards import expand
from shared.batch import Cursor
from shared.sections import RunConfig

START = Cursor()


class Broken(Exception):
    """A law that did not hold."""


def hold(ok: bool, law: str) -> None:
    """Raise Broken unless `ok`."""
    if not ok:
        raise Broken(law)


def index_of(config: RunConfig) -> Index:
    """The index of the run's shards, which must have been built."""
    return Index.open(expand(config.data.datasets, "skip"), config.data, None)


def planner_of(config: RunConfig) -> Planner:
    """The plan of the run."""
    return Planner(config.data, index_of(config))


def walk(planner: Planner, cursor: Cursor = START, rank: int = 0, ranks: int = 1) -> Iterator[tuple[Pack, Cursor]]:
    """Every pack of a data rank from `cursor` on, each with the cursor after it. Never ends."""
    while True:
        after = planner.after(cursor, ranks)
        yield planner.pack(cursor, rank, ranks), after
        cursor = after


def name(cursor: Cursor) -> str:
    """A cursor as messages write it."""
    return "e{}-s{}-m{}".format(*msgspec.structs.astuple(cursor))
