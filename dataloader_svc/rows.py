"""Where the pictures of a batch go, row by row: the slot, or a part of device memory that its reader lent.

A decoder is given places and writes a picture to each; then those that made it close ranks. Both kinds of rows do the
same, so that nobody else asks which they are.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from shared.batch import FieldSpec
from shared.cuda import Gpu

Pixels = NDArray[np.uint8]
Region = tuple[int, int, int, int]
"""Top, left, bottom, right."""
Size = tuple[int, int]
"""Height, width."""


class DevicePlace:
    """Room for one picture of `shape` at `address` of the device."""

    def __init__(self, gpu: Gpu, address: int, shape: tuple[int, ...]) -> None:
        self._gpu, self.address, self.shape = gpu, address, shape

    def put(self, picture: Pixels) -> None:
        """Write a picture that was decoded on the host.

        Raises:
            DeviceError: the memory cannot be written.
        """
        self._gpu.copy_in(self.address, np.ascontiguousarray(picture))
        self._gpu.finish()


Place = Pixels | DevicePlace


def address_of(place: Place) -> int:
    """Where a place begins, on whichever side."""
    return int(place.ctypes.data) if isinstance(place, np.ndarray) else place.address


class Rows(Protocol):
    """The rows of one batch."""

    def place(self, row: int) -> Place:
        """Where the picture of a row goes."""

    def close_ranks(self, places: Sequence[int]) -> None:
        """Move the rows at `places`, which ascend, to the front in their order; zero the others."""


class HostRows:
    """Rows of a slot: `pixels_NHWC` lies over it."""

    def __init__(self, pixels_NHWC: Pixels) -> None:
        self._pixels = pixels_NHWC

    def place(self, row: int) -> Pixels:
        """The row."""
        place: Pixels = self._pixels[row]
        return place

    def close_ranks(self, places: Sequence[int]) -> None:
        """Copy rows over rows."""
        for row, place in enumerate(places):
            if place != row:
                self._pixels[row] = self._pixels[place]
        self._pixels[len(places) :] = 0


class DeviceRows:
    """Rows of a part of device memory, laid out as `field`. All methods raise DeviceError where it cannot be used."""

    def __init__(self, gpu: Gpu, address: int, field: FieldSpec) -> None:
        self._gpu, self._address, self._field = gpu, address, field
        self._row_bytes = field.size_bytes // field.shape[0]

    def place(self, row: int) -> DevicePlace:
        """Room for one picture."""
        return DevicePlace(self._gpu, self._address + row * self._row_bytes, self._field.shape[1:])

    def close_ranks(self, places: Sequence[int]) -> None:
        """Copies within the device; what was written is there for every process afterwards."""
        for row, place in enumerate(places):
            if place != row:
                self._gpu.copy(self.place(row).address, self.place(place).address, self._row_bytes)
        used_bytes = len(places) * self._row_bytes
        self._gpu.zero(self._address + used_bytes, self._field.size_bytes - used_bytes)
        self._gpu.finish()

    def read(self, out: Pixels) -> None:
        """Copy all rows to a contiguous array."""
        self._gpu.copy_out(out, self._address)
        self._gpu.finish()
