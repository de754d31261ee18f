"""Laws of judging a JPEG's scan without decoding it: the verdicts are those that a CPU's decode comes to."""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataloader_svc import scan
from dataloader_svc.decode import Decoder
from dataloader_svc.pipeline import PipelineDecoder
from shared.batch import Bucket
from shared.errors import SampleError
from shared.sections import DataSection, DatasetSection, LoaderSection

DATA = DataSection((DatasetSection("set", ("x.tar",)),))
BUCKET = Bucket(64, 96)
EOI = b"\xff\xd9"


@pytest.fixture(scope="module")
def decoders() -> Iterator[tuple[Decoder, Decoder]]:
    """A CPU's decoder, and one whose GPU is the CPU's operators."""
    by_cpu, by_batch = Decoder(DATA, LoaderSection(threads=1)), Decoder(DATA, LoaderSection(threads=1))
    by_batch._batches = PipelineDecoder(None, 1, 4)
    yield by_cpu, by_batch
    by_cpu.close()
    by_batch.close()


def jpeg(width: int = 300, height: int = 200, mode: str = "RGB", **options: Any) -> bytes:
    noise = np.random.default_rng(3).integers(0, 255, (20, 30, 3), dtype=np.uint8)
    picture = Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)
    out = io.BytesIO()
    picture.save(out, "JPEG", **options)
    return out.getvalue()


def cut(blob: bytes, share: float) -> bytes:
    """The first part of the file with an end marker behind it: whole by its header and its end."""
    return blob[: round(share * len(blob))].rstrip(b"\xff") + EOI


def swapped(blob: bytes) -> bytes:
    """The third restart marker bears the number of the fifth."""
    return blob.replace(b"\xff\xd2", b"\xff\xd4", 1)


@pytest.mark.parametrize("size", [(300, 200), (16, 16), (301, 7), (64, 640)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"restart_marker_rows": 1},
        {"restart_marker_blocks": 3},
        {"restart_marker_blocks": 3, "subsampling": 0},
        {"restart_marker_blocks": 1, "subsampling": 1},
        {"restart_marker_rows": 1, "mode": "L"},
        {"restart_marker_rows": 1, "progressive": True},
    ],
    ids=str,
)
def test_whole_pictures_pass(size: tuple[int, int], options: dict[str, Any]) -> None:
    assert scan.damage(jpeg(*size, **options)) is None


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("share", [0.4, 0.7, 0.9])
def test_lost_data_get_the_cpus_verdict(decoders: tuple[Decoder, Decoder], mode: str, share: float) -> None:
    lost = cut(jpeg(mode=mode, restart_marker_rows=1), share)
    verdicts = [decoder.decode_images([lost], BUCKET)[0] for decoder in decoders]
    assert [getattr(verdict, "reason", "none") for verdict in verdicts] == ["truncated_image"] * 2


@pytest.mark.parametrize("size", [(300, 200), (1200, 800)])
@pytest.mark.parametrize(
    "options", [{}, {"subsampling": 0}, {"optimize": True}, {"mode": "L"}, {"progressive": True}], ids=str
)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_false_end_without_restart_markers_is_found_by_decoding_and_not_by_the_scan(
    decoders: tuple[Decoder, Decoder], size: tuple[int, int], options: dict[str, Any], share: float
) -> None:
    """The limit of `scan.py`: the data's codes tell nothing of how many are missing."""
    lost = cut(jpeg(*size, **options), share)
    assert scan.damage(lost) is None
    assert getattr(decoders[0].decode_images([lost], BUCKET)[0], "reason", "none") == "truncated_image"


def test_data_in_another_order_get_the_cpus_verdict(decoders: tuple[Decoder, Decoder]) -> None:
    verdicts = [decoder.decode_images([swapped(jpeg(restart_marker_rows=1))], BUCKET)[0] for decoder in decoders]
    assert [getattr(verdict, "reason", "none") for verdict in verdicts] == ["image_decode"] * 2


def test_a_file_that_just_ends_gets_the_cpus_verdict(decoders: tuple[Decoder, Decoder]) -> None:
    """With or without restart markers: no end marker, whatever decodes."""
    for options in ({}, {"restart_marker_rows": 1}, {"progressive": True}):
        half = jpeg(**options)
        outcomes = [decoder.decode_images([half[: len(half) // 2]], BUCKET)[0] for decoder in decoders]
        assert [getattr(outcome, "reason", "none") for outcome in outcomes] == ["truncated_image"] * 2


def test_the_others_of_the_batch_are_decoded(decoders: tuple[Decoder, Decoder]) -> None:
    good = jpeg(restart_marker_rows=1)
    outcomes = decoders[1].decode_images([good, cut(good, 0.5), good], BUCKET)
    assert [isinstance(outcome, SampleError) for outcome in outcomes] == [False, True, False]


def test_nonsense_is_no_verdict_of_the_scans() -> None:
    whole = jpeg(restart_marker_rows=1)
    for length in range(2, 700, 3):
        scan.damage(whole[:length])
    for junk in (b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xda\0\2", b"\xff\xd8\xff\xc0\0\x03\x08"):
        assert scan.damage(junk) is None
