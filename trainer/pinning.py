"""Page-lock a mapped segment so that copies from it to the GPU run asynchronously and at full speed."""

import numpy as np
import torch
from numpy.typing import NDArray

from shared.logs import logger
from trainer.batches import Unregister

PORTABLE = 1

_log = logger("client")


def pin(array: NDArray[np.uint8]) -> Unregister:
    """Register the array's memory with CUDA, where there is CUDA; return what undoes it.

    A refusal costs speed, not correctness: it is logged and the memory stays pageable.
    """
    if not array.nbytes or not torch.cuda.is_available():
        return _nothing
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    code = int(runtime.cudaHostRegister(address, array.nbytes, PORTABLE))
    if code:
        _log.warning(
            "segment of %d bytes could not be page-locked (CUDA error %d): copies are slow", array.nbytes, code
        )
        _clear_error()
        return _nothing
    _log.info("segment of %d bytes page-locked for CUDA", array.nbytes)
    return lambda: _unpin(address)


def _unpin(address: int) -> None:
    code = int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]
    if code:
        _log.warning("segment could not be unlocked (CUDA error %d)", code)
        _clear_error()


def _clear_error() -> None:
    """CUDA reports a failed call once more to whoever asks next: ask here."""
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        _log.debug("cleared: %s", error)


def _nothing() -> None:
    """Undoes nothing."""
