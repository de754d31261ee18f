"""Every backend on a GPU is attention in fp32, to half precision, in value and gradient; flash4 leaves blocks whole."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from trainer.models.attention import KERNELS, Backend, attention
from trainer.models.encoder import EncoderBlock, alternating_bounds

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BATCH, LENGTH = 3, 200
LENGTHS = torch.tensor([200, 37, 129])


def qkv(heads: int, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Slices of one projection, as blocks hand them over."""
    torch.manual_seed(0)
    together = torch.randn(BATCH, LENGTH, heads + 2 * kv_heads, size, device="cuda").bfloat16()
    q, k, v = together.split([heads, kv_heads, kv_heads], dim=2)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def results(backend: Backend, causal: bool, cut: bool, inputs: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    lengths = LENGTHS.cuda()
    segments = (torch.arange(LENGTH, device="cuda") < lengths[:, None]).int() if cut else None
    bounds = alternating_bounds(lengths, LENGTH) if cut else None
    out = attention(*inputs, causal=causal, backend=backend, segments_BL=segments, cu_seqlens=bounds)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out).to(out.dtype)
    return [out, *torch.autograd.grad((out * weights).sum(), inputs)]


@pytest.mark.parametrize("backend", ["sdpa", "flash2", "flash4"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(16, 2, 128), (16, 16, 64)])
def test_attention_is_that_of_fp32(
    backend: Backend, causal: bool, cut: bool, heads: int, kv_heads: int, size: int
) -> None:
    if backend in KERNELS:
        pytest.importorskip(KERNELS[backend].module)
    inputs = qkv(heads, kv_heads, size)
    exact = results("math", causal, cut, tuple(x.detach().float().requires_grad_() for x in inputs))
    for ours, theirs in zip(results(backend, causal, cut, inputs), exact, strict=True):
        apart = (ours.float() - theirs).norm() / theirs.norm()
        assert apart < 0.01


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own compiler imports it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # and looks at it
def test_a_compiled_block_with_flash4_is_one_graph_for_every_shape_and_that_of_fp32() -> None:
    pytest.importorskip("flash_attn.cute")
    torch.manual_seed(0)
    torch.compiler.reset()
    counters.clear()
    block = EncoderBlock(256, 4, 512, "flash4", "quick_gelu").cuda().bfloat16()
    exact = EncoderBlock(256, 4, 512, "math", "quick_gelu").cuda()
    exact.load_state_dict(block.state_dict())
    compiled = torch.compile(block, dynamic=True, fullgraph=True)
    for count, places in ((8, 577), (24, 433), (16, 257)):
        x = torch.randn(count, places, 256, device="cuda").bfloat16()
        found = []
        for run, weights in ((compiled, block), (exact, exact)):
            given = x.to(weights.out.weight.dtype).requires_grad_()
            out = run(given)
            found.append([out, *torch.autograd.grad(out.square().sum(), [given, *weights.parameters()])])
        for ours, theirs in zip(*found, strict=True):
            assert (ours.float() - theirs).norm() < 0.02 * theirs.norm()
    assert counters["stats"]["unique_graphs"] == 1
