"""Steps that are passed over on request (`data.skip_steps`): ranges [first, end) of global batches, in any order."""

from collections.abc import Sequence

Ranges = Sequence[tuple[int, int]]


def merged(ranges: Ranges) -> list[tuple[int, int]]:
    """The same steps as ascending ranges that neither overlap nor touch.

    >>> merged([(7, 9), (2, 4), (4, 5), (3, 4)])
    [(2, 5), (7, 9)]
    """
    found: list[tuple[int, int]] = []
    for first, end in sorted(ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((first, end))
    return found


def is_skipped(ranges: Ranges, step: int) -> bool:
    """Whether a step lies in one of the ranges."""
    return any(first <= step < end for first, end in ranges)
