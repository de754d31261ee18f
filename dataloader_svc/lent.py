"""A decode worker's side of lent device memory: readers' memory mapped here, and pictures written into it.

Pictures that a GPU decoded never leave it; those of a CPU are copied in. A reader may die under us: what is written
then lands in memory that the driver keeps for as long as it is mapped. Where memory cannot be mapped or written, its
batches go to their slots.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dataloader_svc.tasks import Target
from shared.batch import FieldSpec
from shared.cuda import Gpu
from shared.errors import DeviceError
from shared.telemetry import logger

_log = logger("worker")


class DeviceRow(msgspec.Struct, frozen=True):
    """A picture in this GPU's memory, at `address`, there for as long as `owner` lives."""

    address: int
    owner: Any


Row = NDArray[np.uint8] | DeviceRow


class LentParts:
    """Parts of readers' memory, by the targets of tasks, on the worker's `gpu`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._mapped: dict[bytes, int] = {}
        self._unusable: set[bytes] = set()

    def write(self, target: Target, rows: Sequence[Row], field: FieldSpec) -> bool:
        """Fill the target with `rows`, then zeros up to the size of `field`; False where that cannot be.

        All of it is there for every process when this returns.

        Raises:
            DeviceError: the GPU cannot be used any more.
        """
        if target.handle in self._unusable:
            return False
        try:
            self._write(self._map(target.handle) + target.offset, rows, field)
        except DeviceError as error:
            self._gpu.finish()
            self._unusable.add(target.handle)
            _log.warning("pixels go to slots for the rest of a reader's session: %s", error)
            return False
        return True

    def read(self, target: Target, out: NDArray[np.uint8]) -> None:
        """Copy the target's bytes to a contiguous array.

        Raises:
            DeviceError: the GPU cannot be used any more.
        """
        self._gpu.copy_out(out, self._map(target.handle) + target.offset)
        self._gpu.finish()

    def fetch(self, row: Row, like: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """A picture as an array of the shape of `like`, copied from the GPU if it is there.

        Raises:
            DeviceError: the GPU cannot be used any more.
        """
        if not isinstance(row, DeviceRow):
            return row
        found = np.empty_like(like)
        self._gpu.copy_out(found, row.address)
        self._gpu.finish()
        return found

    def forget(self, handle: bytes) -> None:
        """Unmap a reader's memory, if it is mapped."""
        self._unusable.discard(handle)
        if address := self._mapped.pop(handle, 0):
            try:
                self._gpu.close(address)
            except DeviceError as error:
                _log.warning("a reader's memory cannot be unmapped: %s", error)

    def _map(self, handle: bytes) -> int:
        if handle not in self._mapped:
            self._mapped[handle] = self._gpu.open(handle)
        return self._mapped[handle]

    def _write(self, address: int, rows: Sequence[Row], field: FieldSpec) -> None:
        row_bytes = field.size_bytes // field.shape[0]
        for row in rows:
            if isinstance(row, DeviceRow):
                self._gpu.copy(address, row.address, row_bytes)
            else:
                self._gpu.copy_in(address, row)
            address += row_bytes
        self._gpu.zero(address, field.size_bytes - len(rows) * row_bytes)
        self._gpu.finish()
