"""Where gradients stop, which parts are frozen, and that recomputing changes no gradient: on one device."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.config import load
from shared.sections import RunConfig
from tests.support.packs import MIXED, global_batch
from tests.support.runs import run_file
from trainer.loss import token_loss
from trainer.memory.recompute import recompute, recomputed_modules
from trainer.models import build
from trainer.models.gradients import CODES, cut_gradients, modalities
from trainer.models.parts import freeze, part_of
from trainer.optim import build_optimizer, set_lr

PREFIXES = {"vision": "0.vision.", "audio": "0.audio."}


def configured(folder: Path, *sets: str) -> RunConfig:
    return load(run_file(folder, "part-{0..0}.tar"), sets)


def built(config: RunConfig) -> build.Stack:
    """The model with the run file's tables applied, as the engine does it."""
    model = build.build(config, "sdpa")
    freeze(model, config.train.freeze, config.model.decoder.depth)
    cut_gradients(model, config.model.gradient_cuts)
    recompute(model, recomputed_modules(config))
    return model


def trained(config: RunConfig, model: build.Stack) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a global batch."""
    batch = global_batch(config, MIXED, seed=0)
    losses = [token_loss(model(inputs), *targets) for inputs, targets in batch]
    torch.stack(losses).sum().backward()
    return sum(loss.item() for loss in losses), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def zero_parts(gradients: dict[str, Tensor], depth: int = 2) -> set[str]:
    """Parts all of whose gradients are zero."""
    parts = {part_of(name, depth) for name in gradients}
    return {part for part in parts if not any(g.any() for n, g in gradients.items() if part_of(n, depth) == part)}


@pytest.mark.parametrize("detach", [(), ("vision",), ("audio",), ("vision", "audio")])
def test_a_detached_encoder_gets_zero_gradients_and_nothing_else_changes(tmp_path: Path, detach: Sequence[str]) -> None:
    plain = trained(configured(tmp_path), built(configured(tmp_path)))
    config = configured(tmp_path, f"model.detach=[{', '.join(detach)}]")
    loss, gradients = trained(config, built(config))
    assert loss == plain[0]
    assert gradients.keys() == plain[1].keys()
    assert zero_parts(gradients) == set(detach)
    others = [name for name in gradients if part_of(name, 2) not in detach]
    assert all(torch.equal(gradients[name], plain[1][name]) for name in others)


def test_a_detached_encoder_keeps_its_weights_whatever_the_decay(tmp_path: Path) -> None:
    config = configured(tmp_path, "model.detach=[audio]", "train.optim.weight_decay=0.5")
    model = built(config)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer(model, config.train.optim)
    set_lr(optimizer.param_groups, 1e-2)
    trained(config, model)
    optimizer.step()
    same = {part_of(name, 2) for name, p in model.named_parameters() if torch.equal(p, before[name])}
    assert "audio" in same
    moved = {part_of(name, 2) for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {"vision", "vision_projector", "audio_projector", "embedding", "decoder", "head"}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kinds", [("audio",), ("vision",), ("text",), ("vision", "audio")])
def test_a_cut_zeroes_the_gradient_that_leaves_the_layer_at_its_places_alone(
    tmp_path: Path, layer: int, kinds: Sequence[str]
) -> None:
    plain_config = configured(tmp_path)
    config = configured(tmp_path, f"model.gradient_cuts={{{layer}: [{', '.join(kinds)}]}}")
    plain, cut = entering(plain_config, layer), entering(config, layer)
    codes, segments = plain[1], plain[2]
    at = torch.isin(codes, torch.tensor([CODES[kind] for kind in kinds]))
    assert plain[3] == cut[3]
    assert not cut[0][at].any()
    assert plain[0][at & (segments > 0)].any()
    assert torch.equal(cut[0][~at], plain[0][~at])
    assert cut[0][~at].any()


def entering(config: RunConfig, layer: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Gradient of the hidden state that enters a layer, the places' codes and segments, and the loss."""
    model, states = built(config), []

    def keep(part: torch.nn.Module, inputs: object, state: tuple[Tensor, ...]) -> None:
        state[0].retain_grad()
        states.append(state)

    dict(model.named_children())[str(layer)].register_forward_hook(keep)
    ((inputs, targets),) = global_batch(config, [(True, True, (60,))], seed=0)
    loss = token_loss(model(inputs), *targets)
    loss.backward()
    hidden, _, segments, _, codes = states[0]
    assert hidden.grad is not None
    return hidden.grad, codes, segments, loss.item()


def test_a_cut_on_entering_layer_0_reaches_the_encoder_and_its_projector(tmp_path: Path) -> None:
    config = configured(tmp_path, "model.gradient_cuts={0: [audio]}")
    assert zero_parts(trained(config, built(config))[1]) == {"audio", "audio_projector"}


def test_places_are_named_by_what_stands_there() -> None:
    assert modalities(torch.tensor([-1, 0, 3, 4, -1, 5]), 4).tolist() == [0, 1, 1, 2, 0, 2]


@pytest.mark.parametrize("parts", [("vision", "audio"), ("decoder",), ("embedding", "head", "audio_projector")])
def test_frozen_parts_have_no_gradient_and_no_place_in_the_optimizer(tmp_path: Path, parts: Sequence[str]) -> None:
    config = configured(tmp_path, f"train.freeze=[{', '.join(parts)}]")
    model = built(config)
    _, gradients = trained(config, model)
    frozen = {name for name, _ in model.named_parameters() if part_of(name, 2) in parts}
    assert frozen and frozen == {name for name, _ in model.named_parameters()} - gradients.keys()
    optimizer = build_optimizer(model, config.train.optim)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(gradients)


@pytest.mark.parametrize(
    ("sets", "again"),
    [
        (["train.recompute.vision=1"], {"0.vision.blocks.0"}),
        (["train.recompute.audio=-1"], {"0.audio.blocks.0"}),
        (["train.recompute.decoder=1"], {"1"}),
        (["train.recompute.decoder=-1"], {"2"}),
        (
            ["train.recompute={vision: all, audio: all, decoder: all, projectors: true}"],
            {"0.vision.blocks.0", "0.audio.blocks.0", "0.vision_projector", "0.audio_projector", "1", "2"},
        ),
    ],
)
def test_chosen_blocks_run_twice_and_gradients_stay_as_they_are(
    tmp_path: Path, sets: list[str], again: set[str]
) -> None:
    plain = trained(config := configured(tmp_path), built(config))
    config = configured(tmp_path, *sets)
    model, runs = built(config), dict[str, int]()
    for path, part in model.named_modules():
        first = next((inner for name, inner in part.named_children() if name in ("attention_norm", "up")), None)
        if first is not None:
            first.register_forward_hook(lambda *_, path=path: runs.update({path: runs.get(path, 0) + 1}))
    loss, gradients = trained(config, model)
    assert {path for path, count in runs.items() if count == 2 * len(MIXED)} == again
    assert loss == plain[0]
    assert all(torch.equal(gradients[name], plain[1][name]) for name in plain[1])
    assert model.state_dict().keys() == build.build(config, "sdpa").state_dict().keys()
