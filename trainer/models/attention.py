"""Attention: one function, four backends, chosen once.

Shapes: B sequences, L places, H query heads, G key/value heads (G divides H), D head size. `segments_BL` cuts a
sequence into independent parts: a place attends to its own segment only, padding (one more segment) to itself, so no
row is ever empty. `cu_seqlens` gives the same cuts as bounds over the B x L places laid end to end.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.errors import ConfigError
from trainer.models.flash2 import flash2
from trainer.models.flash4 import flash4

Backend = Literal["math", "sdpa", "flash2", "flash4"]


class Kernels(NamedTuple):
    """A package of attention kernels: its module, and the GPUs (major compute capabilities) and heads that it takes."""

    name: str
    module: str
    majors: tuple[int, ...]
    gpus: str
    largest_head: int
    run: Callable[[Tensor, Tensor, Tensor, bool, Tensor | None], Tensor]


KERNELS: dict[Backend, Kernels] = {
    "flash4": Kernels("flash-attn-4", "flash_attn.cute", (9, 10), "a Hopper or Blackwell GPU", 256, flash4),
    "flash2": Kernels(
        "flash-attn 2", "flash_attn.flash_attn_interface", (8, 9, 10, 12), "an Ampere or later GPU", 256, flash2
    ),
}
"""The fastest first."""

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, ...], asked: Backend | Literal["auto"] = "auto"
) -> Backend:
    """`asked`, or the fastest that is right here: the first of KERNELS that fits, else `sdpa`.

    Raises:
        ConfigError: kernels were asked for that this machine, precision or model cannot have.
    """
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    fitting = [name for name in KERNELS if fits(KERNELS[name], major, dtype, head_sizes)]
    if asked == "auto":
        return fitting[0] if fitting else "sdpa"
    if asked in KERNELS and asked not in fitting:
        kernels = KERNELS[asked]
        heads = f"head sizes in multiples of 8 up to {kernels.largest_head}"
        rule = f"needs {kernels.name}, {kernels.gpus}, bf16 and {heads}"
        raise ConfigError("train.attention", asked, rule, "set train.attention=auto")
    return asked


def fits(kernels: Kernels, major: int, dtype: torch.dtype, head_sizes: tuple[int, ...]) -> bool:
    """Whether a GPU of compute capability `major` (0: none) has the kernels, for these heads in `dtype`."""
    heads = all(size % 8 == 0 and size <= kernels.largest_head for size in head_sizes)
    return major in kernels.majors and dtype != torch.float32 and heads and _installed(kernels.module)


def attention(
    q_BLHD: Tensor,
    k_BLGD: Tensor,
    v_BLGD: Tensor,
    *,
    causal: bool,
    backend: Backend,
    segments_BL: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(D)) v in each segment, as [B, L, H, D]; any of B and L may be 0.

    Without segments a sequence is one segment. Those of KERNELS need `cu_seqlens` (int32) wherever there are segments.
    """
    if backend in KERNELS and q_BLHD.numel():
        return KERNELS[backend].run(q_BLHD, k_BLGD, v_BLGD, causal, cu_seqlens)
    run = _math if backend == "math" or not q_BLHD.numel() else _sdpa
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    return run(q, k, v, causal, segments_BL).transpose(1, 2)


def masked_attention(q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B1LS: Tensor, *, backend: Backend) -> Tensor:
    """softmax(q k^T / sqrt(D)) v as [B, L, H, D], over the S keys where the mask is true; no row of it may be empty.

    KERNELS take no masks, so `sdpa` stands in for them.
    """
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BSGD, v_BSGD))
    if backend == "math":
        return _softmax_mix(q, k, v, mask_B1LS).transpose(1, 2)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1LS, enable_gqa=grouped).transpose(1, 2)


def segment_mask(segments_BL: Tensor, causal: bool) -> Tensor:
    """[B, 1, L, L], true where the row's place may attend to the column's."""
    mask = segments_BL[:, None, :, None] == segments_BL[:, None, None, :]
    return mask.tril() if causal else mask


def _math(q: Tensor, k: Tensor, v: Tensor, causal: bool, segments_BL: Tensor | None) -> Tensor:
    if segments_BL is None:
        segments_BL = q.new_zeros(q.shape[0], q.shape[2], dtype=torch.int32)
    return _softmax_mix(q, k, v, segment_mask(segments_BL, causal))


def _softmax_mix(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(repeat, dim=1) for x in (k, v))
    scores = q.float() @ k.float().transpose(-1, -2) / math.sqrt(q.shape[-1])
    return (scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.float()).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool, segments_BL: Tensor | None) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    if segments_BL is not None:
        mask = segment_mask(segments_BL, causal)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
    if not (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    with sdpa_kernel(CUDNN_FIRST, set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
