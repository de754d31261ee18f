"""The orientation an EXIF block tells (a TIFF file without pictures; TIFF 6.0, sections 2 and 8).

`shown` asks Pillow, `orientation` reads what is undamaged itself.
"""

import struct

from PIL import Image

ORIENTATION = 0x0112
SHORT = 3
VALUE_BYTES = {1: 1, 2: 1, SHORT: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
ORDERS = {b"II*\0": "<", b"MM\0*": ">"}


def orientation(tiff: bytes) -> int | None:
    """1 (upright) to 8 by the first directory, 1 where it tells none; None where anything is damaged or odd."""
    order = ORDERS.get(tiff[:4])
    if not order or not (entries := _entries(tiff, order)):
        return None
    found = None
    for tag, kind, count, value in struct.iter_unpack(f"{order}HHLL", entries):
        size = VALUE_BYTES.get(kind, 0) * count
        if not size or (size > 4 and value + size > len(tiff)):
            return None
        if tag == ORIENTATION:
            if found is not None or (kind, count) != (SHORT, 1):
                return None
            found = value >> 16 if order == ">" else value & 0xFFFF
    return 1 if found is None else found


def _entries(tiff: bytes, order: str) -> bytes:
    """The first directory's entries, 12 bytes each; empty where they, or the link behind them, are not all there."""
    at = struct.unpack_from(f"{order}L", tiff, 4)[0] if len(tiff) >= 8 else len(tiff)
    if at + 2 > len(tiff):
        return b""
    start = at + 2
    end = start + 12 * struct.unpack_from(f"{order}H", tiff, at)[0]
    return tiff[start:end] if end + 4 <= len(tiff) else b""


def shown(block: bytes) -> int:
    """By Pillow: orientation, or 1 (upright) where there is none or it cannot be read, as decoders take it."""
    if not block:
        return 1
    exif = Image.Exif()
    try:
        exif.load(block)
        return int(exif.get(ORIENTATION, 1))
    except Exception:
        return 1
