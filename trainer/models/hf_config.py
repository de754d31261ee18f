"""`config.json` of `transformers` <-> our model sections. What this model cannot compute is refused by name.

A key that the file leaves out has the family's default, as in `transformers`.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.model_sections import Activation, AudioEncoderSection, DecoderSection, VisionSection
from trainer.models.hf import FAMILIES, FamilyName, Part, PartSection

Json = Mapping[str, Any]

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "quick_gelu": "quick_gelu"}
SECTIONS: dict[Part, type[PartSection]] = {
    "vision": VisionSection,
    "audio": AudioEncoderSection,
    "decoder": DecoderSection,
}


class Form(msgspec.Struct, frozen=True):
    """How a family's config is read.

    fields: our field -> (their key, their default). fixed: our fields that the family decides. required: keys and the
    only value of each that this model computes. activation: their key and default.
    """

    fields: dict[str, tuple[str, Any]]
    fixed: dict[str, Any]
    required: dict[str, Any]
    activation: tuple[str, str]
    architecture: str


def _vision(eps: float) -> dict[str, tuple[str, Any]]:
    return {
        "dim": ("hidden_size", 768),
        "depth": ("num_hidden_layers", 12),
        "heads": ("num_attention_heads", 12),
        "mlp": ("intermediate_size", 3072),
        "norm_eps": ("layer_norm_eps", eps),
    }


def _decoder(vocab: int, mlp: int, kv_heads: int | None) -> dict[str, tuple[str, Any]]:
    return {
        "vocab": ("vocab_size", vocab),
        "dim": ("hidden_size", 4096),
        "depth": ("num_hidden_layers", 32),
        "heads": ("num_attention_heads", 32),
        "kv_heads": ("num_key_value_heads", kv_heads),
        "mlp": ("intermediate_size", mlp),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "tied": ("tie_word_embeddings", False),
    }


AUDIO = {
    "dim": ("d_model", 384),
    "depth": ("encoder_layers", 4),
    "heads": ("encoder_attention_heads", 6),
    "mlp": ("encoder_ffn_dim", 1536),
    "mels": ("num_mel_bins", 80),
    "places": ("max_source_positions", 1500),
}
CLIP = {"class_token": True, "pre_norm": True, "patch_bias": False, "pixels": "clip"}
SIGLIP = {"class_token": False, "pre_norm": False, "patch_bias": True, "pixels": "half"}
WHISPER = {"positions": "table", "key_bias": False}
IMAGES = {"num_channels": 3}
LLAMA = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1}
SLIDING = {"use_sliding_window": False}
ROUTED = {
    "experts": ("num_local_experts", 8),
    "experts_per_token": ("num_experts_per_tok", 2),
    "norm_eps": ("rms_norm_eps", 1e-5),
}
MIXTRAL = {"qkv_bias": False, "expert_every": 1, "expert_mlp": 0, "capacity_factor": 0.0}
UNROUTED = {"sliding_window": None, "router_jitter_noise": 0.0}
SILU = ("hidden_act", "silu")
THETAS = {"mixtral": 1e6}
FORMS: dict[FamilyName, Form] = {
    "clip": Form(_vision(1e-5), CLIP, IMAGES, ("hidden_act", "quick_gelu"), "CLIPVisionModel"),
    "siglip": Form(_vision(1e-6), SIGLIP, IMAGES, ("hidden_act", "gelu_pytorch_tanh"), "SiglipVisionModel"),
    "whisper": Form(AUDIO, WHISPER, {"scale_embedding": False}, ("activation_function", "gelu"), "WhisperModel"),
    "llama": Form(_decoder(32_000, 11_008, None), {"qkv_bias": False, "experts": 0}, LLAMA, SILU, "LlamaForCausalLM"),
    "qwen2": Form(_decoder(151_936, 22_016, 32), {"qkv_bias": True, "experts": 0}, SLIDING, SILU, "Qwen2ForCausalLM"),
    "mixtral": Form(_decoder(32_000, 14_336, 8) | ROUTED, MIXTRAL, UNROUTED, SILU, "MixtralForCausalLM"),
}
MODEL_TYPES: dict[str, FamilyName] = {
    "clip": "clip",
    "clip_vision_model": "clip",
    "siglip": "siglip",
    "siglip_vision_model": "siglip",
    "whisper": "whisper",
    "llama": "llama",
    "qwen2": "qwen2",
    "mixtral": "mixtral",
}
GRIDS: dict[str, tuple[int, int]] = {"clip": (224, 32), "siglip": (224, 16)}


def family_from_hf(config: Json) -> FamilyName:
    """The family of a config.json.

    Raises:
        ConfigError: it is none of ours.
    """
    kind = config.get("model_type", "")
    if kind not in MODEL_TYPES:
        rule = f"is not one of {', '.join(MODEL_TYPES)}"
        raise ConfigError("model_type", kind or "not set", rule, "give a checkpoint of one of these")
    return MODEL_TYPES[kind]


def section_from_hf(config: Json) -> PartSection:
    """The section of a config.json; fields it says nothing of (hop, n_fft, ...) keep our defaults.

    Raises:
        ConfigError: it asks for what this model cannot compute.
    """
    family = family_from_hf(config)
    form, config = FORMS[family], _own(config)
    _check_required(form, config)
    values = {name: config.get(key, default) for name, (key, default) in form.fields.items()} | form.fixed
    kind = SECTIONS[FAMILIES[family].part]
    if kind is DecoderSection:
        values |= _decoder_values(config, values, THETAS.get(family, 10_000.0))
    else:
        values["activation"] = _activation(*form.activation, config)
    if kind is VisionSection:
        values["grid"] = _grid(family, config)
    return msgspec.convert(values, kind)


def patch_from_hf(config: Json) -> int:
    """Side of a vision family's patches, in pixels."""
    return int(_own(config).get("patch_size", GRIDS[family_from_hf(config)][1]))


