"""Random but valid micro-batches on the CPU, laid out as `shared.batch.batch_spec` says, for models and engines."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shared.batch import IGNORE, Group, groups
from shared.sections import RunConfig
from trainer.feed import MicroBatch
from trainer.loss import loss_scale
from trainer.models.fusion import Inputs

Plan = tuple[bool, bool, tuple[int, ...]]
"""With images, with audio, and the label tokens of each sample of the pack (none: an empty pack)."""

MIXED: tuple[Plan, ...] = (
    (True, False, (5,)),
    (False, True, (50,)),
    (True, True, (150,)),
    (False, False, (5, 200)),
    (False, False, ()),
    (True, False, (0, 20)),
    (False, True, (5,)),
    (True, True, (30,)),
)
"""One global batch: every modality set, an empty pack, an empty caption, 5 to 200 labels."""

LOPSIDED: tuple[Plan, ...] = ((False, False, (40,)), (True, True, (40,))) * 4
"""Of two data-parallel ranks one has text alone, the other images and audio."""

SILENT: tuple[Plan, ...] = ((True, True, (40,)), (False, False, ())) * 4
"""Of two data-parallel ranks one has no token at all."""

WRITTEN: tuple[Plan, ...] = (
    (False, False, (5, 60)),
    (False, False, (50, 0, 20)),
    (False, False, (205,)),
    (False, False, (5,)),
)
"""Text alone, of 5 to 205 labels a micro-batch; one caption is empty."""

WORDS: tuple[Plan, ...] = ((False, False, (40,)), (False, False, (5, 30))) * 4
"""No rank has a picture or a clip."""


def pick_group(config: RunConfig, image: bool, audio: bool, number: int = 0) -> Group:
    """The `number`-th group of a modality set, counted round and round."""
    fit = [g for g in groups(config.data) if bool(g.bucket) == image and bool(g.clip_samples) == audio]
    return fit[number % len(fit)]


def global_batch(config: RunConfig, plans: Sequence[Plan], seed: int) -> list[MicroBatch]:
    """One micro-batch for each plan, with losses scaled by the labels of all of them."""
    random = torch.Generator().manual_seed(seed)
    labels = sum(sum(captions) for *_, captions in plans)
    scale = torch.tensor(loss_scale(len(plans), labels))
    packs = [
        pack(config, pick_group(config, image, audio, seed + i), captions, random)
        for i, (image, audio, captions) in enumerate(plans)
    ]
    return [(inputs, (labels_T, scale)) for inputs, labels_T in packs]


def global_batch_apart(config: RunConfig, plans: Sequence[Plan], seed: int) -> list[MicroBatch]:
    """The samples of `global_batch`, each in a micro-batch of its own, with losses scaled by the labels of all."""
    held = zip(plans, global_batch(config, plans, seed), strict=True)
    rows = []
    for i, ((image, audio, captions), (inputs, (labels_T, _))) in enumerate(held):
        group = pick_group(config, image, audio, seed + i)
        rows += [padded(group, inputs, labels_T, sample) for sample in range(len(captions))]
    scale = torch.tensor(loss_scale(len(rows), sum(sum(captions) for *_, captions in plans)))
    return [(inputs, (labels_T, scale)) for inputs, labels_T in rows]


def pack(config: RunConfig, group: Group, captions: Sequence[int], random: torch.Generator) -> tuple[Inputs, Tensor]:
    """Inputs and labels of one pack of `group`: each sample is its image tokens, its clip tokens, its caption."""
    assert len(captions) <= group.samples
    rows = {name: torch.zeros(group.tokens, dtype=torch.int32) for name in ("tokens", "positions", "segments")}
    labels = torch.full((group.tokens,), IGNORE, dtype=torch.int32)
    features = torch.full((group.tokens,), -1, dtype=torch.int32)
    bounds, at = [0], 0
    for i, caption in enumerate(captions):
        prefix = group.image_tokens + group.clip_tokens
        length = prefix + caption + 1
        place = slice(at, at + length)
        text = torch.randint(0, 256, (length,), generator=random, dtype=torch.int32)
        rows["tokens"][place], rows["segments"][place] = text, i + 1
        rows["positions"][place] = torch.arange(length, dtype=torch.int32)
        labels[at + prefix : at + prefix + caption] = text[prefix + 1 :]
        features[at : at + prefix] = feature_rows(group, i)
        at += length
        bounds.append(at)
    bounds += [group.tokens] * (group.samples + 2 - len(bounds))
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    media = images(config, group, random), *clips(config, group, len(captions), random)
    return (rows["tokens"], rows["positions"], rows["segments"], features, cu_seqlens, *media), labels


def padded(group: Group, inputs: Inputs, labels: Tensor, sample: int) -> tuple[Inputs, Tensor]:
    """One sample of a pack alone in a pack of the same shapes."""
    tokens, positions, segments, features, cu_seqlens, patches, mels, lengths = inputs
    at = segments == sample + 1
    length = int(at.sum())
    fill = (0, 0, 0, -1, IGNORE)
    rows = [
        torch.full_like(x, value)
        for x, value in zip((tokens, positions, segments, features, labels), fill, strict=True)
    ]
    for row, whole in zip(rows, (tokens, positions, at.int(), features, labels), strict=True):
        row[:length] = whole[at]
    held = feature_rows(group, 0)
    rows[3][: len(held)] = held
    bounds = torch.full_like(cu_seqlens, group.tokens)
    bounds[0], bounds[1] = 0, length
    media = [torch.zeros_like(x) for x in (patches, mels, lengths)]
    for one, many in zip(media, (patches, mels, lengths), strict=True):
        one[:1] = many[sample : sample + 1]
    return (*rows[:4], bounds, *media), rows[4]  # type: ignore[return-value]


def feature_rows(group: Group, sample: int) -> Tensor:
    """Rows of [image tokens; clip tokens] that belong to the `sample`-th sample."""
    image = torch.arange(group.image_tokens) + sample * group.image_tokens
    clip = torch.arange(group.clip_tokens) + group.images * group.image_tokens + sample * group.clip_tokens
    return torch.cat([image, clip]).to(torch.int32)


def images(config: RunConfig, group: Group, random: torch.Generator) -> Tensor:
    """[N, h, w, P] patches."""
    patch = config.data.image.patch
    height, width = (group.bucket.height, group.bucket.width) if group.bucket else (0, 0)
    return torch.randn(group.images, height // patch, width // patch, 3 * patch**2, generator=random)


def clips(config: RunConfig, group: Group, full: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """[M, mels, F] frames and their true number: of the first `full` clips the odd ones are half length."""
    frames = group.clip_samples // config.model.audio.hop
    mels = torch.randn(group.clips, config.model.audio.mels, frames, generator=random)
    lengths = torch.tensor([0 if i >= full else frames // (1 + i % 2) for i in range(group.clips)], dtype=torch.int32)
    return mels, lengths
