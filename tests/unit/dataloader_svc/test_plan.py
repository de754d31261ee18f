"""The order: each sample once, one shape a round, the same for any number of ranks, places and processes."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
from rich.console import Console

from dataloader_svc.bucket import Columns, assign, sample_tokens
from dataloader_svc.daemon import describe
from dataloader_svc.epoch import pack_starts
from dataloader_svc.hashing import mix64, shuffled
from dataloader_svc.plan import SPARES, Pack, Planner
from dataloader_svc.tables import show_plan
from shared.batch import Cursor, groups
from shared.errors import ConfigError, ProtocolError
from shared.sections import AudioSection, BatchSection, DataSection, TextSection
from shared.telemetry import REGISTRY
from tests.support.columns import columns, pictures
from tests.support.media import sample, write_tar
from tests.support.tars import built, data_section

SMALL = BatchSection(tokens=256, micro_batches=4, round=2)
COLUMNS = ("height", "clip_samples")


def section(batch: BatchSection = SMALL, seed: int = 0) -> DataSection:
    audio = AudioSection(classes_s=(1.0, 3.0), samples_per_token=1600)
    return data_section(batch=batch, seed=seed, audio=audio, text=TextSection(max_tokens=48, expected_tokens=12))


def rank_packs(planner: Planner, epoch: int, rank: int, ranks: int) -> list[Pack]:
    """Every micro-batch one rank reads in an epoch, by walking `after`."""
    packs, cursor = [], Cursor(epoch)
    while cursor.epoch == epoch:
        packs.append(planner.pack(cursor, rank, ranks))
        cursor = planner.after(cursor, ranks)
    assert cursor == Cursor(epoch + 1)
    return packs


def global_batches(planner: Planner, epoch: int, ranks: int) -> list[list[tuple[str, tuple[int, ...]]]]:
    """The packs of every step, whichever rank reads them, in the order of their places."""
    found: list[list[tuple[str, tuple[int, ...]]]] = [[] for _ in range(planner.steps(epoch))]
    for rank in range(ranks):
        for pack in rank_packs(planner, epoch, rank, ranks):
            found[pack.cursor.step].append((pack.batch_id, pack.sample_ids))
    return [sorted(step, key=lambda p: int(p[0].split("-p")[1].split("-")[0])) for step in found]


# --- what an epoch holds ---


@pytest.mark.parametrize("samples", [4, 5, 26, 333, 2000])
@pytest.mark.parametrize("shape", [(1, 1), (4, 2), (6, 3), (8, 8)])
def test_every_good_sample_is_trained_once_an_epoch(samples: int, shape: tuple[int, int]) -> None:
    batch = BatchSection(tokens=256, micro_batches=shape[0], round=shape[1])
    facts = columns(samples + 8, bad_share=0.1)
    good = np.flatnonzero(facts.verdict == 0).tolist()
    planner = Planner(section(batch), facts)
    for epoch in (0, 1):
        ids = [i for step in global_batches(planner, epoch, 1) for _, pack in step for i in pack]
        assert sorted(ids) == good


def test_packs_hold_their_budgets_and_what_fits_their_group() -> None:
    data, facts = section(), columns(1500)
    planner, table, group_of = Planner(data, facts), groups(data), assign(facts, data)
    for pack in rank_packs(planner, 0, 0, 1):
        group, ids = table[pack.group], np.array(pack.sample_ids, np.int64)
        assert len(ids) <= group.samples
        own = [table[g] for g in group_of[ids]]
        assert all(g.bucket == group.bucket and g.clip_samples <= group.clip_samples for g in own)
        lengths = sample_tokens(group, facts.clip_samples[ids], facts.text_tokens[ids], data.audio)
        assert lengths.sum() <= group.tokens
        assert pack.label_tokens == int((facts.text_tokens[ids] + 1).sum())


@pytest.mark.parametrize("leftovers", ["pad", "drop"])
def test_packs_of_every_epoch_are_of_groups_that_good_samples_have(leftovers: Literal["pad", "drop"]) -> None:
    data, facts = section(BatchSection(256, 4, 2, leftovers)), columns(200, bad_share=0.1)
    silent = msgspec.structs.replace(facts, clip_samples=facts.clip_samples * 0)
    for these in (facts, silent):
        planner = Planner(data, these)
        found = planner.groups()
        assert {g.id for g in found} == set(assign(these, data)[these.verdict == 0].tolist())
        assert {pack.group for epoch in range(3) for pack in rank_packs(planner, epoch, 0, 1)} <= {g.id for g in found}


@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_all_ranks_hold_one_group_at_every_micro_step(ranks: int) -> None:
    planner = Planner(section(BatchSection(tokens=256, micro_batches=12, round=6)), columns(900))
    steps = [rank_packs(planner, 0, rank, ranks) for rank in range(ranks)]
    assert len({len(packs) for packs in steps}) == 1
    for together in zip(*steps, strict=True):
        assert len({pack.group for pack in together}) == 1
        assert len({pack.step_labels for pack in together}) == 1


@pytest.mark.parametrize(("micro_batches", "width"), [(4, 2), (6, 6), (12, 4)])
def test_global_batches_do_not_depend_on_the_number_of_ranks(micro_batches: int, width: int) -> None:
    batch = BatchSection(tokens=256, micro_batches=micro_batches, round=width)
    planner = Planner(section(batch), columns(700))
    expected = global_batches(planner, 0, 1)
    assert all(len(step) == micro_batches for step in expected)
    for ranks in [d for d in range(2, width + 1) if width % d == 0]:
        assert global_batches(planner, 0, ranks) == expected


def test_no_sample_is_twice_in_a_global_batch_nor_on_two_ranks() -> None:
    planner = Planner(section(), pictures(*[(64, 64)] * 32))
    read = [[i for pack in rank_packs(planner, 0, r, 2) for i in pack.sample_ids] for r in range(2)]
    assert sorted(read[0] + read[1]) == list(range(32))
    assert not set(read[0]) & set(read[1])


def test_step_labels_are_the_sum_over_the_global_batch() -> None:
    planner = Planner(section(), columns(400))
    packs = rank_packs(planner, 0, 0, 2) + rank_packs(planner, 0, 1, 2)
    for step in range(planner.steps(0)):
        mine = [p for p in packs if p.cursor.step == step]
        assert {p.step_labels for p in mine} == {sum(p.label_tokens for p in mine)}
        assert mine[0].step_labels > 0


def test_fewer_shards_than_ranks_are_split_by_sample(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "p.tar", [m for n in range(40) for m in sample(f"{n:03d}", n)])
    index, _ = built(data_section(path, batch=BatchSection(512, 4, 4)))
    planner = Planner(data_section(path, batch=BatchSection(512, 4, 4)), index)
    read = [sorted(i for p in rank_packs(planner, 0, r, 4) for i in p.sample_ids) for r in range(4)]
    assert all(read)
    assert sorted(i for ids in read for i in ids) == list(range(40))


# --- leftovers ---


def test_a_bucket_smaller_than_a_pack_is_trained_under_pad_and_counted_under_drop() -> None:
    facts = pictures(*[(64, 64)] * 16, *[(128, 32)] * 3)
    pad = Planner(section(), facts)
    for epoch in (0, 1):
        ids = [i for p in rank_packs(pad, epoch, 0, 1) for i in p.sample_ids]
        assert {16, 17, 18} <= set(ids)
        assert pad.summary(epoch).dropped_samples == 0
    drop = Planner(section(BatchSection(256, 2, 2, "drop")), facts)
    ids = [i for p in rank_packs(drop, 0, 0, 1) for i in p.sample_ids]
    summary = drop.summary(0)
    assert (summary.samples, summary.dropped_samples) == (len(ids), 19 - len(ids))
    describe(drop)
    assert REGISTRY.get_sample_value("loader_samples_dropped") == 19 - len(ids)
    console = Console(file=io.StringIO(), record=True)
    show_plan(console, summary)
    assert f"Left out as data.batch.leftovers asks: {19 - len(ids)} good samples" in console.export_text()
    assert not {16, 17, 18} & set(ids)


def test_drop_leaves_no_empty_pack_and_pad_only_completes_steps() -> None:
    facts = columns(500)
    drop = Planner(section(BatchSection(256, 4, 2, "drop")), facts)
    assert all(p.sample_ids for p in rank_packs(drop, 0, 0, 1))
    assert drop.summary(0).empty_packs == 0
    pad = Planner(section(), facts)
    empty = [p for p in rank_packs(pad, 0, 0, 1) if not p.sample_ids]
    assert len(empty) == pad.summary(0).empty_packs < 30
    assert all(p.label_tokens == 0 and p.spares == () and p.step_labels > 0 for p in empty)


def test_fewer_samples_than_a_global_batch_are_refused_with_both_numbers() -> None:
    batch = BatchSection(tokens=256, micro_batches=64, round=2)
    with pytest.raises(ConfigError, match=r"micro_batches \(64\).*good samples, 63"):
        Planner(section(batch), columns(63)).steps(0)
    dropping = BatchSection(tokens=256, micro_batches=64, round=2, leftovers="drop")
    with pytest.raises(ConfigError, match=r"no whole global batch of 70 good samples.*leftovers: pad"):
        Planner(section(dropping), columns(70)).steps(0)
    with pytest.raises(ConfigError, match="good samples, 0"):
        Planner(section(), columns(50, bad_share=1.0)).pack(Cursor(), 0, 1)


def test_a_sample_longer_than_a_pack_is_refused() -> None:
    none = np.zeros(9, np.int64)
    facts = Columns(none, none, none, np.full(9, 300), none)
    with pytest.raises(ConfigError, match="must hold the largest sample, 302 tokens"):
        Planner(section(), facts).steps(0)


def test_a_groups_short_round_rides_with_longer_clips_of_its_bucket_and_saves_packs() -> None:
    data, facts = section(BatchSection(256, 4, 4)), columns(640)
    planner, table, group_of = Planner(data, facts), groups(data), assign(facts, data)
    riders = []
    for pack in rank_packs(planner, 0, 0, 1):
        group = table[pack.group]
        riding = [table[int(group_of[i])] for i in pack.sample_ids if group_of[i] != pack.group]
        assert all(g.bucket == group.bucket and g.clip_samples < group.clip_samples for g in riding)
        riders += riding
    assert {bool(g.clip_samples) for g in riders} == {True, False}
    largest = [sum(1 for g in riders if g == own) for own in set(riders)]
    assert max(largest) < 4 * max(g.samples for g in table)
    assert planner.steps(0) < 28  # 32 where every group completes a round of its own


def test_a_short_round_is_spread_so_that_no_rank_idles() -> None:
    planner = Planner(section(BatchSection(256, 4, 4)), pictures(*[(64, 64)] * 5))
    sizes = [len(planner.pack(Cursor(0, 0, 0), rank, 4).sample_ids) for rank in range(4)]
    assert sorted(sizes) == [1, 1, 1, 2]


# --- the same for ever ---


def test_epochs_and_seeds_differ_and_repeat() -> None:
    facts = columns(600)
    orders = {(s, e): str(global_batches(Planner(section(seed=s), facts), e, 1)) for s in (0, 1) for e in (0, 1)}
    assert len(set(orders.values())) == 4
    assert str(global_batches(Planner(section(seed=1), facts), 1, 2)) == orders[1, 1]


def test_asking_in_another_order_changes_nothing() -> None:
    facts = columns(600)
    straight, jumping = Planner(section(), facts), Planner(section(), facts)
    expected = {(e, s): straight.pack(Cursor(e, s, 1), 1, 2) for e in range(4) for s in range(5)}
    for (epoch, step), pack in reversed(expected.items()):
        assert jumping.pack(Cursor(epoch, step, 1), 1, 2) == pack
    assert len(jumping._epochs._plans) == 2


def test_processes_of_any_hash_seed_agree() -> None:
    program = (
        "from tests.unit.dataloader_svc.test_plan import *\n"
        "planner = Planner(section(seed=5), columns(300))\n"
        "print([planner.pack(Cursor(1, s, m), r, 2) for s in range(4) for m in range(2) for r in range(2)])\n"
    )
    root = Path(__file__).parents[3]
    runs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1", "4242")
    ]
    assert runs[0] == runs[1] == runs[2]
    assert "e1-s0-p0-" in runs[0]


def reference_hash(*words: int) -> int:
    """splitmix64's finaliser chained over the words, in Python's own integers."""
    whole, state = 2**64 - 1, 0
    for word in words:
        state = ((state ^ (word & whole)) + 0x9E3779B97F4A7C15) & whole
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & whole
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & whole
        state ^= state >> 31
    return state


def test_the_hash_is_splitmix64() -> None:
    assert int(mix64(0)[0]) == reference_hash(0) == 0xE220A8397B1DCDAF
    ids = np.arange(50)
    assert mix64(1, -7, ids).tolist() == [reference_hash(1, -7, i) for i in range(50)]


def test_the_order_never_changes() -> None:
    """Golden values: another order would break every run that resumes."""
    assert shuffled(np.arange(12), 1, 7, 0).tolist() == [0, 3, 2, 4, 9, 11, 5, 10, 1, 8, 7, 6]
    planner = Planner(section(), pictures(*[(64, 64)] * 50, *[(64, 96)] * 50))
    found = [planner.pack(Cursor(0, 1, m), 0, 1).batch_id for m in range(2)]
    assert found == ["e0-s1-p0-c7a7eb3d", "e0-s1-p1-a5068d06"]


@pytest.mark.parametrize("top", [1, 2**12, 2**31, 2**50, 2**61])
def test_a_shuffle_is_an_argsort_of_whole_hashes(top: int) -> None:
    """The larger the ids, the fewer bits of a hash are sorted with them, and the more ties whole hashes decide."""
    ids = np.unique(np.random.default_rng(0).integers(0, top, 4000))
    assert np.array_equal(shuffled(ids, 1, -5, 3), ids[np.argsort(mix64(1, -5, 3, ids), kind="stable")])
    assert len(shuffled(ids[:0], 1)) == 0


def test_steps_are_the_same_balanced_in_blocks_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    data, facts = section(), columns(3000)
    whole = [global_batches(Planner(data, facts), epoch, 2) for epoch in (0, 1)]
    monkeypatch.setattr("dataloader_svc.plan.BLOCK_STEPS", 7)
    planner = Planner(data, facts)
    assert [global_batches(planner, epoch, 2) for epoch in (0, 1)] == whole
    assert len(whole[0]) > 2 * 7
    assert len(planner._blocks) <= 8


def test_the_next_epoch_is_planned_while_the_last_eighth_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloader_svc.plan.BLOCK_STEPS", 4)
    planner = Planner(section(), columns(3000))
    steps = planner.steps(0)
    planner.pack(Cursor(0, steps * 3 // 4), 0, 1)
    assert list(planner._epochs._plans) == [0]
    planner.pack(Cursor(0, steps - 1), 0, 1)
    assert set(planner._epochs._plans) == {0, 1}
    assert planner.pack(Cursor(1, 3), 0, 1) == Planner(section(), columns(3000)).pack(Cursor(1, 3), 0, 1)


def test_hashes_spread_evenly() -> None:
    order = shuffled(np.arange(20_000), 1, 0, 0)
    assert sorted(order.tolist()) == list(range(20_000))
    assert abs(np.corrcoef(np.arange(20_000), order)[0, 1]) < 0.03
    assert abs(np.corrcoef(order, shuffled(np.arange(20_000), 1, 0, 1))[0, 1]) < 0.03
    assert len(np.unique(mix64(3, np.arange(100_000)))) == 100_000


def test_negative_and_huge_seeds_are_seeds() -> None:
    facts = columns(100)
    ids = {Planner(section(seed=s), facts).pack(Cursor(), 0, 1).batch_id for s in (-1, 0, 2**63 - 1)}
    assert len(ids) == 3


# --- packing, places, spares ---


def test_next_fit_is_next_fit() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        tokens = rng.integers(1, 40, rng.integers(1, 200))
        starts, at, used, count = [0], 0, 0, 0
        for at, length in enumerate(tokens.tolist()):
            if used + length > 64 or count == 5:
                starts.append(at)
                used = count = 0
            used, count = used + length, count + 1
        assert pack_starts(tokens, 64, 5).tolist() == [*starts, len(tokens)]


@pytest.mark.parametrize(
    ("cursor", "ranks", "told"),
    [
        (Cursor(0, 10_000, 0), 1, "the epoch has"),
        (Cursor(0, 0, 4), 1, "a rank has 4 micro-batches"),
        (Cursor(0, 0, 2), 2, "a rank has 2 micro-batches"),
        (Cursor(-1, 0, 0), 1, "nothing is below 0"),
        (Cursor(0, 0, -1), 1, "nothing is below 0"),
        (Cursor(0, 0, 0), 3, "3 data ranks do not divide"),
        (Cursor(0, 0, 0), 0, "0 data ranks do not divide"),
    ],
)
def test_what_is_no_place_of_the_plan_is_refused(cursor: Cursor, ranks: int, told: str) -> None:
    planner = Planner(section(), columns(300))
    for call in (planner.check, planner.after, lambda c, d: planner.pack(c, 0, d)):
        with pytest.raises(ProtocolError, match=told):
            call(cursor, ranks)
    with pytest.raises(ProtocolError, match="data rank 2 is not one of 2"):
        planner.pack(Cursor(), 2, 2)


def test_spares_are_others_of_the_group_and_always_the_same() -> None:
    data, facts = section(), columns(800)
    group_of = assign(facts, data)
    packs = [p for p in rank_packs(Planner(data, facts), 0, 0, 1) if p.sample_ids]
    again = [p for p in rank_packs(Planner(data, facts), 0, 0, 1) if p.sample_ids]
    assert packs == again
    for pack in packs:
        assert not set(pack.spares) & set(pack.sample_ids)
        assert len(set(pack.spares)) == len(pack.spares) <= SPARES
        assert {int(group_of[i]) for i in pack.spares} <= {pack.group}
    large = [p for p in packs if (group_of == p.group).sum() > 60]
    assert large
    assert all(len(p.spares) == SPARES for p in large)


def test_a_group_without_others_has_no_spares() -> None:
    planner = Planner(section(BatchSection(256, 1, 1)), pictures((64, 64)))
    assert planner.pack(Cursor(), 0, 1).spares == ()


def test_the_summary_counts_what_the_packs_hold() -> None:
    facts = columns(1200, bad_share=0.05)
    planner = Planner(section(), facts)
    packs, summary = rank_packs(planner, 0, 0, 1), planner.summary(0)
    assert summary.packs == len(packs) == summary.steps * 4
    assert summary.samples == sum(len(p.sample_ids) for p in packs) == sum(summary.samples_per_group.values())
    assert 0 < summary.padding_bucketed < summary.padding_naive < 1
    table = [groups(section())[p.group] for p in packs]
    used = {name: [i for p in packs for i in p.sample_ids if getattr(facts, name)[i] > 0] for name in COLUMNS}
    slots = sum(g.images for g in table), sum(g.clips for g in table)
    assert summary.unused_images == pytest.approx(1 - len(used["height"]) / slots[0])
    assert summary.unused_clips == pytest.approx(1 - len(used["clip_samples"]) / slots[1])
    told = [planner.pack(Cursor(0, step), 0, 2).imbalance for step in range(summary.steps)]
    assert summary.imbalance.balanced == pytest.approx(np.mean([t.balanced for t in told]))
    assert summary.worst_imbalance.packed == pytest.approx(max(t.packed for t in told))


def test_a_million_samples_are_planned_without_a_loop_over_them() -> None:
    planner = Planner(section(), columns(1_000_000))
    summary = planner.summary(0)
    assert summary.samples == 1_000_000
    assert planner.pack(Cursor(0, summary.steps - 1, 3), 0, 1).group >= 0
