"""Our towers and decoder are those of `transformers`: same outputs from the same weights, and names there and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shared.errors import CheckpointError, ConfigError
from shared.model_sections import AudioEncoderSection, DecoderSection, VisionSection
from tests.support.hugging import MODELS, PATCH, hf_model, saved, stored_names, transformers
from trainer.features import Patches
from trainer.models.audio import AudioTower
from trainer.models.build import Stack
from trainer.models.decoder import DecoderBlock, Head
from trainer.models.hf import from_hf, to_hf
from trainer.models.hf_config import config_to_hf, family_from_hf, family_of, section_from_hf
from trainer.models.moe import ExpertBlock
from trainer.models.vision import VisionTower
from trainer.weights import read_config, read_tensors, save, save_sharded

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-5}


def ours_of(model: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """The section of a transformers model, and its weights by our names without `prefix`."""
    config = model.config.to_dict()
    section = section_from_hf(config)
    state = from_hf(stored_names(model), family_from_hf(config), section)
    return section, {name.removeprefix(prefix): tensor for name, tensor in state.items()}


def patches(images_NCHW: Tensor) -> Tensor:
    n, _, height, width = images_NCHW.shape
    x = images_NCHW.permute(0, 2, 3, 1).reshape(n, height // PATCH, PATCH, width // PATCH, PATCH, 3)
    return x.transpose(2, 3).reshape(n, height // PATCH, width // PATCH, -1)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_a_vision_tower_gives_the_features_of_transformers(name: str) -> None:
    model: Any = hf_model(name)
    section, state = ours_of(model, "0.vision.")
    tower = VisionTower(section, 3 * PATCH**2, 1, "sdpa")
    tower.load_state_dict(state)
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        wanted = model(pixel_values=images).last_hidden_state
        if name == "clip":
            wanted = model.post_layernorm(wanted)[:, 1:]
        torch.testing.assert_close(tower(patches(images)), wanted, **CLOSE)


@pytest.mark.parametrize(("places", "spoken"), [(50, 100), (1500, 3000), (1500, 700)])
def test_an_audio_tower_gives_the_features_of_transformers(places: int, spoken: int) -> None:
    kind, config, values = MODELS["whisper"]
    whisper = getattr(transformers, kind)(getattr(transformers, config)(**values, max_source_positions=places)).eval()
    section, state = ours_of(whisper, "0.audio.")
    tower = AudioTower(section, 1, "sdpa")
    tower.load_state_dict(state)
    mels = torch.randn(2, 80, 2 * places)
    mels[:, :, spoken:] = -1.0
    with torch.no_grad():
        wanted = whisper.model.encoder(mels).last_hidden_state
        found = tower(mels, torch.full((2,), 2 * places))
    torch.testing.assert_close(found, wanted, **CLOSE)


def decoder_of(section: DecoderSection, state: dict[str, Tensor]) -> tuple[nn.Embedding, nn.Module]:
    kind = ExpertBlock if section.experts else DecoderBlock
    blocks: list[nn.Module] = [kind(section, "sdpa", 64) for _ in range(section.depth)]
    head = Head(section)
    embedding = nn.Embedding(section.vocab, section.dim)
    if section.tied:
        head.vocabulary.weight = embedding.weight
        state = {**state, f"{section.depth + 1}.vocabulary.weight": state["0.embedding.weight"]}
    stack = Stack([embedding, *blocks, head])
    stack.load_state_dict({name.replace("0.embedding.", "0."): tensor for name, tensor in state.items()})
    return embedding, stack


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "qwen2-tied", "mixtral"])
def test_one_pack_of_two_gives_the_logits_of_two_separate_runs(name: str) -> None:
    model: Any = hf_model(name)
    section, state = ours_of(model, "")
    embedding, stack = decoder_of(section, state)
    one, two = torch.randint(0, 300, (17,)), torch.randint(0, 300, (30,))
    positions = torch.cat([torch.arange(17), torch.arange(30)])
    segments = torch.tensor([1] * 17 + [2] * 30)
    bounds = torch.tensor([0, 17, 47], dtype=torch.int32)
    with torch.no_grad():
        passed: Any = embedding(torch.cat([one, two])), positions, segments, bounds, torch.zeros_like(segments)
        for place in stack.places[1:]:
            passed = getattr(stack, place)(passed)
        wanted = torch.cat([model(input_ids=ids[None]).logits[0] for ids in (one, two)])
    torch.testing.assert_close(passed, wanted, **CLOSE)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_weights_go_through_our_names_and_files_bit_for_bit(name: str, sharded: bool, tmp_path: Path) -> None:
    saved(name, tmp_path / "theirs", **({"max_shard_size": "20KB"} if sharded else {}))
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() is sharded
    config = read_config(tmp_path / "theirs")
    section, family, theirs = section_from_hf(config), family_from_hf(config), read_tensors(tmp_path / "theirs")
    ours = from_hf(theirs, family, section)
    save_sharded(to_hf(ours, family, section), tmp_path, 20_000 if sharded else 10**9)
    back = read_tensors(tmp_path)
    again = from_hf(back, family, section)
    assert ours.keys() == again.keys()
    assert all(torch.equal(ours[key], again[key]) for key in ours)
    bare = {key.replace("vision_model.", ""): tensor for key, tensor in back.items()}
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in bare.items())
    left = {key.removeprefix("model.").split(".")[0] for key in theirs.keys() - bare.keys()}
    assert left <= {"head", "decoder", "proj_out"}


@pytest.mark.parametrize("name", MODELS)
def test_transformers_reads_what_we_write(name: str, tmp_path: Path) -> None:
    model: Any = hf_model(name)
    section, state = ours_of(model, "")
    family = family_of(section)
    config = config_to_hf(section, PATCH, 2048)
    assert section_from_hf(config) == section
    save_sharded(to_hf(state, family, section), tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = getattr(transformers, config["architectures"][0])
    read, info = kind.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert not [key for key in info["missing_keys"] if "decoder." not in key and "lm_head" not in key]
    wanted = model.state_dict()
    for key, tensor in read.state_dict().items():
        if not key.startswith("decoder."):
            assert torch.equal(tensor, wanted[key if key in wanted else f"model.{key}"]), key


def test_a_key_bias_that_the_form_lacks_stays_zero() -> None:
    section, state = ours_of(hf_model("whisper"), "0.audio.")
    tower = AudioTower(section, 1, "sdpa")
    tower.load_state_dict(state)
    optimizer = torch.optim.AdamW(tower.parameters(), lr=0.1)
    for _ in range(3):
        tower(torch.randn(2, 80, 60), torch.tensor([60, 40])).square().sum().backward()
        optimizer.step()
    bias = tower.blocks[0].qkv.bias
    assert not bias[32:64].any()
    assert bias[:32].all()


def test_a_trained_key_bias_is_left_out_because_it_changes_nothing() -> None:
    section = AudioEncoderSection(dim=32, depth=2, heads=4, mlp=48, places=50)
    tower, mels = AudioTower(section, 1, "sdpa"), torch.randn(1, 80, 100)
    for block in tower.blocks:
        nn.init.normal_(block.qkv.bias)
    theirs = to_hf({f"0.audio.{k}": v for k, v in tower.state_dict().items()}, "whisper", section)
    without = AudioTower(section, 1, "sdpa")
    without.load_state_dict({k.removeprefix("0.audio."): v for k, v in from_hf(theirs, "whisper", section).items()})
    torch.testing.assert_close(without(mels, torch.tensor([100])), tower(mels, torch.tensor([100])), **CLOSE)


@pytest.mark.parametrize("name", ["clip", "whisper", "qwen2"])
def test_missing_and_unknown_names_are_listed(name: str) -> None:
    model: Any = hf_model(name)
    config, theirs = model.config.to_dict(), dict(model.state_dict())
    first, *_ = (key for key in theirs if ".layers.1." in key and "decoder." not in key)
    del theirs[first]
    theirs["adapter.weight"] = torch.zeros(1)
    with pytest.raises(CheckpointError, match=r"lacks .*layers\.1\..*; it has unknown adapter\.weight"):
        from_hf(theirs, family_from_hf(config), section_from_hf(config))


REFUSED = [
    ({"model_type": "gpt2"}, r"model_type \(gpt2\) is not one of"),
    ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, r"rope_scaling \(llama3\)"),
    ({"model_type": "qwen2", "rope_parameters": {"rope_type": "yarn"}}, r"rope_scaling \(yarn\)"),
    ({"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling \(linear\)"),
    (
        {"model_type": "mixtral", "num_experts_per_tok": 1},
        r"num_experts_per_tok \(1\) is not supported: Mixtral",
    ),
    ({"model_type": "mixtral", "sliding_window": 4096}, r"sliding_window \(4096\) is not supported"),
    ({"model_type": "llama", "attention_bias": True}, r"attention_bias \(True\)"),
    ({"model_type": "llama", "mlp_bias": True}, r"mlp_bias \(True\)"),
    ({"model_type": "llama", "hidden_act": "gelu"}, r"hidden_act \(gelu\)"),
    ({"model_type": "llama", "partial_rotary_factor": 0.5}, r"partial_rotary_factor \(0.5\)"),
    ({"model_type": "llama", "quantization_config": {"bits": 4}}, r"quantization_config"),
    ({"model_type": "qwen2", "use_sliding_window": True}, r"use_sliding_window \(True\)"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, r"layer_types \(sliding_attention\)"),
    ({"model_type": "clip", "vision_config": {"hidden_act": "relu"}}, r"hidden_act \(relu\)"),
    ({"model_type": "siglip", "vision_config": {"num_channels": 1}}, r"num_channels \(1\)"),
    ({"model_type": "whisper", "scale_embedding": True}, r"scale_embedding \(True\)"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED)
def test_what_the_model_cannot_compute_is_refused_by_name(config: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        section_from_hf(config)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip", "Whisper", "Llama", "Qwen2", "Mixtral"])
def test_a_key_left_out_has_the_familys_default(kind: str) -> None:
    whole = getattr(transformers, f"{kind}Config")()
    diff = {"model_type": whole.model_type, "vision_config": {}} if "vision" in str(whole) else None
    assert section_from_hf(diff or {"model_type": whole.model_type}) == section_from_hf(whole.to_dict())


def test_a_form_that_no_family_has_cannot_be_exported() -> None:
    with pytest.raises(ConfigError, match="class_token"):
        family_of(VisionSection(class_token=True))
    with pytest.raises(ConfigError, match="head_dim"):
        family_of(DecoderSection(head_dim=64, qkv_bias=True))
    for changes in ({"qkv_bias": True}, {"expert_every": 2}, {"capacity_factor": 1.0}, {"experts_per_token": 1}):
        with pytest.raises(ConfigError, match=f"{next(iter(changes))} .*Mixtral"):
            family_of(DecoderSection(experts=4, **changes))  # type: ignore[arg-type]


def test_siglips_pixels_have_mean_and_deviation_one_half() -> None:
    pixels = torch.randint(0, 256, (1, 16, 16, 3), dtype=torch.uint8)
    values = Patches(PATCH, torch.device("cpu"), section_from_hf({"model_type": "siglip"}).pixels)(pixels)
    torch.testing.assert_close(values, patches((pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5), **CLOSE)


def test_a_file_that_the_system_refuses_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"Not a directory|os error 20"):
        (tmp_path / "file").write_text("")
        save({"x": torch.zeros(1)}, tmp_path / "file" / "x.safetensors")
