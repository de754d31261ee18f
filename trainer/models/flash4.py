"""flash-attn-4 as operators of torch, which torch.compile takes as they are: a block around them is one graph.

Its own autograd function cannot be traced, and a call that the compiler skips cuts a block into four graphs, whose
calls kept a processor busier than an H200 with packs of 4,096 tokens. So its two entry points below that function are
used; they are private, and the package's version is pinned.
"""

import os
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def flash4(q_BLHD: Tensor, k_BLGD: Tensor, v_BLGD: Tensor, causal: bool, cu_seqlens: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(D)) v as [B, L, H, D], within the bounds of `cu_seqlens` where they are given."""
    if cu_seqlens is not None:
        q, k, v = (x.flatten(0, 1) for x in (q_BLHD, k_BLGD, v_BLGD))
    else:
        q, k, v = q_BLHD, k_BLGD, v_BLGD
    mixed: Tensor = _forward(q, k, v, cu_seqlens, causal)[0]
    return mixed.view_as(q_BLHD)


@torch.library.custom_op(
    "millstream::flash4",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, bool causal) -> (Tensor, Tensor)",
)
def _forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """The result, and log-sum-exp in fp32 as [B, H, L] or [H, places]."""
    run, _ = _kernels()
    bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    out, lse, *_ = run(q, k, v, causal=causal, return_lse=True, **bounds)
    return out, lse


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    *outer, places, heads, _ = q.shape
    lse = q.new_empty(*outer, heads, places, dtype=torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), lse


@torch.library.custom_op(
    "millstream::flash4_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? cu_seqlens, bool causal)"
    " -> (Tensor, Tensor, Tensor)",
)
def _backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    _, run = _kernels()
    bounds = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens}
    into = {name: x.new_empty(x.shape) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    dq, dk, dv = run(q, k, v, out, gradient, lse, causal=causal, **bounds, **into)
    return dq, dk, dv


@_backward.register_fake
def _(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _differentiate(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    dq, dk, dv = _backward(gradient, *ctx.saved_tensors, ctx.causal)
    return dq, dk, dv, None, None


_forward.register_autograd(_differentiate, setup_context=_keep)


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Forward and backward; what they compile is kept on disk, once for a machine and user."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(Path.home() / ".cache" / "flash-attention-4"))
    warnings.filterwarnings("ignore", ".*cannot be converted to a JitArgument.*", UserWarning)
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return _flash_attn_fwd, _flash_attn_bwd
