"""Weights by the names of Hugging Face `transformers` and by ours: one table for each family.

Our names are those of the whole model, `<place>.<name in the layer>`. A rule pairs some of our tensors with some of
theirs; `out` and `into` only cut, join and permute, so both ways are exact to the bit.

Invariant: every name of a part is in exactly one rule. Anything missing or left over is an error, except what the model
has no use for (text towers, pooling heads, Whisper's decoder), which a family lists as `ignored`.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, cast

import msgspec
import torch
from torch import Tensor

from shared.errors import CheckpointError
from shared.model_sections import AudioEncoderSection, DecoderSection, VisionSection
from trainer.models.audio import sinusoids

FamilyName = Literal["clip", "siglip", "whisper", "llama", "qwen2", "mixtral"]
Part = Literal["vision", "audio", "decoder"]
PartSection = VisionSection | AudioEncoderSection | DecoderSection
Reshape = Callable[[Sequence[Tensor]], list[Tensor]]


class Rule(msgspec.Struct, frozen=True):
    """Tensors that belong together: `out` makes theirs of ours, `into` ours of theirs."""

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    out: Reshape = list
    into: Reshape = list


class Family(msgspec.Struct, frozen=True):
    """The part it is, the prefix that we write (any of `prefixes` is read), and names that are passed over."""

    part: Part
    prefix: str
    prefixes: str
    ignored: str


VISION_IGNORED = r"text_model\..*|.*_projection\.weight|logit_scale|logit_bias|embeddings\.position_ids|head\..*"
DECODER_IGNORED = r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
FAMILIES: dict[FamilyName, Family] = {
    "clip": Family("vision", "vision_model.", r"vision_model\.", VISION_IGNORED),
    "siglip": Family("vision", "vision_model.", r"vision_model\.", VISION_IGNORED),
    "whisper": Family("audio", "model.encoder.", r"(model\.)?encoder\.", r"(model\.)?decoder\..*|proj_out\.weight"),
    "llama": Family("decoder", "model.", r"model\.", DECODER_IGNORED),
    "qwen2": Family("decoder", "model.", r"model\.", DECODER_IGNORED),
    "mixtral": Family("decoder", "model.", r"model\.", DECODER_IGNORED),
}


def to_hf(state: Mapping[str, Tensor], family: FamilyName, section: PartSection) -> dict[str, Tensor]:
    """The family's tensors from the whole model's `state`; values keep their bits.

    A trained key bias has no place in Whisper's form and is left out: attention does not depend on it.

    Raises:
        CheckpointError: the state lacks names of this part, or has more of them than the section says.
    """
    rules = rules_of(family, section)
    wanted = [name for rule in rules for name in rule.ours]
    part = FAMILIES[family].part
    _refuse(family, set(wanted) - state.keys(), {name for name in state if part_of(name) == part} - set(wanted))
    found: dict[str, Tensor] = {}
    for rule in rules:
        tensors = rule.out([state[name] for name in rule.ours])
        found |= {_full_name(family, name): x.contiguous() for name, x in zip(rule.theirs, tensors, strict=True)}
    return found


def from_hf(tensors: Mapping[str, Tensor], family: FamilyName, section: PartSection) -> dict[str, Tensor]:
    """Our tensors of one part from a `transformers` checkpoint; values keep their bits.

    Raises:
        CheckpointError: names are missing or unknown; all of them are listed.
    """
    rules = rules_of(family, section)
    theirs = {_bare_name(family, name): tensor for name, tensor in tensors.items()}
    wanted = {name for rule in rules for name in rule.theirs}
    _refuse(family, wanted - theirs.keys(), {n for n in theirs if not _ignored(family, section, n)} - wanted)
    found: dict[str, Tensor] = {}
    for rule in rules:
        made = rule.into([theirs[name] for name in rule.theirs])
        found |= {name: x.contiguous() for name, x in zip(rule.ours, made, strict=True)}
    return found


def part_of(name: str) -> Part | Literal["projectors", "cross_attention"]:
    """The part that one of our names belongs to."""
    if re.match(r"\d+\.cross\.", name):
        return "cross_attention"
    if re.match(r"0\.(vision|audio)_projector\.", name):
        return "projectors"
    match = re.match(r"0\.(vision|audio)\.", name)
    return cast(Part, match[1]) if match else "decoder"


def rules_of(family: FamilyName, section: PartSection) -> list[Rule]:
    """The family's table, written out for every layer of the section."""
    if isinstance(section, VisionSection):
        return _vision_rules(section)
    if isinstance(section, AudioEncoderSection):
        return _audio_rules(section)
    return _decoder_rules(section)


