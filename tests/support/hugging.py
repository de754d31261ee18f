"""Tiny random models of `transformers`, built from configs, none downloaded, and run files that fit them."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shared.sections import RunConfig
from tests.support.runs import run_config
from trainer.audio_frontend import import_torchaudio

import_torchaudio()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
    from transformers.core_model_loading import revert_weight_conversion
transformers.utils.logging.disable_progress_bar()

PATCH = 8
WIDE: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
IMAGE: dict[str, Any] = {**WIDE, "image_size": 32, "patch_size": PATCH}
TEXT: dict[str, Any] = {**WIDE, "vocab_size": 300, "num_key_value_heads": 2}
WHISPER: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_layers": 1,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "vocab_size": 100,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "clip": ("CLIPVisionModel", "CLIPVisionConfig", IMAGE),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", IMAGE),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "head_dim": 16}),
    "llama-tied": ("LlamaForCausalLM", "LlamaConfig", {**TEXT, "tie_word_embeddings": True}),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**TEXT, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_theta": 20_000.0},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", TEXT),
    "qwen2-tied": ("Qwen2ForCausalLM", "Qwen2Config", {**TEXT, "tie_word_embeddings": True}),
}
"""Name -> class, config class, config."""

RUN: dict[str, Any] = {
    "data": {"image": {"patch": PATCH, "pixel_budget": 1024, "buckets": [[32, 32], [16, 48]]}},
    "model": {
        "vision": {
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "mlp": 48,
            "grid": 4,
            "class_token": True,
            "pre_norm": True,
            "patch_bias": False,
            "activation": "quick_gelu",
        },
        "audio": {"dim": 32, "depth": 2, "heads": 4, "mlp": 48, "positions": "table", "key_bias": False},
        "decoder": {
            "vocab": 300,
            "dim": 32,
            "depth": 2,
            "heads": 4,
            "kv_heads": 2,
            "mlp": 48,
            "norm_eps": 1e-6,
            "qkv_bias": True,
            "tied": True,
        },
    },
}
"""A run file's sections that fit `clip`, `whisper` and `qwen2-tied`."""


def hf_model(name: str, seed: int = 0) -> nn.Module:
    """A model of MODELS; every weight is random, norms and biases too."""
    kind, config, values = MODELS[name]
    model: nn.Module = getattr(transformers, kind)(getattr(transformers, config)(**values)).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    return model


def stored_names(model: Any) -> dict[str, Tensor]:
    """A model's weights by the names that its files have, which for some families are not those in memory."""
    found: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    return found


def saved(name: str, folder: Path, **options: Any) -> nn.Module:
    """`hf_model`, also saved in `folder` as transformers does it."""
    model: Any = hf_model(name)
    model.save_pretrained(folder, **options)
    return model


def fitting_run(folder: Path, **train: Any) -> RunConfig:
    """RUN as a loaded run file."""
    return run_config(folder, "part-{0..0}.tar", **RUN, train=train)
