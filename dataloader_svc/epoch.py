"""One epoch's order, built whole: a pure function of (data section, index, epoch).

Good samples are shuffled, or drawn and mixed as weights say (`mixture`); within each group consecutive ones are packed
into micro-batches (packs) by next-fit; `round` packs of one group form a round; rounds are shuffled (in a mixture
spread evenly, so that repeats stay apart); micro_batches/round rounds form a step, inside which `balance` evens out the
ranks' work. A group's last, short round rides with the next longer clip class of the same bucket, where there is one:
a sample without a clip, or with a shorter one, fits there. What is then left at the end of a group or of the epoch is
completed (`leftovers: pad`) with packs that stay empty where there are not samples enough, or dropped (`drop`).

Shapes: E entries (samples as often as they come), R rounds in the order of use, W packs of a round.
"""

import msgspec
import numpy as np

from dataloader_svc import balance, mixture
from dataloader_svc.bucket import Array, Facts, sample_tokens
from dataloader_svc.hashing import shuffled
from shared.batch import Group, groups
from shared.errors import ConfigError
from shared.sections import BatchSection, DataSection

# What a hash is for: different uses of one (seed, epoch) must not be correlated.
SAMPLES, ROUNDS = 1, 2


class EpochPlan(msgspec.Struct, frozen=True):
    """An epoch's order. Pack c of round r holds ids[bounds[r, c] : bounds[r, c + 1]], maybe none.

    `labels`, `costs` and `packed_costs` [R, W] are each pack's label tokens and its cost as it is and before balancing.
    `members` are the samples of each group in shuffled order, whichever group they ride with.
    """

    ids: Array
    bounds: Array
    labels: Array
    costs: Array
    packed_costs: Array
    round_group: Array
    members: dict[int, Array]

    def samples(self, round_: int, column: int) -> tuple[int, ...]:
        """Sample ids of a pack."""
        return tuple(self.ids[self.bounds[round_, column] : self.bounds[round_, column + 1]].tolist())

    def sizes(self) -> Array:
        """How many samples each pack holds. int64 [R, W]."""
        sizes: Array = np.diff(self.bounds, axis=1)
        return sizes

    def chosen(self) -> Array:
        """The ids in packs: all of `ids`, but for dropped leftovers. int64, in no order that means anything."""
        edges = np.zeros(len(self.ids) + 1, np.int64)
        np.add.at(edges, self.bounds[:, 0], 1)
        np.subtract.at(edges, self.bounds[:, -1], 1)
        chosen: Array = self.ids[np.cumsum(edges)[:-1] > 0]
        return chosen


class _Packed(msgspec.Struct):
    """Entries group by group in packs, before rounds are put in order. Lists are joined at the end."""

    ids: list[Array]
    tokens: list[Array]
    costs: list[Array]
    bounds: list[Array]
    groups: list[int]
    entries: int = 0


def pack_starts(tokens: Array, most_tokens: int, most_samples: int) -> Array:
    """Next-fit: where each pack starts in a row of samples of `tokens` [S] tokens, and S at the end.

    Every start's successor is found at once; only packs are walked in Python.
    """
    ends = np.concatenate([[0], np.cumsum(tokens)])
    last_fit = np.searchsorted(ends, ends[:-1] + most_tokens, side="right") - 1
    following = np.minimum(last_fit, np.arange(len(tokens)) + most_samples)
    starts, at = [], 0
    while at < len(tokens):
        starts.append(at)
        at = following.item(at)
    return np.array([*starts, len(tokens)], np.int64)


def build_epoch(data: DataSection, facts: Facts, group_of: Array, epoch: int) -> EpochPlan:
    """The whole order of one epoch. `group_of` [I] is what `bucket.assign` gives.

    Raises:
        ConfigError: a sample is longer than a pack.
    """
    members = _members(drawn(data, facts, group_of, epoch), group_of)
    packed, table = _pack(data, facts, members), groups(data)
    ids, tokens, costs = (np.concatenate(parts) for parts in (packed.ids, packed.tokens, packed.costs))
    each = [len(part) for part in packed.bounds]
    bounds, group = _in_steps(np.concatenate(packed.bounds), np.repeat(packed.groups, each), data, epoch)
    most, per_step = np.array([g.samples for g in table])[group], data.batch.micro_batches // data.batch.round
    order, leveled = balance.balanced(bounds, costs, tokens, most, data.batch.tokens, per_step)
    labels = balance.sums(facts.text_tokens[ids[order]].astype(np.int64) + 1, leveled)
    both = balance.sums(costs[order], leveled), balance.sums(costs, bounds)
    return EpochPlan(ids[order], leveled, labels, *both, group.astype(np.int16), members)


