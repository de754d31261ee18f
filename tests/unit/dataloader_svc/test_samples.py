"""WebDataset's grouping rule and its verdicts."""

import pytest

from dataloader_svc.samples import REASONS, VERDICTS, Sample, group, split
from dataloader_svc.shards import Member


def grouped(names: str) -> dict[str, Sample]:
    samples, _ = group(Member(name, i * 1024, 10) for i, name in enumerate(names.split()))
    return {sample.key: sample for sample in samples}


def verdicts(names: str) -> dict[str, str]:
    return {key: sample.reason for key, sample in grouped(names).items()}


def test_the_key_ends_at_the_first_dot_of_the_basename() -> None:
    assert split("a.b/c.d.e/22.05.PNG") == ("a.b/c.d.e/22", "05.png")
    assert split("README") == split("a/.DS_Store") == split("k.") == ("", "")


def test_dots_in_the_name_are_an_unknown_field_not_a_silent_merge() -> None:
    found = grouped("22.05.png 22.06.png 22.05.txt 23.png 23.txt")
    assert found["22"].reason == "unknown_field"
    assert "unknown field 05.png" in found["22"].detail
    assert found["23"].reason == ""


def test_keys_that_come_back_are_one_bad_sample() -> None:
    assert verdicts("0.jpg 1.jpg 0.txt 1.txt") == {"0": "unsorted_key", "1": "unsorted_key"}
    assert verdicts("0.jpg 0.txt 1.jpg 1.txt 0.json") == {"0": "unsorted_key", "1": ""}


def test_a_duplicate_member_costs_its_sample_only() -> None:
    found = grouped("0.jpg 0.jpg 0.txt 1.jpg 1.txt")
    assert {k: s.reason for k, s in found.items()} == {"0": "duplicate_member", "1": ""}
    assert "jpg" in found["0"].detail


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        ("a.jpg", "missing_text"),
        ("a.json", "missing_text"),
        ("a.json a.txt", ""),
        ("a.txt", ""),
        ("a.jpg a.jpeg a.txt", "ambiguous_member"),
        ("a.wav a.flac a.txt", "ambiguous_member"),
        ("a.left.jpg a.right.jpg a.txt", "unknown_field"),
        ("a.JPG a.TXT", ""),
        ("a.jpg a.JPG a.txt", "duplicate_member"),
        ("a.jpg a.wav a.txt", ""),
        ("a.gif a.txt", "unsupported_format"),
        ("a.avif a.txt", "unsupported_format"),
        ("a.pkl a.txt", ""),
        ("a.exe a.txt", "unknown_field"),
    ],
)
def test_fields_decide_the_verdict(names: str, reason: str) -> None:
    assert verdicts(names) == {"a": reason}


def test_the_fields_are_told_when_text_is_missing() -> None:
    assert grouped("a.jpg a.json")["a"].detail == "fields jpg, json: no txt"


def test_names_without_a_field_belong_to_no_sample() -> None:
    assert verdicts("a.jpg a/._a.jpg README a.txt") == {"a": ""}


def test_verdict_codes_are_stable() -> None:
    assert VERDICTS["good"] == 0
    assert [VERDICTS[r] for r in ("unknown_field", "unsorted_key", "missing_text", "bad_utf8")] == [1, 4, 5, 19]
    assert len(set(REASONS)) == len(REASONS) < 256
