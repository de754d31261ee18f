"""Run file -> layers. `layers` is data (what to construct, in order); `Stack` is the model on one device."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from shared.batch import clip_classes
from shared.errors import ConfigError
from shared.sections import RunConfig
from trainer.models.attention import Backend
from trainer.models.decoder import DecoderBlock, Head
from trainer.models.fusion import Encode
from trainer.models.moe import ExpertBlock


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
    """Encode, the decoder's blocks, Head.

    Raises:
        ConfigError: the model cannot be laid out like this.
    """
    check(config)
    decoder, places = config.model.decoder, config.data.batch.tokens
    kinds = [ExpertBlock if block in decoder.expert_blocks else DecoderBlock for block in range(decoder.depth)]
    blocks = [
        Layer(kind, (decoder, backend, places, block in decoder.cross_blocks)) for block, kind in enumerate(kinds)
    ]
    return [Layer(Encode, (config.model, config.data, backend)), *blocks, Layer(Head, (decoder,))]


def check(config: RunConfig) -> None:
    """Refuse clips longer than the table of positions.

    Raises:
        ConfigError: there are some.
    """
    audio = config.model.audio
    need = max(clip_classes(config.data.audio), default=0) // (2 * audio.hop)
    if audio.positions == "table" and need > audio.places:
        rule = f"must be at least {need}, the places of the longest of data.audio.classes_s"
        raise ConfigError("model.audio.places", audio.places, rule, "drop the longest class")


def head_sizes(config: RunConfig) -> tuple[int, ...]:
    """Attention head sizes that occur, for `choose_backend`."""
    vision, audio, decoder = config.model.vision, config.model.audio, config.model.decoder
    return vision.dim // vision.heads, audio.dim // audio.heads, decoder.head_size


def build(config: RunConfig, backend: Backend, seed_layer: Callable[[int], Any] = torch.manual_seed) -> Stack:
    """The model, with layer i's weights drawn after `seed_layer(train.seed + i)`, as a pipeline does it."""
    parts = []
    for place, layer in enumerate(layers(config, backend)):
        seed_layer(config.train.seed + place)
        parts.append(layer.build())
    stack = Stack(parts)
    if config.model.decoder.tied:
        tie(stack)
    return stack


def tie(model: nn.Module) -> None:
    """Let the head's vocabulary be the embedding's weight; it is then named as the embedding's alone."""
    embedding, vocabulary = ends(model)
    assert embedding is not None and vocabulary is not None
    vocabulary.weight = embedding.weight


def ends(model: nn.Module) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """The token embedding and the head's projection to the vocabulary, where the model, or a stage of it, has them."""
    parts = list(model.children())
    embedding = next((part.embedding for part in parts if isinstance(part, Encode)), None)
    return embedding, next((part.vocabulary for part in parts if isinstance(part, Head)), None)


def shapes(config: RunConfig) -> dict[str, torch.Size]:
    """Name and shape of every weight of the whole model, buffers included, a tied head left out; nothing is built."""
    with torch.device("meta"):
        built = [layer.build().state_dict() for layer in layers(config, "sdpa")]
    named = {f"{place}.{name}": tensor.shape for place, part in enumerate(built) for name, tensor in part.items()}
    if config.model.decoder.tied:
        del named[f"{len(built) - 1}.vocabulary.weight"]
    return named


def parameter_counts(config: RunConfig) -> list[int]:
    """Parameters of each layer, counted without allocating them; a tied head counts its vocabulary too."""
    with torch.device("meta"):
        return [sum(p.numel() for p in layer.build().parameters()) for layer in layers(config, "sdpa")]


def active_parameter_count(config: RunConfig) -> int:
    """Parameters that one token passes through: all but those of the experts that it is not sent to."""
    decoder = config.model.decoder
    idle = (decoder.experts - decoder.experts_per_token) * 3 * decoder.dim * decoder.expert_size
    return sum(parameter_counts(config)) - idle * len(decoder.expert_blocks)
