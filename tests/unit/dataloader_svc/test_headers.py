"""Header facts without decoding: sizes as shown, and every refusal with its reason."""

import io
import struct
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from dataloader_svc.headers import audio_info, image_size
from shared.errors import SampleError
from shared.sections import AudioSection, ImageSection
from tests.support.media import photo, tone


def refusal(data: bytes, limits: ImageSection | None = None) -> str:
    with pytest.raises(SampleError) as caught:
        image_size(data, limits or ImageSection())
    return caught.value.reason


def saved(picture: Image.Image, form: str, **extra: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **extra)  # type: ignore[arg-type]
    return out.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims any size, with its end marker."""
    chunks = b""
    for kind, body in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", b""),
        (b"IEND", b""),
    ):
        chunks += struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    return b"\x89PNG\r\n\x1a\n" + chunks


def with_thumbnail(width: int, height: int) -> bytes:
    """A JPEG whose first segment holds another whole JPEG."""
    body = b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0" + photo(16, 12, 3)
    data = photo(width, height)
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_sizes_are_as_shown(form: str, orientation: int) -> None:
    expected = (30, 50) if orientation < 5 else (50, 30)
    assert image_size(photo(50, 30, form=form, orientation=orientation)) == expected


@pytest.mark.parametrize("extra", [{"lossless": True}, {"quality": 80}])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_every_kind_of_webp_is_read(mode: str, extra: dict[str, object]) -> None:
    assert image_size(saved(Image.new(mode, (301, 77), 128), "WEBP", **extra)) == (77, 301)


def test_progressive_grey_cmyk_and_16_bit_have_true_sizes() -> None:
    assert image_size(saved(Image.new("RGB", (40, 20)), "JPEG", progressive=True)) == (20, 40)
    assert image_size(saved(Image.new("CMYK", (40, 20)), "JPEG")) == (20, 40)
    assert image_size(saved(Image.new("L", (40, 20)), "JPEG")) == (20, 40)
    assert image_size(saved(Image.fromarray(np.zeros((20, 40), np.uint16)), "PNG")) == (20, 40)


@pytest.mark.parametrize("form", ["GIF", "BMP", "TIFF", "AVIF"])
def test_other_formats_are_told_by_content(form: str) -> None:
    picture = Image.new("RGB", (64, 48), 9)
    assert refusal(saved(picture, form)) == "unsupported_format"


def test_what_is_no_image_is_junk() -> None:
    for data in (b"", b"<html>not found</html>", b"\x89PNG\r\n\x1a", b"\xff\xd8\xff", photo(30, 30)[:20], bytes(100)):
        assert refusal(data) == "junk_image"


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_truncation_is_seen_in_every_format(form: str) -> None:
    data = photo(120, 80, form=form)
    assert refusal(data[: len(data) * 3 // 4]) == "truncated_image"
    if form != "WEBP":
        assert refusal(data[: len(data) * 3 // 4] + bytes(len(data) // 4)) == "truncated_image"


@pytest.mark.parametrize(
    "trailer", [b"x" * 64, bytes(5000), b"SEFT" * 5000, b"\xff\xd8\xff\xe0\0\x10" * 99, photo(90, 60, 7)[:-2]]
)
@pytest.mark.parametrize("extra", [{}, {"progressive": True}, {"restart_marker_blocks": 1}])
def test_what_stands_behind_a_picture_is_no_truncation(trailer: bytes, extra: dict[str, object]) -> None:
    """Motion photos, depth maps and makers' trailers follow the end marker; a thumbnail's own stands before it."""
    picture = Image.open(io.BytesIO(photo(50, 30, form="PNG")))
    for data in (photo(50, 30, form="PNG"), saved(picture, "JPEG", **extra), with_thumbnail(50, 30)):
        assert image_size(data + trailer) == (30, 50)


def test_a_progressive_picture_cut_in_any_scan_is_truncated() -> None:
    data = saved(Image.open(io.BytesIO(photo(200, 150, form="PNG"))), "JPEG", progressive=True)
    for share in (0.5, 0.7, 0.9, 0.99):
        assert refusal(data[: round(len(data) * share)]) == "truncated_image"


def test_a_thumbnails_end_is_not_the_pictures() -> None:
    data = with_thumbnail(120, 80)
    for share in (0.7, 0.9):
        assert refusal(data[: round(len(data) * share)]) == "truncated_image"
    assert image_size(data) == (80, 120)


def test_the_ratio_limit_is_inclusive() -> None:
    for width, height in ((1000, 5), (5, 1000)):
        assert image_size(photo(width, height, form="PNG")) == (height, width)
    for width, height in ((1093, 5), (5, 1093), (1001, 5)):
        assert refusal(photo(width, height, form="PNG")) == "odd_ratio"


def test_a_bomb_is_refused_from_its_header_without_warnings() -> None:
    limits = ImageSection(max_pixels=100_000_000)
    assert refusal(png_header(30_000, 30_000), limits) == "image_too_large"
    assert refusal(png_header(10_000, 10_001), limits) == "image_too_large"
    assert image_size(png_header(10_000, 10_000), limits) == (10_000, 10_000)
    bomb = b"GIF89a" + struct.pack("<HH", 65535, 66601 % 65536) + bytes(34)
    assert refusal(bomb) == "unsupported_format"


def test_fuzzed_headers_are_refused_or_measured_never_more() -> None:
    rng = np.random.default_rng(0)
    for form in ("JPEG", "PNG", "WEBP"):
        for _ in range(300):
            data = bytearray(photo(40, 30, form=form, orientation=6))
            for at in rng.integers(0, 120, 4):
                data[at % len(data)] = rng.integers(256)
            try:
                height, width = image_size(bytes(data))
                assert height > 0
                assert width > 0
            except SampleError:
                pass


@pytest.mark.parametrize(("form", "rate"), [("WAV", 8000), ("FLAC", 44_100), ("OGG", 16_000), ("MP3", 16_000)])
def test_audio_facts_are_the_headers(form: str, rate: int) -> None:
    frames, rate_hz, channels = audio_info(tone(1.5, rate, channels=2, form=form))
    assert (rate_hz, channels) == (rate, 2)
    assert abs(frames - 1.5 * rate) <= 2304


def test_opus_is_read() -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(48_000), 48_000, format="OGG", subtype="OPUS")
    assert audio_info(out.getvalue())[1:] == (48_000, 1)


def test_bad_audio_has_its_reason() -> None:
    cases = {b"": "junk_audio", b"<html>": "junk_audio", tone(0): "empty_audio", tone(3): "audio_too_long"}
    for data, reason in cases.items():
        with pytest.raises(SampleError) as caught:
            audio_info(data, AudioSection(max_s=2.5))
        assert caught.value.reason == reason
        assert " at 0x" not in caught.value.detail
    assert audio_info(tone(2.5), AudioSection(max_s=2.5))[0] == 40_000


def test_a_truncated_wav_counts_what_is_there() -> None:
    data = tone(1.0)
    assert audio_info(data[: len(data) // 2])[0] < 8100
