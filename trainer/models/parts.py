"""Which part of the model a parameter belongs to, by its name, and which parts are trained."""

from collections.abc import Collection
from typing import cast

from torch import Tensor, nn

from shared.sections import ModelPart

EMBEDDING = "0.embedding.weight"
"""The token embedding; a tied head is named so too."""


def part_of(name: str, depth: int) -> ModelPart:
    """The part of a parameter named as in the whole model, whose decoder has `depth` layers.

    >>> part_of("0.audio.stem.weight", 4), part_of("4.q.weight", 4), part_of("5.norm.weight", 4)
    ('audio', 'decoder', 'head')
    >>> part_of("4.cross.q.weight", 4)
    'cross_attention'
    """
    place, inner, *_ = name.split(".")
    if place == "0":
        return cast(ModelPart, inner)
    if inner == "cross":
        return "cross_attention"
    return "head" if int(place) > depth else "decoder"


def is_tied_copy(parameter: Tensor) -> bool:
    """Whether the parameter is a copy of the embedding's, which another pipeline stage steps and saves."""
    return bool(getattr(parameter, "tied_copy", False))


def freeze(model: nn.Module, parts: Collection[ModelPart], depth: int) -> None:
    """No parameter of `parts` gets a gradient from here on; `model` is whole or a pipeline's stage."""
    for name, parameter in model.named_parameters():
        if part_of(name, depth) in parts:
            parameter.requires_grad_(False)
