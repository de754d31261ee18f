"""JPEG decoded no larger than it is needed.

libjpeg-turbo's scaled inverse DCT yields 1/2, 1/4 or 1/8 of the sides for a fraction of a full decode's time (its other
scales are slow). What is at least twice as large as its bucket is reduced so on a CPU, the rest decoded whole; a resize
goes the rest of the way. Anything out of the ordinary (CMYK, oddities that libjpeg repairs) is left to DALI; a picture
whose data ends too early is refused here, because DALI shows it half grey when it has an end marker, and libjpeg's
word for that goes to standard error (`native.py`): `damage` reads it.
"""

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from shared.errors import SampleError

Pixels = NDArray[np.uint8]

FACTORS = (8, 4, 2)
DAMAGE = ("bad huffman code", "bad arithmetic code", "instead of rst")
PLAIN = ("YCbCr", "Gray", "RGB")


def reduction(size: tuple[int, int], needed: tuple[int, int]) -> int:
    """The largest of 8, 4, 2 by which (height, width) can shrink and still cover `needed`; 1 when none can."""
    fits = (f for f in FACTORS if size[0] >= f * needed[0] and size[1] >= f * needed[1])
    return next(fits, 1)


def decode_reduced(blob: bytes, factor: int) -> Pixels | None:
    """The picture as stored (no EXIF applied) at 1 / `factor` (1, 2, 4, 8) of its sides, RGB; None: ask DALI.

    Raises:
        SampleError: `truncated_image`.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(blob)
        if colours not in PLAIN:
            return None
        pixels: Pixels = simplejpeg.decode_jpeg(
            blob, "RGB", min_height=-(-height // factor), min_width=-(-width // factor)
        )
    except ValueError as error:
        if found := damage(str(error)):
            raise found from None
        return None
    return pixels


def damage(said: str) -> SampleError | None:
    """The verdict that libjpeg's warnings amount to: data lost or false. What it only skips (stray bytes) is none."""
    for line in said.splitlines():
        words = line.strip().lower()
        if "premature end" in words:
            return SampleError("truncated_image", line.strip()[:200])
        if any(mark in words for mark in DAMAGE):
            return SampleError("image_decode", line.strip()[:200])
    return None


def orient(pixels: Pixels, orientation: int) -> Pixels:
    """Stored pixels [H, W, 3] as shown, by EXIF orientation 1 to 8 (TIFF 6.0, tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    return np.ascontiguousarray(pixels)
