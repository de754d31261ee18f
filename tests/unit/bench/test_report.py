"""Percentiles, spreads and tables as the benchmarks write them."""

import sys

import pytest

from tests.bench import report


@pytest.mark.parametrize(("share", "value"), [(0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10), (0.01, 1)])
def test_a_percentile_is_the_nearest_rank(share: float, value: float) -> None:
    assert report.percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], share) == value


def test_a_percentile_of_one_value_is_that_value() -> None:
    assert report.percentile([3.0], 0.5) == report.percentile([3.0], 0.99) == 3.0


def test_a_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing"):
        report.percentile([], 0.5)


def test_a_spread_shows_the_extremes_only_where_there_are_several() -> None:
    assert report.spread([812.4]) == "812"
    assert report.spread([790, 845, 812]) == "812 (790-845)"
    assert report.spread([1.25, 1.0, 2.0], 2) == "1.25 (1.00-2.00)"


def test_a_table_has_every_row_s_columns_and_gaps_where_a_row_has_none() -> None:
    lines = list(report.table([{"loader": "a", "error": "x | y"}, {"loader": "b", "samples/s": "7"}]))
    assert lines == [
        "| loader | error | samples/s |",
        "| --- | --- | --- |",
        "| a | x \\| y |  |",
        "| b |  | 7 |",
    ]


def test_versions_names_what_is_installed_and_leaves_out_what_is_not() -> None:
    found = report.versions(("no-such-package", "numpy"), sys.executable)
    assert found.startswith("numpy ") and "," not in found


def test_the_machine_is_told_with_its_cores_and_memory() -> None:
    assert "CPU cores" in report.machine() and "GiB" in report.machine()
