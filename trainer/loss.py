"""Token-weighted loss: every label token of a global batch weighs the same, however it is split.

With G micro-batches in the global batch, micro-batch loss = (sum of its cross-entropies) * G / step_labels. The mean
over micro-batches and data-parallel ranks, which is what DeepSpeed takes, is then sum / step_labels exactly.

The vocabulary may be cut over ranks: rank r of n has logits of tokens r V/n .. (r + 1) V/n. Maxima and sums over it
are then taken over the ranks (`Vocabulary`); the logits themselves never move.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shared.batch import IGNORE

CHUNK = 1024
"""Places of a pack whose logits are in fp32 at one time."""

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


def token_loss(
    logits_TV: Tensor, labels_T: Tensor, scale: Tensor, vocabulary: Vocabulary = WHOLE, compiled: bool = False
) -> Tensor:
    """Cross-entropies in fp32 over labels other than -100, summed, times `scale` (a scalar); 0 without labels.

    `compiled` fuses the passes over the logits, so that nothing [places, V] in fp32 is written to memory.
    """
    trains = torch.is_grad_enabled() and logits_TV.requires_grad
    total: Tensor = _CrossEntropy.apply(logits_TV, labels_T, vocabulary, trains, compiled)  # type: ignore[no-untyped-call]
    return total * scale


def loss_scale(micro_batches: int, step_labels: int) -> float:
    """`micro_batches` of the global batch over its label tokens (1 where it has none: the sum is 0 then)."""
    return micro_batches / max(1, step_labels)


class _CrossEntropy(torch.autograd.Function):
    """Sum over labelled places of log(sum(exp(logits))) - logit of the label; gradient softmax - one-hot.

    The gradient, where one is wanted, is taken in the same pass as the loss, `CHUNK` places at a time, and kept in the
    logits' dtype: what is wide in fp32 is [CHUNK, V], never [T, V].
    """

    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, labels_T: Tensor, vocabulary: Vocabulary, trains: bool, compiled: bool
    ) -> Tensor:
        gradient_TV = torch.empty_like(logits_TV) if trains else None
        total = logits_TV.new_zeros((), dtype=torch.float32)
        for start in range(0, logits_TV.shape[0], CHUNK):
            part = slice(start, start + CHUNK)
            wanted = None if gradient_TV is None else gradient_TV[part]
            total += _chunk(logits_TV[part], labels_T[part].long(), vocabulary, wanted, compiled)
        ctx.gradient_TV, ctx.compiled = gradient_TV, compiled
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient_TV, ctx.gradient_TV = ctx.gradient_TV, None
        scale: Callable[..., None] = _compiled(_scale) if ctx.compiled else _scale
        scale(gradient_TV, outer)
        return gradient_TV, None, None, None, None


def _chunk(logits: Tensor, labels: Tensor, vocabulary: Vocabulary, gradient: Tensor | None, compiled: bool) -> Tensor:
    """Summed loss of some places, in fp32; `gradient` [places, V], if given, is filled with its gradient."""
    sums_of: Callable[..., Tensor] = _compiled(_sums) if compiled else _sums
    write_gradient: Callable[..., None] = _compiled(_write_gradient) if compiled else _write_gradient
    at = labels - vocabulary.rank * logits.shape[1]
    largest = vocabulary.largest(logits.amax(1).float())
    sums, label_logits = vocabulary.total(sums_of(logits, largest, at))
    labelled = labels != IGNORE
    if gradient is not None:
        write_gradient(gradient, logits, largest, sums, at, labelled)
    losses: Tensor = (sums.log() - label_logits).masked_fill(~labelled, 0)
    return losses.sum()


def _sums(logits: Tensor, largest: Tensor, at: Tensor) -> Tensor:
    """[2, places]: sums of exp(logits - largest), and the label's logit - largest (0 where `at` is outside)."""
    apart = logits.float() - largest[:, None]
    held = (at >= 0) & (at < logits.shape[1])
    label_logits = apart.gather(1, at.masked_fill(~held, 0)[:, None])[:, 0].masked_fill(~held, 0)
    return torch.stack([apart.exp().sum(1), label_logits])


def _write_gradient(
    gradient: Tensor, logits: Tensor, largest: Tensor, sums: Tensor, at: Tensor, labelled: Tensor
) -> None:
    """softmax - one-hot, zeros where a place has no label."""
    probs = (logits.float() - largest[:, None]).exp() / sums[:, None]
    hot = torch.arange(logits.shape[1], device=logits.device) == at[:, None]
    gradient.copy_((probs - hot.float()) * labelled[:, None])


def _scale(gradient: Tensor, outer: Tensor) -> None:
    gradient.mul_(outer)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)
