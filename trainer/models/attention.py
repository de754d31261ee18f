"""Attention: one function, three backends, chosen once.

Shapes: B sequences, L places, H query heads, G key/value heads (G divides H), D head size. `segments_BL` cuts a
sequence into independent parts: a place attends to its own segment only, padding (one more segment) to itself, so no
row is ever empty. `cu_seqlens` gives the same cuts as bounds over the B x L places laid end to end.
"""

import importlib.util
import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from shared.errors import ConfigError
from trainer.models.flash4 import flash4

Backend = Literal["math", "sdpa", "flash4"]

CUDNN_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def choose_backend(
    device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, ...], asked: Backend | Literal["auto"] = "auto"
) -> Backend:
    """`asked`, or the fastest that is right here: `flash4` on Hopper and Blackwell in half precision, else `sdpa`.

    Raises:
        ConfigError: `flash4` was asked for, and this machine, precision or model cannot have it.
    """
    fits = _flash4_fits(device, dtype, head_sizes)
    if asked == "flash4" and not fits:
        rule = "needs flash-attn-4, a Hopper or Blackwell GPU, bf16 and head sizes in multiples of 8"
        raise ConfigError("train.attention", asked, rule, "set train.attention=auto")
    if asked != "auto":
        return asked
    return "flash4" if fits else "sdpa"


def _flash4_fits(device: torch.device, dtype: torch.dtype, head_sizes: tuple[int, ...]) -> bool:
    if device.type != "cuda" or dtype == torch.float32 or any(size % 8 for size in head_sizes):
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10) and _has_flash4()


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

    Without segments a sequence is one segment. `flash4` needs `cu_seqlens` (int32) wherever there are segments.
    """
    if backend == "flash4" and q_BLHD.numel():
        return flash4(q_BLHD, k_BLGD, v_BLGD, causal, cu_seqlens)
    run = _math if backend == "math" or not q_BLHD.numel() else _sdpa
    q, k, v = (x.transpose(1, 2) for x in (q_BLHD, k_BLGD, v_BLGD))
    return run(q, k, v, causal, segments_BL).transpose(1, 2)


def masked_attention(q_BLHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, mask_B1LS: Tensor, *, backend: Backend) -> Tensor:
    """softmax(q k^T / sqrt(D)) v as [B, L, H, D], over the S keys where the mask is true; no row of it may be empty.

    `flash4` takes no masks, so `sdpa` stands in for it.
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


def _has_flash4() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False
