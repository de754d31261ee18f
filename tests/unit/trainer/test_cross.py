"""Cross-attention: closed gates change nothing, open ones show a sample its own features alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from shared.config import load
from shared.errors import CheckpointError
from shared.sections import RunConfig
from tests.support.crossing import CROSS, open_gates
from tests.support.packs import MIXED, Plan, global_batch, pack, pick_group
from tests.support.runs import run_file
from trainer.loss import token_loss
from trainer.memory.recompute import recompute, recomputed_modules
from trainer.models import build
from trainer.models.attention import Backend
from trainer.models.cross import CrossAttention, joined, parted, visibility
from trainer.models.gradients import cut_gradients
from trainer.models.hf import to_hf
from trainer.models.parts import freeze, part_of
from trainer.weights import load_initial

TEXT, IMAGE, CLIP = 0, 1, 2


def configured(folder: Path, *sets: str) -> RunConfig:
    return load(run_file(folder, "part-{0..0}.tar"), sets)


def opened(config: RunConfig, backend: Backend = "sdpa") -> build.Stack:
    """The model with open gates and the run file's tables applied, as the engine does it."""
    model = build.build(config, backend)
    open_gates(model)
    freeze(model, config.train.freeze, config.model.decoder.depth)
    cut_gradients(model, config.model.gradient_cuts)
    recompute(model, recomputed_modules(config))
    return model


def gradients(config: RunConfig, model: build.Stack) -> dict[str, Tensor]:
    """Of a global batch with every modality set."""
    for inputs, targets in global_batch(config, MIXED, seed=0):
        token_loss(model(inputs), *targets).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def moved_parts(found: dict[str, Tensor], depth: int = 2) -> set[str]:
    """Parts with a gradient that is not zero."""
    return {part_of(name, depth) for name, gradient in found.items() if gradient.any()}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("sets", [(), ("model.decoder.experts=4",)], ids=["dense", "experts"])
def test_with_closed_gates_logits_are_those_of_the_plain_decoder(
    tmp_path: Path, every: int, sets: tuple[str, ...]
) -> None:
    plain, crossed = (configured(tmp_path, *sets, f"model.decoder.cross_every={n}") for n in (0, every))
    one, other = build.build(plain, "sdpa"), build.build(crossed, "sdpa")
    assert sum(name.endswith("attention_gate") for name, _ in other.named_parameters()) == 2 // every
    for inputs, _ in global_batch(plain, MIXED, seed=0):
        assert torch.equal(one(inputs), other(inputs))


def test_open_gates_change_text_that_has_features_and_nothing_else(tmp_path: Path) -> None:
    plain, config = configured(tmp_path), configured(tmp_path, "model.decoder.cross_every=2")
    one, other = build.build(plain, "sdpa"), opened(config)
    for plan, (inputs, _) in zip(MIXED, global_batch(config, MIXED, seed=0), strict=True):
        image, audio, _ = plan
        differs = (one(inputs) != other(inputs)).any(1)
        text = (inputs[2] > 0) & (inputs[3] < 0)
        assert torch.equal(differs, text if image or audio else torch.zeros_like(text)), plan


def test_features_of_one_sample_do_not_reach_another_of_its_pack(tmp_path: Path) -> None:
    config = configured(tmp_path, CROSS)
    model = opened(config)
    inputs, _ = pack(config, pick_group(config, True, True), [20, 30], torch.Generator().manual_seed(0))
    segments, features = inputs[2], inputs[3]
    before = model(inputs)
    inputs[5][0], inputs[6][0] = 9.0, 9.0
    after = model(inputs)
    assert torch.equal(before[segments == 2], after[segments == 2])
    assert (before != after)[(segments == 1) & (features < 0)].any(1).all()


def test_a_place_sees_the_features_of_its_segment_alone() -> None:
    segments = torch.tensor([1, 1, 1, 2, 2, 3, 3, 3, 0, 0])
    kinds = torch.tensor([IMAGE, CLIP, TEXT, TEXT, TEXT, TEXT, CLIP, TEXT, TEXT, TEXT])
    visible, sees = visibility(segments, kinds)
    assert sees.tolist() == [False, False, True, False, False, True, False, True, False, False]
    assert visible[2].nonzero().flatten().tolist() == [0, 1]
    assert visible[5].nonzero().flatten().tolist() == visible[7].nonzero().flatten().tolist() == [6]
    assert [visible[i].nonzero().flatten().tolist() for i in (3, 8, 9)] == [[3], [8], [9]]


@pytest.mark.parametrize("plan", MIXED, ids=str)
def test_every_parameter_has_a_finite_gradient_whatever_the_pack_holds(tmp_path: Path, plan: Plan) -> None:
    config = configured(tmp_path, CROSS)
    model = opened(config)
    ((inputs, targets),) = global_batch(config, [plan], seed=0)
    token_loss(model(inputs), *targets).backward()
    image, audio, captions = plan
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), name
        if part_of(name, 2) == "cross_attention":
            assert bool(parameter.grad.any()) is bool((image or audio) and sum(captions)), name


