"""Token-weighted loss: every label token of a global batch weighs the same, however it is split.

With G micro-batches in the global batch, micro-batch loss = (sum of its cross-entropies) * G / step_labels. The mean
over micro-batches and data-parallel ranks, which is what DeepSpeed takes, is then sum / step_labels exactly.

The vocabulary may be cut over ranks: rank r of n has logits of tokens r V/n .. (r + 1) V/n. Maxima and sums over it
are then taken over the ranks (`Vocabulary`); the logits themselves never move.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.batch import IGNORE

Targets = tuple[Tensor, Tensor]
"""labels_T and the loss scale, a scalar."""


class Vocabulary(Protocol):
    """How the last dimension of the logits is cut: this is slice `rank`, and all slices are equally wide."""

    rank: int

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the slices, place by place."""

    def total(self, x: Tensor) -> Tensor:
        """The sum over the slices, place by place."""


class WholeVocabulary:
    """One slice, which is all of it."""

    rank = 0

    def largest(self, x: Tensor) -> Tensor:
        """x."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """x."""
        return x


WHOLE = WholeVocabulary()


def token_loss(logits_TV: Tensor, labels_T: Tensor, scale: Tensor, vocabulary: Vocabulary = WHOLE) -> Tensor:
    """Cross-entropies in fp32 over labels other than -100, summed, times `scale` (a scalar); 0 without labels."""
    total: Tensor = _CrossEntropy.apply(logits_TV, labels_T, vocabulary)  # type: ignore[no-untyped-call]
    return total * scale


def loss_scale(micro_batches: int, step_labels: int) -> float:
    """`micro_batches` of the global batch over its label tokens (1 where it has none: the sum is 0 then)."""
    return micro_batches / max(1, step_labels)


class _CrossEntropy(torch.autograd.Function):
    """Sum over labelled places of log(sum(exp(logits))) - logit of the label; gradient softmax - one-hot."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, labels_T: Tensor, vocabulary: Vocabulary) -> Tensor:
        logits, width = logits_TV.float(), logits_TV.shape[1]
        shifted = logits - vocabulary.largest(logits.amax(1))[:, None]
        at = labels_T.long() - vocabulary.rank * width
        held = (at >= 0) & (at < width)
        at = at.masked_fill(~held, 0)[:, None]
        label_logits = shifted.gather(1, at)[:, 0].masked_fill(~held, 0)
        exps = shifted.exp_()
        sums, label_logits = vocabulary.total(torch.stack([exps.sum(1), label_logits]))
        ctx.save_for_backward(exps.div_(sums[:, None]), at, held, labels_T)
        ctx.dtype = logits_TV.dtype
        losses_T: Tensor = (sums.log() - label_logits).masked_fill(labels_T == IGNORE, 0)
        return losses_T.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        softmax_TV, at, held, labels_T = ctx.saved_tensors
        minus_one_hot = softmax_TV.scatter_add_(1, at, -held[:, None].float())
        labelled = (labels_T != IGNORE)[:, None]
        return minus_one_hot.mul_(labelled * gradient).to(ctx.dtype), None, None
