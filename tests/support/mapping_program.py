"""A program for `run_ranks`: functions of `trainer.parallel.mappings` against their definitions, on every rank.

Every rank knows the tensors of all of them, so what a function and its gradient should give is written out here.
Report: name of the function, and of its gradient -> the largest difference.
"""

import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.parallel import mappings
from trainer.parallel.groups import TensorGroup

Rows = list[Tensor]
ROWS = 6


def tensors(size: int, rows: int, seed: int) -> Rows:
    """Each rank's tensor."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, 2, generator=random) for _ in range(size)]


def uneven(x: Tensor, size: int) -> Rows:
    """x shared out as far as it goes: the last ranks may have nothing."""
    most = -(-len(x) // size)
    return [x[rank * most : (rank + 1) * most] for rank in range(size)]


def deviations(name: str, run: Callable[[Tensor], Tensor], rank: int, data: tuple[Rows, Rows, Rows, Rows]) -> Rows:
    """How far output and gradient are from those wanted, for inputs and outer gradients of all ranks."""
    inputs, outers, outputs, gradients = data
    x = inputs[rank].clone().requires_grad_()
    out = run(x)
    out.backward(outers[rank])
    assert x.grad is not None and out.shape == outputs[rank].shape, name
    return [(out.detach() - outputs[rank]).abs().sum(), (x.grad - gradients[rank]).abs().sum()]


def tables(size: int) -> dict[str, tuple[Rows, Rows, Rows, Rows]]:
    """Name -> inputs, outer gradients, and by definition outputs and gradients, of each rank."""
    whole, other = tensors(1, ROWS, 1)[0], tensors(1, ROWS, 2)[0]
    some, more = tensors(size, ROWS, 3), tensors(size, ROWS, 4)
    zeros, few, lone = torch.zeros_like(other), tensors(1, 2 * size - 1, 5)[0], tensors(1, 2 * size - 1, 6)[0]
    total, sum_of_more = torch.stack(some).sum(0), torch.stack(more).sum(0)
    shared, outer_shared = list(whole.chunk(size)), list(other.chunk(size))
    return {
        "copy_to": ([whole] * size, more, [whole] * size, [sum_of_more] * size),
        "reduce_from": (some, [other] * size, [total] * size, [other] * size),
        "count_once": ([whole] * size, [other] * size, [whole] * size, [other, *[zeros] * (size - 1)]),
        "gather": (shared, more, [whole] * size, list(sum_of_more.chunk(size))),
        "reduce_scatter": (some, outer_shared, list(total.chunk(size)), [other] * size),
        "scatter": ([whole] * size, outer_shared, shared, [other] * size),
        "join": (uneven(few, size), [lone] * size, [few] * size, uneven(lone, size)),
        "join of one row": (uneven(few[:1], size), [lone[:1]] * size, [few[:1]] * size, uneven(lone[:1], size)),
    }


def copies(group: TensorGroup, rank: int) -> float:
    """The largest difference of gradients through `copy_all_to` from their sums."""
    every = [tensors(group.size, rows, rows) for rows in (1, 3)]
    held = [torch.zeros(rows, 2, requires_grad=True) for rows in (1, 3)]
    outs = mappings.copy_all_to(held, group)
    torch.autograd.backward(outs, [each[rank] for each in every])
    wanted = [torch.stack(each).sum(0) for each in every]
    return max(float((x.grad - y).abs().max()) for x, y in zip(held, wanted, strict=True) if x.grad is not None)


def main() -> None:
    """Run every function in this rank."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, size = dist.get_rank(), dist.get_world_size()
    group = TensorGroup(dist.group.WORLD, rank, size)
    report = {"copy_all_to": copies(group, rank)}
    for name, data in tables(size).items():
        function = getattr(mappings, name.split()[0])
        more = (len(data[2][0]),) if function is mappings.join else ()
        far = deviations(name, lambda x, f=function, more=more: f(x, *more, group), rank, data)  # type: ignore[misc]
        report[name] = float(max(far))
    (Path(os.environ["MILLSTREAM_OUT"]) / f"rank-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
