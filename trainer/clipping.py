"""Gradient norm, clipping and skipping before a plain optimizer's step, for runs without ZeRO.

DeepSpeed's own, without ZeRO, counts stage 0 alone, does not report, and steps on what is not finite.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.optim import clip_gradients


class Clipping:
    """A pre-hook of the optimizer's step.

    A norm that is not finite takes all gradients away: torch's optimizers leave a parameter without a gradient, and
    its state, as they are. The norm is the same on all ranks, so all of them skip.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        clip: float,
        add_up: Callable[[Tensor], Tensor],
        counts: Callable[[Tensor], bool],
    ) -> None:
        self._parameters, self._clip, self._add_up, self._counts = parameters, clip, add_up, counts
        self.norm = 0.0

    def attach(self, optimizer: torch.optim.Optimizer) -> "Clipping":
        """Run before every step of `optimizer`."""
        optimizer.register_step_pre_hook(self)
        return self

    def __call__(self, *step: Any) -> None:
        """Clip, and remember the norm; or take the gradients away."""
        self.norm = clip_gradients(self._parameters, self._clip, self._add_up, self._counts)
        if not math.isfinite(self.norm):
            for parameter in self._parameters:
                parameter.grad = None
