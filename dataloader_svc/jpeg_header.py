"""Size and orientation of an ordinary JPEG by its own markers (ITU-T T.81, annex B), a fifth of Pillow's time.

Ordinary is what encoders and cameras write: whole segments one after the other up to the first scan, one frame of
eight bits, at most one EXIF block, undamaged. Anything else is None here and left to Pillow, whose word this never
contradicts.
"""

import struct

from dataloader_svc.exif import orientation

SOS, APP1, DQT = 0xDA, 0xE1, 0xDB
FRAMES = (0xC0, 0xC1, 0xC2)
LAYERS = (1, 3, 4)
EXIF = b"Exif\0\0"
# The least length of segments after which Pillow goes on, whatever is in them; Photoshop's (APP13) it reads, and may
# refuse.
LEAST = {0xC4: 2, 0xDD: 2, 0xFE: 2, APP1: 2, **{0xE0 + n: 2 for n in range(3, 16) if n != 13}}
LEAST |= {0xE0: 16, 0xE2: 16, 0xEE: 14}

Size = tuple[int, int, int]


def frame(data: bytes) -> Size | None:
    """(width, height, EXIF orientation) as stored, of bytes that begin as a JPEG's do; None: ask Pillow."""
    at, end, size, turned = 0, 2, None, None
    while (at := end) + 4 <= len(data) and data[at] == 0xFF:
        code, end = data[at + 1], at + 2 + (data[at + 2] << 8 | data[at + 3])
        if end < at + 4 or end > len(data):
            return None
        if code == SOS:
            return (*size, turned or 1) if size else None
        if code in FRAMES:
            if size or not (size := _sides(data, at, end)):
                return None
        elif code == APP1 and data.startswith(EXIF, at + 4):
            if turned is not None or (turned := orientation(data[at + 4 + len(EXIF) : end])) is None:
                return None
        elif not (_are_tables(data, at, end) if code == DQT else end - at - 2 >= LEAST.get(code, 1 << 16)):
            return None
    return None


def _sides(data: bytes, at: int, end: int) -> tuple[int, int] | None:
    """(width, height) of a frame header (T.81, B.2.2)."""
    if end - at < 10:
        return None
    bits, height, width, layers = struct.unpack_from(">BHHB", data, at + 4)
    usual = bits == 8 and layers in LAYERS and end - at == 10 + 3 * layers and width and height
    return (width, height) if usual else None


def _are_tables(data: bytes, at: int, end: int) -> bool:
    """Whether quantization tables fill the segment (T.81, B.2.4.1)."""
    table = at + 4
    while table < end:
        table += 129 if data[table] >> 4 else 65
    return table == end
