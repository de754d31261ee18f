"""Optimizer, its parameter groups, and the learning rate as a pure function of the step."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from shared.sections import OptimSection
from trainer.models.parts import is_tied_copy


def lr_at(step: int, steps: int, optim: OptimSection) -> float:
    """Learning rate of `step` (from 0) of `steps`: linear warm-up, then a cosine to `min_lr_share` of `lr`."""
    if step < optim.warmup_steps:
        return optim.lr * (step + 1) / optim.warmup_steps
    done = (step - optim.warmup_steps) / max(1, steps - optim.warmup_steps)
    low = optim.lr * optim.min_lr_share
    return low + (optim.lr - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay; norms, biases, embeddings, positions and what is marked `without_decay` do not."""
    exempt = {
        id(p)
        for part in model.modules()
        for name, p in part.named_parameters(recurse=False)
        if p.ndim < 2
        or isinstance(part, nn.Embedding)
        or name.startswith("positions")
        or getattr(p, "without_decay", False)
    }
    chosen = [p for p in model.parameters() if p.requires_grad and not is_tied_copy(p)]
    decayed = [p for p in chosen if id(p) not in exempt]
    others = [p for p in chosen if id(p) in exempt]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def build_optimizer(model: nn.Module, optim: OptimSection) -> torch.optim.Optimizer:
    """AdamW or SGD over `parameter_groups`."""
    groups = parameter_groups(model, optim.weight_decay)
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, fused=fused)


def set_lr(groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Give every group the learning rate."""
    for group in groups:
        group["lr"] = lr


def clip_gradients(
    parameters: list[nn.Parameter],
    clip: float,
    add_up: Callable[[Tensor], Tensor],
    counts: Callable[[Tensor], bool] = lambda parameter: True,
) -> float:
    """Scale gradients in place to a 2-norm of at most `clip` (0: leave them); return the norm before.

    `add_up` adds a scalar over the ranks that hold the model's other parts; `counts` tells whether this rank counts a
    parameter, because one that several of them hold is counted once. One that does not count still makes the norm NaN
    where its gradient is not finite (0 times infinity).
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    squares = [p.grad.float().square().sum() * counts(p) for p in parameters if p.grad is not None]
    none = torch.zeros((), device=parameters[0].device)
    norm = float(add_up(torch.stack([none, *squares]).sum()).sqrt())
    if 0 < clip < norm:
        torch._foreach_mul_(gradients, clip / (norm + 1e-6))
    return norm
