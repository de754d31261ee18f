"""Compiled blocks and additions: what they compute, and how often the compiler is asked."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from shared.sections import TrainSection
from trainer import accumulating
from trainer.accumulating import accumulate_in_one_pass
from trainer.compiling import compile_blocks
from trainer.models.encoder import EncoderBlock

CPU = torch.device("cpu")
COMPILED = TrainSection(compile=True)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch.compiler.reset()
    counters.clear()


def gradients(blocks: nn.Module, x_NLC: torch.Tensor) -> list[torch.Tensor]:
    x_NLC = x_NLC.clone().requires_grad_()
    out = x_NLC
    for block in blocks.children():
        out = block(out)
    blocks.zero_grad()
    out.square().sum().backward()
    return [out.detach(), x_NLC.grad, *(parameter.grad.clone() for parameter in blocks.parameters())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler imports it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # and looks at it
def test_one_compilation_serves_every_number_and_shape_of_pictures_and_one_more_none_of_them() -> None:
    eager = nn.Sequential(*(EncoderBlock(32, 2, 64, "sdpa", "quick_gelu") for _ in range(3)))
    compiled = copy.deepcopy(eager)
    assert compile_blocks(compiled, COMPILED, CPU) == 3
    for count, places in ((8, 17), (16, 26), (24, 10), (8, 37)):
        x = torch.randn(count, places, 32)
        torch.testing.assert_close(gradients(compiled, x), gradients(eager, x), rtol=1e-4, atol=1e-3)
        assert counters["stats"]["unique_graphs"] == 1
    for places in (17, 26):
        assert not any(gradient.any() for gradient in gradients(compiled, torch.randn(0, places, 32)))
    assert counters["stats"]["unique_graphs"] == 2


def test_blocks_whose_weights_come_and_go_are_not_compiled() -> None:
    block = EncoderBlock(32, 2, 64, "sdpa")
    assert compile_blocks(block, TrainSection(compile=True, zero_stage=3), CPU) == 0
    assert compile_blocks(block, TrainSection(compile=False), CPU) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler imports it
def test_the_compiled_addition_is_the_eager_one_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "LARGE", 1000)
    sizes, found = [(40, 50), (12,), (3, 700), (7, 143)], []
    weights = [nn.Parameter(torch.empty(size, dtype=torch.bfloat16)) for size in sizes]
    for weight in weights:
        weight.grad = torch.randn(weight.shape).bfloat16()
    for compiled in (False, True):
        flat = torch.full((sum(weight.numel() for weight in weights) + 8,), 1 / 3)
        pieces = list(flat[8:].split([weight.numel() for weight in weights]))
        optimizer = SimpleNamespace(fp32_groups_gradients=[pieces], fp32_groups_has_gradients=[[False] * len(sizes)])
        accumulate_in_one_pass(optimizer, compiled)
        for place, weight in enumerate(weights):
            optimizer._update_hp_grad(weight, 0, place, False)
        assert all(optimizer.fp32_groups_has_gradients[0])
        found.append(flat)
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.full_like(found[0], 1 / 3))
    assert counters["stats"]["unique_graphs"] == 1
