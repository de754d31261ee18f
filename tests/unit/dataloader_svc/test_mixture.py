"""Weighted mixtures: shares, passes and windows as a pure function of weights, seed and epoch."""

import hashlib
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dataloader_svc import mixture, verify
from dataloader_svc.block import build_block
from dataloader_svc.bucket import assign
from dataloader_svc.epoch import build_epoch
from dataloader_svc.mixture import quotas
from dataloader_svc.plan import Pack, Planner
from shared.batch import Cursor, groups
from shared.config import check, load
from shared.consumed import Consumed
from shared.errors import ConfigError
from shared.sections import AudioSection, BatchSection, DataSection, DatasetSection, TextSection
from tests.support.columns import columns
from tests.support.media import write_dataset
from tests.support.runs import run_file
from tests.support.tars import built, data_section


def named(*weights: float | None, limit: int | None = None) -> tuple[DatasetSection, ...]:
    limits = [limit if weight is not None else None for weight in weights]
    return tuple(
        DatasetSection(f"d{i}", ("x",), w, most) for i, (w, most) in enumerate(zip(weights, limits, strict=True))
    )


def section(datasets: tuple[DatasetSection, ...], seed: int = 0, leftovers: str = "pad") -> DataSection:
    audio = AudioSection(classes_s=(1.0, 3.0), samples_per_token=1600)
    text = TextSection(max_tokens=48, expected_tokens=12)
    data = data_section(batch=BatchSection(256, 4, 2, leftovers), seed=seed, audio=audio, text=text)
    return msgspec.structs.replace(data, datasets=datasets)


def planner(data: DataSection, *sizes: int) -> Planner:
    starts = tuple(np.cumsum([0, *sizes]).tolist())
    return Planner(data, msgspec.structs.replace(columns(starts[-1]), dataset_starts=starts))


def packs(planner: Planner, epoch: int) -> list[Pack]:
    """Every pack of an epoch, in order."""
    found, cursor = [], Cursor(epoch)
    while cursor.epoch == epoch:
        found.append(planner.pack(cursor, 0, 1))
        cursor = planner.after(cursor, 1)
    return found


def entries(planner: Planner, epoch: int) -> list[int]:
    return [i for pack in packs(planner, epoch) for i in pack.sample_ids]


# --- how much ---


def test_where_all_have_weights_only_ratios_count_and_the_epoch_keeps_its_size() -> None:
    for weights in ((0.75, 0.25), (3.0, 1.0)):
        found = quotas(named(*weights), (1000, 200))
        assert [(q.entries, q.asked) for q in found] == [(900, 0.75), (300, 0.25)]


def test_datasets_without_a_weight_come_once_and_leave_the_weights_their_shares() -> None:
    found = quotas(named(None, 0.5, None), (900, 50, 100))
    assert [q.entries for q in found] == [900, 1000, 100]
    assert found[1].asked == 0.5
    assert sum(q.asked for q in found) == pytest.approx(1)


def test_a_repeat_limit_caps_a_dataset_and_the_rest_keeps_its_part() -> None:
    found = quotas(named(0.5, 0.5, limit=3), (1000, 50))
    assert [q.entries for q in found] == [525, 150]
    assert [q.asked for q in found] == [0.5, 0.5]


def test_a_weight_on_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"data.datasets.weight \(0.5\) is set for data.datasets.d1, which has no good"
    ):
        quotas(named(0.5, 0.5), (10, 0))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ([{"weight": 0}], r"data.datasets\[0\].weight \(0\) must be above 0"),
        ([{"weight": float("nan")}], r"data.datasets\[0\].weight \(nan\) must be a finite number"),
        ([{"weight": 1, "repeat_limit": 0}], r"repeat_limit \(0\) must be at least 1"),
        ([{"repeat_limit": 2}], "has no effect without a weight"),
        ([{"weight": 0.6}, {"weight": 0.4}, {}], r"data.datasets.weight \(1\) must be below 1 in all"),
    ],
)
def test_impossible_mixtures_are_refused(tmp_path: Path, changes: list[dict[str, float]], text: str) -> None:
    sets = [{"name": f"d{i}", "shards": ["x.tar"], **change} for i, change in enumerate(changes)]
    with pytest.raises(ConfigError, match=text):
        load(run_file(tmp_path, "x.tar", data={"datasets": sets}))


# --- which samples ---


def test_an_epoch_serves_whole_passes_and_a_window() -> None:
    mixed = planner(section(named(0.5, 0.5)), 700, 100)
    times = Counter(entries(mixed, 0))
    assert sum(times[i] for i in range(700)) == sum(times[i] for i in range(700, 800)) == 400
    assert {times[i] for i in range(700)} == {0, 1}
    assert {times[i] for i in range(700, 800)} == {4}
    assert mixed.times(0).tolist() == [times[i] for i in range(800)]


def test_over_epochs_no_sample_lags_by_more_than_one() -> None:
    mixed = planner(section(named(0.3, 0.7)), 500, 90)
    total = np.zeros(590, np.int64)
    for epoch in range(7):
        total += mixed.times(epoch)
        for part in (total[:500], total[500:]):
            assert part.max() - part.min() <= 1


