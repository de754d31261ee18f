"""A worker's hands: threads that each fill one slot at a time, so that one reads while another's pictures are decoded.

Reports leave in the order in which tasks came, and a careful task is alone: it begins when all before it are reported,
and none after it begins before it is. What a death of the process may be due to stays countable so (`pool.py`). The
daemon bounds every wait here: it kills a worker that sits on a task too long.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dataloader_svc.tasks import Done, Task

Fill = Callable[[Task], Done]


class Hands:
    """One hand for each of `fills`, the caller's thread among them.

    `receive` waits for the next task, or gives None once there are no more; `stop` makes it do so. `report` sends.
    """

    def __init__(
        self,
        fills: Sequence[Fill],
        receive: Callable[[], Task | None],
        report: Callable[[Done], None],
        stop: Callable[[], None],
    ) -> None:
        self._fills, self._receive, self._report, self._stop = fills, receive, report, stop
        self._receiving = threading.Lock()
        self._reported = threading.Condition()
        self._taken = self._done = 0
        self._failed = False

    def serve(self) -> None:
        """Until there are no more tasks.

        Raises:
            Exception: what a fill or a report raised first, once no hand is at work any more.
        """
        first, *others = self._fills
        with ThreadPoolExecutor(max(1, len(others)), thread_name_prefix="hand") as threads:
            futures = [threads.submit(self._work, fill) for fill in others]
            self._work(first)
        for future in futures:
            future.result()

    def _work(self, fill: Fill) -> None:
        try:
            while not self._failed and self._another(fill):
                pass
        except BaseException:
            with self._reported:
                self._failed = True
                self._reported.notify_all()
            self._stop()
            raise

    def _another(self, fill: Fill) -> bool:
        """Take a task and answer it; False when there are no more."""
        with self._receiving:
            task = self._receive()
            if task is None:
                return False
            number, self._taken = self._taken, self._taken + 1
            if task.careful:
                self._await_turn(number)
                self._answer(fill, task, number)
        if not task.careful:
            self._answer(fill, task, number)
        return True

    def _answer(self, fill: Fill, task: Task, number: int) -> None:
        done = fill(task)
        if self._await_turn(number):
            self._report(done)
            with self._reported:
                self._done += 1
                self._reported.notify_all()

    def _await_turn(self, number: int) -> bool:
        """Wait until all tasks before `number` are reported; False when one of them never will be."""
        with self._reported:
            self._reported.wait_for(lambda: self._failed or self._done == number)
            return self._done == number
