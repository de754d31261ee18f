"""A JPEG decoded at a reduced size shows what a full decode shows, and is judged no other way."""

import io

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from dataloader_svc import decode, headers, jpeg
from dataloader_svc.headers import ImageFacts
from shared.batch import Bucket
from shared.errors import SampleError
from tests.support.media import photo

BUCKET = Bucket(64, 96)
MEAN_TOLERANCE = 2.0


def both(blob: bytes, bucket: Bucket = BUCKET) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """The picture by the reduced and by the full path."""
    facts = headers.image_facts(blob)
    found = [path(blob, facts, bucket) for path in (decode.decode_smaller, decode.decode_one)]
    assert all(isinstance(x, np.ndarray) for x in found)
    return found[0], found[1]  # type: ignore[return-value]


def cmyk(width: int, height: int) -> bytes:
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(width, height))).convert("CMYK").save(out, "JPEG")
    return out.getvalue()


@pytest.mark.parametrize(
    ("size", "factor"), [((128, 192), 2), ((127, 192), 1), ((256, 384), 4), ((5000, 9000), 8), ((64, 96), 1)]
)
def test_the_reduction_is_the_largest_that_still_covers(size: tuple[int, int], factor: int) -> None:
    assert jpeg.reduction(size, (64, 96)) == factor


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("side", [90, 200, 431, 1000])
def test_every_orientation_shows_as_a_full_decode_does(orientation: int, side: int) -> None:
    reduced, full = both(photo(side, side * 2 // 3, seed=orientation, orientation=orientation))
    assert reduced.shape == full.shape == (64, 96, 3)
    assert np.abs(reduced.astype(int) - full.astype(int)).mean() <= MEAN_TOLERANCE


def test_a_large_picture_really_takes_the_reduced_path() -> None:
    decoded = jpeg.decode_reduced(photo(801, 401), 4)
    assert decoded is not None and decoded.shape == (101, 201, 3)


@pytest.mark.parametrize(
    "blob", [photo(400, 300, form="PNG"), photo(400, 300, form="WEBP"), cmyk(400, 300), cmyk(90, 60)]
)
def test_what_is_no_plain_jpeg_is_decoded_whole_bit_for_bit(blob: bytes) -> None:
    reduced, full = both(blob)
    assert np.array_equal(reduced, full)


@pytest.mark.parametrize("side", [100, 800])
def test_a_picture_of_another_size_than_its_header_was_read_to_promise_is_refused(side: int) -> None:
    verdict = decode.decode_smaller(photo(side, side), ImageFacts(side, side + 8), BUCKET)
    assert isinstance(verdict, SampleError) and verdict.reason == "size_mismatch"


def test_a_small_shrink_is_bilinear_and_a_large_one_by_area() -> None:
    stripes = np.zeros((600, 600, 3), np.uint8)
    stripes[::2] = 255
    bucket, mean = Bucket(300, 300), 127.5
    assert np.ptp(decode.fit(stripes, bucket, 2.0)) == 0 and abs(decode.fit(stripes, bucket, 2.0).mean() - mean) <= 1
    assert np.array_equal(decode.fit(stripes, Bucket(450, 450), 1.5), cv2_linear(stripes, 450))
    assert not np.array_equal(decode.fit(stripes, Bucket(450, 450)), cv2_linear(stripes, 450))


def cv2_linear(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    resized: NDArray[np.uint8] = cv2.resize(pixels, (side, side), interpolation=cv2.INTER_LINEAR)
    return resized


def test_grey_pictures_become_rgb() -> None:
    out = io.BytesIO()
    Image.open(io.BytesIO(photo(400, 300))).convert("L").save(out, "JPEG")
    reduced, full = both(out.getvalue())
    assert reduced.shape == full.shape and np.abs(reduced.astype(int) - full.astype(int)).mean() <= MEAN_TOLERANCE


def test_a_picture_whose_data_ends_early_is_refused_even_with_an_end_marker() -> None:
    blob = photo(800, 600)
    cut = blob[: len(blob) // 2] + b"\xff\xd9"
    verdict = decode.decode_smaller(cut, headers.image_facts(cut), BUCKET)
    assert isinstance(verdict, SampleError) and verdict.reason == "truncated_image"


def test_what_libjpeg_repairs_is_left_to_the_full_decoder() -> None:
    blob = photo(800, 600)
    odd = blob[:2] + b"\xff" * 3 + blob[2:-2] + b"\0" * 7 + blob[-2:]
    reduced, full = both(odd)
    assert np.abs(reduced.astype(int) - full.astype(int)).mean() <= MEAN_TOLERANCE
