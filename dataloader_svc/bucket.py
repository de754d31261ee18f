"""From a sample's facts to its group, its length in model tokens, and what padding costs. Pure arithmetic on arrays.

Shapes: I samples of an index, S samples of a selection, P micro-batches.
"""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from shared.batch import Bucket, Group, buckets, clip_classes, groups
from shared.sections import AudioSection, DataSection

Array = npt.NDArray[Any]

# Two log ratios closer than this are a tie; far above rounding error, far below any difference that shows.
TIE = 1e-9

# Samples looked at together: their arrays stay in a processor's cache.
CHUNK = 1 << 15


class Facts(Protocol):
    """What planning needs to know: five arrays over sample ids, and the first id of each dataset (and the end)."""

    @property
    def height(self) -> Array: ...

    @property
    def width(self) -> Array: ...

    @property
    def clip_samples(self) -> Array: ...

    @property
    def text_tokens(self) -> Array: ...

    @property
    def verdict(self) -> Array: ...

    @property
    def dataset_starts(self) -> tuple[int, ...]: ...

    @property
    def facts(self) -> "Facts":
        """The same, ready in memory for as long as it is held."""


class Columns(msgspec.Struct, frozen=True, weakref=True):
    """Facts held as plain arrays of equal length: pixels (0 = no image), samples, tokens, verdicts (0 = good).

    Without `dataset_starts` there is one dataset.
    """

    height: Array
    width: Array
    clip_samples: Array
    text_tokens: Array
    verdict: Array
    dataset_starts: tuple[int, ...] = ()

    @property
    def facts(self) -> "Columns":
        """Itself."""
        return self


def nearest(height: Array, width: Array, choices: Sequence[Bucket]) -> Array:
    """The place in `choices` of the bucket whose log ratio is nearest to each image's; the earlier one in a tie."""
    ratio = np.log(width / height)
    best, miss = np.zeros(len(ratio), np.int16), np.full(len(ratio), np.inf)
    for place, bucket in enumerate(choices):
        distance = np.abs(ratio - bucket.log_ratio)
        nearer = distance < miss - TIE
        best[nearer], miss[nearer] = place, distance[nearer]
    return best


def assign(facts: Facts, data: DataSection) -> npt.NDArray[np.int16]:
    """Group id of every sample, -1 where its verdict is bad.

    An image goes to the nearest bucket, a clip to the shortest class that holds it. A clip longer than the largest
    class goes to that one, and the decoder cuts it.
    """
    choices, classes = buckets(data.image), np.array(clip_classes(data.audio), np.int64)
    found = np.empty(len(facts.verdict), np.int16)
    for start in range(0, len(found), CHUNK):
        part = slice(start, start + CHUNK)
        columns = (facts.height[part], facts.width[part], facts.clip_samples[part], facts.verdict[part])
        found[part] = _groups_of(*columns, choices, classes)
    return found


def present(group_of: Array) -> tuple[int, ...]:
    """Groups, ascending, that good samples are of; `group_of` [I] is what `assign` gives. No pack is of another."""
    return tuple(np.flatnonzero(np.bincount(group_of[group_of >= 0])).tolist())


def _groups_of(
    height: Array, width: Array, clip_samples: Array, verdict: Array, choices: Sequence[Bucket], classes: Array
) -> Array:
    bucket = np.zeros(len(verdict), np.int16)
    seen = height > 0
    bucket[seen] = 1 + nearest(height[seen], width[seen], choices)
    clip = np.where(clip_samples > 0, 1 + np.minimum(np.searchsorted(classes, clip_samples), len(classes) - 1), 0)
    group: Array = np.where(verdict == 0, bucket * (1 + len(classes)) + clip, -1)
    return group


def sample_tokens(group: Group, clip_samples: Array, text_tokens: Array, audio: AudioSection) -> Array:
    """Model tokens of each sample of one group: bos, image, audio (cut to the class), caption, eos. int64 [S]."""
    return 2 + group.image_tokens + clip_tokens(group, clip_samples, audio) + text_tokens.astype(np.int64)


def clip_tokens(group: Group, clip_samples: Array, audio: AudioSection) -> Array:
    """Audio tokens of each sample of one group. int64 [S]."""
    return -(-np.minimum(clip_samples, group.clip_samples).astype(np.int64) // audio.samples_per_token)


class Padding(msgspec.Struct, frozen=True):
    """Shares of model tokens that are padding, 0 to 1."""

    naive: float
    bucketed: float


def padding_share(
    facts: Facts, group_of: Array, ids: Array, sizes: Array, micro_batches: int, data: DataSection
) -> Padding:
    """What padding costs this plan, and what it would cost without buckets.

    `ids` [S] are the planned samples in shuffled order, `group_of` [S] their groups, `sizes` [P] how many samples each
    non-empty micro-batch holds, and `micro_batches` how many there are with the empty ones.

    bucketed = 1 - (tokens of all samples) / (micro_batches x batch.tokens).
    naive = 1 - (sum of t) / (sum over batches of n x (2 + max h x max w + max a + max c)): the same samples in
    shuffled order cut into batches of the same sizes n; each image resized to the pixel budget with its own ratio into
    h x w patches and padded to the batch's largest h and w; a and c audio and caption tokens; t = 2 + h w + a + c.
    """
    if not len(sizes):
        return Padding(0.0, 0.0)
    table = groups(data)
    clip_S = np.array([g.clip_samples for g in table])[group_of]
    audio_S = -(-np.minimum(facts.clip_samples[ids], clip_S) // data.audio.samples_per_token)
    text_S = facts.text_tokens[ids].astype(np.int64)
    used = int((np.array([g.image_tokens for g in table])[group_of] + audio_S + text_S + 2).sum())
    rows_S, columns_S = _patches(facts.height[ids], facts.width[ids], data)
    real = int((rows_S * columns_S + audio_S + text_S + 2).sum())
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    rows, columns, audio, text = (np.maximum.reduceat(x, starts) for x in (rows_S, columns_S, audio_S, text_S))
    padded = int((sizes * (rows * columns + audio + text + 2)).sum())
    return Padding(1 - real / padded, 1 - used / (micro_batches * data.batch.tokens))


def unused_slots(facts: Facts, ids: Array, pack_groups: Array, table: Sequence[Group]) -> tuple[float, float]:
    """Shares of image slots and of clip slots that hold nothing: 1 - used / (sum of slots over all packs), 0 without.

    `ids` [S] are the planned samples, `pack_groups` [P] the group of every pack, the empty ones too.
    """
    counts = np.bincount(pack_groups, minlength=len(table))
    images, clips = (int((counts * [getattr(g, name) for g in table]).sum()) for name in ("images", "clips"))
    used_images, used_clips = int((facts.height[ids] > 0).sum()), int((facts.clip_samples[ids] > 0).sum())
    return 1 - used_images / images if images else 0.0, 1 - used_clips / clips if clips else 0.0


def _patches(height: Array, width: Array, data: DataSection) -> tuple[Array, Array]:
    """Rows and columns of patches of each image resized to the pixel budget with its own ratio; 0 without one."""
    side = data.image.patch * data.image.merge
    seen = height > 0
    ratio = np.where(seen, height, 1) / np.where(seen, width, 1)
    root = math.sqrt(data.image.pixel_budget) / side
    rows = np.maximum(1, np.rint(root * np.sqrt(ratio))).astype(np.int64)
    columns = np.maximum(1, np.rint(root / np.sqrt(ratio))).astype(np.int64)
    return rows * seen, columns * seen
