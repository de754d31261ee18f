"""How a decoder's matrices are drawn."""

import math

from torch import nn


def init_block(block: nn.Module, depth: int) -> None:
    """Draw a block's Linears: std 0.02, those that write to the residual stream by 1 / sqrt(2 depth) less."""
    for name, part in block.named_children():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02 / (math.sqrt(2 * depth) if name in ("out", "down") else 1))
            if part.bias is not None:
                nn.init.zeros_(part.bias)
