"""A decode worker's side of lent device memory: readers' memory, mapped here.

A reader may die under us: what is written then lands in memory that the driver keeps for as long as it is mapped. Where
memory cannot be mapped or written, its batches go to their slots until the reader's session is over.
"""

import threading

from dataloader_svc.rows import DeviceRows
from dataloader_svc.tasks import Target
from shared.batch import FieldSpec
from shared.cuda import Gpu
from shared.errors import DeviceError
from shared.logs import logger

_log = logger("worker")


class LentParts:
    """Parts of readers' memory, by the targets of tasks, on the worker's `gpu`. Any thread may ask for rows.

    Memory is mapped once: each `open` would want a `close` of its own.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mapped: dict[bytes, int] = {}
        self._unusable: set[bytes] = set()
        self._lock = threading.Lock()

    def rows(self, target: Target, field: FieldSpec) -> DeviceRows | None:
        """Rows of the target, laid out as `field`; None where it cannot be used."""
        if target.handle in self._unusable:
            return None
        try:
            return DeviceRows(self._gpu, self._map(target.handle) + target.offset, field)
        except DeviceError as error:
            self.give_up(target, error)
            return None

    def give_up(self, target: Target, error: DeviceError) -> None:
        """Use the target's memory no more.

        Raises:
            DeviceError: the GPU cannot be used any more, whatever for.
        """
        self._unusable.add(target.handle)
        self._gpu.finish()
        _log.warning("pixels go to slots for the rest of a reader's session: %s", error)

    def forget(self, handle: bytes) -> None:
        """Unmap a reader's memory, if it is mapped."""
        self._unusable.discard(handle)
        if address := self._mapped.pop(handle, 0):
            try:
                self._gpu.close(address)
            except DeviceError as error:
                _log.warning("a reader's memory cannot be unmapped: %s", error)

    def _map(self, handle: bytes) -> int:
        with self._lock:
            if handle not in self._mapped:
                self._mapped[handle] = self._gpu.open(handle)
            return self._mapped[handle]
