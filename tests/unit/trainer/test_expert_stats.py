"""What experts did, from sums to a line of the log, words and metrics."""

import msgspec
import pytest
import torch

from shared.telemetry import REGISTRY
from trainer.display import in_words
from trainer.expert_stats import ExpertStats, stats_of
from trainer.log import StepLine
from trainer.train import observe_experts

SUMS = torch.tensor([[6.0, 2.0, 7.0, 3.0, 1.0, 2.0], [4.0, 4.0, 8.0, 2.0, 3.0, 2.0]], dtype=torch.float64)
"""Two blocks: assignments asked of two experts, kept ones, both losses, micro-batches with tokens."""
LINE = StepLine(3, 2.5, 1.0, 1e-3, 100, 4, 0.5, 200.0, 1.0, 2.0)


def test_shares_losses_and_drops_are_means_over_what_was_counted() -> None:
    stats = stats_of(SUMS)
    assert stats.load == ((0.75, 0.25), (0.5, 0.5))
    assert (stats.load_max, stats.balance_loss, stats.router_z_loss) == (1.5, 1.25, 1.0)
    assert stats.dropped_share == pytest.approx(1 / 16)


def test_a_step_without_a_token_has_numbers_all_the_same() -> None:
    stats = stats_of(torch.zeros_like(SUMS))
    assert stats == ExpertStats(0.0, 0.0, 0.0, 0.0, ((0.0, 0.0), (0.0, 0.0)))


def test_a_line_names_experts_only_where_there_are_some() -> None:
    line = msgspec.structs.replace(LINE, experts=stats_of(SUMS))
    assert msgspec.json.decode(msgspec.json.encode(line), type=StepLine) == line
    assert b'"experts":{' in msgspec.json.encode(line) and b'"experts":null' in msgspec.json.encode(LINE)
    assert "busiest expert 1.50x  dropped 6.2%" in in_words(line)
    assert "expert" not in in_words(LINE)


def test_metrics_hold_the_last_step() -> None:
    observe_experts(stats_of(SUMS))
    values = [REGISTRY.get_sample_value("trainer_expert_load", {"block": "0", "expert": str(e)}) for e in range(2)]
    assert values == [0.75, 0.25]
    assert REGISTRY.get_sample_value("trainer_expert_balance_loss") == 1.25
    assert REGISTRY.get_sample_value("trainer_router_z_loss") == 1.0
    assert REGISTRY.get_sample_value("trainer_expert_dropped_share") == pytest.approx(1 / 16)
