"""Even work for data ranks: inside a global batch, which sample goes into which pack, and which pack to which rank.

Shapes: E entries (samples of an epoch in plan order), R rounds, W packs of a round (its columns), S steps.

Rank r of D reads columns r, r + D, ... of each round. So balancing the W columns balances every D that divides W: a
rank's columns together are never further above the mean than the largest of them alone. Two greedy passes, both
longest-processing-time-first (Graham 1969): samples to the packs of their round, then packs to columns over a step.
A round is kept as it was packed where that is no worse, and so is a step, so that balancing never makes one worse.
All arithmetic is on integers: the same on every machine.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from dataloader_svc.bucket import Array
from shared.batch import Group
from shared.sections import DataSection

COST_UNITS = 1000
FULL = np.iinfo(np.int64).max
FRAMES_A_SECOND = 50


class Imbalance(msgspec.Struct, frozen=True):
    """The largest data rank's cost of a step over the mean of all ranks: as packed at first, and as balanced."""

    packed: float
    balanced: float


def sample_costs(table: Sequence[Group], group: Array, tokens: Array, data: DataSection) -> Array:
    """Cost of samples by `data.batch.cost` (its formula), in thousandths of a token. int64 [E].

    `group` [E] are places in `table`, `tokens` [E] the samples' tokens.
    """
    cost = data.batch.cost
    patches = [g.bucket.height * g.bucket.width // data.image.patch**2 if g.bucket else 0 for g in table]
    frames = [g.clip_samples * FRAMES_A_SECOND / data.audio.rate_hz for g in table]
    media = cost.patch * np.array(patches) + cost.frame * np.array(frames)
    whole = media[group] + tokens * (cost.token + cost.token_pair * tokens)
    units: Array = np.rint(COST_UNITS * whole).astype(np.int64)
    return units


def sums(values: Array, bounds: Array) -> Array:
    """Sum of `values` [E] over each pack. int64 [R, W]."""
    upto = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[bounds]
    found: Array = np.diff(upto, axis=1)
    return found


def ratios(costs: Array, per_step: int, ranks: int) -> Array:
    """Largest over mean cost of `ranks` data ranks for each step of `costs` [R, W]. float64 [S], 1 where all is 0."""
    loads = costs.reshape(-1, per_step * (costs.shape[1] // ranks), ranks).sum(1)
    mean = loads.mean(1)
    found: Array = np.where(mean > 0, loads.max(1) / np.where(mean > 0, mean, 1), 1.0)
    return found


def balanced(
    bounds: Array, costs: Array, tokens: Array, most: Array, budget: int, per_step: int
) -> tuple[Array, Array]:
    """An order of the entries, and the bounds of packs in it, that spread `costs` over the columns of each step.

    Pack c of round r is entries bounds[r, c] to bounds[r, c + 1], in whole steps of `per_step` rounds. It holds at most
    most[r] entries and `budget` tokens, before and after. Every entry stays in its round.
    """
    packed = _entries(bounds)
    count, costs, tokens = len(costs), costs[packed.at], tokens[packed.at]
    kept = _loads(packed, packed.column, costs, bounds)
    leveled, feasible = _level(packed, costs, tokens, bounds, most, budget)
    loads = _loads(packed, leveled, costs, bounds)
    better = feasible & (loads.max(1) < kept.max(1))
    loads = np.where(better[:, None], loads, kept)
    places = _place(loads, per_step)
    arranged = np.empty_like(loads)
    np.put_along_axis(arranged, places, loads, 1)
    width = loads.shape[1]
    worse = np.repeat(ratios(arranged, per_step, width) > ratios(kept, per_step, width), per_step)
    places[worse] = np.arange(width)
    column = np.where((better & ~worse)[packed.round], leveled, packed.column)
    return _in_order(packed, places[packed.round, column], bounds, count)


class _Entries(msgspec.Struct, frozen=True):
    """Entries that are in a round: where each stands, its round and column, and how many stand before its round."""

    at: Array
    round: Array
    column: Array
    before: Array


def _entries(bounds: Array) -> _Entries:
    sizes = np.diff(bounds, axis=1)
    rounds = np.argsort(bounds[:, 0], kind="stable")
    per_round = sizes[rounds].sum(1)
    before = np.repeat(np.cumsum(per_round) - per_round, per_round)
    at = np.repeat(bounds[rounds, 0], per_round) + np.arange(len(before)) - before
    column = np.repeat(np.tile(np.arange(sizes.shape[1]), len(rounds)), sizes[rounds].ravel())
    return _Entries(at, np.repeat(rounds, per_round), column, before)


def _loads(entries: _Entries, column: Array, values: Array, bounds: Array) -> Array:
    """Sum of `values` over the columns of each round. int64 [R, W]."""
    found = np.zeros((bounds.shape[0], bounds.shape[1] - 1), np.int64)
    np.add.at(found, (entries.round, column), values)
    return found


def _level(
    entries: _Entries, costs: Array, tokens: Array, bounds: Array, most: Array, budget: int
) -> tuple[Array, Array]:
    """The dearest entries of each round first, each to the cheapest column that has room.

    One turn takes the next entry of every round at once. Returns columns, and the rounds in which all found room.
    """
    sizes = bounds[:, -1] - bounds[:, 0]
    largest = np.argsort(-sizes, kind="stable")
    first = np.zeros(len(bounds), np.int64)
    first[entries.round] = entries.before
    first, most, dearest = first[largest], most[largest, None], np.lexsort((-costs, entries.before))
    load, used, count = (np.zeros((len(bounds), bounds.shape[1] - 1), np.int64) for _ in range(3))
    column, fits = np.zeros(len(costs), np.int64), np.ones(len(bounds), bool)
    for turn in range(int(sizes.max(initial=0))):
        n = int(np.count_nonzero(sizes > turn))
        entry, row = dearest[first[:n] + turn], np.arange(n)
        room = (used[:n] <= (budget - tokens[entry])[:, None]) & (count[:n] < most[:n])
        choice = np.where(room, load[:n], FULL).argmin(1)
        fits[:n] &= room[row, choice]
        load[row, choice] += costs[entry]
        used[row, choice] += tokens[entry]
        count[row, choice] += 1
        column[entry] = choice
    feasible = np.empty_like(fits)
    feasible[largest] = fits
    return column, feasible


def _place(loads: Array, per_step: int) -> Array:
    """For each pack the column it goes to, int64 [R, W].

    Of a step's rounds, those with the widest spread first; in each, the dearest pack to the lightest column.
    """
    steps = loads.reshape(-1, per_step, loads.shape[1])
    turns = np.argsort(steps.min(2) - steps.max(2), axis=1, kind="stable")
    totals, places = np.zeros((len(steps), loads.shape[1]), np.int64), np.empty(steps.shape, np.int64)
    number = np.arange(len(steps))
    for turn in turns.T:
        mine, place, moved = steps[number, turn], np.empty_like(totals), np.empty_like(totals)
        dear, light = np.argsort(-mine, axis=1, kind="stable"), np.argsort(totals, axis=1, kind="stable")
        np.put_along_axis(place, dear, light, 1)
        np.put_along_axis(moved, place, mine, 1)
        places[number, turn] = place
        totals += moved
    return places.reshape(loads.shape)


def _in_order(entries: _Entries, column: Array, bounds: Array, count: int) -> tuple[Array, Array]:
    """All `count` entries, those in rounds by column and else as they stood; and the bounds of packs in that order."""
    order = np.arange(count)
    order[entries.at] = entries.at[np.lexsort((column, entries.before))]
    sizes = _loads(entries, column, np.ones(len(column), np.int64), bounds)
    return order, np.concatenate([bounds[:, :1], bounds[:, :1] + np.cumsum(sizes, axis=1)], axis=1)
