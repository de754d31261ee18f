"""Functions with gradients between what a tensor group holds whole, shared out, and as summands.

A tensor is *whole* where every rank has the same one, *partial* where each has a summand of it, and *shared out* where
rank r of n has rows r R/n .. (r + 1) R/n of R. Its gradient may be either of these; each function says what it makes
of both. Sources: Shoeybi et al. 2019, section 3 (whole and partial); Korthikanti et al. 2022, section 4.2.2 (shared
out over places).
"""

from collections.abc import Sequence
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.gather(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.share_of_total(gradients[0]), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.share_of_total(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradients[0]), None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: TensorGroup) -> Tensor:
        ctx.group = group
        return group.share(x).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.group.gather(gradients[0]), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, group: TensorGroup) -> Tensor:
        ctx.group = group
        most = -(-rows // group.size)
        padded = x.new_zeros(most, *x.shape[1:])
        padded[: x.shape[0]] = x
        return group.gather(padded)[:rows].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.group.share(gradients[0]), None, None


class _CopyAllTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: TensorGroup, *every: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(x.view_as(x) for x in every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = ctx.group.total(torch.cat([each.reshape(-1) for each in gradients]))
        parts = flat.split([each.numel() for each in gradients])
        return None, *(part.view_as(each) for part, each in zip(parts, gradients, strict=True))


def copy_to(x: Tensor, group: TensorGroup) -> Tensor:
    """Whole x, as it is; a partial gradient is summed over the ranks."""
    out: Tensor = _CopyTo.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def copy_all_to(every: Sequence[Tensor], group: TensorGroup) -> tuple[Tensor, ...]:
    """`copy_to` of several tensors of one dtype, whose gradients are summed together."""
    out: tuple[Tensor, ...] = _CopyAllTo.apply(group, *every)  # type: ignore[no-untyped-call]
    return out


def reduce_from(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial x, summed over the ranks; a whole gradient passes."""
    out: Tensor = _ReduceFrom.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def count_once(x: Tensor, group: TensorGroup) -> Tensor:
    """Whole x, as it is; a whole gradient becomes partial: rank 0 has it, the others zeros, so their sum is exact."""
    out: Tensor = _CountOnce.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather(x: Tensor, group: TensorGroup) -> Tensor:
    """Shared out x, whole; a partial gradient is summed, and shared out (reduce-scatter)."""
    out: Tensor = _Gather.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_scatter(x: Tensor, group: TensorGroup) -> Tensor:
    """Partial x, summed, and shared out; a shared out gradient becomes whole (all-gather)."""
    out: Tensor = _ReduceScatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def scatter(x: Tensor, group: TensorGroup) -> Tensor:
    """Whole x, shared out; so is its gradient, and becomes whole (all-gather)."""
    out: Tensor = _Scatter.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def join(x: Tensor, rows: int, group: TensorGroup) -> Tensor:
    """x shared out by `TensorGroup.share`, of `rows` in all, whole; a whole gradient is shared out alike."""
    out: Tensor = _Join.apply(x, rows, group)  # type: ignore[no-untyped-call]
    return out
