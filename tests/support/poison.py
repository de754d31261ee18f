"""Spoil one training step on one rank, as broken memory, a bad batch or an overflow would."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer.launch import Ranks

if TYPE_CHECKING:
    from trainer.engine import Engine


@contextmanager
def spoiled(
    engine: "Engine", ranks: Ranks, now: int, step: int = -1, rank: int = 0, kind: str = "gradient", name: str = ""
) -> Iterator[None]:
    """While this is open, `rank` computes something that is not finite, if `now` is the `step` meant.

    `gradient`, `parameter`: the parameter `name` of the rank (its first, without a name) gets NaNs, in its gradient or
    in itself. `backward`: the module `name` gets NaNs as its output's gradient. `loss`: losses are infinite while
    their gradients stay as they are.
    """
    if (now, ranks.rank) != (step, rank):
        yield
        return
    if kind == "backward":
        with bad_backward(engine.module.get_submodule(name)):
            yield
        return
    held = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    parameter = held[name] if name else next(iter(held.values()))
    with {"gradient": bad_gradient, "parameter": bad_parameter, "loss": bad_loss}[kind](parameter):
        yield


@contextmanager
def bad_backward(part: nn.Module) -> Iterator[None]:
    """The gradient of its output is NaN."""

    def spoil(part: nn.Module, inputs: Any, out: Tensor) -> None:
        out.register_hook(lambda gradient: torch.full_like(gradient, math.nan))

    handle = part.register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def bad_gradient(parameter: Tensor) -> Iterator[None]:
    """Every gradient of it is NaN."""
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def bad_parameter(parameter: Tensor) -> Iterator[None]:
    """One of its values is NaN."""
    with torch.no_grad():
        first = parameter.view(-1)[0].clone()
        parameter.view(-1)[0] = math.nan
    try:
        yield
    finally:
        with torch.no_grad():
            parameter.view(-1)[0] = first


@contextmanager
def bad_loss(parameter: Tensor) -> Iterator[None]:
    """token_loss is infinite, and its gradient what it was."""
    from trainer import nonfinite

    sound = nonfinite.token_loss

    def unsound(*arguments: Any) -> Tensor:
        return sound(*arguments) + math.inf

    nonfinite.token_loss = unsound
    try:
        yield
    finally:
        nonfinite.token_loss = sound
