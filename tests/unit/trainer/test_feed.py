"""Readers of one stream that trained on different batches stop the run, and a loader that ends is an error."""

import pytest

from shared.consumed import Consumed
from shared.errors import DataError, ProtocolError
from trainer.feed import Feed, check_same

LINES = [Consumed(0, 5, micro, 0, 1, f"b{micro}", (1, 2), 0, 2, 77) for micro in range(3)]


def test_equal_streams_pass() -> None:
    own = [line.fingerprint for line in LINES]
    check_same(LINES, [own, own], (0, 2))


def test_the_first_batch_that_differs_and_the_other_rank_are_named() -> None:
    own = [line.fingerprint for line in LINES]
    with pytest.raises(ProtocolError, match=r"micro-batch 1 of step 5, epoch 0, is batch b1 .* on rank 2"):
        check_same(LINES, [own, [own[0], 123, own[2]]], (0, 2))


@pytest.mark.parametrize("change", [{"batch_id": "other"}, {"checksum": 78}, {"micro": 9}])
def test_a_fingerprint_holds_batch_place_and_bytes(change: dict[str, object]) -> None:
    import msgspec

    assert msgspec.structs.replace(LINES[0], **change).fingerprint != LINES[0].fingerprint
    assert 0 <= LINES[0].fingerprint < 2**63


def test_a_loader_that_ends_is_an_error_not_the_end() -> None:
    with pytest.raises(DataError, match="ended its stream"):
        next(Feed(iter(()), 4, 0, 1))
