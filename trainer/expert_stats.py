"""What the experts did in a step, summed over micro-batches, data ranks and pipeline stages."""

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from shared.model_sections import DecoderSection
from trainer.launch import Ranks
from trainer.models.moe import expert_blocks


class ExpertStats(msgspec.Struct, frozen=True):
    """Of one global batch; a loss is the mean over blocks and micro-batches with tokens, before its coefficient.

    `load` has for each block with experts the share of assignments that each expert was asked for; `load_max` is the
    largest of them times the number of experts (1: even). `dropped_share` is the part of all assignments that full
    experts dropped.
    """

    balance_loss: float
    router_z_loss: float
    load_max: float
    dropped_share: float
    load: tuple[tuple[float, ...], ...]


def collect(model: nn.Module, decoder: DecoderSection, ranks: Ranks) -> ExpertStats | None:
    """Take every block's tally and add them up over all ranks, together; None for a model without experts."""
    if not decoder.experts:
        return None
    sums = torch.zeros(len(decoder.expert_blocks), decoder.experts + 4, dtype=torch.float64, device=ranks.device)
    for path, block in expert_blocks(model):
        sums[decoder.expert_blocks.index(int(path) - 1)] = block.tally.take()
    dist.all_reduce(sums)
    return stats_of(sums.cpu())


def stats_of(sums: Tensor) -> ExpertStats:
    """From a row of `Tally.sums` for each block."""
    asked, (kept, balance, z, batches) = sums[:, :-4], sums[:, -4:].T
    batches = batches.clamp(min=1)
    shares = asked / asked.sum(1, keepdim=True).clamp(min=1)
    return ExpertStats(
        balance_loss=float((balance / batches).mean()),
        router_z_loss=float((z / batches).mean()),
        load_max=float(shares.max() * asked.shape[1]),
        dropped_share=float((asked.sum() - kept.sum()) / asked.sum().clamp(min=1)),
        load=tuple(tuple(row) for row in shares.tolist()),
    )