def decided_fields(family: FamilyName) -> tuple[str, ...]:
    """Fields of our section that a config.json of the family decides."""
    extra = {"vision": ("activation", "grid"), "audio": ("activation",), "decoder": ("rope_theta", "head_dim")}
    return (*FORMS[family].fields, *FORMS[family].fixed, *extra[FAMILIES[family].part])


def family_of(section: PartSection) -> FamilyName:
    """The family that can hold a part of this section.

    Raises:
        ConfigError: there is none.
    """
    if isinstance(section, AudioEncoderSection):
        return "whisper"
    if isinstance(section, DecoderSection):
        return _decoder_family(section)
    if section.pre_norm != section.class_token or section.patch_bias == section.class_token:
        rule = "can be exported only with pre_norm the same and patch_bias the opposite (CLIP's form, or SigLIP's)"
        raise ConfigError("model.vision.class_token", section.class_token, rule, "train one of these forms")
    return "clip" if section.class_token else "siglip"


def config_to_hf(section: PartSection, patch: int, tokens: int) -> dict[str, Any]:
    """A config.json for the section. `patch`: side in pixels, for vision; `tokens`: the longest sequence trained on.

    Raises:
        ConfigError: no family can hold the section.
    """
    family = family_of(section)
    form = FORMS[family]
    found: dict[str, Any] = {"model_type": family, "architectures": [form.architecture], "dtype": "float32"}
    found |= form.required | {key: getattr(section, name) for name, (key, _) in form.fields.items()}
    if isinstance(section, DecoderSection):
        theta = section.rope_theta
        rope = {"rope_type": "default", "rope_theta": theta}
        found |= {"hidden_act": "silu", "rope_theta": theta, "rope_parameters": rope, "max_position_embeddings": tokens}
        return found | ({} if family == "qwen2" else {"head_dim": section.head_size})
    found[form.activation[0]] = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[section.activation]
    if isinstance(section, VisionSection):
        found |= {"model_type": f"{family}_vision_model", "image_size": section.grid * patch, "patch_size": patch}
        return found | ({"vision_use_head": False} if family == "siglip" else {})
    return found | {"decoder_layers": 0, "decoder_attention_heads": section.heads, "decoder_ffn_dim": section.mlp}


def _decoder_family(section: DecoderSection) -> FamilyName:
    if section.experts:
        _check_mixtral(section)
        return "mixtral"
    if section.qkv_bias and section.head_size * section.heads != section.dim:
        rule = "cannot be exported together with qkv_bias: Qwen2's head size is dim / heads"
        raise ConfigError("model.decoder.head_dim", section.head_dim, rule, "train without one of both")
    return "qwen2" if section.qkv_bias else "llama"


def _check_mixtral(section: DecoderSection) -> None:
    for name, value in MIXTRAL.items():
        if getattr(section, name) != value:
            rule = f"cannot be exported together with experts: Mixtral's form has {value}"
            raise ConfigError(f"model.decoder.{name}", getattr(section, name), rule, f"train with {value}")
    if section.experts_per_token == 1:
        rule = "cannot be exported: Mixtral weighs a single expert by 1, this model by its probability"
        raise ConfigError("model.decoder.experts_per_token", 1, rule, "train with 2 or more")


def _own(config: Json) -> Json:
    """The vision half of a config of two towers, with the model type of the whole."""
    if config.get("model_type") not in ("clip", "siglip"):
        return config
    return {**config.get("vision_config", {}), "model_type": config["model_type"]}


def _check_required(form: Form, config: Json) -> None:
    for key, value in (form.required | {"quantization_config": None}).items():
        found = config.get(key, value)
        if found != value:
            raise ConfigError(key, found, f"is not supported: only {value} is", "give another checkpoint")


def _activation(key: str, default: str, config: Json) -> Activation:
    name = config.get(key, default)
    if name not in ACTIVATIONS:
        raise ConfigError(key, name, f"is not one of {', '.join(ACTIVATIONS)}", "give another checkpoint")
    return ACTIVATIONS[name]


def _grid(family: FamilyName, config: Json) -> int:
    image, patch = GRIDS[family]
    return int(config.get("image_size", image)) // int(config.get("patch_size", patch))


def _decoder_values(config: Json, values: dict[str, Any], base: float) -> dict[str, Any]:
    """Heads, head size and rotary base, after refusing other attention, rotary and routing variants."""
    if values["experts"] and values["experts_per_token"] == 1:
        rule = "is not supported: Mixtral weighs a single expert by 1, this model by its probability"
        raise ConfigError("num_experts_per_tok", 1, rule, "give another checkpoint")
    if config.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            "hidden_act", config["hidden_act"], "is not supported: only silu is", "give another checkpoint"
        )
    if other := set(config.get("layer_types") or ()) - {"full_attention"}:
        raise ConfigError("layer_types", ", ".join(sorted(other)), "is not supported", "give another checkpoint")
    rope: dict[str, Any] = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ConfigError("rope_scaling", kind, "is not supported: only unscaled rotary positions are", "give another")
    share = rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share != 1.0:
        raise ConfigError("partial_rotary_factor", share, "is not supported: only 1.0 is", "give another checkpoint")
    head = config.get("head_dim") or 0
    theta = {"rope_theta": base, **config, **rope}["rope_theta"]
    usual = head * values["heads"] == values["dim"]
    kv_heads = values["kv_heads"] or values["heads"]
    return {"kv_heads": kv_heads, "head_dim": 0 if usual else head, "rope_theta": float(theta)}
