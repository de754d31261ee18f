"""Laws of whole-batch decoding, held by the GPU's pipeline run on the CPU's operators."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from dataloader_svc import headers
from dataloader_svc.decode import Decoder, region
from dataloader_svc.pipeline import PipelineDecoder
from dataloader_svc.rows import Pixels
from shared.batch import Bucket
from shared.errors import SampleError
from shared.sections import DataSection, DatasetSection, LoaderSection
from tests.support.media import photo

DATA = DataSection((DatasetSection("set", ("x.tar",)),))
BUCKET = Bucket(64, 96)
OTHER = Bucket(96, 64)
POISON = 7


@pytest.fixture(scope="module")
def batches() -> PipelineDecoder:
    return PipelineDecoder(None, 2, 8)


@pytest.fixture
def decoder() -> Iterator[Decoder]:
    """A worker's decoder whose GPU is the CPU's operators."""
    decoder = Decoder(DATA, LoaderSection(threads=2))
    decoder._batches = PipelineDecoder(None, 2, 2)
    yield decoder
    decoder.close()


def pictures(count: int) -> list[bytes]:
    return [photo(300 + 10 * i, 200, i, orientation=1 + i % 8) for i in range(count)]


def slot(count: int, bucket: Bucket = BUCKET) -> Pixels:
    return np.full((count, bucket.height, bucket.width, 3), POISON, np.uint8)


def decoded(batches: PipelineDecoder, blobs: list[bytes], places: Any, bucket: Bucket = BUCKET) -> Any:
    sizes = [headers.image_size(blob) for blob in blobs]
    found = batches.decode(blobs, [region(size, bucket) for size in sizes], bucket, list(places))
    assert found is None or found == sizes
    return found


def rotten() -> bytes:
    """A PNG with a good header and a damaged body: only decoding finds out."""
    blob = bytearray(photo(300, 200, form="PNG"))
    blob[len(blob) // 2 : len(blob) // 2 + 40] = bytes(40)
    return bytes(blob)


def test_whole_batches_decode_as_single_pictures_do(batches: PipelineDecoder) -> None:
    """Same regions and orientation, another resampling filter."""
    single = Decoder(DATA, LoaderSection(threads=2))
    for count, bucket in ((3, BUCKET), (8, OTHER), (12, BUCKET), (5, BUCKET)):
        blobs, out = pictures(count), slot(count, bucket)
        assert decoded(batches, blobs, out, bucket)
        for picture, alone in zip(out, single.decode_images(blobs, bucket), strict=True):
            assert isinstance(alone, np.ndarray)
            assert np.abs(picture.astype(int) - alone.astype(int)).mean() < 2.0
    single.close()


def test_pictures_are_written_to_their_places_and_nowhere_else(batches: PipelineDecoder) -> None:
    blobs, whole, scattered = pictures(4), slot(6), slot(9)
    assert decoded(batches, blobs, whole[1:5])
    assert decoded(batches, blobs, [scattered[i] for i in (1, 2, 4, 7)])
    assert np.array_equal(whole[1:5], scattered[[1, 2, 4, 7]])
    assert (whole[[0, 5]] == POISON).all()
    assert (scattered[[0, 3, 5, 6, 8]] == POISON).all()


def test_bytes_are_read_where_they_lie_and_may_go_afterwards(batches: PipelineDecoder) -> None:
    first, out = slot(6), slot(6)
    assert decoded(batches, pictures(6), first)
    for _ in range(3):
        assert decoded(batches, [bytes(bytearray(blob)) for blob in pictures(6)], out)
        gc.collect()
        assert np.array_equal(first, out)


def test_a_batch_with_a_bad_member_is_given_up_whole_and_the_next_one_works(batches: PipelineDecoder) -> None:
    good, out = photo(300, 200), slot(2)
    assert decoded(batches, [good, rotten()], out) is None
    assert decoded(batches, [good, good], out)
    assert np.array_equal(out[0], out[1])


def test_places_of_another_shape_are_refused_before_a_byte_is_written(batches: PipelineDecoder) -> None:
    out = slot(1, OTHER)
    assert batches.decode([photo(300, 200)], [(0, 0, 200, 300)], BUCKET, [out[0]]) is None
    assert (out == POISON).all()


def test_a_bad_picture_costs_only_itself(decoder: Decoder) -> None:
    """Refused by its header, or by the decode of each alone that follows a failed run."""
    good = photo(300, 200)
    for bad in (b"junk", rotten(), good[: len(good) // 2]):
        out = slot(3)
        outcomes = decoder.decode_images([good, bad, good], BUCKET, list(out))
        assert [isinstance(outcome, SampleError) for outcome in outcomes] == [False, True, False]
        assert np.array_equal(out[0], out[2])
        assert (out[0] != POISON).any()


def test_a_size_that_the_header_did_not_promise_is_a_verdict(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = headers.image_facts
    wrong = facts(photo(301, 200), DATA.image)
    monkeypatch.setattr(headers, "image_facts", lambda blob, limits: wrong)
    (outcome,) = decoder.decode_images([photo(300, 200)], BUCKET)
    assert isinstance(outcome, SampleError)
    assert (outcome.reason, outcome.detail) == ("size_mismatch", "decoded to 200x300, its header says 200x301")
