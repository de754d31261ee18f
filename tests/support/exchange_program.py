"""A program for `run_ranks`: rows travel to experts on other ranks and back, forward and backward.

Task: `cases`, name -> for each rank the expert of each of its rows; `device`, where rows are. Report: name -> how far
output and gradients are from those of all experts on one device (an expert's gradient being that of all ranks' rows).
"""

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shared.mesh import Mesh
from shared.model_sections import DecoderSection
from trainer.models.moe import ExpertBlock, Experts
from trainer.parallel.expert import ExpertGroup, make_expert_group, split_experts

SECTION = DecoderSection(dim=8, heads=2, kv_heads=1, experts=4, expert_mlp=6)


def rows_of(ids: list[int], rank: int) -> tuple[Tensor, Tensor]:
    """rows_AC and counts_E of a rank."""
    random = torch.Generator().manual_seed(rank)
    rows = torch.randn(len(ids), 8, generator=random).to(torch.get_default_device()).requires_grad_()
    return rows, torch.bincount(torch.tensor(ids, dtype=torch.long), minlength=4)


def reference(experts: Experts, all_ids: list[list[int]]) -> list[tuple[Tensor, Tensor]]:
    """Each rank's output and row gradients, with all experts here; gradients of the experts are left in them."""
    found = []
    for rank, ids in enumerate(all_ids):
        rows, counts = rows_of(ids, rank)
        out = experts.run(rows, counts)
        out.square().sum().backward()
        assert rows.grad is not None
        found.append((out.detach(), rows.grad))
    return found


def deviation(all_ids: list[list[int]], rank: int, group: ExpertGroup) -> float:
    """The largest difference of this rank's output and gradients from the reference."""
    whole, share = seeded_block(), seeded_block()
    split_experts(share, group)
    wanted_out, wanted_grad = reference(whole.experts, all_ids)[rank]
    rows, counts = rows_of(all_ids[rank], rank)
    out = share.experts.compute(rows, counts, share.experts)
    out.square().sum().backward()
    pairs = [(out, wanted_out), (rows.grad, wanted_grad)]
    for ours, theirs in zip(share.experts.parameters(), whole.experts.parameters(), strict=True):
        pairs.append((ours.grad, theirs.grad.chunk(group.size)[rank]))
    assert all(a.shape == b.shape for a, b in pairs)
    return max(float((a - b).abs().max()) for a, b in pairs if b.numel())


def seeded_block() -> ExpertBlock:
    """The same block every time."""
    torch.manual_seed(0)
    return ExpertBlock(SECTION, "sdpa", 64)


def main() -> None:
    """Run the task in this rank."""
    task: dict[str, Any] = json.loads(os.environ["MILLSTREAM_TASK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    rank, size = dist.get_rank(), dist.get_world_size()
    group = make_expert_group(Mesh(data=size, expert=size), rank, "gloo")
    with torch.device(task.get("device", "cpu")):
        report = {name: deviation(ids, rank, group) for name, ids in task["cases"].items()}
    (Path(os.environ["MILLSTREAM_OUT"]) / f"rank-{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
