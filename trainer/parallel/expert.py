"""Expert parallelism (Lepikhin et al. 2020): the experts of a block shared out over a part of the data ranks.

An expert group is a run of `mesh.expert` neighbouring data ranks. Rank i of n holds experts i E/n .. (i + 1) E/n of
every block, cut off the whole after it was drawn from the same seed everywhere; a token's rows travel to the ranks
that hold its experts and back (all-to-all with uneven splits). Ranks at the same place of different groups hold the
same experts: they are each other's replicas, and an expert's gradient, which already has the whole group's tokens in
it, is summed over replicas only. Everything else is replicated over all data ranks as before. Through Gloo rows travel
by the host's memory, whatever device they are on.

Shapes: A rows of this rank sorted by expert, R rows received, C the width, E experts, n ranks of the group.
"""

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.mesh import Mesh
from trainer.models.moe import Experts, expert_blocks
from trainer.parallel.groups import lines, make_group
from trainer.parallel.tensor import is_cut, mark_cut

NAME = "experts"
"""What DeepSpeed calls the group of parameters that are not replicated over all data ranks."""


class ExpertGroup:
    """The ranks that share out the experts, this one's place among `size`, and the replicas of what it holds."""

    def __init__(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.replicas, self.rank, self.size = group, replicas, rank, size


def make_expert_group(mesh: Mesh, rank: int, backend: str | None = None) -> ExpertGroup:
    """This rank's group, whose rows `backend` carries; all ranks call it together."""
    place = mesh.coords(rank).data % mesh.expert
    group, replicas = make_group(expert_lines(mesh), rank, backend), make_group(replica_lines(mesh), rank)
    return ExpertGroup(group, replicas, place, mesh.expert)


def expert_lines(mesh: Mesh) -> list[list[int]]:
    """Ranks that share out the experts of a stage.

    >>> expert_lines(Mesh(data=4, expert=2))
    [[0, 1], [2, 3]]
    """
    size = mesh.expert
    return [line[at : at + size] for line in lines(mesh, "data") for at in range(0, mesh.data, size)]


def replica_lines(mesh: Mesh) -> list[list[int]]:
    """Ranks that hold the same experts.

    >>> replica_lines(Mesh(data=4, expert=2))
    [[0, 2], [1, 3]]
    """
    return [line[place :: mesh.expert] for line in lines(mesh, "data") for place in range(mesh.expert)]


def split_experts(model: nn.Module, group: ExpertGroup) -> None:
    """Keep this rank's experts of a whole model, or of the stage of it that this rank holds, in place.

    Where tensor parallelism cut them before, every one of them stays cut.
    """
    for _, block in expert_blocks(model):
        for name, whole in list(block.experts.named_parameters()):
            setattr(block.experts, name, _share(whole, group))
        block.experts.compute = Exchange(group)


def cut_dim(parameter: str) -> int | None:
    """The dimension along which a parameter of the model is cut, by its name; None for one that every rank has whole.

    >>> cut_dim("1.experts.down"), cut_dim("1.router.weight")
    (0, None)
    """
    return 0 if re.fullmatch(r"\d+\.experts\.\w+", parameter) else None


def is_expert(parameter: Tensor) -> bool:
    """Whether the ranks of an expert group hold different slices of it, along its first dimension."""
    return getattr(parameter, "group_name", None) == NAME


class Exchange:
    """Compute rows wherever their experts are: a `trainer.models.moe.Compute`."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def __call__(self, rows_AC: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
        """[A, C], in the order of the rows given. Ranks without a single row take part like the others."""
        sent_nE, one_each = counts_E.view(self._group.size, -1), [1] * self._group.size
        received_nE = _exchange(sent_nE, one_each, one_each, self._group.group)
        sent, received = sent_nE.sum(1).tolist(), received_nE.sum(1).tolist()
        rows_RC = _all_to_all(rows_AC, sent, received, self._group.group)
        by_expert = _expert_of_rows(received_nE).argsort(stable=True)
        out_RC = experts.run(rows_RC.index_select(0, by_expert), received_nE.sum(0))
        return _all_to_all(out_RC.index_select(0, by_expert.argsort()), received, sent, self._group.group)


class _AllToAll(torch.autograd.Function):
    """Send runs of rows to the ranks of a group and receive theirs; gradients travel back the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out: Tensor = _AllToAll.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return out


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    taken = rows.cpu() if dist.get_backend(group) == dist.Backend.GLOO else rows
    out = taken.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(out, taken.contiguous(), received, sent, group=group)
    return out.to(rows.device)


def _expert_of_rows(received_nE: Tensor) -> Tensor:
    """The local expert of each row received: runs of experts, once for each rank they came from."""
    ranks, experts = received_nE.shape
    held = torch.arange(experts, device=received_nE.device).repeat(ranks)
    return held.repeat_interleave(received_nE.flatten())


def _share(whole: nn.Parameter, group: ExpertGroup) -> nn.Parameter:
    size = whole.shape[0] // group.size
    held = nn.Parameter(whole.detach().narrow(0, group.rank * size, size).clone(), whole.requires_grad)
    held.allreduce, held.group_name = False, NAME  # type: ignore[attr-defined]
    if is_cut(whole):
        mark_cut(held)
    return held
