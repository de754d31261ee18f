"""Token-weighted loss: every label token of a global batch weighs the same, however it is split.

With G micro-batches in the global batch, micro-batch loss = (sum of its cross-entropies) * G / step_labels. The mean
over micro-batches and data-parallel ranks, which is what DeepSpeed takes, is then sum / step_labels exactly.
"""

import torch
from torch import Tensor

from shared.batch import IGNORE

Targets = tuple[Tensor, Tensor]
"""labels_T and the loss scale, a scalar."""


def token_loss(logits_TV: Tensor, labels_T: Tensor, scale: Tensor) -> Tensor:
    """Cross-entropies in fp32 over labels other than -100, summed, times `scale` (a scalar); 0 without labels."""
    total = torch.nn.functional.cross_entropy(logits_TV.float(), labels_T.long(), ignore_index=IGNORE, reduction="sum")
    return total * scale


def loss_scale(micro_batches: int, step_labels: int) -> float:
    """`micro_batches` of the global batch over its label tokens (1 where it has none: the sum is 0 then)."""
    return micro_batches / max(1, step_labels)
