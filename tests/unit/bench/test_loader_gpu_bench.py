"""The GPU benchmark's own arithmetic, that its pictures weigh what photographs do, and that no failure ends it."""

import io
from pathlib import Path

import pytest
from PIL import Image

from tests.bench.loader_gpu import bench, dataset
from tests.bench.loader_gpu.inside import Inside
from tests.bench.loader_gpu.meter import PARTS
from tests.bench.loader_gpu.work import Drain, Drained, Raw, Torch, ordered


@pytest.mark.parametrize(("size", "least_kb", "most_kb"), [("640x480", 60, 100), ("1024x768", 120, 190)])
def test_pictures_weigh_what_photographs_do(size: str, least_kb: int, most_kb: int) -> None:
    jpegs = [dataset.picture(*dataset.SIZES[size], seed) for seed in range(3)]
    assert len(set(jpegs)) == 3
    for jpeg in jpegs:
        assert Image.open(io.BytesIO(jpeg)).size == dataset.SIZES[size]
        assert least_kb < len(jpeg) / 1e3 < most_kb


def test_tars_hold_every_sample_and_are_made_once(tmp_path: Path) -> None:
    place = dataset.build(tmp_path, "640x480", distinct=2, samples=24, processes=1)
    made = {path.name: path.stat().st_mtime_ns for path in place.iterdir()}
    assert dataset.build(tmp_path, "640x480", distinct=2, samples=24, processes=1) == place
    assert {path.name: path.stat().st_mtime_ns for path in place.iterdir()} == made
    assert dataset.describe(place).startswith("640x480: 24 JPEG pictures")


def test_rates_stand_beside_raw_dalis() -> None:
    row = bench.rate_row("640x480", "daemon", Drained(images=3000, seconds=2.0, cpu_s=3.0), best=2000.0)
    assert row["images/s"] == "1500"
    assert row["of raw DALI"] == "75%"
    assert (row["CPU cores used"], row["CPU s per 1,000"]) == ("1.5", "1.00")


def test_a_measurement_that_fails_keeps_its_row_with_the_reason(tmp_path: Path) -> None:
    for order in (
        Raw(str(tmp_path / "640x480"), ((2, 1.0),), 1, 0.1),
        Drain(Torch(str(tmp_path), workers=0, batch=2), 0.1),
    ):
        found = ordered(order, Drained)
        assert isinstance(found, str) and "Error" in found
        assert bench.rate_row("640x480", "way", found)["images/s"] == found


def test_the_parts_of_a_fill_are_timed_and_left_as_they_were(tmp_path: Path) -> None:
    tars = dataset.build(tmp_path / "tars", "640x480", distinct=2, samples=16, processes=1)
    before = [vars(owner)[name] for places in PARTS.values() for owner, name in places]
    inside = Inside(tmp_path / "scratch", tars, "cpu", hands=2, batch=2, threads=1)
    row = inside.measure(2, 0.2)
    inside.close()
    assert set(PARTS) | {"hands", "images/s", "cores", "processor us", "fill", "report", "threads"} == set(row)
    assert all(float(row[part].partition("/")[0]) > 0 for part in PARTS)
    assert [vars(owner)[name] for places in PARTS.values() for owner, name in places] == before
