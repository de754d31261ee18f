"""Compiled blocks and additions: what they compute, and how often the compiler is asked."""

import copy
from functools import partial
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


SIZES = ([(40, 50), (3, 700), (7, 143)], [(12,), (5,), (9,), (300,), (4,)])
"""Of two groups' parameters."""


def summed(compiled: bool, rounds: int = 1, without: int = -1) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Flat sums of both groups after backward passes, and what they should be; parameter `without` takes no part."""
    random = torch.Generator().manual_seed(0)
    groups = [[nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes] for sizes in SIZES]
    flats = [torch.full((sum(p.numel() for p in group) + 8,), 1 / 3) for group in groups]
    pieces = [list(flat[4:-4].split([p.numel() for p in group])) for flat, group in zip(flats, groups, strict=True)]
    wanted = [flat.clone() for flat in flats]
    optimizer = SimpleNamespace(
        fp32_groups_gradients=pieces,
        fp32_groups_gradients_flat=[flat[4:] for flat in flats],
        fp32_groups_has_gradients=[[False] * len(group) for group in groups],
    )
    accumulate_in_one_pass(optimizer, compiled)

    def hook(parameter: torch.Tensor, group: int, place: int) -> None:
        optimizer._update_hp_grad(parameter, group, place, False)
        parameter.grad = None

    used = [(p, g, i) for g, group in enumerate(groups) for i, p in enumerate(group) if (g, i) != (1, without)]
    for parameter, group, place in used:
        parameter.register_post_accumulate_grad_hook(partial(hook, group=group, place=place))
    for _ in range(rounds):
        factors = [torch.randn(p.shape, generator=random).bfloat16() for p, *_ in used]
        torch.stack([(p * factor).sum() for (p, *_), factor in zip(used, factors, strict=True)]).sum().backward()
        for (_, group, place), factor in zip(used, factors, strict=True):
            offset = pieces[group][place].storage_offset()
            wanted[group][offset : offset + factor.numel()] += factor.flatten()
    assert sum(map(sum, optimizer.fp32_groups_has_gradients)) == len(used)
    return flats, wanted


@pytest.mark.parametrize("small", [0, 10, 1 << 16])
@pytest.mark.parametrize("without", [-1, 0, 2, 4])
def test_sums_are_those_of_additions_one_by_one(monkeypatch: pytest.MonkeyPatch, small: int, without: int) -> None:
    monkeypatch.setattr(accumulating, "SMALL", small)
    found, wanted = summed(False, 2, without)
    assert all(map(torch.equal, found, wanted))
    assert not torch.equal(found[1], torch.full_like(found[1], 1 / 3))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler imports it
def test_the_compiled_addition_is_the_eager_one_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "SMALL", 1000)
    monkeypatch.setattr(accumulating, "LARGE", 1000)
    found, wanted = summed(True)
    assert all(map(torch.equal, found, wanted))
    assert counters["stats"]["unique_graphs"] == 1