def drawn(data: DataSection, facts: Facts, group_of: Array, epoch: int) -> Array:
    """Ids of the epoch's samples in shuffled order; in a mixture an id may stand there several times, or not at all."""
    good = np.flatnonzero(group_of >= 0)
    if not mixture.weighted(data.datasets):
        return shuffled(good, SAMPLES, data.seed, epoch)
    parts = per_dataset(facts, good)
    quotas = mixture.quotas(data.datasets, [len(part) for part in parts])
    return mixture.draw(list(zip(quotas, parts, strict=True)), data.seed, epoch)


def per_dataset(facts: Facts, ids: Array) -> list[Array]:
    """Ascending ids, cut where datasets begin."""
    return np.split(ids, np.searchsorted(ids, facts.dataset_starts[1:-1]))


def _members(order: Array, group_of: Array) -> dict[int, Array]:
    """The samples of each group that has any, ascending by group, in the order given."""
    order = order[np.argsort(group_of[order], kind="stable")]
    found, firsts = np.unique(group_of[order], return_index=True)
    return dict(zip(found.tolist(), np.split(order, firsts[1:]), strict=True))


def _pack(data: DataSection, facts: Facts, members: dict[int, Array]) -> _Packed:
    table, packed = groups(data), _Packed([], [], [], [], [])
    riders = np.zeros(0, np.int64)
    for number, ids in members.items():
        group = table[number]
        ids = np.concatenate([ids, riders])
        tokens = _tokens(ids, group, data, facts)
        starts = pack_starts(tokens, group.tokens, group.samples)
        longer = next((table[n] for n in members if n > number), None)
        stays = len(ids)
        if longer and longer.bucket == group.bucket:
            whole = (len(starts) - 1) // data.batch.round * data.batch.round
            stays, starts = int(starts[whole]), starts[: whole + 1]
        riders, ids, tokens = ids[stays:], ids[:stays], tokens[:stays]
        packed.ids.append(ids)
        packed.tokens.append(tokens)
        packed.costs.append(balance.sample_costs(group, tokens, data))
        packed.bounds.append(packed.entries + _rounds(starts, data.batch))
        packed.groups.append(number)
        packed.entries += len(ids)
    return packed


def _tokens(ids: Array, group: Group, data: DataSection, facts: Facts) -> Array:
    tokens = sample_tokens(group, facts.clip_samples[ids], facts.text_tokens[ids], data.audio)
    if (longest := int(tokens.max())) > group.tokens:
        rule = f"must hold the largest sample, {longest} tokens (group {group.name})"
        raise ConfigError("data.batch.tokens", group.tokens, rule, "raise it, or lower data.text.max_tokens")
    return tokens


def _rounds(starts: Array, batch: BatchSection) -> Array:
    """Bounds of packs in rounds; a last short round is completed with empty packs, or dropped."""
    width, packs = batch.round, len(starts) - 1
    if batch.leftovers == "drop":
        starts = starts[: packs // width * width + 1]
    starts = np.concatenate([starts, np.full(-(len(starts) - 1) % width, starts[-1])])
    first = np.arange(0, len(starts) - 1, width)
    bounds: Array = starts[first[:, None] + np.arange(width + 1)]
    return bounds


def _in_steps(bounds: Array, group: Array, data: DataSection, epoch: int) -> tuple[Array, Array]:
    """All rounds in order, in whole steps: the last is completed with empty rounds of the last real one's group."""
    if mixture.weighted(data.datasets):
        order = mixture.spread_rounds(group, data.seed, epoch)
    else:
        order = shuffled(np.arange(len(bounds)), ROUNDS, data.seed, epoch)
    bounds, group = bounds[order], group[order]
    per_step = data.batch.micro_batches // data.batch.round
    if data.batch.leftovers == "drop":
        whole = len(bounds) // per_step * per_step
        return bounds[:whole], group[:whole]
    lacking = -len(bounds) % per_step
    bounds = np.concatenate([bounds, np.zeros((lacking, data.batch.round + 1), np.int64)])
    return bounds, np.concatenate([group, np.full(lacking, group[-1])])
