"""A daemon in a thread of this process: its real loop, sockets, plan and filler. Only worker processes are left out:
tasks are filled by the loop's thread, one a turn, and pixels go to "device memory" of `host_gpu`.
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any

from dataloader_svc.daemon import Loop, Signals
from dataloader_svc.decode import Decoder
from dataloader_svc.fill import Filler
from dataloader_svc.index import Index
from dataloader_svc.indexing import build
from dataloader_svc.jobs import build_jobs
from dataloader_svc.lent import LentParts
from dataloader_svc.plan import Planner
from dataloader_svc.quarantine import Quarantine
from dataloader_svc.server import Listener
from dataloader_svc.service import Service
from dataloader_svc.shards import expand
from dataloader_svc.store import Reader
from dataloader_svc.tasks import Done, Task
from shared.batch import batch_spec, groups
from shared.config import endpoint
from shared.sections import RunConfig
from shared.slots import SlotPool
from tests.support.host_gpu import UUID, HostGpu

JOIN_S = 20.0


class InlinePool:
    """Stands where the pool of decode workers does; `held` leaves tasks unfilled and memory mapped for a while.

    `newest_first` fills as a pool may in which one worker is stuck: the oldest task is done last. `last` are the
    samples of the batch filled last.
    """

    def __init__(self, config: RunConfig, index: Index, slots: SlotPool, gpu: HostGpu) -> None:
        self.device, self.held, self.newest_first = UUID, False, False
        self.last: tuple[int, ...] = ()
        self._decoder = Decoder(config.data, config.loader)
        lent: Any = gpu
        self._lent = LentParts(lent)
        self._filler = Filler(config.data, index, Reader(), self._decoder, 2, self._lent)
        self._slots, self.tasks, self._to_forget = slots, deque[Task](), set[bytes]()
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def channels(self) -> list[int]:
        return [self._event]

    def submit(self, task: Task) -> None:
        self.tasks.append(task)
        os.eventfd_write(self._event, 1)

    def collect(self) -> list[Done]:
        if self.held:
            return []
        for handle in list(self._to_forget):
            self._lent.forget(handle)
        self._to_forget.clear()
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        if not self.tasks:
            return []
        task = self.tasks.pop() if self.newest_first else self.tasks.popleft()
        if self.tasks:
            os.eventfd_write(self._event, 1)
        done = self._filler.fill(task, self._slots.segment.payload(task.slot), print)
        self.last = done.sample_ids
        return [done]

    def tick(self) -> None:
        """Nothing can die here."""

    def forget(self, handle: bytes) -> None:
        self._to_forget.add(handle)
        os.eventfd_write(self._event, 1)

    def forgetting(self, handle: bytes) -> bool:
        return handle in self._to_forget

    def close(self) -> None:
        self._filler.close()
        self._decoder.close()
        os.close(self._event)


@contextlib.contextmanager
def inline_daemon(config: RunConfig, gpu: HostGpu) -> Iterator[InlinePool]:
    """A daemon that is ready, over the run's data."""
    shards = expand(config.data.datasets, "fail")
    build(shards, config.data, None)
    index = Index.open(shards, config.data, None)
    largest = max(batch_spec(group).size_bytes for group in groups(config.data))
    loader = config.loader
    slots = SlotPool.create(loader.shm_dir, config.job, loader.max_streams * loader.slots_per_stream, largest)
    pool, listener = InlinePool(config, index, slots, gpu), Listener.reserve([endpoint(config)], loader)
    workers: Any = pool
    jobs = build_jobs(config, index, Planner(config.data, index))
    service = Service(config, jobs, Quarantine(loader.quarantine, index.name), slots, workers, listener)
    listener.bind()
    with Signals().installed() as signals:
        thread = threading.Thread(target=Loop(config, listener, service, workers, signals).run, name="inline daemon")
        thread.start()
        try:
            yield pool
        finally:
            pool.held = False
            signals.count = 2
            thread.join(JOIN_S)
            for part in (listener, pool, slots):
                part.close()
