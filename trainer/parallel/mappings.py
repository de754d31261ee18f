"""Functions with gradients between what a tensor group holds whole, in slices, and as summands (Shoeybi et al. 2019).

A tensor is *whole* where every rank has the same one, and *partial* where each has a summand of it. A gradient is
whole or partial like the tensor it belongs to; each function says what it makes of both.
"""

from typing import Any

import torch
from torch import Tensor

from trainer.parallel.groups import TensorGroup


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.total(gradients[0]), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        return group.total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _CountOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.rank = group.rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] if ctx.rank == 0 else torch.zeros_like(gradients[0]), None


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """Whole x, as it is; a partial gradient is summed over the ranks."""
    out: Tensor = _CopyTo.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial x, summed over the ranks; a whole gradient passes."""
    out: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def count_once(x: Tensor, group: TensorGroup) -> Tensor:
    """Whole x, as it is; a whole gradient becomes partial: rank 0 has it, the others zeros, so their sum is exact."""
    out: Tensor = _CountOnce.apply(x, group)  # type: ignore[no-untyped-call]
    return out