def _vision_rules(section: VisionSection) -> list[Rule]:
    ours, patch = "0.vision.", "embeddings.patch_embedding"
    rules = [Rule((f"{ours}patch.weight",), (f"{patch}.weight",), _patch_out, _patch_into)]
    rules += _same(f"{ours}norm", "post_layernorm", "weight", "bias")
    if section.patch_bias:
        rules += _same(f"{ours}patch", patch, "bias")
    if section.pre_norm:
        rules += _same(f"{ours}pre_norm", "pre_layrnorm", "weight", "bias")
    grid, table = f"{ours}positions_GGC", "embeddings.position_embedding.weight"
    if section.class_token:
        rules.append(Rule((f"{ours}class_C",), ("embeddings.class_embedding",)))
        rules.append(Rule((f"{ours}positions_class_C", grid), (table,), _class_grid_out, _class_grid_into))
    else:
        rules.append(Rule((grid,), (table,), _grid_out, _grid_into))
    names = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2", "up": "mlp.fc1", "down": "mlp.fc2"}
    for i in range(section.depth):
        rules += _encoder_block(f"{ours}blocks.{i}", f"encoder.layers.{i}", names, key_bias=True)
    return rules


def _audio_rules(section: AudioEncoderSection) -> list[Rule]:
    ours = "0.audio."
    rules = [
        rule
        for name, theirs in (("stem", "conv1"), ("stride", "conv2"), ("norm", "layer_norm"))
        for rule in _same(f"{ours}{name}", theirs, "weight", "bias")
    ]
    table = ("embed_positions.weight",)
    if section.positions == "table":
        rules.append(Rule((f"{ours}positions_LC",), table))
    else:
        made = partial(sinusoids, section.places, section.dim, torch.empty(0))
        rules.append(Rule((), table, lambda _: [made()], lambda _: []))
    names = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm", "up": "fc1", "down": "fc2"}
    for i in range(section.depth):
        rules += _encoder_block(f"{ours}blocks.{i}", f"layers.{i}", names, key_bias=False)
    return rules


def _encoder_block(ours: str, theirs: str, names: Mapping[str, str], key_bias: bool) -> list[Rule]:
    rules = _same(f"{ours}.out", f"{theirs}.self_attn.out_proj", "weight", "bias")
    for name, their in names.items():
        rules += _same(f"{ours}.{name}", f"{theirs}.{their}", "weight", "bias")
    weights, biases = (tuple(f"{theirs}.self_attn.{x}_proj.{kind}" for x in "qkv") for kind in ("weight", "bias"))
    rules.append(Rule((f"{ours}.qkv.weight",), weights, _thirds, _stacked))
    if key_bias:
        rules.append(Rule((f"{ours}.qkv.bias",), biases, _thirds, _stacked))
    else:
        rules.append(Rule((f"{ours}.qkv.bias",), biases[::2], _without_key, _with_zero_key))
    return rules


ATTENTION_NAMES = {"attention_norm": "input_layernorm", "out": "self_attn.o_proj"}
MLP_NAMES = {
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
ROUTER_NAMES = {"expert_norm": "post_attention_layernorm", "router": "block_sparse_moe.gate"}
EXPERT_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}


