"""One picture at a time on the CPU through DALI's dynamic mode: its only door.

Importing this module takes a second of processor time and a hundred megabytes, so `decode.py` does it at the first
picture that libjpeg-turbo does not decode, and not at all where there is none.
"""

import sys

import numpy as np
from numpy.typing import NDArray

_torch = sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
from nvidia.dali.experimental import dynamic  # noqa: E402  DALI would import torch for a type: 2 s a worker

if _torch is None:
    del sys.modules["torch"]


def decode(blob: bytes) -> NDArray[np.uint8]:
    """The picture `[H, W, 3]`, RGB, EXIF applied.

    Raises:
        Exception: of many kinds (RuntimeError and MemoryError among them) for bytes that are no picture.
    """
    tensor = dynamic.decoders.image(dynamic.as_tensor(np.frombuffer(blob, np.uint8)), device="cpu")
    pixels: NDArray[np.uint8] = np.asarray(tensor.evaluate())
    return pixels
