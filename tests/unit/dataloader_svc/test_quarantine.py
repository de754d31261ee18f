"""Bad samples are counted by reason, named once, and stop the run when there are too many."""

import logging

import pytest
from prometheus_client import generate_latest

from dataloader_svc.quarantine import Quarantine
from dataloader_svc.tasks import Verdict
from shared.errors import TooManyBadSamples
from shared.sections import QuarantineSection
from shared.telemetry import REGISTRY


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Log records reach `caplog`, whatever was set up before; what was is there again afterwards."""
    monkeypatch.setattr(logging.getLogger("millstream"), "propagate", True)


def make(**limits: float) -> Quarantine:
    return Quarantine(QuarantineSection(**limits), lambda i: f"set/part-0.tar/k{i}")  # type: ignore[arg-type]


def bad(sample_id: int, reason: str = "image_decode") -> Verdict:
    return Verdict(sample_id, reason, "premature end")


def test_each_sample_is_named_once_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    quarantine = make()
    with caplog.at_level(logging.WARNING, logger="millstream"):
        for _ in range(3):
            quarantine.record(4, [bad(7)])
    assert [r.message for r in caplog.records] == ["sample set/part-0.tar/k7 is left out: image_decode, premature end"]


def test_verdicts_are_counted_by_reason() -> None:
    quarantine = make()
    quarantine.record(4, [bad(1), bad(2, "empty_audio")])
    quarantine.record(4, [bad(3)])
    assert quarantine.reasons == {"image_decode": 2, "empty_audio": 1}
    assert 'loader_samples_quarantined_total{reason="empty_audio"}' in generate_latest(REGISTRY).decode()


def test_too_many_in_a_row_stop_the_run() -> None:
    quarantine = make(max_consecutive=4)
    quarantine.record(0, [bad(1), bad(2), bad(3)])
    with pytest.raises(TooManyBadSamples, match=r"4 samples in a row are bad.*max_consecutive.*image_decode 4"):
        quarantine.record(0, [bad(4)])


def test_a_good_sample_ends_the_row() -> None:
    quarantine = make(max_consecutive=4)
    for i in range(10):
        quarantine.record(1, [bad(3 * i), bad(3 * i + 1), bad(3 * i + 2)])
        assert quarantine.consecutive == 0


def test_too_large_a_share_stops_the_run_but_not_before_enough_were_seen() -> None:
    quarantine = make(max_share=0.1, after_samples=100)
    for i in range(9):
        quarantine.record(8, [bad(2 * i), bad(2 * i + 1)])
    with pytest.raises(TooManyBadSamples, match=r"20 of 100 samples are bad.*max_share allows 0\.1"):
        quarantine.record(8, [bad(90), bad(91)])


def test_a_share_at_the_limit_is_borne() -> None:
    quarantine = make(max_share=0.2, after_samples=10)
    for i in range(50):
        quarantine.record(8, [bad(2 * i), bad(2 * i + 1)])
    assert sum(quarantine.reasons.values()) == 100


def test_what_the_index_left_out_counts_but_stops_nothing() -> None:
    quarantine = make(max_consecutive=1, max_share=0.0, after_samples=1)
    quarantine.record_index([("junk_image", "part-0.tar k1")] * 50, 50, 100)
    quarantine.record(1, [])
    assert quarantine.reasons["junk_image"] == 50


def test_a_large_share_left_out_by_the_index_is_an_alarm_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    for left_out, alarms in ((20, 0), (21, 1)):
        caplog.clear()
        make(max_share=0.2).record_index([("junk_image", "part-0.tar k1")] * left_out, left_out, 100)
        told = [text for text in caplog.messages if "max_share would bear" in text]
        assert len(told) == alarms
        assert all("21 of 100 samples are left out" in text and "junk_image 21" in text for text in told)
