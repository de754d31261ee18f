"""The loader benchmark's own arithmetic, and that no contender's failure ends it."""

import sys
from pathlib import Path

import pytest
import torch

from tests.bench.loader import bench, dataset, work
from tests.bench.loader.measure import Figures, Window, checked


def figures(samples_per_s: float) -> Figures:
    window = Window(2.0, round(2 * samples_per_s), [0.01, 0.03], 0.02, 4.0)
    return Figures(1.5, 300_000_000, window, window)


FOUND = {
    ("raw", "reduced"): [figures(100), figures(200)],
    ("millstream", "reduced"): [figures(99), figures(202)],
    ("litdata", "pillow"): [Figures(error="not installed")] * 2,
}


def test_ratios_are_taken_within_a_round() -> None:
    assert bench.ratio([99, 202], [100, 200]) == "1.00"
    assert bench.ratio([99, None], [100, 200]) == "0.99"
    assert bench.ratio([None, None], [100, 200]) == ""


def test_a_contender_that_failed_keeps_its_row_with_the_reason() -> None:
    text = "\n".join(bench.written(FOUND, [], 60.0))
    assert text.count("| LitData | Pillow, as shipped | not installed |") == 2
    assert "| Millstream | Millstream's | 150 (99-202) | 1.00 |" in text
    assert "10.0 / 30.0" in text


def test_a_contender_that_dies_is_reported_by_the_line_that_tells_why(tmp_path: Path) -> None:
    found = bench.measured(Path(sys.executable), ("raw", "no-such-decoder"), tmp_path, 0.1, 1.0)
    assert found.drained is None and "Error" in found.error


def test_what_was_not_ordered_is_refused() -> None:
    pixels = torch.zeros(work.BATCH, work.SIDE, work.SIDE, 3, dtype=torch.uint8)
    good = torch.ones(work.BATCH, work.TOKENS, dtype=torch.int64)
    checked((pixels, good))
    for bad in ((pixels.float(), good), (pixels[1:], good), (pixels, torch.zeros_like(good))):
        with pytest.raises(ValueError, match="came"):
            checked(bad)


def test_both_decoders_give_the_same_picture(tmp_path: Path) -> None:
    dataset.build(tmp_path, dataset.SHARDS)
    for jpeg, caption in dataset.samples(tmp_path):
        shipped, ours = (work.Prepare(name)((jpeg, caption)) for name in ("pillow", "reduced"))
        assert shipped[0].shape == ours[0].shape == (work.SIDE, work.SIDE, 3)
        assert (shipped[0].int() - ours[0].int()).abs().float().mean() < 6
        assert bytes(ours[1][ours[1] > 0].tolist()) == caption[: work.TOKENS]
