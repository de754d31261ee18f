"""One epoch's order up to balancing, built whole: a pure function of (data section, index, epoch).

Good samples are shuffled, or drawn and mixed as weights say (`mixture`); within each group consecutive ones are packed
into micro-batches (packs) by next-fit; `round` packs of one group form a round; rounds are shuffled (in a mixture
spread evenly, so that repeats stay apart); micro_batches/round rounds form a step, inside which `block` evens out the
ranks' work when the step is asked for. A group's last, short round rides with the next longer clip class of the same
bucket, where there is one: a sample without a clip, or with a shorter one, fits there. What is then left at the end of
a group or of the epoch is completed (`leftovers: pad`) with packs that stay empty where there are not samples enough,
or dropped (`drop`).

Shapes: E entries (samples as often as they come), R rounds in the order of use, W packs of a round.
"""

import msgspec
import numpy as np

from dataloader_svc import mixture
from dataloader_svc.bucket import Array, Facts, sample_tokens
from dataloader_svc.hashing import shuffled
from shared.batch import Group, groups
from shared.errors import ConfigError
from shared.sections import BatchSection, DataSection

# What a hash is for: different uses of one (seed, epoch) must not be correlated.
SAMPLES, ROUNDS = 1, 2
MOST_INT32 = 1 << 31

# Raise it with every change of the order or of `EpochPlan`: plans that were kept as files are then made anew.
ORDER = 1


class EpochPlan(msgspec.Struct, frozen=True):
    """An epoch's order before balancing. Pack c of round r holds ids[bounds[r, c] : bounds[r, c + 1]], maybe none.

    `tokens` and `labels` [E] are each sample's tokens in the group that it is packed in, and its label tokens.
    Samples of group g, whichever they ride with, are members[member_starts[g] : member_starts[g + 1]], shuffled.
    """

    ids: Array
    tokens: Array
    labels: Array
    bounds: Array
    round_group: Array
    members: Array
    member_starts: Array

    def of_group(self, group: int) -> Array:
        """The samples of one group."""
        mine: Array = self.members[self.member_starts[group] : self.member_starts[group + 1]]
        return mine

    def chosen(self) -> Array:
        """The ids in packs: all of `ids`, but for dropped leftovers. In no order that means anything."""
        edges = np.zeros(len(self.ids) + 1, np.int64)
        np.add.at(edges, self.bounds[:, 0], 1)
        np.subtract.at(edges, self.bounds[:, -1], 1)
        chosen: Array = self.ids[np.cumsum(edges)[:-1] > 0]
        return chosen


class _Packed(msgspec.Struct):
    """Entries group by group in packs, before rounds are put in order. Lists are joined at the end."""

    ids: list[Array]
    tokens: list[Array]
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
    members, starts = _members(drawn(data, facts, group_of, epoch), group_of)
    packed = _pack(data, facts, np.split(members, starts[1:-1]))
    ids, tokens = np.concatenate(packed.ids), np.concatenate(packed.tokens)
    each = [len(part) for part in packed.bounds]
    bounds, group = _in_steps(np.concatenate(packed.bounds), np.repeat(packed.groups, each), data, epoch)
    labels = facts.text_tokens[ids].astype(np.int32) + 1
    return EpochPlan(ids, tokens, labels, bounds, group.astype(np.int16), members, starts)


def drawn(data: DataSection, facts: Facts, group_of: Array, epoch: int) -> Array:
    """Ids of the epoch's samples in shuffled order; in a mixture an id may stand there several times, or not at all."""
    good = np.flatnonzero(group_of >= 0)
    good = good.astype(np.int32) if len(group_of) <= MOST_INT32 else good
    if not mixture.weighted(data.datasets):
        return shuffled(good, SAMPLES, data.seed, epoch)
    parts = per_dataset(facts, good)
    quotas = mixture.quotas(data.datasets, [len(part) for part in parts])
    return mixture.draw(list(zip(quotas, parts, strict=True)), data.seed, epoch)


def per_dataset(facts: Facts, ids: Array) -> list[Array]:
    """Ascending ids, cut where datasets begin."""
    return np.split(ids, np.searchsorted(ids, facts.dataset_starts[1:-1]))


def _members(order: Array, group_of: Array) -> tuple[Array, Array]:
    """`order` sorted by group, each group in the order given; and where each group starts, and the end."""
    mine = group_of[order]
    starts = np.cumsum([0, *np.bincount(mine)])
    return order[np.argsort(mine, kind="stable")], starts


def _pack(data: DataSection, facts: Facts, members: list[Array]) -> _Packed:
    """`members` are the samples of each group."""
    table, packed = groups(data), _Packed([], [], [], [])
    present = [number for number, ids in enumerate(members) if len(ids)]
    riders = members[0][:0]
    for number, following in zip(present, [*present[1:], None], strict=True):
        group = table[number]
        ids = np.concatenate([members[number], riders])
        tokens = _tokens(ids, group, data, facts)
        starts = pack_starts(tokens, group.tokens, group.samples)
        stays = len(ids)
        if following is not None and table[following].bucket == group.bucket:
            whole = (len(starts) - 1) // data.batch.round * data.batch.round
            stays, starts = int(starts[whole]), starts[: whole + 1]
        riders = ids[stays:]
        packed.ids.append(ids[:stays])
        packed.tokens.append(tokens[:stays].astype(np.int32))
        packed.bounds.append(packed.entries + _rounds(starts, data.batch))
        packed.groups.append(number)
        packed.entries += stays
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
