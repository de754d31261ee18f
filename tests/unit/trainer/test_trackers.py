"""Trackers hold every step's numbers, offline, and a resumed run goes on in the same record."""

from pathlib import Path

import msgspec
import pytest

from shared.errors import ConfigError
from tests.support.daemons import wait_until
from trainer.expert_stats import ExpertStats
from trainer.log import StepLine
from trainer.trackers import OPENERS, numbers, open_tracker


def line(step: int, loss: float, mfu: float | None = None) -> StepLine:
    return StepLine(step, loss, 1.0, 0.1, 100, 4, 0.5, 200.0, 0.1, 0.2, mfu)


def scalars(run_dir: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def test_tensorboard_shows_what_the_weights_have_seen(tmp_path: Path) -> None:
    before = open_tracker("tensorboard", tmp_path, 0)
    for step, loss in enumerate((3.0, 2.0, 9.0)):
        before.step(line(step, loss))
    before.close()
    after = open_tracker("tensorboard", tmp_path, 2)
    after.step(line(2, 1.0, mfu=0.5))
    after.close()
    assert scalars(tmp_path, "loss") == {0: 3.0, 1: 2.0, 2: 1.0}
    assert scalars(tmp_path, "mfu") == {2: 0.5}


def test_experts_are_tracked_by_single_numbers() -> None:
    stats = ExpertStats(1.5, 2.5, 3.0, 0.25, ((0.75, 0.25),))
    found = numbers(msgspec.structs.replace(line(0, 3.0), experts=stats))
    wanted = {"balance_loss": 1.5, "router_z_loss": 2.5, "load_max": 3.0, "dropped_share": 0.25}
    assert found == numbers(line(0, 3.0)) | {f"experts/{name}": value for name, value in wanted.items()}


def test_weights_and_biases_records_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracker = open_tracker("wandb", tmp_path, 0)
    tracker.step(line(0, 3.0))
    tracker.close()
    (record,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    wait_until(lambda: b"tokens_per_s" in record.read_bytes(), "its own process has written the record")


def test_a_missing_package_is_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(run_dir: Path, start: int) -> object:
        raise ModuleNotFoundError("No module named 'wandb'")

    monkeypatch.setitem(OPENERS, "wandb", absent)
    with pytest.raises(ConfigError, match=r"train.trackers.*pip install wandb"):
        open_tracker("wandb", tmp_path, 0)
