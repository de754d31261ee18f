"""What our own reading of a JPEG's markers tells, Pillow tells; what Pillow refuses or doubts, is left to it."""

import io
import random
import struct
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import skimage
import sklearn
from PIL import Image, JpegImagePlugin

from dataloader_svc import exif, jpeg_header
from tests.support import mutate
from tests.support.media import photo

FUZZED = 4000
BYTES = (0, 1, 2, 3, 4, 5, 7, 12, 0x12, 0xFE, 0xFF)


def by_pillow(data: bytes) -> tuple[int, int, int] | None:
    try:
        with JpegImagePlugin.JpegImageFile(io.BytesIO(data)) as image:
            return (*image.size, exif.shown(image.info.get("exif", b"")))
    except Exception:
        return None


def camera(order: str, orientation: int = 6, **options: Any) -> bytes:
    """A JPEG with an EXIF block of either byte order, as cameras write them: entries inside, entries outside."""
    text = b"Maker of cameras\0"
    entries = [(0x010F, 2, len(text), 62), (exif.ORIENTATION, 3, 1, orientation), (0x011A, 5, 1, 79), (0x0128, 3, 1, 2)]
    short = 16 if order == ">" else 0
    packed = b"".join(
        struct.pack(f"{order}HHLL", tag, kind, count, value << short if kind == 3 else value)
        for tag, kind, count, value in entries
    )
    head = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(f"{order}LH", 8, len(entries))
    tiff = head + packed + bytes(4) + text + struct.pack(f"{order}LL", 72, 1)
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(60, 40, 1, "PNG"))).save(out, "JPEG", exif=b"Exif\0\0" + tiff, **options)
    return out.getvalue()


def drawn(mode: str = "RGB", **options: Any) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(60, 40, 2, "PNG"))).convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


def photographs() -> list[bytes]:
    """Every JPEG that the libraries of the tests ship."""
    roots = [Path(str(module.__file__)).parent for module in (skimage, sklearn)]
    return [path.read_bytes() for root in roots for path in sorted(root.rglob("*.jpg"))]


ORDINARY = {
    "plain": drawn(),
    "grey": drawn("L"),
    "CMYK": drawn("CMYK"),
    "progressive": drawn(progressive=True),
    "profile and comment": drawn(icc_profile=bytes(300), comment=b"words", dpi=(72, 72)),
    "little endian": camera("<"),
    "big endian": camera(">", comment=b"words"),
    "thumbnail": camera("<", 8, dpi=(72, 72)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_what_encoders_and_cameras_write_is_read_without_pillow(name: str) -> None:
    told = jpeg_header.frame(ORDINARY[name])
    assert told is not None
    assert told == by_pillow(ORDINARY[name])


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_pillows_and_unknown_ones_are_upright(order: str, orientation: int) -> None:
    data = camera(order, orientation)
    assert jpeg_header.frame(data) == by_pillow(data) == (60, 40, orientation if 1 <= orientation <= 8 else 1)


def test_photographs_are_read_as_pillow_reads_them() -> None:
    found = [(jpeg_header.frame(data), by_pillow(data)) for data in photographs()]
    assert len(found) >= 3
    assert all(ours in (None, pillows) for ours, pillows in found)
    assert any(ours for ours, _ in found)


def test_damaged_headers_are_never_read_otherwise_than_by_pillow() -> None:
    rng, tried = random.Random(7), Counter[str]()
    wholes = [*ORDINARY.values(), *(photo(50, 30, n, orientation=n) for n in range(1, 9))]
    outcomes = Counter[str]()
    for _ in range(FUZZED):
        data = damaged(rng.choice(wholes), rng, tried)
        if not data.startswith(b"\xff\xd8\xff"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pillows = by_pillow(data)
        ours = jpeg_header.frame(data)
        assert ours in (None, pillows), data[:400].hex()
        outcomes["ours" if ours else "left" if pillows else "refused"] += 1
    assert min(outcomes[kind] for kind in ("ours", "left", "refused")) > FUZZED // 40, outcomes


def damaged(whole: bytes, rng: random.Random, tried: Counter[str]) -> bytes:
    """Damage of any kind, or a few bytes of the first segments set to what means something there."""
    if rng.random() < 0.3:
        return mutate.mutated(whole, rng, mutate.FILE, tried)
    data = bytearray(whole)
    start = max(0, data.find(b"Exif")) if rng.random() < 0.5 else 2
    for _ in range(rng.choice((1, 1, 2, 4))):
        data[start + rng.randrange(min(250, len(data) - start))] = rng.choice(BYTES)
    return bytes(data)
