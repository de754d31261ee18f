"""Where gradients stop: whole features, places of the pack, or a stage of a pipeline that trains nothing.

Everything here is the identity forward, to the last bit. Backward it gives zeros instead of nothing, so that every
parameter has a gradient from every micro-batch and all ranks reduce the same ones, whatever their batches hold.
"""

from collections.abc import Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn

from shared.model_sections import Modality

CODES: dict[Modality, int] = {"text": 0, "vision": 1, "audio": 2}
"""How modalities_T names them."""

State = tuple[Tensor, ...]


class _Stop(torch.autograd.Function):
    """Identity; the gradient is zero at the places of a mask (and NaN nowhere, whatever came in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return gradients[0].masked_fill(mask, 0), None


class _Anchor(torch.autograd.Function):
    """Identity of its first argument; the second gets a gradient of zeros, so that the result always needs one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(anchor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (anchor,) = ctx.saved_tensors
        return gradients[0], torch.zeros_like(anchor)


def stop_gradient(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """x; its gradient is zero where `mask` (bool, broadcast to x) is true, everywhere without a mask."""
    where = torch.ones((), dtype=torch.bool, device=x.device) if mask is None else mask
    out: Tensor = _Stop.apply(x, where)  # type: ignore[no-untyped-call]
    return out


def anchored(x: Tensor, anchor: Tensor) -> Tensor:
    """x, as an output that needs a gradient although nothing that made it may; `anchor` is a parameter."""
    out: Tensor = _Anchor.apply(x, anchor)  # type: ignore[no-untyped-call]
    return out


def modalities(features_T: Tensor, image_rows: int) -> Tensor:
    """[T] codes of what stands at each place: rows of images come first among the features, then rows of clips."""
    kinds = torch.where(features_T < image_rows, CODES["vision"], CODES["audio"])
    return kinds.masked_fill(features_T < 0, CODES["text"]).to(torch.int32)


def cut_gradients(model: nn.Module, cuts: Mapping[int, Sequence[Modality]]) -> None:
    """Stop gradients at places of some modalities on entering decoder layers; `model` is whole or a pipeline's stage.

    The layer numbered k is the module at place k + 1: place 0 holds the encoders.
    """
    held = dict(model.named_children())
    for layer, kinds in cuts.items():
        if block := held.get(str(layer + 1)):
            block.register_forward_pre_hook(partial(_cut, [CODES[kind] for kind in kinds]))


def _cut(codes: list[int], block: nn.Module, inputs: tuple[State]) -> tuple[State]:
    modalities = inputs[0][4]
    mask = reduce(torch.logical_or, [modalities == code for code in codes])[:, None]
    return (tuple(stop_gradient(x, mask) if x.is_floating_point() else x for x in inputs[0]),)
