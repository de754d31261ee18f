"""Laws of decoding: shape, colour, orientation, length; and a bad sample costs only itself."""

import io
import sys
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray
from PIL import Image

from dataloader_svc import dali, decode, headers
from dataloader_svc.clips import resample
from dataloader_svc.decode import Decoder, region
from shared.batch import Bucket
from shared.errors import ConfigError, DataError, SampleError
from shared.sections import DataSection, DatasetSection, ImageSection, LoaderSection
from tests.support.media import photo, tone

DATA = DataSection((DatasetSection("set", ("x.tar",)),))
BUCKET = Bucket(64, 96)


@pytest.fixture(scope="module")
def decoder() -> Any:
    decoder = Decoder(DATA, LoaderSection(threads=2))
    yield decoder
    decoder.close()


def by_pillow(blob: bytes, bucket: Bucket) -> NDArray[Any]:
    """Reference: upright RGB, centred cover, box filter."""
    from PIL import ImageOps

    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(blob)))
    assert picture
    top, left, bottom, right = region((picture.height, picture.width), bucket)
    part = picture.convert("RGB").resize(
        (bucket.width, bucket.height), Image.Resampling.BOX, (left, top, right, bottom)
    )
    return np.asarray(part)


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def colours(width: int = 300, height: int = 200) -> Image.Image:
    return Image.open(io.BytesIO(photo(width, height, 3, "PNG"))).convert("RGB")


def reason(outcome: Any) -> str:
    assert isinstance(outcome, SampleError), outcome
    return outcome.reason


def difference(a: Any, b: Any) -> float:
    assert isinstance(a, np.ndarray), a
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


@pytest.mark.parametrize("size", [(300, 200), (97, 301), (64, 64), (20, 30), (1200, 100), (96, 64)])
def test_every_picture_gets_the_bucket_shape_and_looks_like_pillows(decoder: Decoder, size: tuple[int, int]) -> None:
    blob = photo(*size, seed=1)
    (pixels,) = decoder.decode_images([blob], BUCKET)
    assert isinstance(pixels, np.ndarray)
    assert (pixels.shape, pixels.dtype) == ((64, 96, 3), np.uint8)
    shrinks = size[0] >= BUCKET.width and size[1] >= BUCKET.height
    assert difference(pixels, by_pillow(blob, BUCKET)) < (1.5 if shrinks else 6.0)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_and_agrees_with_the_header(decoder: Decoder, orientation: int) -> None:
    blob = photo(300, 200, 2, orientation=orientation)
    height, width = headers.image_size(blob)
    assert (height, width) == ((200, 300) if orientation < 5 else (300, 200))
    bucket = Bucket(64, 96) if orientation < 5 else Bucket(96, 64)
    (pixels,) = decoder.decode_images([blob], bucket)
    assert difference(pixels, by_pillow(blob, bucket)) < 1.5


@pytest.mark.parametrize(
    ("mode", "form", "options"),
    [
        ("RGB", "JPEG", {"progressive": True}),
        ("RGB", "JPEG", {"subsampling": 0}),
        ("L", "JPEG", {}),
        ("CMYK", "JPEG", {}),
        ("RGB", "PNG", {}),
        ("L", "PNG", {}),
        ("P", "PNG", {}),
        ("1", "PNG", {}),
        ("RGB", "WEBP", {}),
        ("RGB", "WEBP", {"lossless": True}),
    ],
)
def test_every_form_becomes_rgb(decoder: Decoder, mode: str, form: str, options: dict[str, Any]) -> None:
    blob = encoded(colours().convert(mode), form, **options)
    (pixels,) = decoder.decode_images([blob], BUCKET)
    assert difference(pixels, by_pillow(blob, BUCKET)) < (9.0 if mode == "1" else 3.0)


def test_printers_pictures_have_the_colours_that_pillow_gives_them(decoder: Decoder) -> None:
    """CMYK and YCCK (Adobe's transform 2), plain and reduced: never inverted."""
    for width, height in ((97, 65), (800, 600)):
        cmyk = bytearray(encoded(colours(width, height).convert("CMYK"), "JPEG"))
        ycck = bytearray(cmyk)
        ycck[ycck.index(b"Adobe") + 11] = 2
        for blob in (bytes(cmyk), bytes(ycck)):
            (pixels,) = decoder.decode_images([blob], BUCKET)
            assert difference(pixels, by_pillow(blob, BUCKET)) < 3.0


