"""The calls of CUDA's driver that lent device memory and decode workers need, through ctypes.

A call needs a current context: each method makes the device's primary one current, which torch and DALI use too, and
puts back what was. Memory is plain (cuMemAlloc), whatever torch's allocator is set to: what `expandable_segments` maps
has no IPC handle. What the CUDA manual says of handles, and is kept here and by the callers: an allocation is exported
whole, so sizes are multiples of 2 MiB, which nothing else then shares; the process that made a handle cannot open it;
another opens it once and closes it before the owner frees.
"""

import ctypes
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
from numpy.typing import NDArray

from shared.errors import DeviceError

GRANULE_BYTES = 2 << 20
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1
NON_BLOCKING = 1


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class _Uuid(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 16)]


_address, _size, _pointer, _int = ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
SIGNATURES: dict[str, tuple[type, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGetCount": (ctypes.POINTER(_int),),
    "cuDeviceGet": (ctypes.POINTER(_int), _int),
    "cuDeviceGetUuid_v2": (ctypes.POINTER(_Uuid), _int),
    "cuDevicePrimaryCtxRetain": (ctypes.POINTER(_pointer), _int),
    "cuDevicePrimaryCtxSetFlags_v2": (_int, ctypes.c_uint),
    "cuCtxSetCurrent": (_pointer,),
    "cuMemHostRegister_v2": (_pointer, _size, ctypes.c_uint),
    "cuCtxPushCurrent_v2": (_pointer,),
    "cuCtxPopCurrent_v2": (ctypes.POINTER(_pointer),),
    "cuMemGetInfo_v2": (ctypes.POINTER(_size), ctypes.POINTER(_size)),
    "cuMemAlloc_v2": (ctypes.POINTER(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_address), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_address,),
    "cuStreamCreate": (ctypes.POINTER(_pointer), ctypes.c_uint),
    "cuStreamSynchronize": (_pointer,),
    "cuMemcpyDtoDAsync_v2": (_address, _address, _size, _pointer),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemsetD8Async": (_address, ctypes.c_ubyte, _size, _pointer),
}


class Gpu:
    """One device, by its number in this process, with a stream of its own. Made where a context exists or is wanted.

    Copies are queued in order and are over when `finish` returns; host arrays must live until then. All methods raise
    DeviceError, which names the call and CUDA's code.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._context, self._stream = _pointer(), _pointer()
        device = _int()
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), index)
        call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        with self._current():
            call("cuStreamCreate", ctypes.byref(self._stream), NON_BLOCKING)

    @property
    def uuid(self) -> str:
        """Names the device (or its MIG slice) in every process."""
        return device_uuid(self.index)

    @property
    def stream(self) -> int:
        """The stream, for libraries that take one."""
        return self._stream.value or 0

    def used_bytes(self) -> int:
        """What all processes together have taken of the device's memory."""
        free, total = _size(), _size()
        with self._current():
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return total.value - free.value

    def allocate(self, size_bytes: int) -> int:
        """Address of new memory that can be exported; `size_bytes` is a multiple of GRANULE_BYTES."""
        found = _address()
        with self._current():
            call("cuMemAlloc_v2", ctypes.byref(found), size_bytes)
        return found.value

    def free(self, address: int) -> None:
        """Give back what `allocate` gave; no other process may have it open."""
        with self._current():
            call("cuMemFree_v2", address)

    def export(self, address: int) -> bytes:
        """A handle by which another process opens the allocation that begins at `address`."""
        found = _Handle()
        with self._current():
            call("cuIpcGetMemHandle", ctypes.byref(found), address)
        return bytes(found.reserved)

    def open(self, handle: bytes) -> int:
        """Where another process's allocation lies in this one, until `close`."""
        found = _address()
        with self._current():
            call("cuIpcOpenMemHandle_v2", ctypes.byref(found), _Handle.from_buffer_copy(handle), LAZY_PEER_ACCESS)
        return found.value

    def close(self, address: int) -> None:
        """Let go of what `open` gave."""
        with self._current():
            call("cuIpcCloseMemHandle", address)

    def copy(self, to: int, source: int, size_bytes: int) -> None:
        """Queue a copy within the device."""
        with self._current():
            call("cuMemcpyDtoDAsync_v2", to, source, size_bytes, self._stream)

    def copy_in(self, to: int, source: NDArray[np.uint8]) -> None:
        """Queue a copy of a contiguous host array to the device."""
        with self._current():
            call("cuMemcpyHtoDAsync_v2", to, source.ctypes.data, source.nbytes, self._stream)

    def copy_out(self, to: NDArray[np.uint8], source: int) -> None:
        """Queue a copy from the device that fills a contiguous host array."""
        with self._current():
            call("cuMemcpyDtoHAsync_v2", to.ctypes.data, source, to.nbytes, self._stream)

    def zero(self, to: int, size_bytes: int) -> None:
        """Queue the zeroing of device memory."""
        if size_bytes:
            with self._current():
                call("cuMemsetD8Async", to, 0, size_bytes, self._stream)

    def finish(self) -> None:
        """Wait until everything queued is done: what was written is there for every process."""
        with self._current():
            call("cuStreamSynchronize", self._stream)

    @contextmanager
    def _current(self) -> Iterator[None]:
        call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(_pointer()))


def count_gpus() -> int:
    """How many devices the driver shows; 0 without a driver. Needs no context."""
    count = _int()
    try:
        call("cuInit", 0)
        call("cuDeviceGetCount", ctypes.byref(count))
    except DeviceError:
        return 0
    return count.value


def device_uuid(index: int) -> str:
    """UUID of the device with this number in our process; needs no context.

    Raises:
        DeviceError: there is no such device.
    """
    device, found = _int(), _Uuid()
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDeviceGetUuid_v2", ctypes.byref(found), device)
    return f"GPU-{uuid.UUID(bytes=bytes(found.bytes))}"


def granules(size_bytes: int) -> int:
    """The size rounded up to whole GRANULE_BYTES."""
    return -(-size_bytes // GRANULE_BYTES) * GRANULE_BYTES


def call(name: str, *arguments: object) -> None:
    """Call a driver function.

    Raises:
        DeviceError: there is no driver, or it returned an error.
    """
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(text))
        raise DeviceError(f"{name} failed: {(text.value or b'an unknown error').decode()} ({code})")


@cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        for name, types in SIGNATURES.items():
            getattr(driver, name).argtypes = types
    except (OSError, AttributeError) as error:
        raise DeviceError(f"no CUDA driver that can be used: {error}") from None
    return driver