def _decoder_rules(section: DecoderSection) -> list[Rule]:
    last = section.depth + 1
    rules = _same("0.embedding", "embed_tokens", "weight") + _same(f"{last}.norm", "norm", "weight")
    if not section.tied:
        rules += _same(f"{last}.vocabulary", "lm_head", "weight")
    projected = ("weight", "bias") if section.qkv_bias else ("weight",)
    for i in range(section.depth):
        for name, theirs in (ATTENTION_NAMES | (ROUTER_NAMES if section.experts else MLP_NAMES)).items():
            rules += _same(f"{i + 1}.{name}", f"layers.{i}.{theirs}", "weight")
        rules += _expert_rules(f"{i + 1}.experts", f"layers.{i}.block_sparse_moe.experts", section.experts)
        for name in "qkv":
            rules += _same(f"{i + 1}.{name}", f"layers.{i}.self_attn.{name}_proj", *projected)
    return rules


def _expert_rules(ours: str, theirs: str, experts: int) -> list[Rule]:
    """[E, ...] of ours is a matrix of theirs for each expert; none without experts."""
    found = []
    for name, their in EXPERT_NAMES.items() if experts else ():
        names = tuple(f"{theirs}.{expert}.{their}.weight" for expert in range(experts))
        found.append(Rule((f"{ours}.{name}",), names, _unstacked, _piled))
    return found


def _same(ours: str, theirs: str, *kinds: str) -> list[Rule]:
    return [Rule((f"{ours}.{kind}",), (f"{theirs}.{kind}",)) for kind in kinds]


def _patch_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[C, p p 3] over (row, column, channel) -> a convolution's [C, 3, p, p]."""
    side = math.isqrt(tensors[0].shape[1] // 3)
    return [tensors[0].reshape(-1, side, side, 3).permute(0, 3, 1, 2)]


def _patch_into(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0].permute(0, 2, 3, 1).flatten(1)]


def _grid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[G, G, C] -> [G G, C]."""
    return [tensors[0].flatten(0, 1)]


def _grid_into(tensors: Sequence[Tensor]) -> list[Tensor]:
    side = math.isqrt(len(tensors[0]))
    return [tensors[0].reshape(side, side, -1)]


def _class_grid_out(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[C] of the class token and [G, G, C] -> [1 + G G, C]."""
    return [torch.cat([tensors[0][None], tensors[1].flatten(0, 1)])]


def _class_grid_into(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensors[0][0], *_grid_into([tensors[0][1:]])]


def _thirds(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(tensors[0].chunk(3))


def _stacked(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cat(list(tensors))]


def _unstacked(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(tensors[0].unbind())


def _piled(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.stack(list(tensors))]


def _without_key(tensors: Sequence[Tensor]) -> list[Tensor]:
    query, _, value = tensors[0].chunk(3)
    return [query, value]


def _with_zero_key(tensors: Sequence[Tensor]) -> list[Tensor]:
    query, value = tensors
    return [torch.cat([query, torch.zeros_like(query), value])]


def _full_name(family: FamilyName, bare: str) -> str:
    return bare if bare.startswith("lm_head.") else FAMILIES[family].prefix + bare


def _bare_name(family: FamilyName, name: str) -> str:
    return re.sub(f"^{FAMILIES[family].prefixes}", "", name)


def _ignored(family: FamilyName, section: PartSection, bare: str) -> bool:
    tied = isinstance(section, DecoderSection) and section.tied and bare == "lm_head.weight"
    return tied or re.fullmatch(FAMILIES[family].ignored, bare) is not None


def _refuse(family: FamilyName, missing: set[str], unknown: set[str]) -> None:
    texts = [
        f"{word} {', '.join(sorted(names))}" for word, names in (("lacks", missing), ("has unknown", unknown)) if names
    ]
    if texts:
        raise CheckpointError(f"the {family} checkpoint does not fit its section: it {'; it '.join(texts)}")
