"""A tied head (Press & Wolf 2017) on another pipeline stage than the embedding whose weight it uses.

The first stage owns the weight; the last has a copy that no optimizer knows. The copy's gradient, summed in fp32 over
the micro-batches, is added to the owner's before gradients are reduced over data ranks, and after the step the copy
takes over the owner's numbers. So together they cost one all-reduce, the gradient's norm and a checkpoint have the
weight once, the last stage keeps no optimizer state for it, and the two can never drift apart. Under tensor parallelism
each slice is a weight of its own.
"""

import torch.distributed as dist
from torch import Tensor, nn

from shared.mesh import Coords, Mesh
from trainer.models.build import ends

HOLDERS = ("_hp_grad", "grad_accum", "grad")
"""Where DeepSpeed keeps what it has accumulated of a gradient: bf16, bf16 with offload, fp32."""


class Tie:
    """One pair of owner and copy, seen from either end. `weight` is this rank's of the two."""

    def __init__(self, group: dist.ProcessGroup, owner: int, weight: Tensor, is_copy: bool) -> None:
        self._group, self._owner, self._weight, self._is_copy = group, owner, weight, is_copy
        self._sum: Tensor | None = None

    @property
    def trained(self) -> bool:
        """Whether the weight changes at all."""
        return self._weight.requires_grad

    def mark(self) -> "Tie":
        """On the copy's rank: let nobody step, count or save the copy, and keep its gradients here."""
        if self._is_copy:
            self._weight.tied_copy = True  # type: ignore[attr-defined]
            if self.trained:
                self._weight.register_post_accumulate_grad_hook(self._keep)  # type: ignore[no-untyped-call]
        return self

    def reduce(self) -> None:
        """Add the copy's gradient to the owner's, once for all micro-batches of a step."""
        if not self.trained:
            return
        gradient = self._sum if self._is_copy else accumulated(self._weight)
        assert gradient is not None, "every micro-batch gives both ends a gradient, which DeepSpeed keeps in a holder"
        dist.reduce(gradient, self._owner, group=self._group)
        self._sum = None

    def spread(self) -> None:
        """Give the copy the owner's numbers."""
        dist.broadcast(self._weight.data, self._owner, group=self._group)

    def _keep(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self._sum = weight.grad.float() if self._sum is None else self._sum.add_(weight.grad)
        weight.grad = None


def accumulated(weight: Tensor) -> Tensor | None:
    """The fp32 tensor in which a parameter's gradient has been summed up, if any."""
    return next((x for name in HOLDERS if (x := getattr(weight, name, None)) is not None), None)


def tie_stages(model: nn.Module, mesh: Mesh, rank: int) -> Tie | None:
    """This rank's end of the tie, None on a middle stage; all ranks call it together, as `new_group` demands."""
    places = [(data, tensor) for data in range(mesh.data) for tensor in range(mesh.tensor)]
    pairs = [[mesh.rank(Coords(pipe, *place)) for pipe in (0, mesh.pipe - 1)] for place in places]
    groups = [dist.new_group(pair) for pair in pairs]
    for group, pair in zip(groups, pairs, strict=True):
        if rank in pair:
            weight = next(part.weight for part in ends(model) if part)
            return Tie(group, pair[0], weight, is_copy=rank != pair[0]).mark()
    return None
