"""How much of a GPU's memory is taken, by NVML, which needs no CUDA context and so sees what one costs."""

import ctypes

SUCCESS = 0


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def used_bytes(device: str) -> int:
    """Bytes that all processes together have of the device with this UUID; 0 where NVML does not tell."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    handle, memory = ctypes.c_void_p(), _Memory()
    told = (
        nvml.nvmlInit_v2() == SUCCESS
        and nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle)) == SUCCESS
        and nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == SUCCESS
    )
    return int(memory.used) if told else 0
