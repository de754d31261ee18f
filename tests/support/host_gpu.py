"""Host memory where lent device memory would be, in one process: `shared.cuda.Gpu` and a reader's allocator.

Handles are random names; memory that is open somewhere must not be freed, and is watched for it.
"""

import ctypes
import os
from collections import Counter

import numpy as np
import torch
from numpy.typing import NDArray

from shared.cuda import HANDLE_BYTES
from shared.errors import DeviceError

UUID = "GPU-of-the-host"


class HostGpu:
    """What `LentParts` needs of a Gpu. `broken` makes every copy into lent memory fail, `lost` every call."""

    memories: dict[bytes, NDArray[np.uint8]]

    def __init__(self) -> None:
        self.memories = {}
        self.opened: Counter[int] = Counter()
        self.broken = self.lost = False

    def open(self, handle: bytes) -> int:
        if handle not in self.memories:
            raise DeviceError("cuIpcOpenMemHandle_v2 failed: CUDA_ERROR_INVALID_VALUE (1)")
        address = self.memories[handle].ctypes.data
        self.opened[address] += 1
        return address

    def close(self, address: int) -> None:
        self.opened[address] -= 1

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        if self.broken:
            raise DeviceError("cuMemcpyDtoDAsync_v2 failed: CUDA_ERROR_INVALID_VALUE (1)")
        ctypes.memmove(to, source, size_bytes)

    def copy_in(self, to: int, source: NDArray[np.uint8]) -> None:
        assert source.flags.c_contiguous
        self.copy(to, source.ctypes.data, source.nbytes)

    def copy_out(self, to: NDArray[np.uint8], source: int) -> None:
        assert to.flags.c_contiguous
        ctypes.memmove(to.ctypes.data, source, to.nbytes)

    def zero(self, to: int, size_bytes: int) -> None:
        ctypes.memset(to, 0, size_bytes)

    def finish(self) -> None:
        if self.lost:
            raise DeviceError("cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)")


class HostAllocator:
    """A reader's allocator. Every allocation begins as POISON; `live` are those that were not freed."""

    POISON = 0xA5

    def __init__(self, gpu: HostGpu, device: str = UUID) -> None:
        self.gpu, self.device = gpu, device
        self.live: list[HostAllocation] = []
        self.full = False

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in memory that was allocated here."""
        spans = [(each.array.ctypes.data, each.array.nbytes) for each in self.live]
        return any(start <= tensor.data_ptr() < start + size for start, size in spans)

    def allocate(self, size_bytes: int) -> "HostAllocation":
        if self.full:
            raise DeviceError("cuMemAlloc_v2 failed: CUDA_ERROR_OUT_OF_MEMORY (2)")
        self.live.append(made := HostAllocation(self, size_bytes))
        return made


class HostAllocation:
    """One of them."""

    def __init__(self, allocator: HostAllocator, size_bytes: int) -> None:
        self._allocator, self.handle = allocator, os.urandom(HANDLE_BYTES)
        self.array = np.full(size_bytes, HostAllocator.POISON, np.uint8)
        self.tensor = torch.from_numpy(self.array)
        allocator.gpu.memories[self.handle] = self.array

    def free(self) -> None:
        assert not self._allocator.gpu.opened[self.array.ctypes.data], "freed while a worker maps it"
        self._allocator.live.remove(self)
        del self._allocator.gpu.memories[self.handle]
