"""`BatchSpec`: the one contract between decoder and model, and what it is derived from.

Shape letters: T tokens of a micro-batch, K most samples in it, N images, H height, W width, M audio clips, S samples
of a clip. A *group* is a modality set with one image bucket and one audio class; every micro-batch belongs to one
group and has exactly its static shapes. All of this is a pure function of the `data` section.
"""

import math
from collections.abc import Iterator

import msgspec
import numpy as np

from shared.sections import AudioSection, DataSection, ImageSection

ALIGN = 64
PIXELS = "pixels_NHWC"
IGNORE = -100


class Cursor(msgspec.Struct, frozen=True, order=True, array_like=True):
    """A place in the order: `micro` micro-batches of data-parallel rank r into `step` of `epoch`."""

    epoch: int = 0
    step: int = 0
    micro: int = 0


class Bucket(msgspec.Struct, frozen=True, array_like=True):
    """One image shape, in pixels."""

    height: int
    width: int

    @property
    def log_ratio(self) -> float:
        return math.log(self.width / self.height)


class FieldSpec(msgspec.Struct, frozen=True, array_like=True):
    """One array of a micro-batch: C-contiguous, at `offset` bytes into the slot's payload."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def end(self) -> int:
        """Where its bytes end in the payload."""
        return self.offset + self.size_bytes


class BatchSpec(msgspec.Struct, frozen=True):
    """Static layout of every micro-batch of one group."""

    group: int
    fields: tuple[FieldSpec, ...]
    size_bytes: int

    @property
    def pixels(self) -> FieldSpec:
        """The pictures: the one field that may lie in device memory instead of the slot."""
        return next(field for field in self.fields if field.name == PIXELS)


class Group(msgspec.Struct, frozen=True):
    """A modality set. `bucket` is None without images, `clip_samples` 0 without audio.

    A micro-batch holds at most `samples` samples (so `images` and `clips` are that or 0) and `tokens` tokens;
    `samples` is how many of expected length fill the tokens: captions of `text.expected_tokens`, clips half-way
    between this class and the next shorter one.
    """

    id: int
    bucket: Bucket | None
    clip_samples: int
    samples: int
    image_tokens: int
    clip_tokens: int
    tokens: int

    @property
    def images(self) -> int:
        return self.samples if self.bucket else 0

    @property
    def clips(self) -> int:
        return self.samples if self.clip_samples else 0

    @property
    def name(self) -> str:
        """Short label for tables and metrics, such as `96x160+4.0s`."""
        parts = [f"{self.bucket.height}x{self.bucket.width}"] if self.bucket else []
        parts += [f"a{self.clip_samples}"] if self.clip_samples else []
        return "+".join(parts) or "text"


def fit_bucket(ratio: float, budget: int, multiple: int) -> Bucket:
    """The shape with sides in multiples of `multiple` and at most `budget` pixels nearest to width/height `ratio`.

    Nearness is |log ratio error| plus half the share of the budget left unused (as a log); ties go to the smaller
    height. Raises nothing: `multiple` squared never exceeds a checked budget.
    """
    best: tuple[float, int, int] | None = None
    for height in range(multiple, budget // multiple + 1, multiple):
        for width in {round(height * ratio / multiple + d) * multiple for d in (-0.5, 0, 0.5)}:
            if width >= multiple and height * width <= budget:
                miss = abs(math.log(width / height / ratio)) + 0.5 * math.log(budget / (height * width))
                best = min(best or (math.inf, 0, 0), (round(miss, 9), height, width))
    assert best is not None
    return Bucket(best[1], best[2])


def buckets(image: ImageSection) -> tuple[Bucket, ...]:
    """Image buckets in a fixed order: as listed, or one for each ratio and its portrait form."""
    if image.buckets:
        return tuple(Bucket(h, w) for h, w in image.buckets)
    found: list[Bucket] = []
    for a, b in image.ratios:
        for ratio in (a / b, b / a):
            bucket = fit_bucket(ratio, image.pixel_budget, image.multiple)
            if bucket not in found:
                found.append(bucket)
    return tuple(found)


def image_tokens(bucket: Bucket, image: ImageSection) -> int:
    """Model tokens of one image of `bucket`: patches after the merge."""
    side = image.patch * image.merge
    return (bucket.height // side) * (bucket.width // side)


def audio_tokens(samples: int, audio: AudioSection) -> int:
    """Model tokens of `samples` audio samples at the common rate."""
    return -(-samples // audio.samples_per_token)


def clip_classes(audio: AudioSection) -> tuple[int, ...]:
    """Clip lengths in samples, shortest first."""
    return tuple(sorted(round(s * audio.rate_hz) for s in audio.classes_s))


def groups(data: DataSection) -> tuple[Group, ...]:
    """Every group the data section allows; a group's place in this tuple is its id."""
    pairs = [(b, c) for b in (None, *buckets(data.image)) for c in (0, *clip_classes(data.audio))]
    return tuple(_group(i, bucket, clip, data) for i, (bucket, clip) in enumerate(pairs))


def _group(index: int, bucket: Bucket | None, clip: int, data: DataSection) -> Group:
    patches = image_tokens(bucket, data.image) if bucket else 0
    frames = audio_tokens(clip, data.audio)
    shorter = max((c for c in clip_classes(data.audio) if c < clip), default=0)
    expected = audio_tokens((clip + shorter) // 2, data.audio) if clip else 0
    each = patches + expected + data.text.expected_tokens + 2
    return Group(index, bucket, clip, max(1, data.batch.tokens // each), patches, frames, data.batch.tokens)


def batch_spec(group: Group) -> BatchSpec:
    """Layout of the group's micro-batches: fields in a fixed order, each aligned to 64 bytes.

    tokens_T, labels_T (next token, or -100), positions_T (within the sample), segments_T (1.. a sample, 0 padding),
    features_T (row of [image tokens; audio tokens] that stands here, or -1), cu_seqlens (K+2 segment bounds for
    variable-length attention, padded with T), pixels_NHWC, clips_MS, clip_lengths_M (true samples, 0 = empty).
    """
    text, height, width = (group.tokens,), 0, 0
    if group.bucket:
        height, width = group.bucket.height, group.bucket.width
    wanted = [
        *((name, "int32", text) for name in ("tokens_T", "labels_T", "positions_T", "segments_T", "features_T")),
        ("cu_seqlens", "int32", (group.samples + 2,)),
        (PIXELS, "uint8", (group.images, height, width, 3)),
        ("clips_MS", "int16", (group.clips, group.clip_samples)),
        ("clip_lengths_M", "int32", (group.clips,)),
    ]
    return BatchSpec(group.id, tuple(fields := list(_place(wanted))), _end(fields[-1]))


def _place(wanted: list[tuple[str, str, tuple[int, ...]]]) -> Iterator[FieldSpec]:
    offset = 0
    for name, dtype, shape in wanted:
        field = FieldSpec(name, dtype, shape, offset)
        yield field
        offset = _end(field)


def _end(field: FieldSpec) -> int:
    return -(-field.end // ALIGN) * ALIGN
