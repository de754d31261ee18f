"""Facts from the first bytes of an image or a clip, without decoding it.

The format is told by content, never by name. Sizes are as shown: after EXIF orientation (the EXIF block only; XMP is
not read), which is what the decoder delivers. Every refusal is a SampleError, so a bad file costs itself only.
"""

import io
import re
import struct
from collections.abc import Callable

import msgspec
import soundfile
from PIL import Image, JpegImagePlugin, PngImagePlugin

from dataloader_svc import exif, jpeg_header
from shared.errors import SampleError
from shared.sections import AudioSection, ImageSection

TAIL_BYTES = 64
UPRIGHT = 1
TURNED = (5, 6, 7, 8)
UNKNOWN_FRAMES = 1 << 60

PNG = b"\x89PNG\r\n\x1a\n"
EOI = 0xD9
MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
WITHOUT_LENGTH = (0x01, 0xD8)
IEND = b"IEND\xaeB`\x82"

IMAGE_LIMITS = ImageSection()
AUDIO_LIMITS = AudioSection()

_UNSUPPORTED = {
    b"GIF8": "GIF",
    b"BM": "BMP",
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cJXL ": "JPEG XL",
}

Size = tuple[int, int]


class ImageFacts(msgspec.Struct, frozen=True):
    """Height and width in pixels, as shown; `orientation` is EXIF's, 1 (upright) to 8."""

    height: int
    width: int
    orientation: int = UPRIGHT

    @property
    def size(self) -> Size:
        return self.height, self.width

    @property
    def turned(self) -> bool:
        """Whether rows are shown as columns."""
        return self.orientation in TURNED

    @property
    def stored(self) -> Size:
        """Height and width as the file has them, before orientation."""
        return (self.width, self.height) if self.turned else (self.height, self.width)


def image_size(data: bytes, limits: ImageSection = IMAGE_LIMITS) -> Size:
    """(height, width) in pixels, as shown; raises as `image_facts`."""
    return image_facts(data, limits).size


def image_facts(data: bytes, limits: ImageSection = IMAGE_LIMITS) -> ImageFacts:
    """What the header of a whole JPEG, PNG or WebP tells.

    Raises:
        SampleError: `junk_image`, `unsupported_format`, `truncated_image` (no end marker, or shorter than it says),
            `image_too_large` (over limits.max_pixels) or `odd_ratio` (long side over limits.max_ratio x the short one;
            exactly that ratio is allowed).
    """
    width, height, orientation = _parser(data)(data)
    if width < 1 or height < 1:
        raise SampleError("junk_image", f"{width}x{height} pixels")
    if width * height > limits.max_pixels:
        raise SampleError("image_too_large", f"{width}x{height} pixels, over {limits.max_pixels}")
    if max(width, height) > limits.max_ratio * min(width, height):
        raise SampleError("odd_ratio", f"{width}x{height}, over {limits.max_ratio:g}:1")
    shown = (width, height) if orientation in TURNED else (height, width)
    return ImageFacts(*shown, orientation)


def is_jpeg(data: bytes) -> bool:
    """Whether the bytes begin as a JPEG's do."""
    return data.startswith(b"\xff\xd8\xff")


def told(error: Exception) -> str:
    """What libsndfile says, without our buffer's address that soundfile puts before it: equal bytes, equal words."""
    return str(getattr(error, "error_string", error))


def audio_info(data: bytes, limits: AudioSection = AUDIO_LIMITS) -> tuple[int, int, int]:
    """(frames, rate in hertz, channels) as the header declares them; a decoder may find a few frames more or less.

    Raises:
        SampleError: `junk_audio`, `empty_audio` or `audio_too_long` (over limits.max_s seconds).
    """
    try:
        info = soundfile.info(io.BytesIO(data))
    except (RuntimeError, TypeError, ValueError) as error:
        raise SampleError("junk_audio", f"{len(data)} bytes that are no known audio ({told(error)})") from None
    frames, rate_hz, channels = int(info.frames), int(info.samplerate), int(info.channels)
    if frames >= UNKNOWN_FRAMES or rate_hz < 1 or channels < 1:
        raise SampleError("junk_audio", "the header does not tell length, rate or channels")
    if frames < 1:
        raise SampleError("empty_audio", "no frames")
    if frames > limits.max_s * rate_hz:
        raise SampleError("audio_too_long", f"{frames / rate_hz:.1f} s, over {limits.max_s:g} s")
    return frames, rate_hz, channels