def test_epochs_differ_and_the_same_epoch_repeats() -> None:
    data = section(named(0.3, 0.7))
    one, other = planner(data, 500, 90), planner(data, 500, 90)
    assert entries(one, 0) != entries(one, 1)
    assert entries(one, 1) == entries(other, 1)
    assert entries(one, 0) != entries(planner(section(named(0.3, 0.7), seed=1), 500, 90), 0)


def test_repeats_are_spread_over_the_epoch() -> None:
    data = section(named(0.5, 0.5))
    order = entries(planner(data, 4000, 500), 0)
    places = {i: [] for i in range(4000, 4500)}
    for place, i in enumerate(order):
        if i in places:
            places[i].append(place)
    gaps = np.array([b - a for spots in places.values() for a, b in pairwise(spots)])
    assert np.median(gaps) > len(order) / 8
    halves = [sum(i >= 4000 for i in half) for half in (order[: len(order) // 2], order[len(order) // 2 :])]
    assert abs(halves[0] - halves[1]) < 0.1 * sum(halves)


def test_any_number_of_ranks_reads_the_same_mixture() -> None:
    mixed = planner(section(named(0.5, None)), 60, 400)
    cursors = [pack.cursor for pack in packs(mixed, 0)]
    steps = {c.step for c in cursors}
    halves = [mixed.pack(Cursor(0, s, m), r, 2) for s in steps for m in range(2) for r in range(2)]
    assert sorted(p.batch_id for p in halves) == sorted(p.batch_id for p in packs(mixed, 0))


def test_the_summary_tells_asked_and_served_shares() -> None:
    capped = planner(section(named(0.5, 0.5, limit=2)), 700, 100).summary(0)
    assert [(s.dataset, s.good, s.samples, s.asked) for s in capped.shares] == [
        ("d0", 700, 400, 0.5),
        ("d1", 100, 200, 0.5),
    ]
    assert [s.served for s in capped.shares] == [pytest.approx(2 / 3), pytest.approx(1 / 3)]
    dropping = planner(section(named(0.5, 0.5), leftovers="drop"), 700, 100).summary(0)
    assert sum(s.samples for s in dropping.shares) == dropping.samples
    assert sum(s.served for s in dropping.shares) == pytest.approx(1)


def test_without_weights_the_order_never_changes() -> None:
    """A golden value: another order would break every run that resumes."""
    data = section(named(None), seed=3)
    facts = columns(20_000, bad_share=0.05)
    plan = build_epoch(data, facts, assign(facts, data), 7)
    block = build_block(plan, slice(None), groups(data), data)
    held = hashlib.sha256(block.ids.astype("<i8").tobytes() + block.sizes.astype("<i8").tobytes()).hexdigest()
    assert held[:16] == "9cda0f483c2c44bb"


def test_a_million_samples_are_mixed_in_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = mixture.shuffled
    monkeypatch.setattr(mixture, "shuffled", lambda *a: calls.append(1) or real(*a))
    mixed = planner(section(named(0.5, 0.5)), 900_000, 100_000)
    assert int(mixed.times(0).sum()) == 1_000_000
    assert len(calls) == 9


# --- what is indexed, and what is verified ---


def test_an_index_knows_where_datasets_begin(tmp_path: Path) -> None:
    write_dataset(tmp_path / "a", 10, 2)
    write_dataset(tmp_path / "b", 7, 1)
    sets = (DatasetSection("a", (f"{tmp_path}/a/*.tar",)), DatasetSection("b", (f"{tmp_path}/b/*.tar",), 0.5, 9))
    index, _ = built(msgspec.structs.replace(data_section(), datasets=sets))
    assert index.dataset_starts == index.facts.dataset_starts == (0, 10, 17)
    assert index.row(10).dataset == "b"


def test_planned_repeats_are_clean_and_unplanned_ones_are_not() -> None:
    data = section(named(0.5, 0.5))
    mixed = planner(data, 120, 10)
    log = [
        Consumed(p.cursor.epoch, p.cursor.step, p.cursor.micro, 0, 1, p.batch_id, p.sample_ids) for p in packs(mixed, 0)
    ]
    assert max(mixed.times(0)) > 5
    whole = verify.check(mixed, data, [log])
    assert whole.clean
    assert whole.samples == sum(mixed.times(0))
    assert not verify.check(mixed, data, [[*log, log[3]]]).clean
    assert verify.check(mixed, data, [[*log[:3], *log[4:]]]).lost == len(log[3].sample_ids)


def test_a_checked_run_file_keeps_its_weights(tmp_path: Path) -> None:
    sets = [{"name": "a", "shards": ["a.tar"], "weight": 2}, {"name": "b", "shards": ["b.tar"], "weight": 1}]
    config = check(load(run_file(tmp_path, "x.tar", data={"datasets": sets})))
    assert [d.weight for d in config.data.datasets] == [2.0, 1.0]
