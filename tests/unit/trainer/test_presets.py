"""The shipped sizes have as many weights as the published models they name, and their meshes hold them.

Counts come from the architectures' formulas with the published dimensions, written down here apart from the run files;
`PUBLISHED` holds the formulas themselves to the counts on the models' cards. Nothing is allocated.
"""

from itertools import pairwise

import pytest
import torch

from shared.config import load
from shared.sections import RunConfig
from tests.support.ranks import ROOT
from trainer.models import build
from trainer.parallel import expert, tensor
from trainer.pipeline import bounds_of

FOLDER = ROOT / "deploy" / "configs"


def clip(dim: int, depth: int, mlp: int, patch: int, side: int) -> int:
    """Radford et al. 2021: no bias on the patches, a class token, norms before and after the blocks."""
    places = (side // patch) ** 2 + 1
    return 3 * patch**2 * dim + dim + places * dim + 4 * dim + depth * encoder_block(dim, mlp)


def siglip(dim: int, depth: int, mlp: int, patch: int, side: int) -> int:
    """Zhai et al. 2023, without the pooling head that follows the last norm."""
    return (3 * patch**2 + 1) * dim + (side // patch) ** 2 * dim + depth * encoder_block(dim, mlp) + 2 * dim


def siglip_head(dim: int, mlp: int) -> int:
    """The attention pooling head: a probe, four projections, a norm, an MLP."""
    return dim + 4 * (dim + 1) * dim + 2 * dim + (dim + 1) * mlp + (mlp + 1) * dim


def whisper(dim: int, depth: int, mels: int = 80) -> int:
    """Radford et al. 2022, the encoder without its table of sines; inner width is 4 x dim, keys have no bias."""
    return (3 * mels + 1) * dim + (3 * dim + 1) * dim + depth * (encoder_block(dim, 4 * dim) - dim) + 2 * dim


def encoder_block(dim: int, mlp: int) -> int:
    """Two norms, four projections and an MLP, all with biases."""
    return 4 * dim + 4 * (dim + 1) * dim + (dim + 1) * mlp + (mlp + 1) * dim


def llama(vocab: int, dim: int, depth: int, mlp: int, keys: int, bias: bool = False, tied: bool = False) -> int:
    """Touvron et al. 2023; `keys` is the width of keys and values, `bias` Qwen2's of queries, keys and values."""
    mixing = 2 * dim * dim + 2 * dim * keys + bias * (dim + 2 * keys)
    return (1 if tied else 2) * vocab * dim + depth * (mixing + 3 * dim * mlp + 2 * dim) + dim


def mixtral(vocab: int, dim: int, depth: int, mlp: int, keys: int, experts: int) -> int:
    """Jiang et al. 2024: `experts` networks in each block, and a router."""
    return llama(vocab, dim, depth, mlp, keys) + depth * ((experts - 1) * 3 * dim * mlp + experts * dim)


def projectors(seen: int, heard: int, dim: int) -> int:
    """Ours: two Linears from each encoder's features to the decoder's width."""
    return (seen + 1) * dim + (heard + 1) * dim + 2 * (dim + 1) * dim


QWEN_HALF = llama(151_936, 896, 24, 4864, 128, bias=True, tied=True)
QWEN_3B = llama(151_936, 2048, 36, 11_008, 256, bias=True, tied=True)
QWEN_110B = llama(152_064, 8192, 80, 49_152, 1024, bias=True)
LLAMA_8B = llama(128_256, 4096, 32, 14_336, 1024)
MIXTRAL = mixtral(32_000, 4096, 32, 14_336, 1024, 8)
SO400M = siglip(1152, 27, 4304, 14, 384)
PUBLISHED = {
    "openai/clip-vit-base-patch16": (clip(768, 12, 3072, 16, 224), 85_799_424),
    "openai/clip-vit-large-patch14-336": (clip(1024, 24, 4096, 14, 336), 303_507_456),
    "google/siglip-so400m-patch14-384": (SO400M + siglip_head(1152, 4304), 428_225_600),
    "openai/whisper-small, encoder": (whisper(768, 12) + 1500 * 768, 88_154_112),
    "Qwen/Qwen2.5-0.5B": (QWEN_HALF, 494_032_768),
    "Qwen/Qwen2.5-3B": (QWEN_3B, 3_085_938_688),
    "Qwen/Qwen1.5-110B": (QWEN_110B, 111_209_914_368),
    "meta-llama/Meta-Llama-3-8B": (LLAMA_8B, 8_030_261_248),
    "mistralai/Mixtral-8x7B-v0.1": (MIXTRAL, 46_702_792_704),
}
PRESETS = {
    "clip-b-whisper-base-500m": clip(768, 12, 3072, 16, 224)
    + whisper(512, 6)
    + 6 * 512
    + QWEN_HALF
    + projectors(4 * 768, 10 * 512, 896),
    "clip-l-whisper-small-3b": clip(1024, 24, 4096, 14, 336)
    + whisper(768, 12)
    + 12 * 768
    + QWEN_3B
    + projectors(4 * 1024, 10 * 768, 2048),
    "siglip-whisper-medium-8b": SO400M
    + whisper(1024, 24)
    + 24 * 1024
    + LLAMA_8B
    + projectors(9 * 1152, 10 * 1024, 4096),
    "siglip-whisper-medium-8x7b": SO400M
    + whisper(1024, 24)
    + 24 * 1024
    + MIXTRAL
    + projectors(9 * 1152, 10 * 1024, 4096),
    "siglip-whisper-large-110b": SO400M
    + whisper(1280, 32, mels=128)
    + 32 * 1280
    + QWEN_110B
    + projectors(9 * 1152, 10 * 1280, 8192),
}
"""Weights by formula; our audio encoder keeps a bias of its keys, which is zero and never trained in Whisper's form."""

DEVICE_GB = {"clip-b-whisper-base-500m": 24, "clip-l-whisper-small-3b": 141}
LEFT = 0.15
"""Of a device's memory at least this share must be left for activations."""


@pytest.mark.parametrize("model", PUBLISHED)
def test_the_formulas_give_the_published_counts(model: str) -> None:
    assert PUBLISHED[model][0] == PUBLISHED[model][1]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_has_the_weights_of_the_models_it_names_and_says_so(preset: str) -> None:
    path = FOLDER / f"{preset}.yaml"
    config = load(path)
    assert sum(shape.numel() for shape in build.shapes(config).values()) - table(config) == PRESETS[preset]
    assert f"{PRESETS[preset]:,}" in path.read_text()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_presets_mesh_holds_it_with_room_for_activations(preset: str) -> None:
    path = FOLDER / f"{preset}.yaml"
    config = load(path)
    held_gb, device_gb = max(stage_bytes(config)) / 1e9, DEVICE_GB.get(preset, 80)
    world = config.mesh.pipe * config.mesh.data * config.mesh.tensor
    assert held_gb < (1 - LEFT) * device_gb
    devices = f"{world} devices" if world > 1 else "One device"
    assert f"{devices} of {device_gb} GB" in path.read_text() and f"{held_gb:.0f} GB of" in path.read_text()


@pytest.mark.parametrize(("preset", "most"), [("debug", 1_000_000), ("debug-moe", 1_100_000)])
def test_the_smallest_are_small(preset: str, most: int) -> None:
    assert sum(build.parameter_counts(load(FOLDER / f"{preset}.yaml"))) < most


def table(config: RunConfig) -> int:
    """Numbers of the audio encoder's table of positions, which is no parameter."""
    return config.model.audio.places * config.model.audio.dim


def stage_bytes(config: RunConfig) -> list[int]:
    """What a rank of each stage holds in bf16 with ZeRO-1: weights (2), gradients (4), its share of AdamW's 12."""
    counts = build.parameter_counts(config)
    bounds = bounds_of(config, counts) if config.mesh.pipe > 1 else [0, len(counts)]
    layers = build.layers(config, "sdpa")
    return [sum(layer_bytes(config, place, layers[place]) for place in range(*pair)) for pair in pairwise(bounds)]


def layer_bytes(config: RunConfig, place: int, layer: build.Layer) -> int:
    mesh, total = config.mesh, 0
    with torch.device("meta"):
        named = [(f"{place}.{name}", parameter.numel()) for name, parameter in layer.build().named_parameters()]
    for name, count in named:
        mixed = expert.cut_dim(name) is not None
        tied = config.model.decoder.tied and name.endswith("vocabulary.weight")
        held = count // (mesh.expert if mixed else mesh.tensor if tensor.cut_dim(name) is not None else 1)
        total += 0 if tied else held * 6 + held * 12 // (mesh.data // (mesh.expert if mixed else 1))
    return total
