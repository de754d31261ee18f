"""Work shared out to a few threads, the caller's among them: with one thread nothing is handed over at all."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class Crew:
    """`threads` threads for one caller at a time; each takes the next item when it is done with its last."""

    def __init__(self, threads: int, name: str) -> None:
        self._others = ThreadPoolExecutor(threads - 1, thread_name_prefix=name) if threads > 1 else None
        self._threads = threads

    def map(self, work: Callable[..., Result], *columns: Iterable[Any]) -> list[Result]:
        """`work(*items)` for the items that stand beside each other in `columns`, in their order.

        Raises:
            Exception: what `work` raised, once no thread is at work any more.
        """
        items = list(zip(*columns, strict=True))
        found: list[Any] = [None] * len(items)
        places = iter(range(len(items)))  # its next() is one step under the interpreter lock
        futures = self._call_in(min(self._threads, len(items)) - 1, work, items, places, found)
        try:
            _share(work, items, places, found)
        finally:
            errors = [future.exception() for future in futures]
        for error in filter(None, errors):
            raise error
        return found

    def _call_in(self, helpers: int, *share: Any) -> "list[Future[None]]":
        return [self._others.submit(_share, *share) for _ in range(helpers)] if self._others else []

    def close(self) -> None:
        """Stop the threads."""
        if self._others:
            self._others.shutdown(wait=True, cancel_futures=True)


def _share(work: Callable[..., Any], items: list[tuple[Any, ...]], places: Iterator[int], found: list[Any]) -> None:
    for place in places:
        found[place] = work(*items[place])
