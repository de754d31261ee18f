"""Experts on CUDA: one grouped kernel gives what a loop over experts gives, every time, whoever has no rows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.ranks import run_ranks
from trainer.models.moe import grouped_linear

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def run(counts: list[int], width: int, grouped: bool) -> list[Tensor]:
    """Output and both gradients for seeded rows and weights, in memory that held nonsense before."""
    torch.manual_seed(0)
    made = {"device": "cuda", "dtype": torch.bfloat16}
    rows = torch.randn(sum(counts), width, **made).requires_grad_()  # type: ignore[call-overload]
    weights = torch.randn(len(counts), 96, width, **made).requires_grad_()  # type: ignore[call-overload]
    torch.full((1 << 24,), torch.nan, device="cuda")
    if grouped:
        out = grouped_linear(rows, weights, torch.tensor(counts, device="cuda"))
    else:
        out = torch.cat([F.linear(x, w) for x, w in zip(rows.split(counts), weights, strict=True)])
    out.backward(torch.randn(sum(counts), 96, **made))  # type: ignore[call-overload]
    assert rows.grad is not None and weights.grad is not None
    return [out.detach(), rows.grad, weights.grad]


@pytest.mark.parametrize("width", [64, 60])
@pytest.mark.parametrize("counts", [[5, 0, 130, 0, 1, 64, 0, 0], [0, 0, 0, 9], [7], [0, 3], [0, 0]], ids=str)
def test_a_grouped_kernel_is_a_loop_over_experts(counts: list[int], width: int) -> None:
    wanted = run(counts, width, grouped=False)
    found = [run(counts, width, grouped=True) for _ in range(2)]
    for loop, once, again in zip(wanted, *found, strict=True):
        torch.testing.assert_close(once, loop, rtol=1e-2, atol=1e-2)
        assert torch.equal(once, again)


def test_rows_on_a_gpu_travel_through_gloo(tmp_path: Path) -> None:
    task = {"cases": {"mixed": [[0, 1, 1, 2, 3, 3], [0, 2, 2, 3]], "none": [[], []]}, "device": "cuda"}
    reports = run_ranks("tests.support.exchange_program", 2, tmp_path, task, timeout_s=120)
    assert all(max(report.values()) <= 1e-5 for report in reports), reports
