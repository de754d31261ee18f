"""Expert parallelism under DeepSpeed: which parameters it reduces over whom, and the gradient's norm.

DeepSpeed reduces parameters marked `allreduce = False` over the ranks registered for their `group_name`, and divides
by all data ranks, which is right. Two things it does not do rightly for a model of our own are done here. It looks
for layers of its own class to learn that there are experts (`shown`). It computes norms group of parameters by group
of parameters, each with collectives over all stages, which a stage without experts would never join (`own_norm`).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.utils import groups as known_groups
from torch import Tensor, nn

from trainer.parallel.expert import NAME, ExpertGroup, is_expert, split_experts
from trainer.parallel.tensor import is_cut


class _Mark(MoE):
    """Tells DeepSpeed that a model has experts, and does nothing else."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_experts = 0

    def set_deepspeed_parallelism(self, *args: object) -> None:
        """Groups are registered already."""


class ExpertState:
    """What DeepSpeed is told of the experts."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def split(self, model: nn.Module) -> None:
        """Keep this rank's experts of the model."""
        split_experts(model, self._group)

    @contextlib.contextmanager
    def shown(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """While DeepSpeed takes the model over: register the groups, and give experts a parameter group of their own.

        A stage without experts that are trained is a dense one to DeepSpeed.
        """
        known_groups._EXPERT_PARALLEL_GROUP[NAME] = self._group.group
        known_groups._EXPERT_DATA_PARALLEL_GROUP[NAME] = self._group.replicas
        if not any(is_expert(p) and p.requires_grad for p in model.parameters()):
            yield
            return
        _separate(optimizer)
        model.add_module(NAME, _Mark())
        try:
            yield
        finally:
            delattr(model, NAME)

    def own_norm(self, optimizer: Any) -> None:
        """Let one of DeepSpeed's optimizers compute the gradient's norm with every element counted once.

        Stages without experts take the same way as the others, so that all find the same bits.
        """
        if isinstance(optimizer, BF16_Optimizer):
            if not optimizer.has_moe_layers:
                optimizer.has_moe_layers, optimizer.expert_gradients = True, {}
            optimizer.get_grads_for_norm = with_expert_norm(optimizer.get_grads_for_norm, self._group)
        else:
            optimizer.scaled_global_norm = lambda: partitioned_norm(optimizer)


def partitioned_norm(optimizer: Any) -> Tensor:
    """2-norm over the partitions of all ranks; infinite where a gradient is not finite.

    They are disjoint but for what tensor ranks hold whole, which the first of them counts. A partition is a piece of
    each parameter in it, in order, and padding; or padding alone.
    """
    squares = torch.zeros((), device=optimizer.device)
    for place, parameters in enumerate(optimizer.params_in_partition):
        pieces = (g for g in optimizer.averaged_gradients[place] if not getattr(g, "_zero_padding", False))
        for piece, parameter in zip(pieces, parameters, strict=False):
            if is_cut(parameter) or optimizer.model_parallel_rank == 0:
                squares += piece.float().square().sum()
    dist.all_reduce(squares)
    return torch.where(squares.isfinite(), squares.sqrt(), torch.inf)


def with_expert_norm(original: Any, group: ExpertGroup) -> Any:
    """A BF16_Optimizer's `get_grads_for_norm` that hands the experts' norm, over their group, on as one more scalar."""

    def gradients(for_clipping: bool = False) -> Any:
        if for_clipping:
            return original(for_clipping=True)
        whole, experts = original()
        held = experts.get(NAME)
        if not held:
            return whole, {}
        squares = torch.stack([gradient.float().square().sum() for gradient in held]).sum()
        dist.all_reduce(squares, group=group.group)
        return [*whole, squares.sqrt()], {}

    return gradients


def _separate(optimizer: torch.optim.Optimizer) -> None:
    for settings in list(optimizer.param_groups):
        experts = [parameter for parameter in settings["params"] if is_expert(parameter)]
        if experts:
            settings["params"] = [parameter for parameter in settings["params"] if not is_expert(parameter)]
            own = {key: value for key, value in settings.items() if key != "params"}
            optimizer.add_param_group({**own, "params": experts, "moe": True, "name": NAME})
