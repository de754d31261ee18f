"""The few calls of CUDA's driver that decode workers need, through ctypes. None is needed to decode: all save time."""

import ctypes
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from shared.telemetry import logger

SLEEP_WHEN_WAITING = 0x04
PORTABLE = 0x01

log = logger("device")


def wait_asleep(gpu_id: int) -> None:
    """Have threads that wait for the GPU sleep. By default they spin, each a core's whole time.

    To be called before anything in this process makes a context (CUDA Driver API, CU_CTX_SCHED_BLOCKING_SYNC).
    """

    def set_flag(driver: ctypes.CDLL, device: ctypes.c_int) -> int:
        return int(driver.cuDevicePrimaryCtxSetFlags_v2(device, SLEEP_WHEN_WAITING))

    _done("threads that wait for the GPU spin", gpu_id, set_flag)


def page_lock(memory: NDArray[np.uint8], gpu_id: int) -> bool:
    """Page-lock shared memory for copies from the GPU, for as long as this process lives; whether that could be.

    To be called once the decoder has made its context, which is used here too.
    """

    def register(driver: ctypes.CDLL, device: ctypes.c_int) -> int:
        context, address = ctypes.c_void_p(), ctypes.c_void_p(memory.ctypes.data)
        return int(
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
            or driver.cuCtxSetCurrent(context)
            or driver.cuMemHostRegister_v2(address, ctypes.c_size_t(memory.nbytes), PORTABLE)
        )

    return _done(f"{memory.nbytes} bytes of slots stay pageable, and copies to them slow", gpu_id, register)


def _done(otherwise: str, gpu_id: int, calls: Callable[[ctypes.CDLL, ctypes.c_int], int]) -> bool:
    """Whether the driver did it for that device; a refusal costs speed alone, and is logged."""
    device = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        code = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), gpu_id) or calls(driver, device)
    except (OSError, AttributeError) as error:
        code = str(error)
    if code:
        log.warning("%s: CUDA's driver says %s", otherwise, code)
    return not code
