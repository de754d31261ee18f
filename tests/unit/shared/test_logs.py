"""Warnings that may come a thousand times: what is told, how often, and what is said of the rest."""

import itertools
from collections.abc import Callable

import pytest

from shared.logs import RateLimited

Say = Callable[[float, str], list[str]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Warn at a time; what was logged by it."""
    lines: list[str] = []
    warn = RateLimited(lines.append, burst=3, every_s=30)

    def at(seconds: float, text: str) -> list[str]:
        before = len(lines)
        monkeypatch.setattr("shared.logs.time.monotonic", lambda: 1000 + seconds)
        warn("kind", text)
        return lines[before:]

    return at


def test_the_same_words_are_said_once_and_then_with_their_number(say: Say) -> None:
    assert [say(second, "taken") for second in range(30)] == [["taken"]] + 29 * [[]]
    assert say(30, "taken") == ["taken (29 more of kind kind since the last line)"]


def test_different_words_pass_up_to_the_burst(say: Say) -> None:
    assert list(itertools.chain(*(say(second, f"{second}") for second in range(9)))) == ["0", "1", "2"]
    assert say(32, "32") == ["32 (6 more of kind kind since the last line)"]


def test_two_that_take_turns_are_said_once_each(say: Say) -> None:
    assert list(itertools.chain(*(say(second, "ab"[second % 2]) for second in range(8)))) == ["a", "b"]
