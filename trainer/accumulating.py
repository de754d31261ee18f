"""Gradients of micro-batches added up in fp32 as soon as backward has each: one pass over memory.

DeepSpeed's BF16_Optimizer would keep the bf16 gradient, which autograd then adds to, and cast it to fp32 in memory
before adding that: 8 % of an H200's kernel time in a step of 3.5 billion weights over 8 packs. Vectors, of which there
are hundreds, wait for backward's end: the sums of neighbours lie side by side, and are one addition.
"""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

SMALL = 1 << 16
"""Weights below which an addition costs its launch and no more."""

LARGE = 1 << 22
"""Weights from which on a compiled addition, twice as fast on an H200 as torch's own of two dtypes, repays its call."""

Key = tuple[int, int]
"""A parameter's group and its place there."""


class OnePass:
    """Adds gradients to the sums of a BF16_Optimizer."""

    def __init__(self, optimizer: Any, compiled: bool = False) -> None:
        self._optimizer = optimizer
        self._add_large = torch.compile(_add, dynamic=True) if compiled else _add
        self._waiting: dict[Key, Tensor] = {}

    @torch.no_grad()
    def add(self, parameter: Tensor, group: int, place: int, clear_lp_grads: bool) -> None:
        """What the optimizer is to do in a parameter's hook."""
        total = self._optimizer.fp32_groups_gradients[group][place]
        if parameter.grad is None:
            return
        gradient = parameter.grad.view(total.shape)
        if total.numel() < SMALL:
            self._wait((group, place), gradient)
        else:
            (self._add_large if total.numel() >= LARGE else _add)(total, gradient)
        parameter._hp_grad = total  # type: ignore[attr-defined]
        self._optimizer.fp32_groups_has_gradients[group][place] = True

    def _wait(self, key: Key, gradient: Tensor) -> None:
        if not self._waiting:
            Variable._execution_engine.queue_callback(self._finish)
        self._waiting[key] = gradient

    @torch.no_grad()
    def _finish(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for group, start, stop in _runs(waiting):
            totals, flat = (getattr(self._optimizer, f"fp32_groups_gradients{part}")[group] for part in ("", "_flat"))
            gradient = torch.cat([waiting[group, place] for place in range(start, stop)])
            offset = totals[start].storage_offset() - flat.storage_offset()
            _add(flat.narrow(0, offset, gradient.numel()), gradient)


def accumulate_in_one_pass(optimizer: Any, compiled: bool = False) -> None:
    """Let a BF16_Optimizer, which was told to update at once, add without a cast."""
    optimizer._update_hp_grad = OnePass(optimizer, compiled).add


def _runs(keys: Iterable[Key]) -> Iterator[tuple[int, int, int]]:
    """(group, start, stop) of neighbours."""
    for (group, _), run in groupby(enumerate(sorted(keys)), lambda each: (each[1][0], each[1][1] - each[0])):
        places = [place for _, (_, place) in run]
        yield group, places[0], places[-1] + 1


def _add(total: Tensor, gradient: Tensor) -> None:
    total.add_(gradient)