def test_alpha_is_dropped_and_sixteen_bits_become_eight(decoder: Decoder) -> None:
    clear = colours()
    clear.putalpha(40)
    deep = Image.fromarray(np.full((200, 300), 40_000, np.uint16))
    pixels = decoder.decode_images([encoded(clear, "PNG"), encoded(deep, "PNG")], BUCKET)
    assert difference(pixels[0], by_pillow(encoded(colours(), "PNG"), BUCKET)) < 1.5
    assert difference(pixels[1], np.full((64, 96, 3), 156)) < 1.5


def test_a_bad_picture_costs_only_itself(decoder: Decoder) -> None:
    good = photo(300, 200)
    progressive = encoded(colours(), "JPEG", progressive=True)
    blobs = {
        "truncated_image": good[: len(good) // 2],
        "junk_image": b"<html>no picture</html>",
        "unsupported_format": encoded(colours().convert("P"), "GIF"),
    }
    mixed = [good, *blobs.values(), b"", good[:30], progressive[: len(progressive) // 2], good]
    outcomes = decoder.decode_images(mixed, BUCKET)
    assert [reason(o) for o in outcomes[1:4]] == list(blobs)
    assert all(isinstance(o, SampleError) for o in outcomes[4:7])
    alone = decoder.decode_images([good], BUCKET)[0]
    assert np.array_equal(outcomes[0], alone)
    assert np.array_equal(outcomes[7], alone)


def test_a_damaged_png_body_is_a_verdict(decoder: Decoder) -> None:
    blob = bytearray(encoded(colours(), "PNG"))
    blob[len(blob) // 2 : len(blob) // 2 + 40] = bytes(40)
    assert reason(decoder.decode_images([bytes(blob)], BUCKET)[0]) == "image_decode"


def test_a_huge_raster_is_refused_from_its_header() -> None:
    small = Decoder(DataSection(DATA.datasets, image=ImageSection(max_pixels=50_000)), LoaderSection(threads=1))
    outcome = small.decode_images([photo(300, 200)], BUCKET)[0]
    small.close()
    assert reason(outcome) == "image_too_large"


def test_a_size_the_header_did_not_promise_is_a_verdict() -> None:
    assert reason(decode.decode_one(photo(300, 200), headers.ImageFacts(200, 301), BUCKET)) == "size_mismatch"


def test_a_decoder_exhausted_by_one_picture_goes_on(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*args: Any, **options: Any) -> None:
        raise MemoryError("std::bad_alloc")

    with monkeypatch.context() as patch:
        patch.setattr(dali.dynamic.decoders, "image", exhausted)
        assert reason(decoder.decode_images([photo(300, 200, form="PNG")], BUCKET)[0]) == "image_decode"
    assert isinstance(decoder.decode_images([photo(300, 200, form="PNG")], BUCKET)[0], np.ndarray)


def test_a_dali_that_cannot_be_loaded_is_no_verdict_on_the_sample(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dataloader_svc.dali", None)
    monkeypatch.delattr("dataloader_svc.dali")
    decode._by_dali.cache_clear()
    with pytest.raises(DataError, match=r"nvidia\.dali cannot be loaded"):
        decoder.decode_images([photo(300, 200, form="PNG")], BUCKET)


@pytest.mark.parametrize("size", [(200, 300), (300, 200), (7, 2000), (1, 1), (64, 96), (63, 97)])
def test_the_region_is_centred_inside_and_of_the_buckets_ratio(size: tuple[int, int]) -> None:
    top, left, bottom, right = region(size, BUCKET)
    assert 0 <= top < bottom <= size[0]
    assert 0 <= left < right <= size[1]
    assert abs((size[0] - bottom) - top) <= 1
    assert abs((size[1] - right) - left) <= 1
    assert bottom - top == size[0] or right - left == size[1]


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "count_gpus", lambda: 0)
    with pytest.raises(ConfigError, match=r"loader.device .gpu. needs an NVIDIA driver.*loader.device: cpu"):
        decode.check_device(LoaderSection(device="gpu"))
    monkeypatch.setattr(decode, "count_gpus", lambda: 2)
    with pytest.raises(ConfigError, match=r"loader.gpu_id .2. must be below the 2 GPUs"):
        decode.check_device(LoaderSection(device="gpu", gpu_id=2))
    decode.check_device(LoaderSection(device="gpu", gpu_id=1))


def clip(decoder: Decoder, blob: bytes, most: int = 10**6) -> NDArray[np.int16]:
    wave = decoder.decode_audio(blob, most)
    assert isinstance(wave, np.ndarray), wave
    assert wave.dtype == np.int16
    return wave


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
def test_every_audio_form_becomes_mono_int16(decoder: Decoder, form: str) -> None:
    wave = clip(decoder, tone(1.0, 16_000, form=form))
    assert abs(len(wave) - 16_000) < 2_500
    spectrum = np.abs(np.fft.rfft(wave.astype(float)))
    assert abs(np.argmax(spectrum) * 16_000 / len(wave) - 440) < 5


def test_stereo_at_another_rate_keeps_its_seconds(decoder: Decoder) -> None:
    assert len(clip(decoder, tone(1.0, 48_000, channels=2))) == 16_000
    assert len(clip(decoder, tone(1.0, 44_100, channels=2))) == 16_000
    assert len(clip(decoder, tone(1.0, 8_000, channels=2))) == 16_000


def test_channels_are_averaged(decoder: Decoder) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.stack([np.full(1600, 0.5), np.full(1600, -0.25)], 1), 16_000, "PCM_16", format="WAV")
    assert np.abs(clip(decoder, out.getvalue()) / 32767 - 0.125).max() < 1e-3


def energy_db(wave: NDArray[Any], rate_hz: int, low_hz: float) -> float:
    """Energy at or above `low_hz` against all, in decibels."""
    power = np.abs(np.fft.rfft(wave * np.hanning(len(wave)))) ** 2
    above = np.fft.rfftfreq(len(wave), 1 / rate_hz) >= low_hz
    return float(10 * np.log10(power[above].sum() / power.sum()))


@pytest.mark.parametrize("hz", [440.0, 1_000.0, 3_000.0, 3_700.0])
def test_raising_the_rate_leaves_no_images(decoder: Decoder, hz: float) -> None:
    """The filter's stopband is 96 dB down; what is left is int16 rounding."""
    assert energy_db(clip(decoder, tone(1.0, 8_000, hz=hz)).astype(float), 16_000, 4_000) < -60


def test_lowering_the_rate_leaves_no_aliases() -> None:
    t = np.arange(48_000) / 48_000
    wave = resample(np.sin(2 * np.pi * 11_000 * t).astype(np.float32), 48_000, 16_000)
    assert 20 * np.log10(np.abs(wave[1_000:-1_000]).max()) < -80


def test_the_passband_is_untouched() -> None:
    t = np.arange(44_100) / 44_100
    wave = resample(np.sin(2 * np.pi * 1_000 * t).astype(np.float32), 44_100, 16_000)
    expected = np.sin(2 * np.pi * 1_000 * np.arange(16_000) / 16_000)
    assert np.abs(wave - expected)[500:-500].max() < 1e-3


def test_odd_rates_resample_too() -> None:
    assert abs(len(resample(np.zeros(44_101, np.float32), 44_101, 16_000)) - 16_000) <= 2


def test_a_long_clip_is_cut_and_its_start_is_the_same(decoder: Decoder) -> None:
    blob = tone(3.0, 44_100)
    whole, cut = clip(decoder, blob), clip(decoder, blob, 8_000)
    assert len(cut) == 8_000
    assert np.array_equal(cut[:7_000], whole[:7_000])


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (b"", "audio_decode"),
        (b"junk" * 100, "audio_decode"),
        (tone(0.0), "empty_audio"),
        (tone(1.0, form="FLAC")[:60], "audio_decode"),
    ],
)
def test_bad_audio_is_a_verdict(decoder: Decoder, blob: bytes, why: str) -> None:
    assert reason(decoder.decode_audio(blob, 16_000)) == why


def test_audio_that_is_not_finite_is_a_verdict(decoder: Decoder) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.full(1600, np.nan, np.float32), 16_000, "FLOAT", format="WAV")
    assert reason(decoder.decode_audio(out.getvalue(), 1600)) == "audio_decode"


def test_a_truncated_wav_has_the_length_its_bytes_give(decoder: Decoder) -> None:
    blob = tone(1.0)
    assert len(clip(decoder, blob[: len(blob) // 2])) == (len(blob) // 2 - 44) // 2


def test_silence_stays_silence(decoder: Decoder) -> None:
    out = io.BytesIO()
    soundfile.write(out, np.zeros(48_000), 16_000, "PCM_16", format="WAV")
    assert not clip(decoder, out.getvalue()).any()
