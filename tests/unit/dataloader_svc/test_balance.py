"""Balancing: every entry stays in its round, budgets hold, and no step becomes worse for any number of ranks."""

import math
from collections import Counter

import msgspec
import numpy as np
import pytest

from dataloader_svc import balance
from dataloader_svc.balance import Imbalance, balanced, ratios, sample_costs, sums
from dataloader_svc.bucket import Columns, sample_tokens
from dataloader_svc.plan import Pack, Planner
from shared.batch import Cursor, groups
from shared.sections import AudioSection, BatchSection, CostSection, DataSection, TextSection
from tests.support.columns import columns
from tests.support.tars import data_section

WIDTH, PER_STEP, BUDGET, MOST = 8, 3, 400, 30


def made(seed: int, rounds: int = 12) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bounds of packs within the budgets, in a shuffled order of rounds with gaps between some; tokens; costs.

    Costs grow with tokens for odd seeds, and have nothing to do with them for even ones.
    """
    rng = np.random.default_rng(seed)
    bounds, tokens = [], []
    for _ in range(rounds):
        tokens += rng.integers(1, 40, rng.integers(0, 4)).tolist()
        edges = [len(tokens)]
        for _ in range(WIDTH):
            lengths = rng.integers(1, 120, rng.integers(0, 12))
            tokens += lengths[np.cumsum(lengths) <= BUDGET].tolist()
            edges.append(len(tokens))
        bounds.append(edges)
    found = np.array(tokens, np.int64)
    costs = found**2 if seed % 2 else rng.integers(1, 10_000, len(found))
    return np.array(bounds)[rng.permutation(rounds)], found, costs


def run(seed: int) -> tuple[np.ndarray, ...]:
    bounds, tokens, costs = made(seed)
    order, moved = balanced(bounds, costs, tokens, np.full(len(bounds), MOST), BUDGET, PER_STEP)
    return bounds, tokens, costs, order, moved


@pytest.mark.parametrize("seed", range(40))
def test_every_entry_stays_in_its_round_and_budgets_hold(seed: int) -> None:
    bounds, tokens, _, order, moved = run(seed)
    assert sorted(order.tolist()) == list(range(len(tokens)))
    assert np.array_equal(moved[:, [0, -1]], bounds[:, [0, -1]])
    for low, high in bounds[:, [0, -1]].tolist():
        assert sorted(order[low:high].tolist()) == list(range(low, high))
    assert sums(tokens[order], moved).max() <= BUDGET
    assert np.diff(moved, axis=1).max() <= MOST
    inside = np.zeros(len(tokens) + 1, bool)
    for low, high in bounds[:, [0, -1]].tolist():
        inside[low:high] = True
    gaps = np.flatnonzero(~inside[:-1])
    assert np.array_equal(order[gaps], gaps)


@pytest.mark.parametrize("seed", range(40))
def test_no_step_becomes_worse_and_fewer_ranks_are_at_least_as_even(seed: int) -> None:
    bounds, _, costs, order, moved = run(seed)
    before, after = sums(costs, bounds), sums(costs[order], moved)
    assert np.array_equal(before.sum(1), after.sum(1))
    assert (ratios(after, PER_STEP, WIDTH) <= ratios(before, PER_STEP, WIDTH)).all()
    for ranks in (4, 2, 1):
        assert (ratios(after, PER_STEP, ranks) <= ratios(after, PER_STEP, WIDTH) + 1e-12).all()
    assert ratios(after, PER_STEP, 1).tolist() == [1.0] * (len(bounds) // PER_STEP)


def test_balancing_is_worth_it() -> None:
    both = []
    for seed in range(40):
        bounds, _, costs, order, moved = run(seed)
        both.append([ratios(c, PER_STEP, WIDTH).mean() for c in (sums(costs, bounds), sums(costs[order], moved))])
    packed, even = np.mean(both, axis=0)
    assert packed > 1.3
    assert even < 1.1


def contents(values: np.ndarray, order: np.ndarray, bounds: np.ndarray) -> list[list[int]]:
    """Values of each pack of the first round."""
    return [part.tolist() for part in np.split(values[order], bounds[0, 1:-1])]


def test_the_dearest_samples_go_first_each_to_the_cheapest_pack_with_room() -> None:
    costs, one = np.array([9, 8, 7, 1, 1, 1]), np.ones(6, np.int64)
    packs = np.array([[0, 3, 6]])
    assert contents(costs, *balanced(packs, costs, one, np.array([6]), 6, 1)) == [[8, 7], [9, 1, 1, 1]]
    assert contents(costs, *balanced(packs, costs, one, np.array([3]), 6, 1)) == [[8, 7, 1], [9, 1, 1]]


def test_what_finds_no_room_stays_as_it_was_packed() -> None:
    costs, tokens = np.array([5, 5, 6, 4]), np.array([5, 5, 6, 4])
    order, bounds = balanced(np.array([[0, 2, 4]]), costs, tokens, np.array([2]), 10, 1)
    assert (order.tolist(), bounds.tolist()) == ([0, 1, 2, 3], [[0, 2, 4]])


def test_over_a_step_the_dearest_pack_meets_the_lightest_column() -> None:
    costs = np.array([10, 1, 4, 2])
    order, bounds = balanced(np.array([[0, 1, 2], [2, 3, 4]]), costs, np.full(4, 9), np.array([1, 1]), 9, 2)
    assert sums(costs[order], bounds).tolist() == [[10, 1], [2, 4]]


def test_a_step_that_greed_would_make_worse_stays_as_it_was_packed() -> None:
    """Differences of 3, 3, 2, 2, 2 can cancel out; the largest first leaves 2."""
    costs = np.array([4, 1, 4, 1, 1, 3, 1, 3, 1, 3])
    packs = np.arange(10).reshape(5, 2)[:, [0, 1, 1]] + [0, 0, 1]
    order, bounds = balanced(packs, costs, np.ones(10, np.int64), np.ones(5, np.int64), 9, 5)
    assert (order.tolist(), bounds.tolist()) == (list(range(10)), packs.tolist())


def test_nothing_to_balance_is_no_trouble() -> None:
    none = np.zeros(0, np.int64)
    order, bounds = balanced(np.zeros((0, 3), np.int64), none, none, none, 9, 2)
    assert (order.shape, bounds.shape) == ((0,), (0, 3))
    order, bounds = balanced(np.zeros((2, 3), np.int64), none, none, np.ones(2), 9, 2)
    assert bounds.tolist() == [[0, 0, 0]] * 2
    assert ratios(np.zeros((2, 2), np.int64), 2, 2).tolist() == [1.0]


def test_costs_follow_the_stated_formula() -> None:
    cost = CostSection(patch=0.5, frame=0.25, token=1.0, token_pair=0.01)
    data = section(BatchSection(256, 4, 4, cost=cost))
    group = next(g for g in groups(data) if g.bucket and g.clip_samples == 16_000)
    patches = group.bucket.height * group.bucket.width // 256 if group.bucket else 0
    wanted = 0.5 * patches + 0.25 * 50 + 40 + 0.01 * 1600
    assert sample_costs(groups(data), np.array([group.id]), np.array([40]), data).tolist() == [round(1000 * wanted)]


def section(batch: BatchSection) -> DataSection:
    audio = AudioSection(classes_s=(1.0, 3.0), samples_per_token=1600)
    return data_section(batch=batch, audio=audio, text=TextSection(max_tokens=48, expected_tokens=12))


def step_sets(planner: Planner, epoch: int, ranks: int, micro_batches: int) -> list[Counter[int]]:
    """What each global batch holds, read as `ranks` ranks do."""
    return [
        Counter(
            i
            for micro in range(micro_batches // ranks)
            for rank in range(ranks)
            for i in planner.pack(Cursor(epoch, step, micro), rank, ranks).sample_ids
        )
        for step in range(planner.steps(epoch))
    ]


def test_costs_never_change_what_a_global_batch_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, facts = BatchSection(256, 16, 8), columns(1500, bad_share=0.05)
    even = Planner(section(batch), facts)
    odd = Planner(section(msgspec.structs.replace(batch, cost=CostSection(3.0, 0.0, 0.1, 0.5))), facts)
    monkeypatch.setattr(balance, "balanced", lambda bounds, costs, *rest: (np.arange(len(costs)), bounds))
    plain = Planner(section(batch), facts)
    assert step_sets(even, 1, 1, 16) == step_sets(odd, 1, 1, 16) == step_sets(plain, 1, 1, 16)
    assert plain.summary(1).imbalance.packed == plain.summary(1).imbalance.balanced == even.summary(1).imbalance.packed


@pytest.mark.parametrize("seed", range(4))
def test_global_batches_are_the_same_sets_for_1_2_4_and_8_ranks_each_evenly_loaded(seed: int) -> None:
    batch = BatchSection(256, 16, 8)
    data = msgspec.structs.replace(section(batch), seed=seed)
    planner = Planner(data, columns(1200, seed))
    whole = step_sets(planner, 0, 1, 16)
    for ranks in (2, 4, 8):
        assert step_sets(planner, 0, ranks, 16) == whole
        told = [planner.pack(Cursor(0, step), 0, ranks).imbalance for step in range(planner.steps(0))]
        assert np.mean([t.balanced for t in told[:-1]]) < 1.05 < np.mean([t.packed for t in told[:-1]]) + 0.02
        assert all(
            planner.pack(Cursor(0, s), r, ranks).imbalance == t for s, t in enumerate(told) for r in range(ranks)
        )


def test_a_ranks_load_is_the_sum_of_its_packs_costs() -> None:
    batch = BatchSection(256, 8, 4)
    data, facts = section(batch), columns(300)
    planner = Planner(data, facts)
    for ranks in (1, 2, 4):
        loads = []
        for rank in range(ranks):
            packs = [planner.pack(Cursor(0, 2, micro), rank, ranks) for micro in range(8 // ranks)]
            loads.append(sum(cost_of(pack, data, facts) for pack in packs))
        told = planner.pack(Cursor(0, 2), 0, ranks).imbalance
        assert isinstance(told, Imbalance)
        assert math.isclose(told.balanced, max(loads) / (sum(loads) / ranks))


def cost_of(pack: Pack, data: DataSection, facts: Columns) -> int:
    group, ids = groups(data)[pack.group], np.array(pack.sample_ids, np.int64)
    tokens = sample_tokens(group, facts.clip_samples[ids], facts.text_tokens[ids], data.audio)
    return int(sample_costs(groups(data), np.full(len(ids), pack.group), tokens, data).sum())
