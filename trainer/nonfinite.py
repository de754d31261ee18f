"""Steps whose loss or gradient norm is not finite: how all ranks come to skip them, and when they end the run.

A loss that is not finite is given gradients that are not, so one number tells of both: the norm of the whole
gradient, which is summed over all ranks before any of them steps. A skipped step changes no weight and no optimizer
state. It counts as a step all the same: the learning rate goes on and the loader's cursor passes its batch.
"""

import math
from collections.abc import Iterable, Sequence

import msgspec
import torch
from torch import Tensor

from shared.errors import NumericsError
from shared.logs import logger
from trainer.expert_stats import ExpertStats
from trainer.launch import Ranks
from trainer.loss import Targets, Vocabulary, token_loss

NAMED = 16
"""Most batches that a message names."""

_log = logger("train")


class StepResult(msgspec.Struct, frozen=True):
    """Mean loss per label token of the global batch, and the gradient's 2-norm before clipping.

    `skipped`: the norm is not finite, so nothing was changed, on any rank (or a gradient that no norm counts is not: on
    this rank alone). `suspects` are then the places among this rank's micro-batches of those whose loss is not finite
    (none on a stage that computes no loss). `experts` is None for a model without experts and for a skipped step.
    """

    loss: float
    grad_norm: float
    skipped: bool = False
    suspects: tuple[int, ...] = ()
    experts: ExpertStats | None = None


class LossFunction:
    """`token_loss` that notes which micro-batches had a loss that is not finite, and spoils their gradients."""

    def __init__(self, vocabulary: Vocabulary, compiled: bool = False) -> None:
        self._vocabulary, self._compiled = vocabulary, compiled
        self._finite: list[Tensor] = []

    def __call__(self, logits_TV: Tensor, targets: Targets) -> Tensor:
        """The micro-batch's loss, a scalar."""
        loss = token_loss(logits_TV, *targets, self._vocabulary, self._compiled)
        finite = torch.isfinite(loss)
        self._finite.append(finite)
        return loss * torch.where(finite, 1.0, math.nan)

    def take(self) -> Tensor | None:
        """[micro-batches] whether each loss since the last call was finite; None where no loss is computed."""
        finite, self._finite = self._finite, []
        return torch.stack(finite) if finite else None


class GradientWatch:
    """Notes gradients that are not finite among parameters that the norm does not count on this rank.

    Such a parameter is whole on every tensor-parallel rank and counted on the first alone. Its gradients are equal on
    all of them, so only broken hardware makes one differ; no norm would tell.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._bad: Tensor | None = None
        for parameter in parameters:
            parameter.register_hook(self._look)  # type: ignore[no-untyped-call]

    def take(self) -> bool:
        """Whether there was one since the last call."""
        bad, self._bad = self._bad, None
        return bad is not None and bool(bad)

    def _look(self, gradient: Tensor) -> None:
        bad = ~torch.isfinite(gradient).all()
        self._bad = bad if self._bad is None else self._bad | bad


class Skips:
    """Counts skipped steps in a row, since the run or its last resume began. All ranks call it together."""

    def __init__(self, ranks: Ranks, limit: int) -> None:
        self._ranks, self._limit = ranks, limit
        self._in_a_row = 0

    def note(self, step: int, result: StepResult, batch_ids: Sequence[str], skipped_by: int) -> None:
        """Take in a step of which this rank consumed `batch_ids`, and which `skipped_by` ranks skipped.

        Raises:
            NumericsError: some ranks skipped it and some did not, or it is the last that may be skipped in a row.
        """
        world = self._ranks.mesh.world
        if skipped_by not in (0, world):
            text = f"step {step} was not finite on {skipped_by} of {world} ranks alone, so their weights differ now"
            raise NumericsError(f"{text}; resume from the last checkpoint")
        self._in_a_row = self._in_a_row + 1 if result.skipped else 0
        if result.skipped:
            self._report(step, result, batch_ids)

    def _report(self, step: int, result: StepResult, batch_ids: Sequence[str]) -> None:
        found = (
            f"loss {result.loss:.4g}, gradient norm {result.grad_norm:.4g}; {self._name(batch_ids, result.suspects)}"
        )
        if self._in_a_row >= self._limit:
            raise NumericsError(
                f"{self._in_a_row} steps in a row up to step {step} were not finite (train.skip_limit {self._limit}): "
                f"{found}; lower train.optim.lr, look at these batches, or resume from an earlier checkpoint"
            )
        if self._ranks.is_main:
            _log.warning("step %d is not finite, skipped: %s", step, found)

    def _name(self, batch_ids: Sequence[str], suspects: Sequence[int]) -> str:
        """In words: the batches whose loss was not finite, or all of the step, where only the gradient was not."""
        mine = [[batch_ids[i] for i in suspects if batch_ids], list(batch_ids)]
        every = [msgspec.json.decode(x, type=list[list[str]]) for x in self._ranks.gather(msgspec.json.encode(mine))]
        for place, words in enumerate(("batches whose loss is not finite", "batches of the step")):
            if names := sorted({name for each in every for name in each[place]}):
                more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
                return f"{words}: {', '.join(names[:NAMED])}{more}"
        return "no batches known"
