"""Device memory that this reader lends to a daemon's decode workers, which write pixels into it.

The memory is ours, so a worker may die at any time and a batch that we hold stays whole. It is freed only when no batch
lies there and the daemon said that none of its processes has it open; until then the same memory is lent again by the
next session, and only while no batch lies there, so that nothing is written under a batch that is still held.
"""

import math
from typing import Protocol

import torch

from shared import wire
from shared.cuda import Gpu, granules
from shared.errors import DeviceError
from shared.logs import logger

ALIGN_BYTES = 512
"""As CUDA aligns allocations, and torch counts on."""

_log = logger("client")


class Allocation(Protocol):
    """Exported memory. `tensor` is all of it, uint8."""

    handle: bytes
    tensor: torch.Tensor

    def free(self) -> None:
        """Give it back; nobody may use it any more."""


class Allocator(Protocol):
    """Where memory to lend comes from."""

    device: str
    """UUID of the GPU."""

    def allocate(self, size_bytes: int) -> Allocation:
        """New memory; raises DeviceError where there is none."""


class GpuAllocator:
    """Plain memory of one GPU, apart from torch's allocator, whatever that is set to."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self.device = gpu, gpu.uuid

    def allocate(self, size_bytes: int) -> "GpuAllocation":
        """New memory of whole granules, exported."""
        return GpuAllocation(self._gpu, granules(size_bytes))


class GpuAllocation:
    """Memory of `gpu`; torch sees it through `__cuda_array_interface__`."""

    def __init__(self, gpu: Gpu, size_bytes: int) -> None:
        self._gpu, self._address = gpu, gpu.allocate(size_bytes)
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }
        self.handle = gpu.export(self._address)
        self.tensor = torch.as_tensor(self, device=torch.device("cuda", gpu.index))

    def free(self) -> None:
        """Give the memory back; every tensor over it is void. The last reference to `tensor` ends with it."""
        self.tensor = torch.empty(0)
        self._gpu.free(self._address)


class LentMemory:
    """`parts` parts of at least `size_bytes` each: a `batches.Lent`.

    `lent`: the daemon's processes may have it open.
    """

    def __init__(self, allocator: Allocator, parts: int, size_bytes: int, hashed: bool) -> None:
        self.parts, self.hashed, self.lent = parts, hashed, False
        self.part_bytes = math.ceil(size_bytes / ALIGN_BYTES) * ALIGN_BYTES
        self._allocation: Allocation = allocator.allocate(parts * self.part_bytes)
        self.handle, self.size_bytes = self._allocation.handle, self._allocation.tensor.nbytes
        self._leases, self._unwanted, self._freed = 0, False, False

    def fits(self, parts: int, size_bytes: int) -> bool:
        """Whether it can be lent (again) for so many parts of that size: nothing lies there."""
        return not self._leases and self.parts == parts and self.part_bytes >= size_bytes

    def lend(self) -> wire.Lend:
        """What tells the daemon of it."""
        self.lent = True
        return wire.Lend(self.handle, self.parts, self.part_bytes, self.hashed)

    def part(self, number: int, size_bytes: int) -> torch.Tensor:
        """The first bytes of a part, uint8."""
        start = number * self.part_bytes
        return self._allocation.tensor[start : start + size_bytes]

    def lease(self) -> None:
        """One more batch may lie there."""
        self._leases += 1

    def give_back(self) -> None:
        """One batch fewer."""
        self._leases -= 1
        self._free_if_over()

    def returned(self) -> None:
        """No process of the daemon has it open any more."""
        self.lent = False
        self._free_if_over()

    def close(self) -> None:
        """It is not lent again, and freed as soon as that is safe; where it never is, the process's end does it."""
        self._unwanted = True
        if self.lent:
            _log.warning("%d bytes of device memory stay: the daemon did not say it let go of them", self.size_bytes)
        self._free_if_over()

    def _free_if_over(self) -> None:
        if self._unwanted and not (self.lent or self._leases or self._freed):
            self._freed = True
            self._allocation.free()


def find_allocator(device: torch.device | str | None) -> Allocator | None:
    """The allocator of a CUDA device (None: the current one), or None, which is logged: there is none, or no driver."""
    wanted = torch.device("cuda" if device is None else device)
    try:
        if wanted.type != "cuda" or not torch.cuda.is_available():
            raise DeviceError(f"{wanted} is no CUDA device here")
        return GpuAllocator(Gpu(torch.cuda.current_device() if wanted.index is None else wanted.index))
    except DeviceError as error:
        _log.warning("pixels come through slots, not the cuda lane: %s", error)
        return None
