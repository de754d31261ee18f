"""Experiment trackers: every step's numbers for TensorBoard or Weights & Biases, in the run folder.

They show what `metrics.jsonl` shows. A run that resumes goes on in the same record: steps beyond the checkpoint that
it resumes from are dropped by TensorBoard, and given a second value by Weights & Biases, whose records only grow.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from shared.errors import ConfigError
from trainer.log import StepLine


class Tracker(Protocol):
    """Takes in one step at a time."""

    def step(self, line: StepLine) -> None:
        """One step is done."""

    def close(self) -> None:
        """Bring everything to the disk."""


class TensorBoard:
    """Event files under `tensorboard/` of the run folder."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def step(self, line: StepLine) -> None:
        """Each number under its own tag."""
        for name, value in numbers(line).items():
            self._writer.add_scalar(name, value, line.step)

    def close(self) -> None:
        """Write what is buffered."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, whose name and id are those of the run folder."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def step(self, line: StepLine) -> None:
        """All numbers at once."""
        self._run.log(numbers(line), step=line.step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


def numbers(line: StepLine) -> dict[str, float]:
    """What is tracked of a step: everything that is known but its number; of experts all but each one's load."""
    found = msgspec.structs.asdict(line)
    experts = msgspec.structs.asdict(line.experts) if line.experts else {}
    found |= {f"experts/{name}": value for name, value in experts.items()}
    return {name: value for name, value in found.items() if isinstance(value, int | float) and name != "step"}


def open_tracker(name: str, run_dir: Path, start: int) -> Tracker:
    """The tracker of that name, whose next step is `start`.

    Raises:
        ConfigError: its package is not installed.
    """
    try:
        return OPENERS[name](run_dir, start)
    except ImportError as error:
        rule = f"needs a package that is not installed: {error}"
        raise ConfigError("train.trackers", name, rule, f"pip install {name}, or leave it out") from error


def _tensorboard(run_dir: Path, start: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(run_dir / "tensorboard", purge_step=start)
    return TensorBoard(writer)


def _wandb(run_dir: Path, start: int) -> Tracker:
    import wandb

    os.environ.setdefault("WANDB_MODE", "offline")
    name = run_dir.resolve().name
    return WeightsAndBiases(wandb.init(project="millstream", name=name, id=name, resume="allow", dir=run_dir))


OPENERS: dict[str, Callable[[Path, int], Tracker]] = {"tensorboard": _tensorboard, "wandb": _wandb}
