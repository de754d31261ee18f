"""What saves decode workers time on a GPU and is not needed to decode: sleep while waiting, page-locked slots."""

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.cuda import call
from shared.errors import DeviceError
from shared.logs import logger

SLEEP_WHEN_WAITING = 0x04
PORTABLE = 0x01

log = logger("device")


def wait_asleep(gpu_id: int) -> None:
    """Have threads that wait for the GPU sleep. By default they spin, each a core's whole time.

    To be called before anything in this process makes a context (CUDA Driver API, CU_CTX_SCHED_BLOCKING_SYNC).
    """
    set_flag = "cuDevicePrimaryCtxSetFlags_v2"
    _done("threads that wait for the GPU spin", gpu_id, lambda device: call(set_flag, device, SLEEP_WHEN_WAITING))


def page_lock(memory: NDArray[np.uint8], gpu_id: int) -> bool:
    """Page-lock shared memory for copies from the GPU, for as long as this process lives; whether that could be.

    To be called once the decoder has made its context, which becomes the calling thread's.
    """

    def register(device: ctypes.c_int) -> None:
        context = ctypes.c_void_p()
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        call("cuCtxSetCurrent", context)
        call("cuMemHostRegister_v2", memory.ctypes.data, memory.nbytes, PORTABLE)

    return _done(f"{memory.nbytes} bytes of slots stay pageable, and copies to them slow", gpu_id, register)


def _done(otherwise: str, gpu_id: int, calls: Callable[[ctypes.c_int], None]) -> bool:
    """Whether the driver did it for that device; a refusal costs speed alone, and is logged."""
    device = ctypes.c_int()
    try:
        call("cuInit", 0)
        call("cuDeviceGet", ctypes.byref(device), gpu_id)
        calls(device)
    except DeviceError as error:
        log.warning("%s: %s", otherwise, error)
        return False
    return True
