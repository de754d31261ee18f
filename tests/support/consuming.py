"""Logs as trainers would write them, from a plan alone: any number of ranks, any start, steps passed over."""

from collections.abc import Iterator

from dataloader_svc.plan import Pack, Planner
from shared.batch import Cursor
from shared.consumed import Consumed


def read(planner: Planner, start: Cursor, steps: int, rank: int, ranks: int) -> Iterator[Pack]:
    """The packs of one rank over `steps` global batches from `start` on, as a daemon hands them out."""
    cursor = planner.skips.landing(start)
    while steps:
        yield planner.pack(cursor, rank, ranks)
        after = planner.after(cursor, ranks)
        steps -= after.micro == 0
        cursor = planner.skips.landing(after)


def lines(planner: Planner, start: Cursor, steps: int, rank: int, ranks: int) -> list[Consumed]:
    """What the trainer of that rank logs."""
    return [
        Consumed(
            *(pack.cursor.epoch, pack.cursor.step, pack.cursor.micro, rank, ranks, pack.batch_id, pack.sample_ids),
            skipped_from=planner.skips.before(pack.cursor),
        )
        for pack in read(planner, start, steps, rank, ranks)
    ]


def logs(planner: Planner, start: Cursor, steps: int, ranks: int) -> list[list[Consumed]]:
    """One log a rank."""
    return [lines(planner, start, steps, rank, ranks) for rank in range(ranks)]
