"""Each label token weighs the same, however a global batch is split into micro-batches."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.loss import loss_scale, token_loss


def test_the_mean_over_micro_batches_is_the_mean_over_all_label_tokens() -> None:
    logits, labels = torch.randn(260, 11, requires_grad=True), torch.randint(0, 11, (260,))
    labels[::3] = -100
    whole = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
    (wanted,) = torch.autograd.grad(whole, logits)
    scale = torch.tensor(loss_scale(4, int((labels >= 0).sum())))
    split = [5, 50, 200, 5]
    parts = [token_loss(x, y, scale) for x, y in zip(logits.split(split), labels.split(split), strict=True)]
    mean = torch.stack(parts).mean()
    torch.testing.assert_close(mean, whole)
    torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], wanted)


def test_a_micro_batch_without_labels_adds_zero() -> None:
    logits = torch.randn(6, 11, requires_grad=True)
    loss = token_loss(logits, torch.full((6,), -100), torch.tensor(loss_scale(4, 0)))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_the_loss_is_taken_in_fp32() -> None:
    assert token_loss(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]), torch.tensor(1.0)).dtype == torch.float32


@pytest.mark.parametrize(("labels", "scale"), [(100, 0.08), (0, 8.0)])
def test_the_scale_is_finite_always(labels: int, scale: float) -> None:
    assert loss_scale(8, labels) == pytest.approx(scale)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, labels = torch.randn(70, 11, requires_grad=True), torch.randint(-1, 11, (70,))
    labels[labels < 0] = -100
    found = []
    for chunk in (1, 16, 70, 1024):
        monkeypatch.setattr("trainer.loss.CHUNK", chunk)
        loss = token_loss(logits, labels, torch.tensor(0.5))
        found.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler imports it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_loss_is_the_eager_one(dtype: torch.dtype) -> None:
    logits, labels = (9 * torch.randn(70, 33)).to(dtype).requires_grad_(), torch.randint(-1, 33, (70,))
    labels[labels < 0] = -100
    found = []
    for compiled in (False, True):
        loss = token_loss(logits, labels, torch.tensor(0.5), compiled=compiled)
        found.append((loss.detach(), *torch.autograd.grad(loss, logits)))
    torch.testing.assert_close(found[1], found[0])


def test_half_precision_logits_get_gradients_of_their_own_dtype() -> None:
    logits, labels = torch.randn(40, 11).bfloat16().requires_grad_(), torch.randint(0, 11, (40,))
    wanted = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
    loss = token_loss(logits, labels, torch.tensor(1.0))
    torch.testing.assert_close(loss, wanted)
    (gradient,), (exact,) = torch.autograd.grad(loss, logits), torch.autograd.grad(wanted, logits)
    torch.testing.assert_close(gradient, exact)


@pytest.mark.parametrize("graph", [True, False])
def test_a_loss_that_nobody_goes_backward_from_costs_no_gradient(graph: bool) -> None:
    logits, labels = torch.randn(8, 5, requires_grad=graph), torch.arange(8) % 5
    wanted = token_loss(logits, labels, torch.tensor(1.0))
    seen = Operations()
    with torch.no_grad(), seen:
        loss = token_loss(logits, labels, torch.tensor(1.0))
    assert not loss.requires_grad
    assert torch.equal(loss, wanted)
    assert seen.names.isdisjoint({"scatter_add_", "div_", "copy_", "empty_like"})


class Operations(TorchDispatchMode):
    """Names of the operations that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
