"""Cuts balance the stages, keep order, and leave none empty."""

from itertools import pairwise

import pytest

from shared.errors import ConfigError
from trainer.pipeline import cuts


@pytest.mark.parametrize(
    ("weights", "stages", "bounds"),
    [
        ([5, 1, 1, 1, 1, 1], 1, [0, 6]),
        ([5, 1, 1, 1, 1, 1], 2, [0, 1, 6]),
        ([2, 2, 2, 2], 2, [0, 2, 4]),
        ([1, 9, 9, 1], 2, [0, 2, 4]),
        ([1, 1, 1, 1, 8], 3, [0, 2, 4, 5]),
        ([3, 3, 3, 3], 4, [0, 1, 2, 3, 4]),
    ],
)
def test_the_heaviest_stage_is_as_light_as_can_be(weights: list[int], stages: int, bounds: list[int]) -> None:
    found = cuts(weights, stages)

    def heaviest(cut: list[int]) -> int:
        return max(sum(weights[a:b]) for a, b in pairwise(cut))

    assert heaviest(found) == heaviest(bounds)
    assert len(found) == stages + 1
    assert found[0] == 0
    assert found[-1] == len(weights)
    assert all(a < b for a, b in pairwise(found))


def test_more_stages_than_layers_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match=r"mesh.pipe \(5\) must be at most the number of layers, 4"):
        cuts([1, 1, 1, 1], 5)
