"""What a JPEG's scan tells of its wholeness without being decoded: its restart markers (ITU-T T.81, B.2.1 and F.1.1).

A GPU decodes half a scan without a word. Where an encoder put a marker after every so many units, as cameras do, their
number and order follow from the size of the picture, so data that were lost or swapped are found by counting. What
libjpeg finds on a CPU gets the same reason here. Of other JPEGs nothing is known: that a scan is whole shows only in
the number of its blocks, and to count those is to read all of its codes, forty times as long as what is done here.
"""

import struct

import numpy as np

from shared.errors import SampleError

SEQUENTIAL = (0xC0, 0xC1)
DRI, SOS, RST0 = 0xDD, 0xDA, 0xD0
RESTARTS = 8
BLOCK = 8


def damage(data: bytes) -> SampleError | None:
    """The verdict against a JPEG, whose header was found good, when its restart markers are too few or out of order.

    None too for what is not sequential in one scan, and for what has no such markers.
    """
    try:
        layout = _layout(data)
    except (IndexError, struct.error):  # segments that only a lenient parser takes
        return None
    if layout is None:
        return None
    start, due = layout
    found = _restarts(data, start)
    if any(number != place % RESTARTS for place, number in enumerate(found)):
        return SampleError("image_decode", f"restart markers come in the order {', '.join(map(str, found[:16]))}")
    if len(found) < due:
        return SampleError("truncated_image", f"{len(found)} restart markers where a whole scan has {due}")
    return None


def _layout(data: bytes) -> tuple[int, int] | None:
    """Where the only scan's data begin, and how many restart markers are due in it."""
    at, interval, units, layers = 2, 0, 0, 0
    while data[at] == 0xFF:
        code, length = struct.unpack_from(">xBH", data, at)
        if code == DRI:
            (interval,) = struct.unpack_from(">H", data, at + 4)
        elif code in SEQUENTIAL:
            units, layers = _units(data, at), data[at + 9]
        elif code == SOS:
            whole = interval and units and data[at + 4] == layers
            return (at + 2 + length, -(-units // interval) - 1) if whole else None
        at += 2 + length
    return None


def _units(data: bytes, at: int) -> int:
    """Units (MCUs) of one scan of all layers of the frame whose header is at `at`."""
    height, width, layers = struct.unpack_from(">HHB", data, at + 5)
    sampling = [data[at + 11 + 3 * layer] for layer in range(layers)] if layers > 1 else [0x11]
    across, down = max(each >> 4 for each in sampling), max(each & 15 for each in sampling)
    rows, columns = -(-int(height) // (BLOCK * down)), -(-int(width) // (BLOCK * across))
    return rows * columns


def _restarts(data: bytes, start: int) -> list[int]:
    """Numbers of the restart markers from `start` up to the first other marker."""
    scan = np.frombuffer(data, np.uint8)[start:]
    codes = scan[1:][scan[:-1] == 0xFF]
    codes = codes[(codes != 0) & (codes != 0xFF)]
    others = np.flatnonzero((codes < RST0) | (codes >= RST0 + RESTARTS))
    numbers: list[int] = (codes[: others[0]] if len(others) else codes).astype(int).tolist()
    return [number - RST0 for number in numbers]
