"""GPU decode against CPU decode. Needs an NVIDIA GPU; run with `pytest tests/gpu`."""

import ctypes
import io
from collections.abc import Iterator

import numpy as np
import pytest
from PIL import Image

from dataloader_svc import device, pipeline
from dataloader_svc.decode import Decoder
from shared.batch import Bucket
from shared.cuda import count_gpus
from shared.errors import SampleError
from shared.sections import DataSection, DatasetSection, LoaderSection
from shared.slots import SlotPool
from tests.support.media import photo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(count_gpus() == 0, reason="no CUDA device")]

DATA = DataSection((DatasetSection("set", ("x.tar",)),))
BUCKET = Bucket(96, 128)

# Grey levels. The hardware decoder's inverse DCT and chroma upsampling differ from libjpeg's by a few levels, and its
# resize is an antialiased triangle filter where the CPU averages areas.
MEAN_TOLERANCE, WORST_TOLERANCE = 3.0, 24


@pytest.fixture(scope="module")
def decoders() -> Iterator[tuple[Decoder, Decoder]]:
    pair = Decoder(DATA, LoaderSection(device="gpu", threads=2)), Decoder(DATA, LoaderSection(threads=2))
    yield pair
    for decoder in pair:
        decoder.close()


def pictures(count: int) -> list[bytes]:
    sizes = [(640, 480), (300, 200), (97, 301), (1024, 768), (130, 100), (60, 50)]
    forms = ["JPEG", "JPEG", "PNG", "JPEG", "WEBP", "JPEG"]
    return [
        photo(*sizes[i % 6], seed=i, form=forms[i % 6], orientation=1 + i % 8 if i % 6 == 1 else 1)
        for i in range(count)
    ]


@pytest.fixture
def on_the_gpu(decoders: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No batch is decoded on the CPU instead."""
    told: list[str] = []
    monkeypatch.setattr(decoders[0]._batches, "_warn", lambda kind, text: told.append(text))
    yield
    assert told == []


@pytest.mark.usefixtures("on_the_gpu")
@pytest.mark.parametrize("count", [1, 6, 33, 6])
def test_gpu_pixels_are_cpu_pixels_within_tolerance(decoders: tuple[Decoder, Decoder], count: int) -> None:
    on_gpu, on_cpu = (decoder.decode_images(pictures(count), BUCKET) for decoder in decoders)
    for gpu, cpu in zip(on_gpu, on_cpu, strict=True):
        assert isinstance(gpu, np.ndarray), gpu
        assert isinstance(cpu, np.ndarray), cpu
        difference = np.abs(gpu.astype(int) - cpu.astype(int))
        assert difference.mean() <= MEAN_TOLERANCE
        assert difference.max() <= WORST_TOLERANCE


@pytest.mark.usefixtures("on_the_gpu")
def test_the_same_batch_twice_is_bit_identical(decoders: tuple[Decoder, Decoder]) -> None:
    first, second = (decoders[0].decode_images(pictures(24), BUCKET) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))  # type: ignore[arg-type]


@pytest.mark.usefixtures("on_the_gpu")
def test_waiting_on_a_stream_of_ours_changes_no_bit(
    decoders: tuple[Decoder, Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into rows that follow each other and into others; a place is whole when the call returns."""
    monkeypatch.setattr(pipeline, "ON_OUR_STREAM", True)
    ours, blobs = Decoder(DATA, LoaderSection(device="gpu", threads=2)), pictures(24)
    warned: list[str] = []
    monkeypatch.setattr(ours._batches, "_warn", lambda kind, text: warned.append(text))
    together = np.zeros((24, BUCKET.height, BUCKET.width, 3), np.uint8)
    apart = np.zeros((48, BUCKET.height, BUCKET.width, 3), np.uint8)
    for _ in range(3):
        ours.decode_images(blobs, BUCKET, list(together))
        ours.decode_images(blobs, BUCKET, list(apart[::2]))
        expected = decoders[0].decode_images(blobs, BUCKET)
        assert all(np.array_equal(a, b) for a, b in zip(together, expected, strict=True))  # type: ignore[arg-type]
        assert np.array_equal(together, apart[::2])
    assert warned == []
    ours.close()


@pytest.mark.usefixtures("on_the_gpu")
def test_a_pictures_bits_do_not_depend_on_its_batch(decoders: tuple[Decoder, Decoder]) -> None:
    """A careful task decodes one at a time what others decode together."""
    blobs = pictures(24)
    together = decoders[0].decode_images(blobs, BUCKET)
    for blob, picture in zip(blobs, together, strict=True):
        assert np.array_equal(decoders[0].decode_images([blob], BUCKET)[0], picture)  # type: ignore[arg-type]


def test_a_bad_picture_costs_only_itself_on_the_gpu_too(decoders: tuple[Decoder, Decoder]) -> None:
    blobs = pictures(6)
    blobs[1], blobs[3] = blobs[1][: len(blobs[1]) // 2], b"junk"
    png = bytearray(blobs[2])
    png[len(png) // 2 : len(png) // 2 + 40] = bytes(40)
    blobs[2] = bytes(png)
    outcomes = decoders[0].decode_images(blobs, BUCKET)
    assert [isinstance(o, SampleError) for o in outcomes] == [False, True, True, True, False, False]


@pytest.mark.usefixtures("on_the_gpu")
def test_what_a_scan_lost_is_a_verdict_on_the_gpu_too(decoders: tuple[Decoder, Decoder]) -> None:
    """An end marker was put behind half a picture; its restart markers tell."""
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(640, 480, 5))).save(out, "JPEG", restart_marker_rows=1)
    whole = out.getvalue()
    half = whole[: len(whole) // 2].rstrip(b"\xff") + b"\xff\xd9"
    for decoder in decoders:
        good, bad = decoder.decode_images([whole, half], BUCKET)
        assert isinstance(good, np.ndarray)
        assert isinstance(bad, SampleError)
        assert bad.reason == "truncated_image"


@pytest.mark.usefixtures("on_the_gpu")
def test_pictures_go_straight_into_page_locked_slots(decoders: tuple[Decoder, Decoder]) -> None:
    """Into rows that follow each other, by one copy, and into others; nothing else in the slot changes."""
    import torch

    blobs, row_bytes = pictures(4), BUCKET.height * BUCKET.width * 3
    pool = SlotPool.create("/dev/shm", "gputest", 1, 8 * row_bytes)
    try:
        assert device.page_lock(pool.segment.array, 0)
        rows = pool.segment.payload(0)[: 8 * row_bytes].reshape(8, BUCKET.height, BUCKET.width, 3)
        assert torch.from_numpy(rows).is_pinned()
        rows[:] = 7
        for places in ([1, 2, 3, 4], [0, 2, 5, 7]):
            outcomes = decoders[0].decode_images(blobs, BUCKET, [rows[place] for place in places])
            assert all(isinstance(outcome, np.ndarray) for outcome in outcomes)
        assert np.array_equal(rows[[1, 2, 3, 4]][[0, 3]], rows[[0, 7]])
        assert (rows[6] == 7).all()
    finally:
        ctypes.CDLL("libcuda.so.1").cuMemHostUnregister(ctypes.c_void_p(pool.segment.array.ctypes.data))
        del rows
        pool.close()