Parser = Callable[[bytes], tuple[int, int, int]]


def _parser(data: bytes) -> Parser:
    if data[:3] == b"\xff\xd8\xff":
        return _jpeg
    if data.startswith(PNG):
        return _png
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp
    kind = next((name for magic, name in _UNSUPPORTED.items() if data.startswith(magic)), "")
    if kind or data[4:8] == b"ftyp":
        raise SampleError("unsupported_format", kind or f"ISO media file {data[8:12]!r}, such as AVIF or HEIC")
    raise SampleError("junk_image", f"{len(data)} bytes that are no known image")


def _jpeg(data: bytes) -> tuple[int, int, int]:
    found = jpeg_header.frame(data) or _by_pillow(JpegImagePlugin.JpegImageFile, data)
    if b"\xff\xd9" not in _tail(data) and not _jpeg_ends(data):
        raise SampleError("truncated_image", f"JPEG of {len(data)} bytes without its end marker")
    return found


def _jpeg_ends(data: bytes) -> bool:
    """Whether the picture's own markers (ITU-T T.81, annex B) lead to its end, whatever was put behind it.

    Cameras put films, depth maps and second pictures there. Thumbnails lie inside segments and are stepped over.
    """
    at = 2
    while found := MARKER.search(data, at):
        code, at = data[found.end() - 1], found.end()
        if code == EOI:
            return True
        if code not in WITHOUT_LENGTH:
            at += int.from_bytes(data[at : at + 2], "big")
    return False


def _png(data: bytes) -> tuple[int, int, int]:
    found = _by_pillow(PngImagePlugin.PngImageFile, data)
    if IEND not in _tail(data) and not _png_ends(data):
        raise SampleError("truncated_image", f"PNG of {len(data)} bytes without its IEND chunk")
    return found


def _png_ends(data: bytes) -> bool:
    """Whether the chunks lead to IEND, whatever was put behind it (PNG specification, section 5)."""
    at = len(PNG)
    while at + len(IEND) <= len(data):
        if data.startswith(IEND, at + 4):
            return True
        at += 12 + int.from_bytes(data[at : at + 4], "big")
    return False


def _tail(data: bytes) -> bytes:
    """The last bytes, zeros aside: where the end marker of nearly every picture stands."""
    return data.rstrip(b"\0")[-8 - TAIL_BYTES :]


def _by_pillow(kind: Callable[[io.BytesIO], Image.Image], data: bytes) -> tuple[int, int, int]:
    """Width, height, orientation. The plugin is called directly: Image.open adds only process-wide size warnings."""
    try:
        with kind(io.BytesIO(data)) as image:
            width, height = image.size
            return width, height, exif.shown(image.info.get("exif", b""))
    except Exception as error:
        raise SampleError("junk_image", f"header cannot be read ({error})") from None


def _webp(data: bytes) -> tuple[int, int, int]:
    """Width, height, orientation from the RIFF chunks (WebP container specification)."""
    declared = int.from_bytes(data[4:8], "little") + 8
    if declared > len(data):
        raise SampleError("truncated_image", f"WebP of {declared} bytes, {len(data)} are there")
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        raise SampleError("junk_image", "WebP without an image chunk")
    if kind == b"VP8X":
        sides = [int.from_bytes(body[at : at + 3], "little") + 1 for at in (4, 7)]
    elif kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        sides = [(bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1]
    elif kind == b"VP8 ":
        sides = [side & 0x3FFF for side in struct.unpack("<HH", body[6:10])]
    else:
        raise SampleError("junk_image", f"WebP with chunk {kind!r} first")
    return sides[0], sides[1], exif.shown(_riff_chunk(data, b"EXIF")) if kind == b"VP8X" else 1


def _riff_chunk(data: bytes, wanted: bytes) -> bytes:
    at = 12
    while at + 8 <= len(data):
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == wanted:
            return data[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    return b""
