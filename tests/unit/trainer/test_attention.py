"""Every backend is the same function: attention inside segments, nothing across them, no empty rows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from shared.errors import ConfigError
from tests.support.flash_attn_stand_in import CUTE, FLASH2, install
from trainer.models.attention import KERNELS, attention, choose_backend, fits
from trainer.models.encoder import alternating_bounds

SEGMENTS = torch.tensor([[1] * 5 + [2] * 3 + [3] * 7 + [0] * 5])


def qkv(batch: int, length: int, heads: int = 4, kv_heads: int = 2, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((batch, length, n, size) for n in (heads, kv_heads, kv_heads))
    q, k, v = (torch.randn(shape, generator=random, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segments", [None, SEGMENTS])
def test_sdpa_equals_math_in_value_and_gradient(causal: bool, segments: Tensor | None) -> None:
    results = []
    for backend in ("math", "sdpa"):
        inputs = qkv(1, 20)
        out = attention(*inputs, causal=causal, backend=backend, segments_BL=segments)
        out.square().sum().backward()
        results.append((out, *(x.grad for x in inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_padding_attends_to_itself_so_no_row_is_empty(backend: str) -> None:
    out = attention(*qkv(1, 20), causal=True, backend=backend, segments_BL=SEGMENTS)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("backend", ["math", "sdpa"])
def test_a_segment_never_sees_another(backend: str) -> None:
    q, k, v = (x.detach() for x in qkv(1, 20))
    before = attention(q, k, v, causal=False, backend=backend, segments_BL=SEGMENTS)
    k[:, :5], v[:, :5] = 7.0, -7.0
    after = attention(q, k, v, causal=False, backend=backend, segments_BL=SEGMENTS)
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, :5], after[:, :5])


@pytest.mark.parametrize("backend", ["math", "sdpa", "flash2", "flash4"])
@pytest.mark.parametrize("shape", [(0, 6), (2, 0), (0, 0)])
def test_nothing_in_gives_nothing_out_and_zero_size_gradients(backend: str, shape: tuple[int, int]) -> None:
    inputs = qkv(*shape)
    out = attention(*inputs, causal=False, backend=backend, segments_BL=torch.zeros(shape, dtype=torch.int32))
    out.sum().backward()
    assert out.shape == (*shape, 4, 8)
    assert all(x.grad is not None for x in inputs)


def test_alternating_bounds_cut_where_the_lengths_end() -> None:
    bounds = alternating_bounds(torch.tensor([3, 0, 5]), 5)
    assert bounds.tolist() == [0, 3, 5, 5, 10, 15, 15]
    assert bounds.dtype == torch.int32


def test_a_cpu_gets_sdpa() -> None:
    assert choose_backend(torch.device("cpu"), torch.bfloat16, (64,)) == "sdpa"


def test_a_backend_that_cannot_run_here_is_refused_and_any_other_is_taken() -> None:
    cpu = torch.device("cpu")
    assert choose_backend(cpu, torch.float32, (64,), "math") == "math"
    for name, words in (("flash4", "flash-attn-4, a Hopper or Blackwell GPU"), ("flash2", "flash-attn 2, an Ampere")):
        with pytest.raises(ConfigError, match=rf"train.attention.*{name}.*{words}.*train.attention=auto"):
            choose_backend(cpu, torch.bfloat16, (64,), name)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_flash_attn_2_is_given_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, causal: bool, cut: bool
) -> None:
    install(tmp_path, monkeypatch, FLASH2)
    lengths = torch.tensor([20, 0, 7])
    segments = (torch.arange(20) < lengths[:, None]).int() if cut else None
    bounds = alternating_bounds(lengths, 20) if cut else None
    results = []
    for backend in ("math", "flash2"):
        inputs = qkv(3, 20)
        out = attention(*inputs, causal=causal, backend=backend, segments_BL=segments, cu_seqlens=bounds)
        out.square().sum().backward()
        results.append((out, *(x.grad for x in inputs)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


FITTING = [
    ((FLASH2, CUTE), 9, 64, ["flash4", "flash2"]),
    ((FLASH2, CUTE), 8, 64, ["flash2"]),
    ((FLASH2,), 9, 64, ["flash2"]),
    ((CUTE,), 9, 256, ["flash4"]),
    ((CUTE,), 8, 64, []),
    ((), 9, 64, []),
    ((FLASH2, CUTE), 7, 64, []),
    ((FLASH2, CUTE), 0, 64, []),
    ((FLASH2, CUTE), 9, 60, []),
    ((FLASH2, CUTE), 9, 264, []),
]


@pytest.mark.parametrize(("packages", "major", "head", "wanted"), FITTING)
def test_kernels_fit_where_they_are_installed_and_gpu_and_heads_are_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packages: tuple[str, ...], major: int, head: int, wanted: list[str]
) -> None:
    install(tmp_path, monkeypatch, *packages)

    def fitting(dtype: torch.dtype) -> list[str]:
        return [name for name, kernels in KERNELS.items() if fits(kernels, major, dtype, (64, head))]

    assert fitting(torch.bfloat16) == wanted
    assert fitting(torch.float32) == []
