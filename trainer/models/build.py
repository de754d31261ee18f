"""Run file -> layers. `layers` is data (what to construct, in order); `Stack` is the model on one device."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shared.sections import RunConfig
from trainer.models.attention import Backend
from trainer.models.decoder import DecoderBlock, Head
from trainer.models.fusion import Encode


class Layer(msgspec.Struct, frozen=True):
    """One layer not yet built: its class and arguments."""

    kind: type[nn.Module]
    args: tuple[Any, ...]

    def build(self) -> nn.Module:
        """Construct it, with weights from torch's current random state."""
        return self.kind(*self.args)


class Stack(nn.Module):
    """Layers run in order; parameters are named `<place>.<name in the layer>` in every layout."""

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.places = [str(place) for place in range(len(parts))]
        for place, part in zip(self.places, parts, strict=True):
            self.add_module(place, part)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """`Inputs` of one micro-batch -> logits [T, V]."""
        state: Any = inputs
        for place in self.places:
            state = getattr(self, place)(state)
        logits: Tensor = state
        return logits


def layers(config: RunConfig, backend: Backend) -> list[Layer]:
    """Encode, the decoder's blocks, Head."""
    decoder = config.model.decoder
    blocks = [Layer(DecoderBlock, (decoder, backend))] * decoder.depth
    return [Layer(Encode, (config.model, config.data, backend)), *blocks, Layer(Head, (decoder,))]


def head_sizes(config: RunConfig) -> tuple[int, ...]:
    """Attention head sizes that occur, for `choose_backend`."""
    return tuple(part.dim // part.heads for part in (config.model.vision, config.model.audio, config.model.decoder))


def build(config: RunConfig, backend: Backend, seed_layer: Callable[[int], Any] = torch.manual_seed) -> Stack:
    """The model, with layer i's weights drawn after `seed_layer(train.seed + i)`, as a pipeline does it."""
    parts = []
    for place, layer in enumerate(layers(config, backend)):
        seed_layer(config.train.seed + place)
        parts.append(layer.build())
    return Stack(parts)


def parameter_counts(config: RunConfig) -> list[int]:
    """Parameters of each layer, counted without allocating them."""
    with torch.device("meta"):
        return [sum(p.numel() for p in layer.build().parameters()) for layer in layers(config, "sdpa")]
