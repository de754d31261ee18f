"""Who is let in: known keys over CURVE, and nobody else."""

import pytest

from dataloader_svc.zap import answer

KEY = b"k" * 32


def request(version: bytes = b"1.0", mechanism: bytes = b"CURVE", *credentials: bytes) -> list[bytes]:
    return [version, b"7", b"millstream", b"10.0.0.9", b"", mechanism, *credentials]


def test_a_known_key_is_let_in() -> None:
    reply, why = answer(request(b"1.0", b"CURVE", KEY), {KEY})
    assert (reply[:3], why) == ([b"1.0", b"7", b"200"], "")


@pytest.mark.parametrize(
    "asked",
    [
        request(b"1.0", b"CURVE", b"x" * 32),
        request(b"1.0", b"NULL"),
        request(b"1.0", b"PLAIN", b"user", KEY),
        request(b"9.9", b"CURVE", KEY),
        request(b"1.0", b"CURVE"),
    ],
)
def test_all_others_are_refused_and_named_by_address(asked: list[bytes]) -> None:
    reply, why = answer(asked, {KEY})
    assert reply[:3] == [b"1.0", b"7", b"400"]
    assert "10.0.0.9" in why and "loader.keys_dir" in why
