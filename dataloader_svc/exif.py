"""The orientation an EXIF block tells (a TIFF file without pictures; TIFF 6.0, sections 2 and 8).

`shown` asks Pillow, `orientation` reads what is undamaged itself.
"""

import struct

from PIL import Image

ORIENTATION, X_RESOLUTION, RESOLUTION_UNIT = 0x0112, 0x011A, 0x0128
SHORT, RATIONAL = 3, 5
VALUE_BYTES = {1: 1, 2: 1, SHORT: 2, 4: 4, RATIONAL: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8}
# Entries that Pillow looks at when it opens a JPEG, as (type, count): it may refuse a picture for any other form.
USUAL = {ORIENTATION: (SHORT, 1), X_RESOLUTION: (RATIONAL, 1), RESOLUTION_UNIT: (SHORT, 1)}
ORDERS = {b"II*\0": "<", b"MM\0*": ">"}


def orientation(tiff: bytes) -> int | None:
    """1 (upright) to 8 by the first directory, 1 where it tells none; None where anything is damaged or odd."""
    order = ORDERS.get(tiff[:4])
    if not order or not (packed := _directory(tiff, order)):
        return None
    entries = list(struct.iter_unpack(f"{order}HHLL", packed))
    usual = [(tag, value) for tag, kind, count, value in entries if USUAL.get(tag) == (kind, count)]
    values = dict(usual)
    odd = sum(1 for tag, *_ in entries if tag in USUAL) != len(values)
    if odd or not all(_is_whole(kind, count, value, len(tiff)) for _, kind, count, value in entries):
        return None
    value = values.get(ORIENTATION, 0)
    return _known(value >> 16 if order == ">" else value & 0xFFFF)


def _directory(tiff: bytes, order: str) -> bytes:
    """The first directory's entries, 12 bytes each; empty where they, or the link behind them, are not all there."""
    at = struct.unpack_from(f"{order}L", tiff, 4)[0] if len(tiff) >= 8 else len(tiff)
    if at + 2 > len(tiff):
        return b""
    start = at + 2
    end = start + 12 * struct.unpack_from(f"{order}H", tiff, at)[0]
    return tiff[start:end] if end + 4 <= len(tiff) else b""


def _is_whole(kind: int, count: int, value: int, tiff_bytes: int) -> bool:
    """Whether an entry has values of a known type inside the block: in itself up to four bytes, else at `value`."""
    size = VALUE_BYTES.get(kind, 0) * count
    return 0 < size <= 4 or (size > 4 and value + size <= tiff_bytes)


def shown(block: bytes) -> int:
    """By Pillow: orientation, or 1 (upright) where there is none or it cannot be read, as decoders take it."""
    if not block:
        return 1
    exif = Image.Exif()
    try:
        exif.load(block)
        return _known(int(exif.get(ORIENTATION, 1)))
    except Exception:
        return 1


def _known(value: int) -> int:
    return value if value in range(1, 9) else 1
