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
    _done("waiting threads spin", lambda driver: driver.cuDevicePrimaryCtxSetFlags_v2(gpu_id, SLEEP_WHEN_WAITING))


def page_lock(memory: NDArray[np.uint8], gpu_id: int) -> bool:
    """Page-lock shared memory for copies from the GPU, for as long as this process lives; whether that could be.

    To be called once the decoder has made its context, which is used here too.
    """

    def register(driver: ctypes.CDLL) -> int:
        context = ctypes.c_void_p()
        return int(
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), gpu_id)
            or driver.cuCtxSetCurrent(context)
            or driver.cuMemHostRegister_v2(
                ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), PORTABLE
            )
        )

    return _done(f"{memory.nbytes} bytes of slots stay pageable, and copies to them slow", register)


def _done(otherwise: str, calls: Callable[[ctypes.CDLL], int]) -> bool:
    """Whether the driver did it; a refusal costs speed alone, and is logged."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        code = driver.cuInit(0) or calls(driver)
    except (OSError, AttributeError) as error:
        code = str(error)
    if code:
        log.warning("%s: CUDA's driver says %s", otherwise, code)
    return not code
