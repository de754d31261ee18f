"""One round of the fuzzer for damaged media and for lies on the socket, on a fixed seed."""

import pytest

from tests.bench.fuzz_loader import run


@pytest.mark.slow
def test_damage_and_lies_cost_only_what_is_damaged() -> None:
    tallies, failures = run(0, seed=3, kinds=("media", "socket"))
    assert failures == []
    assert tallies["media"]["served"] >= 12
    assert tallies["socket"]["messages"] == 300
