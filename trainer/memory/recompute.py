"""Recomputation of activations (Chen et al. 2016) as a table applied to a model that was built without it.

A chosen block keeps its inputs alone and runs again in the backward pass, non-reentrant, so it also works where an
input needs no gradient (the first block of an encoder) and inside a pipeline. Random states are restored for the
second run. Names of parameters do not change.
"""

from collections.abc import Collection
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from shared.sections import Blocks, RunConfig


def chosen(blocks: Blocks, depth: int) -> range:
    """The blocks meant, of `depth`: all, the first n, or the last n for -n.

    >>> list(chosen(2, 5)), list(chosen(-2, 5)), list(chosen("all", 2))
    ([0, 1], [3, 4], [0, 1])
    """
    if blocks == "all":
        return range(depth)
    return range(blocks) if blocks >= 0 else range(depth + blocks, depth)


def recomputed_modules(config: RunConfig) -> list[str]:
    """Paths of the modules that `train.recompute` chooses, as in the whole model."""
    section, model = config.train.recompute, config.model
    whole = chosen(section.decoder, model.decoder.depth)
    return [
        *(f"0.vision.blocks.{i}" for i in chosen(section.vision, model.vision.depth)),
        *(f"0.audio.blocks.{i}" for i in chosen(section.audio, model.audio.depth)),
        *(["0.vision_projector", "0.audio_projector"] if section.projectors else []),
        *(f"{i + 1}.cross" for i in model.decoder.cross_blocks if section.cross_attention and i not in whole),
        *(str(i + 1) for i in whole),
    ]


def recompute(model: nn.Module, paths: Collection[str]) -> None:
    """Make these modules recompute, in place; `model` is whole or a pipeline's stage, which holds only some of them."""
    for path, part in model.named_modules():
        if path in paths:
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)
