"""Process groups of a rank: those it shares layers with (tensor) and those it shares data with (data).

`Groups` also answers the questions DeepSpeed asks of an `mpu`, for the engine without a pipeline; a pipeline's own
grid answers them itself. Every rank makes every group, in one order, as `new_group` demands.
"""

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shared.mesh import Mesh


class TensorGroup:
    """The ranks that hold the slices of the same layers. `rank` is this one's place among `size`."""

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self.group, self.rank, self.size = group, rank, size

    def total(self, x: Tensor) -> Tensor:
        """A new tensor: the sum over the ranks, in x's dtype, the same bits on all."""
        return self._reduce(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        """A new tensor: the maximum over the ranks."""
        return self._reduce(x, dist.ReduceOp.MAX)

    def share(self, x: Tensor) -> Tensor:
        """A view: this rank's rows of x. The last ranks have fewer, or none, where `size` does not divide them."""
        most = -(-x.shape[0] // self.size)
        return x[self.rank * most : (self.rank + 1) * most]

    def gather(self, x: Tensor) -> Tensor:
        """A new tensor: the ranks' x [R, ...], of one shape, end to end, [size x R, ...]."""
        found = x.new_empty(self.size, *x.shape)
        dist.all_gather(list(found.unbind()), x.detach().contiguous(), group=self.group)
        return found.flatten(0, 1)

    def share_of_total(self, x: Tensor) -> Tensor:
        """A new tensor: this rank's rows of the sum over the ranks, whose number `size` must divide."""
        parts = list(x.detach().contiguous().chunk(self.size))
        found = torch.empty_like(parts[0])
        dist.reduce_scatter(found, parts, group=self.group)
        return found

    def _reduce(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        found = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(found, op=operation, group=self.group)
        return found


class Groups:
    """The tensor and the data group of one rank, and DeepSpeed's names for them (a model is cut in tensor only)."""

    def __init__(self, mesh: Mesh, rank: int, tensor: dist.ProcessGroup, data: dist.ProcessGroup) -> None:
        self._mesh, self._coords, self._data = mesh, mesh.coords(rank), data
        self.tensor = TensorGroup(tensor, self._coords.tensor, mesh.tensor)

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold parts of one model."""
        return self.tensor.group

    def get_model_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self.tensor.rank

    def get_model_parallel_world_size(self) -> int:
        """Their number."""
        return self.tensor.size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """Ranks that hold the same part and see other data."""
        return self._data

    def get_data_parallel_rank(self) -> int:
        """This rank's place among them."""
        return self._coords.data

    def get_data_parallel_world_size(self) -> int:
        """Their number."""
        return self._mesh.data


def make_groups(mesh: Mesh, rank: int) -> Groups:
    """This rank's groups; all ranks call it together."""
    tensor, data = (make_group(lines(mesh, axis), rank) for axis in ("tensor", "data"))
    return Groups(mesh, rank, tensor, data)


def lines(mesh: Mesh, axis: str) -> list[list[int]]:
    """Ranks that differ on `axis` alone, a list for each place on the other axes, in order of rank.

    >>> lines(Mesh(pipe=2, data=1, tensor=2), "tensor")
    [[0, 1], [2, 3]]
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world):
        place = msgspec.structs.replace(mesh.coords(rank), **{axis: 0})
        found.setdefault(msgspec.structs.astuple(place), []).append(rank)
    return list(found.values())


def make_group(every: list[list[int]], rank: int, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of each list of ranks, which every rank does in one order; the one that holds `rank`.

    Its backend is that of all ranks unless another is named.
    """
    made = {rank in ranks: dist.new_group(ranks, backend=backend) for ranks in every}
    group: dist.ProcessGroup = made[True]
    return group