def through_memory(config: RunConfig, gate: float) -> set[str]:
    """Parts of the first layer that get a gradient through the first block's cross-attention alone."""
    encode = build.build(config, "sdpa").get_submodule("0")
    cross = CrossAttention(config.model.decoder, "sdpa")
    torch.nn.init.constant_(cross.attention_gate, gate)
    inputs, _ = pack(config, pick_group(config, True, True), [20, 30], torch.Generator().manual_seed(0))
    hidden, _, segments, _, kinds, memory = encode(inputs)
    cross(hidden.detach(), memory, segments, kinds).square().sum().backward()
    return moved_parts({f"0.{name}": p.grad for name, p in encode.named_parameters() if p.grad is not None})


def test_gradients_reach_the_encoders_once_the_gate_is_open(tmp_path: Path) -> None:
    whole = {"vision", "vision_projector", "audio", "audio_projector"}
    assert through_memory(configured(tmp_path, CROSS), 0.0) == set()
    assert through_memory(configured(tmp_path, CROSS), 0.5) == whole
    assert through_memory(configured(tmp_path, CROSS, "model.detach=[audio]"), 0.5) == whole - {"audio"}


def test_closed_gates_learn_to_open(tmp_path: Path) -> None:
    config = configured(tmp_path, CROSS)
    found = gradients(config, build.build(config, "sdpa"))
    crossed = {name: bool(g.any()) for name, g in found.items() if part_of(name, 2) == "cross_attention"}
    assert crossed == {name: name.endswith("_gate") for name in crossed}


def test_a_cut_stops_what_cross_attention_sends_back_too(tmp_path: Path) -> None:
    config = configured(tmp_path, CROSS, "model.gradient_cuts={0: [vision, audio]}")
    assert moved_parts(gradients(config, opened(config))) == {"embedding", "decoder", "cross_attention", "head"}
    config = configured(tmp_path, CROSS, "model.gradient_cuts={0: [vision]}")
    assert moved_parts(gradients(config, opened(config))) >= {"audio", "audio_projector"}


def test_it_freezes_apart_from_the_decoder(tmp_path: Path) -> None:
    others = "[vision, audio, vision_projector, audio_projector, embedding, decoder, head]"
    config = configured(tmp_path, CROSS, f"train.freeze={others}")
    assert moved_parts(gradients(config, opened(config))) == {"cross_attention"}
    config = configured(tmp_path, CROSS, "train.freeze=[cross_attention]")
    assert "cross_attention" not in {part_of(name, 2) for name in gradients(config, opened(config))}


@pytest.mark.parametrize("chosen", ["{cross_attention: true}", "{cross_attention: true, decoder: 1}"])
def test_recomputing_it_changes_no_gradient(tmp_path: Path, chosen: str) -> None:
    plain, config = configured(tmp_path, CROSS), configured(tmp_path, CROSS, f"train.recompute={chosen}")
    assert ("1.cross" in recomputed_modules(config)) is ("decoder" not in chosen)
    one, other = gradients(plain, opened(plain)), gradients(config, opened(config))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_backends_agree(tmp_path: Path) -> None:
    config = configured(tmp_path, CROSS)
    for inputs, _ in global_batch(config, MIXED, seed=0):
        torch.testing.assert_close(opened(config, "math")(inputs), opened(config)(inputs), rtol=0, atol=1e-5)


def test_a_state_that_a_pipeline_sends_on_is_the_state() -> None:
    hidden, memory = torch.randn(6, 3, requires_grad=True), torch.randn(6, 3)
    rest = tuple(torch.arange(n) for n in (6, 6, 4, 6))
    for state in ((hidden, *rest, memory), (hidden, *rest)):
        sent = joined(state)
        assert [x.is_floating_point() for x in sent] == [True, False, False, False, False]
        assert sent[0].requires_grad
        for found, wanted in zip(parted(sent), state, strict=True):
            assert torch.equal(found, wanted)


def test_counts_and_files_know_it(tmp_path: Path) -> None:
    plain, config = configured(tmp_path), configured(tmp_path, "model.decoder.cross_every=2")
    model = opened(config)
    extra = sum(p.numel() for name, p in model.named_parameters() if part_of(name, 2) == "cross_attention")
    assert build.parameter_counts(config)[2] - build.parameter_counts(plain)[2] == extra > 0
    assert sum(build.parameter_counts(config)) - sum(build.parameter_counts(plain)) == extra
    assert not [name for name in to_hf(model.state_dict(), "llama", config.model.decoder) if "cross" in name]
    path = tmp_path / "init.safetensors"
    config = configured(tmp_path, "model.decoder.cross_every=2", f"train.init_from={path}")
    state: dict[str, Any] = {name: x for name, x in model.state_dict().items() if part_of(name, 2) == "cross_attention"}
    save_file(state, path)
    fresh = build.build(config, "sdpa")
    load_initial(fresh, config)
    assert all(torch.equal(fresh.state_dict()[name], x) for name, x in model.state_dict().items())
    del state["2.cross.q.weight"]
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"lacks 2\.cross\.q\.weight"):
        load_initial(fresh, config)
